"""UCX between real processes that are killed, stopped and replaced: every wait ends, with the right result."""

from __future__ import annotations

import time

import pytest
from pairs import Pair
from sides import digest_of

pytestmark = pytest.mark.ucx

KV_BLOCK_BYTES = 368_640
LARGE_BYTES = 16 << 20


def until(condition, deadline_s: float = 10.0) -> bool:  # type: ignore[no-untyped-def]
    """Waits for ``condition``; returns whether it came true in time."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def test_blocks_pushed_by_another_process_land_whole(ucx_pair: Pair) -> None:
    """64 blocks in flight land with their digests, and nothing stays outstanding on either side."""
    tags = list(range(1, 65))
    ucx_pair.far.push("p", ucx_pair.near_name, tags, KV_BLOCK_BYTES)
    ucx_pair.near.receive("r", ucx_pair.far_name, tags, KV_BLOCK_BYTES)
    assert ucx_pair.near.results("r") == ["OK"] * 64
    assert ucx_pair.far.results("p") == ["OK"] * 64
    assert all(ucx_pair.near.landed(tag) == digest_of(tag, KV_BLOCK_BYTES) for tag in tags)
    assert ucx_pair.near.outstanding(ucx_pair.far_name) == ucx_pair.far.outstanding(ucx_pair.near_name) == []


def test_a_killed_sender_ends_the_wait_by_its_deadline_and_others_go_on(ucx_pair: Pair) -> None:
    """Nothing hangs after kill -9; proof of death settles every tag; a new incarnation is served by the same worker."""
    tags = list(range(1, 33))
    ucx_pair.far.push("p", ucx_pair.near_name, tags, LARGE_BYTES // 4)
    ucx_pair.near.receive("r", ucx_pair.far_name, [*tags, 99], LARGE_BYTES // 4, 3.0)
    ucx_pair.kill_far()
    dead = ucx_pair.far_name
    started = time.monotonic()
    results = ucx_pair.near.results("r")
    assert time.monotonic() - started < 3.5
    assert set(results) <= {"OK", "TIMEOUT", "PEER_LOST"} and results[-1] != "OK"
    ucx_pair.near.peer_lost(dead, True)
    assert ucx_pair.near.outstanding(dead) == []
    ucx_pair.replace_far()
    assert ucx_pair.link() == ("ok", "ok")
    ucx_pair.far.push("q", ucx_pair.near_name, [200], KV_BLOCK_BYTES)
    ucx_pair.near.receive("s", ucx_pair.far_name, [200], KV_BLOCK_BYTES)
    assert ucx_pair.near.results("s") == ["OK"]


def test_a_killed_receiver_ends_the_push_by_its_deadline(ucx_pair: Pair) -> None:
    """The sender of blocks that nobody will take gets its answer in time and its memory back on proof of death."""
    ucx_pair.near.push("p", ucx_pair.far_name, [1, 2, 3], LARGE_BYTES, 1.5)
    ucx_pair.kill_far()
    started = time.monotonic()
    assert set(ucx_pair.near.results("p")) <= {"TIMEOUT", "PEER_LOST"}
    assert time.monotonic() - started < 2.0
    ucx_pair.near.peer_lost(ucx_pair.far_name, True)
    assert ucx_pair.near.outstanding(ucx_pair.far_name) == []


def test_a_slot_is_free_only_when_nobody_can_write_it(ucx_pair: Pair) -> None:
    """Sender stopped in mid-transfer: a slot that the transport calls settled is never written again."""
    pair = ucx_pair
    pair.far.push("p", pair.near_name, [7], LARGE_BYTES)
    pair.stop_far()
    pair.near.receive("r", pair.far_name, [7], LARGE_BYTES, 0.3)
    result = pair.near.results("r")[0]
    was_outstanding = pair.near.outstanding(pair.far_name) == [7]
    assert was_outstanding == (result == "TIMEOUT")
    if not was_outstanding:
        pair.near.fill("receive", 7, 42)
    pair.resume_far()
    if was_outstanding:
        assert until(lambda: pair.near.settled() == [7]), "the late block never settled"
        assert pair.near.outstanding(pair.far_name) == []
        pair.near.fill("receive", 7, 42)
    assert pair.far.results("p") == ["OK"]
    # A second transfer drives both ends on, so that a late write would come now.
    pair.far.push("q", pair.near_name, [8], KV_BLOCK_BYTES)
    pair.near.receive("s", pair.far_name, [8], KV_BLOCK_BYTES)
    assert pair.near.results("s") == ["OK"]
    assert pair.near.has_only("receive", 7, 42)


def test_closing_on_a_stopped_sender_keeps_its_slots_fenced(ucx_pair: Pair) -> None:
    """Without proof of death a closed link settles nothing that may still be written; with it, bytes stay."""
    pair = ucx_pair
    pair.far.push("p", pair.near_name, [7], LARGE_BYTES)
    pair.stop_far()
    pair.near.receive("r", pair.far_name, [7, 9], LARGE_BYTES, 0.3)
    results = pair.near.results("r")
    assert results[1] == "TIMEOUT"
    pair.near.peer_lost(pair.far_name, False)
    fenced = pair.near.outstanding(pair.far_name)
    assert 9 in fenced or results[0] == "OK"
    pair.kill_far()
    pair.near.peer_lost(pair.far_name, True)
    assert pair.near.outstanding(pair.far_name) == []
    for tag in (7, 9):
        pair.near.fill("receive", tag, 42)
    pair.replace_far()
    assert pair.link() == ("ok", "ok")
    pair.far.push("q", pair.near_name, [200], LARGE_BYTES)
    pair.near.receive("s", pair.far_name, [200], LARGE_BYTES)
    assert pair.near.results("s") == ["OK"]
    assert all(pair.near.has_only("receive", tag, 42) for tag in (7, 9))


def test_an_idle_link_costs_next_to_nothing_and_wakes_at_once(ucx_pair: Pair) -> None:
    """At most 3 % of a core while linked and idle; the first transfer afterwards is not stalled by a lost wake-up."""
    before, start = ucx_pair.far.cpu_s(), time.monotonic()
    time.sleep(2.0)
    used = ucx_pair.far.cpu_s() - before
    assert used / (time.monotonic() - start) <= 0.03, f"{used:.3f} CPU seconds while idle"
    for tag in range(1, 6):
        started = time.monotonic()
        ucx_pair.far.push("p", ucx_pair.near_name, [tag], KV_BLOCK_BYTES)
        ucx_pair.near.receive("r", ucx_pair.far_name, [tag], KV_BLOCK_BYTES)
        assert ucx_pair.near.results("r") == ["OK"]
        assert time.monotonic() - started < 1.0
        time.sleep(0.2)


def test_waiting_for_a_silent_peer_costs_little(ucx_pair: Pair) -> None:
    """A receive that nothing comes for does not spin until its deadline."""
    pair = ucx_pair
    before = time.process_time()
    pair.near.receive("r", pair.far_name, [5], KV_BLOCK_BYTES, 2.0)
    assert pair.near.results("r") == ["TIMEOUT"]
    assert time.process_time() - before < 0.2
