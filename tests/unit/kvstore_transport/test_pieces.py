"""Pieces of large blocks: the digest is that of the whole block, whoever folds them and in whatever order they land."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from kvstore.digest import block_digest
from kvstore.transport.pieces import PIECE_BYTES, LandingPieces, Pieces, cut


@dataclass
class FakeRequest:
    completed: bool = False


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


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]])
def test_the_digest_is_the_blocks_in_whatever_order_pieces_complete(order: list[int]) -> None:
    """Looked at after every completion; over exactly when the last piece is."""
    block = make_block(3 * PIECE_BYTES + 5)
    requests = [FakeRequest() for _ in cut(block)]
    landing = LandingPieces(list(requests), block)
    for count, index in enumerate(order, start=1):
        requests[index].completed = True
        assert landing.completed == (count == len(order))
    assert landing.digest() == block_digest(block)


def test_a_piece_is_folded_when_it_lands_and_not_later() -> None:
    """What happens to the memory of a folded piece afterwards does not change the digest: it was read while hot."""
    block = make_block(2 * PIECE_BYTES)
    expected = block_digest(block)
    requests = [FakeRequest(completed=True), FakeRequest()]
    landing = LandingPieces(list(requests), block)
    assert not landing.completed
    block[:PIECE_BYTES] = 0
    requests[1].completed = True
    assert landing.completed and landing.digest() == expected


def test_a_changed_byte_anywhere_changes_the_digest() -> None:
    block = make_block(2 * PIECE_BYTES)
    expected = block_digest(block)
    for position in (0, PIECE_BYTES - 1, PIECE_BYTES, 2 * PIECE_BYTES - 1):
        damaged = block.copy()
        damaged[position] ^= 1
        landing = LandingPieces([FakeRequest(completed=True) for _ in cut(damaged)], damaged)
        while not landing.completed:
            pass
        assert landing.digest() != expected
