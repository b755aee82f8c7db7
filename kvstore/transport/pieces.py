"""Large blocks travel in pieces, and each piece is folded into the block's digest while it is still in the cache.

All pieces of a block have the block's tag: messages of one tag from one sender arrive in the order in which they were
sent. A block of up to ``PIECE_BYTES`` is one message. Both sides must cut alike, so the size is part of the address.

The thread that copies also folds. A second thread was tried: it reads the bytes from farther away, uses more processor
time for the same digest, and keeps blocks waiting whenever both cores are busy.

Life cycle of landing pieces: made with their posted requests -> ``completed`` is asked until it is True -> ``digest``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash

PIECE_BYTES = 512 << 10
"""Fits into a second-level cache beside its source."""


def cut(buffer: np.ndarray) -> list[np.ndarray]:
    """Returns consecutive views of ``buffer`` (uint8, one dimension), each at most ``PIECE_BYTES`` long."""
    if buffer.nbytes <= PIECE_BYTES:
        return [buffer]
    return [buffer[start : start + PIECE_BYTES] for start in range(0, buffer.nbytes, PIECE_BYTES)]


class Pieces:
    """A block under way in several messages: over when all of them are."""

    def __init__(self, requests: list[Any]) -> None:
        self.requests = requests
        self._num_completed = 0

    @property
    def completed(self) -> bool:
        """True when every piece has completed. Looks at each no further than the first that has not."""
        requests = self.requests
        while self._num_completed < len(requests) and requests[self._num_completed].completed:
            self._num_completed += 1
        return self._num_completed == len(requests)


class BrokenPieces(Pieces):
    """A block of which not all pieces could be posted: over when those are that were."""


class LandingPieces(Pieces):
    """A block whose pieces are folded into a digest as they land."""

    def __init__(self, requests: list[Any], buffer: np.ndarray) -> None:
        super().__init__(requests)
        self._buffers = cut(buffer)
        self._hasher = xxhash.xxh3_128()
        self._num_folded = 0

    @property
    def completed(self) -> bool:
        """True when all pieces have landed and are folded. Folds those that have landed since the last look."""
        has_landed = super().completed
        while self._num_folded < self._num_completed:
            self._hasher.update(self._buffers[self._num_folded].data)
            self._num_folded += 1
        return has_landed

    def digest(self) -> bytes:
        """Returns the 16 bytes of xxh3-128 of the whole block; it must be ``completed``."""
        assert self._num_folded == len(self.requests), (self._num_folded, len(self.requests))
        return self._hasher.digest()
