"""What every backend promises (``kvstore.transport.base``), asked of each of them in the same words."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from pairs import Pair
from sides import FILLER, content, digest_of

from kvstore.errors import BadInput
from kvstore.transport.base import TAG_MAX, BlockReceive, BlockSend, TransferResult

KV_BLOCK_BYTES = 368_640
Tags = Callable[[int], list[int]]


def until(condition: Callable[[], bool], deadline_s: float = 10.0) -> bool:
    """Waits for ``condition``; returns whether it came true in time."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            return False
        threading.Event().wait(0.002)
    return True


def nothing_outstanding(pair: Pair) -> bool:
    return not pair.near.outstanding(pair.far_name) and not pair.far.outstanding(pair.near_name)


@pytest.mark.parametrize("size", [1, 64, 4096, 8249, KV_BLOCK_BYTES, (4 << 20) + 1])
def test_a_block_lands_byte_for_byte(shared_pair: Pair, tags: Tags, size: int) -> None:
    """Any size lands whole and verified, whichever side is first."""
    first, second = tags(2)
    shared_pair.far.push("p", shared_pair.near_name, [first], size)
    shared_pair.near.receive("r", shared_pair.far_name, [first, second], size)
    shared_pair.far.push("q", shared_pair.near_name, [second], size)
    assert shared_pair.near.results("r") == ["OK", "OK"]
    assert [shared_pair.near.landed(tag) for tag in (first, second)] == [
        digest_of(tag, size) for tag in (first, second)
    ]
    assert shared_pair.far.results("p") == shared_pair.far.results("q") == ["OK"]
    assert until(lambda: nothing_outstanding(shared_pair))


def test_sixty_four_blocks_in_flight_each_way_at_once(shared_pair: Pair, tags: Tags) -> None:
    """Both directions at the same time; tags belong to the receiver, so both may use the same ones."""
    mine = tags(64)
    for side, peer in ((shared_pair.near, shared_pair.far_name), (shared_pair.far, shared_pair.near_name)):
        side.push("p", peer, mine, KV_BLOCK_BYTES)
        side.receive("r", peer, mine, KV_BLOCK_BYTES)
    for side in (shared_pair.near, shared_pair.far):
        assert side.results("r") == side.results("p") == ["OK"] * 64
    assert until(lambda: nothing_outstanding(shared_pair))


def test_receives_in_another_order_than_sends_get_their_own_blocks(shared_pair: Pair, tags: Tags) -> None:
    mine = tags(16)
    shared_pair.far.push("p", shared_pair.near_name, mine, 10_000)
    shared_pair.near.receive("r", shared_pair.far_name, mine[::-1], 10_000)
    assert shared_pair.near.results("r") == ["OK"] * 16
    assert all(shared_pair.near.landed(tag) == digest_of(tag, 10_000) for tag in mine)


def test_other_bytes_than_the_digest_says_are_corrupt_and_only_they(shared_pair: Pair, tags: Tags) -> None:
    """One wrong block among right ones: its result alone is CORRUPT; it is settled, counted, and the rest is OK."""
    before = shared_pair.near.stats()
    good, bad, last = tags(3)
    shared_pair.far.push("p", shared_pair.near_name, [good], KV_BLOCK_BYTES)
    shared_pair.far.push("q", shared_pair.near_name, [bad], KV_BLOCK_BYTES, seed=1)
    shared_pair.far.push("s", shared_pair.near_name, [last], KV_BLOCK_BYTES)
    shared_pair.near.receive("r", shared_pair.far_name, [good, bad, last], KV_BLOCK_BYTES)
    assert shared_pair.near.results("r") == ["OK", "CORRUPT", "OK"]
    assert shared_pair.far.results("q") == ["OK"]
    assert until(lambda: nothing_outstanding(shared_pair))
    name = shared_pair.near.transport.name
    assert shared_pair.near.stats()[f"{name}_corrupt_blocks"] == before[f"{name}_corrupt_blocks"] + 1


def test_without_a_digest_nothing_is_verified(shared_pair: Pair, tags: Tags) -> None:
    [tag] = tags(1)
    shared_pair.far.push("p", shared_pair.near_name, [tag], 5000, seed=1)
    shared_pair.near.receive("r", shared_pair.far_name, [tag], 5000, verify=False)
    assert shared_pair.near.results("r") == ["OK"]
    assert shared_pair.near.landed(tag) == digest_of(tag, 5000, seed=1)


@pytest.mark.parametrize("sent_bytes", [100, 200_000])
def test_a_block_of_another_size_is_corrupt_and_writes_nothing_beyond_its_end(
    shared_pair: Pair, tags: Tags, sent_bytes: int
) -> None:
    """Too short or too long, the digest does not fit; the memory after the destination stays what it was."""
    [tag] = tags(1)
    size, guard = 100_000, 4096
    memory = bytearray([FILLER]) * (size + guard)
    receive = BlockReceive(tag, memoryview(memory)[:size], digest_of(tag, size))
    future = shared_pair.near.transport.receive(shared_pair.far_name, [receive], deadline_s=10)
    shared_pair.far.push("p", shared_pair.near_name, [tag], sent_bytes)
    shared_pair.near.outstanding(shared_pair.far_name)
    assert future.result(10) == [TransferResult.CORRUPT]
    assert memory[size:] == bytes([FILLER]) * guard


