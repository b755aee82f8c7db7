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
import time
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
class Place:
    """One end of a cable: a namespace, its only device that leads anywhere, and that device's address."""

    namespace: str
    device: str
    host: str


@contextmanager
def cable() -> Iterator[tuple[Place, Place]]:
    """Makes two namespaces joined by a veth pair and removes them. Raises: EnvironmentProblem where that cannot be."""
    require_namespaces()
    mark = secrets.token_hex(3)
    ends = (Place(f"kopir-a-{mark}", f"ka{mark}", "10.78.0.1"), Place(f"kopir-b-{mark}", f"kb{mark}", "10.78.0.2"))
    here, there = ends
    try:
        for end in ends:
            run_ip("netns", "add", end.namespace)
        peer = ["peer", "name", there.device, "netns", there.namespace]
        run_ip("link", "add", here.device, "netns", here.namespace, "type", "veth", *peer)
        for end in ends:
            run_ip("-n", end.namespace, "addr", "add", f"{end.host}/24", "dev", end.device)
            run_ip("-n", end.namespace, "link", "set", end.device, "up")
            run_ip("-n", end.namespace, "link", "set", "lo", "up")
        for end in ends:
            wait_until_up(end)
        yield ends
    finally:
        for end in ends:
            subprocess.run(["ip", "netns", "del", end.namespace], capture_output=True, timeout=COMMAND_DEADLINE_S)


def require_namespaces() -> None:
    """Raises: EnvironmentProblem where this process may not make network namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        raise EnvironmentProblem("network namespaces need root and the ip command (Debian, Ubuntu: iproute2)")


def call_inside(place: Place, make: Callable[[], T]) -> T:
    """Calls ``make`` on a thread inside a network namespace; threads that it starts stay there.

    The thread gets mounts of its own as well, because interfaces are listed under /sys.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            enter(place.namespace)
            future.set_result(make())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name=f"kopir-in-{place.namespace}")
    thread.start()
    thread.join()
    return future.result()


def enter(namespace: str) -> None:
    """Moves the calling thread into a network namespace, with mounts of its own. Raises: EnvironmentProblem."""
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


def wait_until_up(end: Place) -> None:
    """The kernel finds out about a carrier a moment after the device was switched on."""
    deadline = time.monotonic() + COMMAND_DEADLINE_S
    while "state UP" not in run_ip("-n", end.namespace, "link", "show", "dev", end.device):
        if time.monotonic() > deadline:
            raise EnvironmentProblem(f"the cable's end {end.device} does not come up")
        time.sleep(0.01)


def run_ip(*arguments: str) -> str:
    """Runs ``ip`` and returns what it prints. Raises: EnvironmentProblem with its message."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=COMMAND_DEADLINE_S)
    if done.returncode != 0:
        raise EnvironmentProblem(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout
