"""A cable between two network namespaces that goes down, or lets bytes through one way only, in mid-transfer."""

from __future__ import annotations

import time
from contextlib import ExitStack

import pytest
from cables import CUTS, CablePair, broken

from bench.network import Place

pytestmark = pytest.mark.ucx

BLOCK_BYTES = 4 << 20


@pytest.mark.parametrize("name", CUTS)
def test_a_cut_ends_every_wait_and_the_link_can_be_made_anew(cable_ends: tuple[Place, Place], name: str) -> None:
    """TIMEOUT or PEER_LOST by the deadline on both sides; a probe says so too; mended and linked again, blocks move.

    Bytes of before the cut never reach memory that the transport called settled.
    """
    with ExitStack() as stack:
        pair = CablePair(cable_ends)
        stack.callback(pair.end)
        assert pair.link() == ("ok", "ok")
        pair.far.push("warm", pair.near_name, [1], BLOCK_BYTES)
        pair.near.receive("warm", pair.far_name, [1], BLOCK_BYTES)
        assert pair.near.results("warm") == ["OK"]
        tags = [10, 11, 12]
        with broken(cable_ends, name):
            pair.far.push("p", pair.near_name, tags, BLOCK_BYTES, 0.5)
            pair.near.receive("r", pair.far_name, tags, BLOCK_BYTES, 0.5)
            started = time.monotonic()
            assert set(pair.near.results("r")) | set(pair.far.results("p")) <= {"TIMEOUT", "PEER_LOST"}
            assert pair.near.probe(pair.far_name, 0.2) in ("DeadlineExceeded", "PeerLost")
            assert time.monotonic() - started < 2.0
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
