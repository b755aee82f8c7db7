"""The book of transfers: results, deadlines and settlement, on made-up requests and a made-up clock."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from kvstore.digest import block_digest
from kvstore.errors import BadInput
from kvstore.transport.base import TransferResult
from kvstore.transport.transfers import Batch, Direction, PromisedFuture, RequestEnd, TransferBook

PEER = "peer"


@dataclass(eq=False)
class FakeRequest:
    completed: bool = False
    end: RequestEnd = RequestEnd.DONE

    def finish(self, end: RequestEnd = RequestEnd.DONE) -> None:
        self.completed, self.end = True, end


def make_book() -> TransferBook:
    return TransferBook("test", lambda request: request.end)


def make_batch(
    book: TransferBook,
    tags: list[int],
    *,
    direction: Direction = Direction.RECEIVE,
    deadline: float = 10.0,
    is_settled_by_end: bool = False,
    digests: list[bytes | None] | None = None,
) -> tuple[Batch, list[FakeRequest]]:
    """Returns a begun batch of 4-byte blocks and its requests."""
    buffers = [np.full(4, tag, np.uint8) for tag in tags]
    batch = Batch(PEER, direction, tags, digests or [None] * len(tags), deadline, buffers)
    batch.is_settled_by_end = is_settled_by_end
    book.admit(batch)
    requests = [FakeRequest() for _ in tags]
    batch.requests += requests
    book.begin(batch)
    book.check_invariants()
    return batch, requests


def test_results_keep_the_order_of_the_blocks() -> None:
    """Whatever completes first, result n belongs to block n."""
    book = make_book()
    batch, requests = make_batch(book, [1, 2, 3])
    requests[2].finish()
    requests[0].finish(RequestEnd.DAMAGED)
    book.collect(0.0)
    assert not batch.future.done()
    requests[1].finish()
    book.collect(0.0)
    assert batch.future.result() == [TransferResult.CORRUPT, TransferResult.OK, TransferResult.OK]
    assert book.outstanding(PEER) == frozenset()
    book.check_invariants()


def test_a_digest_decides_between_ok_and_corrupt() -> None:
    book = make_book()
    right, wrong = block_digest(np.full(4, 1, np.uint8)), block_digest(b"other")
    batch, requests = make_batch(book, [1, 2], digests=[right, wrong])
    for request in requests:
        request.finish()
    book.collect(0.0)
    assert batch.future.result() == [TransferResult.OK, TransferResult.CORRUPT]
    assert book.stats()["test_corrupt_blocks"] == 1


def test_one_that_completed_just_before_the_deadline_is_no_timeout() -> None:
    """A last look comes before TIMEOUT, also at blocks beyond those that a step looks at."""
    book = make_book()
    batch, requests = make_batch(book, list(range(1, 21)))
    requests[19].finish()
    book.collect(10.0)
    assert batch.future.result() == [TransferResult.TIMEOUT] * 19 + [TransferResult.OK]
    assert book.outstanding(PEER) == frozenset(range(1, 20))
    book.check_invariants()


def test_a_late_block_settles_and_is_told_after_its_result() -> None:
    book = make_book()
    told: list[int] = []
    book.on_settled = told.extend
    batch, requests = make_batch(book, [1])
    book.collect(10.0)
    assert batch.future.result() == [TransferResult.TIMEOUT] and told == []
    requests[0].finish()
    book.collect(11.0)
    assert told == [1] and book.outstanding(PEER) == frozenset()
    assert book.stats()["test_late_blocks"] == 1


@pytest.mark.parametrize("is_settled_by_end", [False, True])
def test_a_broken_request_settles_only_where_its_end_proves_something(is_settled_by_end: bool) -> None:
    """Without that proof the tag stays outstanding until its peer is proved dead; either way the peer is reported."""
    book = make_book()
    told: list[int] = []
    lost: list[str] = []
    book.on_settled, book.on_broken = told.extend, lost.append
    batch, requests = make_batch(book, [1, 2], is_settled_by_end=is_settled_by_end)
    requests[0].finish(RequestEnd.BROKEN)
    book.collect(0.0)
    assert lost == [PEER] and told == [] and not batch.future.done()
    book.check_invariants()
    requests[1].finish()
    book.collect(0.0)
    assert batch.future.result() == [TransferResult.PEER_LOST, TransferResult.OK]
    assert told == ([1] if is_settled_by_end else [])
    assert book.outstanding(PEER) == (frozenset() if is_settled_by_end else {1})
    book.settle_peer(PEER)
    assert told == [1] and book.outstanding(PEER) == frozenset()
    book.check_invariants()


def test_giving_a_peer_up_ends_its_batches_and_no_others() -> None:
    book = make_book()
    mine, requests = make_batch(book, [1, 2])
    other = Batch("other", Direction.SEND, [1], [None], 10.0, [np.zeros(4, np.uint8)])
    book.admit(other)
    other.requests.append(FakeRequest())
    book.begin(other)
    requests[0].finish()
    book.give_up_peer(PEER)
    assert mine.future.result() == [TransferResult.OK, TransferResult.PEER_LOST]
    assert not other.future.done()
    assert book.outstanding(PEER) == {2} and book.outstanding("other") == {1}
    book.check_invariants()


def test_what_was_never_posted_is_lost_and_settled() -> None:
    """A batch of which only the first block could be posted."""
    book = make_book()
    batch = Batch(PEER, Direction.SEND, [1, 2], [None, None], 10.0, [np.zeros(4, np.uint8)] * 2)
    book.admit(batch)
    batch.requests.append(FakeRequest())
    book.begin(batch)
    assert book.outstanding(PEER) == {1}
    batch.requests[0].finish()
    book.collect(0.0)
    assert batch.future.result() == [TransferResult.OK, TransferResult.PEER_LOST]


def test_both_directions_may_use_one_tag_but_one_direction_may_not_twice() -> None:
    book = make_book()
    make_batch(book, [5], direction=Direction.SEND)
    make_batch(book, [5], direction=Direction.RECEIVE)
    with pytest.raises(BadInput, match="in flight"):
        make_batch(book, [4, 5], direction=Direction.SEND)
    make_batch(book, [4], direction=Direction.SEND)


def test_a_listener_that_fails_does_not_take_the_book_down() -> None:
    book = make_book()

    def fail(tags: list[int]) -> None:
        raise RuntimeError("listener")

    book.on_settled = fail
    _, requests = make_batch(book, [1])
    book.collect(10.0)
    requests[0].finish()
    book.collect(10.0)
    assert book.outstanding(PEER) == frozenset()


def test_a_promised_future_cannot_be_cancelled() -> None:
    future: PromisedFuture[int] = PromisedFuture()
    assert not future.cancel()
    future.set_result(1)
    assert future.result() == 1
