"""The hand-off tracker: decode starts only over blocks that all landed and verified."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.messages import DestinationBlock, HandOff, PostedBlock
from workers.core.hand_off import HandOffState, HandOffTracker, Refusal

DIGEST = b"d" * 16


def make_tracker(num_blocks: int) -> HandOffTracker:
    return HandOffTracker(tuple(DestinationBlock(i, 1, 100 + i) for i in range(num_blocks)))


def make_posted(index: int, tag: int | None = None) -> PostedBlock:
    return PostedBlock(index, 100 + index if tag is None else tag, DIGEST, 16)


HAND_OFF = HandOff(attempt_id="a", epoch=1, first_token_id=5)


@given(st.permutations(["p0", "p1", "p2", "l0", "l1", "l2", "h"]))
def test_complete_exactly_when_all_landed_and_handed_off(order: list[str]) -> None:
    """In every legal order of events, COMPLETE appears with the last of them and not before."""
    posts = [order.index(f"p{i}") for i in range(3)]
    legal = all(order.index(f"l{i}") > order.index(f"p{i}") for i in range(3)) and order.index("h") > max(posts)
    if not legal:
        return
    tracker = make_tracker(3)
    for step, event in enumerate(order):
        match event[0]:
            case "p":
                assert tracker.on_posted((make_posted(int(event[1])),)) == [make_posted(int(event[1]))]
            case "l":
                tracker.on_landed(int(event[1]))
            case _:
                tracker.on_hand_off(HAND_OFF)
        tracker.check_invariants()
        assert (tracker.state is HandOffState.COMPLETE) == (step == len(order) - 1)


@pytest.mark.parametrize(
    ("posted", "why"),
    [
        (make_posted(3), "index 3: the ticket has 3 blocks"),
        (make_posted(1, tag=7), "index 1: tag 7 is not the ticket's"),
    ],
)
def test_posted_block_outside_the_ticket_fails_the_attempt(posted: PostedBlock, why: str) -> None:
    """A block that the ticket does not name is refused by index and field."""
    tracker = make_tracker(3)
    assert tracker.on_posted((posted,)) == Refusal(why)
    assert (tracker.state, tracker.failure) == (HandOffState.FAILED, why)


def test_posting_twice_fails() -> None:
    """The same block twice is a fault of the sender, not a second chance."""
    tracker = make_tracker(2)
    tracker.on_posted((make_posted(0),))
    assert isinstance(tracker.on_posted((make_posted(0),)), Refusal)


def test_hand_off_before_all_blocks_were_posted_fails() -> None:
    """Hand-off says that everything was posted; when it was not, nothing is decoded."""
    tracker = make_tracker(2)
    tracker.on_posted((make_posted(0),))
    tracker.on_landed(0)
    assert tracker.on_hand_off(HAND_OFF) is HandOffState.FAILED
    assert tracker.failure == "handed off with 1 of 2 blocks posted"


@pytest.mark.parametrize("result", ["CORRUPT", "TIMEOUT", "PEER_LOST"])
def test_failed_block_is_final(result: str) -> None:
    """After one bad block nothing that still arrives makes the attempt complete."""
    tracker = make_tracker(2)
    tracker.on_posted((make_posted(0), make_posted(1)))
    assert tracker.on_failed(0, result) is HandOffState.FAILED
    assert tracker.outstanding_indices == {0, 1}
    tracker.on_landed(1)
    assert tracker.on_hand_off(HAND_OFF) is HandOffState.FAILED
    assert tracker.failure == f"block 0: {result}"
    tracker.check_invariants()
