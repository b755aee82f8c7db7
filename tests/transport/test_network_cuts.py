"""A cable between two network namespaces that goes down, or lets bytes through one way only, in mid-transfer."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import pytest
from pairs import UcxPair
from sides import RemoteSide

from bench.network import Place, cable, call_inside, wait_until_up
from kvstore.errors import EnvironmentProblem
from kvstore.transport.ucx import UcxTransport

pytestmark = pytest.mark.ucx

BLOCK_BYTES = 4 << 20


def open_at(place: Place) -> UcxTransport:
    return call_inside(place, partial(UcxTransport, network_devices=(place.device,)))


class CablePair(UcxPair):
    """A pair whose sides live at the ends of a cable.

    Both in processes of their own: UCX reads the routes once in the life of a process.
    """

    def __init__(self, ends: tuple[Place, Place]) -> None:
        self._ends = ends
        super().__init__("ucx-network")

    def make_near(self) -> RemoteSide:
        return RemoteSide(partial(open_at, self._ends[0]))

    def end(self) -> None:
        self.near.end()
        self.far.end()

    def make_far(self) -> RemoteSide:
        return RemoteSide(partial(open_at, self._ends[1]))


@dataclass
class Cut:
    """A way to break the cable and to mend it."""

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


@pytest.fixture
def ends() -> Iterator[tuple[Place, Place]]:
    try:
        with cable() as made:
            yield made
    except EnvironmentProblem as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", CUTS)
def test_a_cut_ends_every_wait_and_the_link_can_be_made_anew(ends: tuple[Place, Place], name: str) -> None:
    """TIMEOUT or PEER_LOST by the deadline on both sides; a probe says so too; mended and linked again, blocks move.

    Bytes of before the cut never reach memory that the transport called settled.
    """
    pair = CablePair(ends)
    cut = CUTS[name]
    try:
        assert pair.link() == ("ok", "ok")
        pair.far.push("warm", pair.near_name, [1], BLOCK_BYTES)
        pair.near.receive("warm", pair.far_name, [1], BLOCK_BYTES)
        assert pair.near.results("warm") == ["OK"]
        subprocess.run(["ip", *cut.apart(ends)], check=True, timeout=10)
        tags = [10, 11, 12]
        pair.far.push("p", pair.near_name, tags, BLOCK_BYTES, 0.5)
        pair.near.receive("r", pair.far_name, tags, BLOCK_BYTES, 0.5)
        started = time.monotonic()
        assert set(pair.near.results("r")) | set(pair.far.results("p")) <= {"TIMEOUT", "PEER_LOST"}
        assert pair.near.probe(pair.far_name, 0.2) in ("DeadlineExceeded", "PeerLost")
        assert time.monotonic() - started < 2.0
        subprocess.run(["ip", *cut.together(ends)], check=True, timeout=10)
        for end in ends:
            wait_until_up(end)
        pair.near.peer_lost(pair.far_name, False)
        pair.far.peer_lost(pair.near_name, False)
        fenced = set(pair.near.outstanding(pair.far_name))
        for tag in set(tags) - fenced:
            pair.near.fill("receive", tag, 42)
        assert pair.link(20.0) == ("ok", "ok")
        pair.far.push("q", pair.near_name, [20], BLOCK_BYTES)
        pair.near.receive("s", pair.far_name, [20], BLOCK_BYTES)
        assert pair.near.results("s") == ["OK"]
        assert all(pair.near.has_only("receive", tag, 42) for tag in set(tags) - fenced)
    finally:
        pair.end()
