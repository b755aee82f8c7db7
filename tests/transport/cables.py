"""Two processes at the ends of a cable between network namespaces, and the ways to break that cable."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from pairs import UcxPair
from sides import RemoteSide

from bench.network import Place, call_inside, wait_until_up
from kvstore.errors import EnvironmentProblem
from kvstore.transport.ucx import UcxTransport

COMMAND_DEADLINE_S = 10.0
PORT_DEADLINE_S = 20.0


def open_at(place: Place, port: int | None = None) -> UcxTransport:
    """Opens a transport at one end, listening on ``port`` if given. For a process that opens no other.

    Waits until the kernel has taken the port away from a predecessor that was killed.
    """
    if port is not None:
        os.environ["UCX_TCP_PORT_RANGE"] = f"{port}-{port}"
    deadline = time.monotonic() + PORT_DEADLINE_S
    while True:
        try:
            return call_inside(place, partial(UcxTransport, network_devices=(place.device,)))
        except EnvironmentProblem:
            if port is None or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


class CablePair(UcxPair):
    """A pair whose sides live at the ends of a cable; a far side that is replaced comes back on ``far_port``.

    Both in processes of their own: UCX reads the routes once in the life of a process.
    """

    def __init__(self, ends: tuple[Place, Place], *, far_port: int | None = None) -> None:
        self._ends = ends
        self._far_port = far_port
        if far_port is not None:
            # UCX does not take a port over that still waits for stray packets of its last connections.
            setting = "echo 0 > /proc/sys/net/ipv4/tcp_max_tw_buckets"
            command = ["ip", "netns", "exec", ends[1].namespace, "sh", "-c", setting]
            subprocess.run(command, check=True, timeout=COMMAND_DEADLINE_S)
        super().__init__("ucx-network")

    def make_near(self) -> RemoteSide:
        return RemoteSide(partial(open_at, self._ends[0]))

    def make_far(self) -> RemoteSide:
        return RemoteSide(partial(open_at, self._ends[1], self._far_port))

    def end(self) -> None:
        self.near.end()
        self.far.end()


@dataclass
class Cut:
    """A way to break the cable and to mend it: arguments of ``ip``."""

    apart: Callable[[tuple[Place, Place]], list[str]]
    together: Callable[[tuple[Place, Place]], list[str]]


CUTS = {
    "down": Cut(
        lambda ends: ["-n", ends[0].namespace, "link", "set", ends[0].device, "down"],
        lambda ends: ["-n", ends[0].namespace, "link", "set", ends[0].device, "up"],
    ),
    "far-cannot-send": Cut(
        lambda ends: ["-n", ends[1].namespace, "route", "add", "blackhole", f"{ends[0].host}/32"],
        lambda ends: ["-n", ends[1].namespace, "route", "del", "blackhole", f"{ends[0].host}/32"],
    ),
    "near-cannot-send": Cut(
        lambda ends: ["-n", ends[0].namespace, "route", "add", "blackhole", f"{ends[1].host}/32"],
        lambda ends: ["-n", ends[0].namespace, "route", "del", "blackhole", f"{ends[1].host}/32"],
    ),
}


@contextmanager
def broken(ends: tuple[Place, Place], name: str) -> Iterator[None]:
    """Breaks the cable meanwhile; afterwards it is up again."""
    cut = CUTS[name]
    subprocess.run(["ip", *cut.apart(ends)], check=True, timeout=COMMAND_DEADLINE_S)
    try:
        yield
    finally:
        subprocess.run(["ip", *cut.together(ends)], check=True, timeout=COMMAND_DEADLINE_S)
        for end in ends:
            wait_until_up(end)