def test_a_block_that_never_comes_is_a_timeout_that_settles_nothing(shared_pair: Pair, tags: Tags) -> None:
    """TIMEOUT by the deadline; the tag stays outstanding; when the block comes late, ``on_settled`` says so."""
    here, late = tags(2)
    shared_pair.far.push("p", shared_pair.near_name, [here], 5000)
    started = time.monotonic()
    shared_pair.near.receive("r", shared_pair.far_name, [here, late], 5000, 0.2)
    assert shared_pair.near.results("r") == ["OK", "TIMEOUT"]
    assert time.monotonic() - started < 1.0
    assert shared_pair.near.outstanding(shared_pair.far_name) == [late]
    shared_pair.far.push("q", shared_pair.near_name, [late], 5000)
    assert until(lambda: late in shared_pair.near.settled())
    assert here not in shared_pair.near.settled()
    assert shared_pair.near.outstanding(shared_pair.far_name) == []


def test_a_push_that_nobody_takes_is_a_timeout_and_completes_when_somebody_does(shared_pair: Pair, tags: Tags) -> None:
    """Large blocks wait at the sender; its memory is held until the receiver has copied."""
    [tag] = tags(1)
    shared_pair.near.push("p", shared_pair.far_name, [tag], 4 << 20, 0.2)
    assert shared_pair.near.results("p") == ["TIMEOUT"]
    assert shared_pair.near.outstanding(shared_pair.far_name) == [tag]
    shared_pair.far.receive("r", shared_pair.near_name, [tag], 4 << 20)
    assert shared_pair.far.results("r") == ["OK"]
    assert until(lambda: shared_pair.near.outstanding(shared_pair.far_name) == [])


def test_no_blocks_is_an_answer_at_once(shared_pair: Pair) -> None:
    shared_pair.near.receive("r", shared_pair.far_name, [], 10)
    shared_pair.near.push("p", shared_pair.far_name, [], 10)
    assert shared_pair.near.results("r") == shared_pair.near.results("p") == []


def test_an_unknown_peer_is_lost_and_nothing_is_held(shared_pair: Pair, tags: Tags) -> None:
    [tag] = tags(1)
    shared_pair.near.push("p", "nobody", [tag], 100)
    shared_pair.near.receive("r", "nobody", [tag], 100)
    assert shared_pair.near.results("p") == shared_pair.near.results("r") == ["PEER_LOST"]
    assert shared_pair.near.outstanding("nobody") == []


def test_impossible_blocks_are_refused_before_anything_is_posted(shared_pair: Pair, tags: Tags) -> None:
    """Tag out of range or twice, empty or read-only memory: BadInput naming the field; nothing is outstanding."""
    [tag] = tags(1)
    transport, peer = shared_pair.near.transport, shared_pair.far_name
    block = memoryview(bytearray(10))
    for bad in (-1, TAG_MAX + 1):
        with pytest.raises(BadInput, match="tag"):
            transport.push(peer, [BlockSend(bad, block)], deadline_s=1)
    with pytest.raises(BadInput, match="tag"):
        transport.push(peer, [BlockSend(tag, block), BlockSend(tag, block)], deadline_s=1)
    with pytest.raises(BadInput, match="block"):
        transport.receive(peer, [BlockReceive(tag, memoryview(b"read-only"), None)], deadline_s=1)
    with pytest.raises(BadInput, match="block"):
        transport.receive(peer, [BlockReceive(tag, memoryview(bytearray(0)), None)], deadline_s=1)
    with pytest.raises(BadInput, match="block"):
        transport.push(peer, [BlockSend(tag, memoryview(bytearray(10))[::2])], deadline_s=1)
    assert shared_pair.near.outstanding(peer) == []


def test_connecting_again_changes_nothing(shared_pair: Pair, tags: Tags) -> None:
    """Idempotent, also from several threads at once; blocks move afterwards as before."""
    [tag] = tags(1)
    assert shared_pair.link() == ("ok", "ok")
    shared_pair.far.push("p", shared_pair.near_name, [tag], 5000)
    shared_pair.near.receive("r", shared_pair.far_name, [tag], 5000)
    assert shared_pair.near.results("r") == ["OK"]


def test_a_probe_comes_back_from_a_peer_that_lives(shared_pair: Pair) -> None:
    """Both ways, also while the other side does nothing; without a link it says so."""
    for _ in range(3):
        assert shared_pair.near.probe(shared_pair.far_name) == "ok"
        assert shared_pair.far.probe(shared_pair.near_name) == "ok"
    assert shared_pair.near.probe("nobody") == "PeerLost"


