"""Two network namespaces with a cable between them: two hosts, as far as the network can tell, on one machine.

Owns the namespaces it makes and takes them away again. Needs root and ``ip``; where that is missing it says so.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvstore.errors import EnvironmentProblem

T = TypeVar("T")

CLONE_NEWNS, CLONE_NEWNET = 0x0002_0000, 0x4000_0000
MS_REC, MS_PRIVATE, MNT_DETACH = 1 << 14, 1 << 18, 2
COMMAND_DEADLINE_S = 10.0
NAMESPACE_FOLDER = Path("/var/run/netns")


@dataclass(frozen=True, slots=True)
class Cable:
    """Two namespaces and the addresses of their ends of the cable."""

    namespaces: tuple[str, str]
    hosts: tuple[str, str]


@contextmanager
def cable() -> Iterator[Cable]:
    """Makes two namespaces joined by a veth pair and removes them. Raises: EnvironmentProblem where that cannot be."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        raise EnvironmentProblem("network namespaces need root and the ip command (Debian, Ubuntu: iproute2)")
    mark = secrets.token_hex(3)
    made = Cable((f"kopir-a-{mark}", f"kopir-b-{mark}"), ("10.78.0.1", "10.78.0.2"))
    devices = (f"ka{mark}", f"kb{mark}")
    try:
        for namespace in made.namespaces:
            _ip("netns", "add", namespace)
        _ip("link", "add", devices[0], "netns", made.namespaces[0], "type", "veth", "peer", "name", devices[1],
            "netns", made.namespaces[1])  # fmt: skip
        for namespace, device, host in zip(made.namespaces, devices, made.hosts, strict=True):
            _ip("-n", namespace, "addr", "add", f"{host}/24", "dev", device)
            _ip("-n", namespace, "link", "set", device, "up")
            _ip("-n", namespace, "link", "set", "lo", "up")
        yield made
    finally:
        for namespace in made.namespaces:
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, timeout=COMMAND_DEADLINE_S)


def call_inside(namespace: str | None, make: Callable[[], T]) -> T:
    """Calls ``make`` on a thread inside a network namespace; threads that it starts stay there. None: calls it here.

    The thread gets mounts of its own as well, because interfaces are listed under /sys.
    """
    if namespace is None:
        return make()
    future: Future[T] = Future()

    def run() -> None:
        try:
            _enter(namespace)
            future.set_result(make())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name=f"kopir-in-{namespace}")
    thread.start()
    thread.join()
    return future.result()


def _enter(namespace: str) -> None:
    descriptor = os.open(NAMESPACE_FOLDER / namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call("unshare", CLONE_NEWNS)
        _call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
        _call("setns", descriptor, CLONE_NEWNET)
        _call("umount2", b"/sys", MNT_DETACH)
        _call("mount", b"sysfs", b"/sys", b"sysfs", 0, None)
    finally:
        os.close(descriptor)


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        raise EnvironmentProblem(f"cannot enter a network namespace: {name}: {os.strerror(ctypes.get_errno())}")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=COMMAND_DEADLINE_S)
    if done.returncode != 0:
        raise EnvironmentProblem(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
