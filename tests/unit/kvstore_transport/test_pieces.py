"""Pieces of large blocks: the digest is that of the whole block, whoever folds them and in whatever order they land."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import pytest

from kvstore.digest import block_digest
from kvstore.transport.pieces import PIECE_BYTES, DigestHelper, LandingPieces, Pieces, cut


@dataclass
class FakeRequest:
    completed: bool = False


class BusyHelper(DigestHelper):
    """A helper that never takes anything."""

    def __init__(self) -> None:
        super().__init__(lambda: None)

    def offer(self, block: LandingPieces) -> bool:
        return False


def make_block(size: int) -> np.ndarray:
    return np.frombuffer(np.random.default_rng(size).bytes(size), np.uint8).copy()


@pytest.mark.parametrize("size", [1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES - 7])
def test_cut_covers_the_block_once_and_in_order(size: int) -> None:
    """Views, not copies; none larger than a piece; together exactly the block."""
    block = make_block(size)
    pieces = cut(block)
    assert all(0 < piece.nbytes <= PIECE_BYTES and np.shares_memory(piece, block) for piece in pieces)
    assert b"".join(piece.tobytes() for piece in pieces) == block.tobytes()
    assert len(pieces) == -(-size // PIECE_BYTES)


def test_pieces_are_over_when_the_last_one_is() -> None:
    requests = [FakeRequest(), FakeRequest(), FakeRequest()]
    pieces = Pieces(requests)
    for request in (requests[2], requests[0]):
        request.completed = True
        assert not pieces.completed
    requests[1].completed = True
    assert pieces.completed


def test_without_a_helper_each_look_folds_one_landed_piece() -> None:
    """The mover never hashes more than a piece at a time, and the digest is the block's."""
    block = make_block(3 * PIECE_BYTES + 5)
    requests = [FakeRequest(completed=True) for _ in cut(block)]
    helper = BusyHelper()
    landing = LandingPieces(list(requests), block, helper)
    looks = [landing.completed for _ in range(4)]
    assert looks == [False, False, False, True]
    assert landing.digest() == block_digest(block)
    helper.close()


def test_the_helper_folds_while_others_land_and_says_when_it_is_done() -> None:
    """Pieces land one after the other under a running helper; the result is the block's digest."""
    block = make_block(6 * PIECE_BYTES)
    requests = [FakeRequest() for _ in cut(block)]
    done = threading.Event()
    helper = DigestHelper(done.set)
    landing = LandingPieces(list(requests), block, helper)
    assert not landing.completed
    for request in requests:
        request.completed = True
        while not landing.completed and landing._num_folded < landing._num_completed:
            done.wait(5)
            done.clear()
    assert landing.completed
    assert landing.digest() == block_digest(block)
    helper.close()


def test_a_changed_byte_anywhere_changes_the_digest() -> None:
    block = make_block(2 * PIECE_BYTES)
    helper = BusyHelper()
    expected = block_digest(block)
    for position in (0, PIECE_BYTES - 1, PIECE_BYTES, 2 * PIECE_BYTES - 1):
        damaged = block.copy()
        damaged[position] ^= 1
        landing = LandingPieces([FakeRequest(completed=True) for _ in cut(damaged)], damaged, helper)
        while not landing.completed:
            pass
        assert landing.digest() != expected
    helper.close()


def test_a_closed_helper_takes_nothing() -> None:
    helper = DigestHelper(lambda: None)
    helper.close()
    helper.close()
    block = make_block(PIECE_BYTES + 1)
    assert not helper.offer(LandingPieces([FakeRequest(), FakeRequest()], block, helper))