def test_counters_add_up_to_what_was_moved(shared_pair: Pair, tags: Tags) -> None:
    before = shared_pair.near.stats()
    mine = tags(5)
    shared_pair.near.push("p", shared_pair.far_name, mine, 7000)
    shared_pair.far.receive("r", shared_pair.near_name, mine, 7000)
    assert shared_pair.far.results("r") == shared_pair.near.results("p") == ["OK"] * 5
    name, after = shared_pair.near.transport.name, shared_pair.near.stats()
    assert after[f"{name}_sent_blocks"] - before[f"{name}_sent_blocks"] == 5
    assert after[f"{name}_sent_bytes"] - before[f"{name}_sent_bytes"] == 35_000


def test_a_dead_peer_settles_everything_once_it_is_proved_dead(pair: Pair) -> None:
    """Both directions in flight at the kill: results by the deadline, and after the proof nothing is outstanding."""
    pair.near.push("p", pair.far_name, [1, 2], 4 << 20, 1.0)
    pair.near.receive("r", pair.far_name, [3, 4], 4 << 20, 1.0)
    pair.kill_far()
    assert set(pair.near.results("p") + pair.near.results("r")) <= {"TIMEOUT", "PEER_LOST"}
    pair.near.peer_lost(pair.far_name, True)
    assert pair.near.outstanding(pair.far_name) == []


def test_losing_a_peer_ends_its_transfers_at_once_and_no_others(pair: Pair) -> None:
    """``peer_lost`` does not wait for deadlines. The link can be made anew when both sides have said so."""
    pair.near.receive("r", pair.far_name, [1], 5000, 60.0)
    pair.near.peer_lost(pair.far_name, False)
    assert pair.near.results("r", 5.0) == ["PEER_LOST"]
    pair.near.receive("s", pair.far_name, [2], 5000)
    assert pair.near.results("s", 5.0) == ["PEER_LOST"]
    pair.far.peer_lost(pair.near_name, False)
    assert pair.link() == ("ok", "ok")
    pair.far.push("q", pair.near_name, [3], KV_BLOCK_BYTES)
    pair.near.receive("t", pair.far_name, [3], KV_BLOCK_BYTES)
    assert pair.near.results("t") == ["OK"]


def test_a_new_incarnation_is_served_by_the_same_transport(pair: Pair) -> None:
    """Five deaths and replacements: each newcomer gets its blocks, and no tag of the dead stays outstanding."""
    for life in range(5):
        pair.near.receive("lost", pair.far_name, [100 + life], KV_BLOCK_BYTES, 30.0)
        dead = pair.far_name
        pair.kill_far()
        pair.replace_far()
        pair.near.peer_lost(dead, True)
        assert pair.near.results("lost") == ["PEER_LOST"]
        assert pair.near.outstanding(dead) == []
        assert pair.link() == ("ok", "ok")
        pair.far.push("p", pair.near_name, [200 + life], KV_BLOCK_BYTES)
        pair.near.receive("r", pair.far_name, [200 + life], KV_BLOCK_BYTES)
        assert pair.near.results("r") == ["OK"]


def test_a_stopped_sender_never_writes_a_settled_slot(pair: Pair) -> None:
    """Stop in mid-transfer, expire, reassign as soon as the tag is settled, continue: the new bytes stay."""
    size = 4 << 20
    pair.far.push("p", pair.near_name, [7], size)
    pair.stop_far()
    pair.near.receive("r", pair.far_name, [7], size, 0.2)
    result = pair.near.results("r")[0]
    assert (result == "TIMEOUT") == (pair.near.outstanding(pair.far_name) == [7])
    if result == "OK":
        pair.near.fill("receive", 7, 42)
    pair.resume_far()
    if result == "TIMEOUT":
        assert until(lambda: pair.near.settled() == [7])
        pair.near.fill("receive", 7, 42)
    assert pair.far.results("p") == ["OK"]
    pair.far.push("q", pair.near_name, [8], size)
    pair.near.receive("s", pair.far_name, [8], size)
    assert pair.near.results("s") == ["OK"]
    assert pair.near.has_only("receive", 7, 42)


def test_a_stopped_peer_answers_no_probe_until_it_goes_on(pair: Pair) -> None:
    pair.stop_far()
    assert pair.near.probe(pair.far_name, 0.2) == "DeadlineExceeded"
    pair.resume_far()
    assert until(lambda: pair.near.probe(pair.far_name) == "ok")


def test_closing_ends_every_wait(pair: Pair) -> None:
    """After ``close`` no future stays open, later calls end at once, and closing again is harmless."""
    pair.near.receive("r", pair.far_name, [1], 5000, 60.0)
    pair.near.push("p", pair.far_name, [2], 4 << 20, 60.0)
    pair.near.close()
    assert pair.near.results("r", 5.0) == pair.near.results("p", 5.0) == ["PEER_LOST"]
    pair.near.receive("s", pair.far_name, [3], 5000)
    assert pair.near.results("s", 5.0) == ["PEER_LOST"]
    assert pair.near.connect("other", pair.far.address(), True) == "PeerLost"
    pair.near.close()


def test_content_of_the_tests_differs_by_tag() -> None:
    """The helper must not hide a swapped block."""
    assert not (content(1, 100) == content(2, 100)).all()
