"""Large blocks travel in pieces, and each piece is folded into the block's digest while it is still in the cache.

All pieces of a block have the block's tag: messages of one tag from one sender arrive in the order in which they were
sent. A block of up to ``PIECE_BYTES`` is one message. Both sides must cut alike, so the size is part of the address.

The thread that moves bytes leaves the folding to a helper thread when that one is idle, and does it itself when the
helper is busy: with a free core a verified block costs little more than an unverified one, without one nobody waits
for a thread that does not run.

Life cycle of landing pieces: made with their posted requests -> ``completed`` is asked until it is True -> ``digest``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash

PIECE_BYTES = 512 << 10
"""Fits into a second-level cache beside its source."""

LAG_PIECES_MAX = 4
"""So many landed pieces may wait for the helper before the mover folds one itself."""
LOOK_S = 50e-6
PATIENCE_S = 2e-3
"""How long the helper stays with a block of which no further piece lands."""


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
        requests = self.requests
        while self._num_completed < len(requests) and requests[self._num_completed].completed:
            self._num_completed += 1
        return self._num_completed == len(requests)


class BrokenPieces(Pieces):
    """A block of which not all pieces could be posted: over when those are that were."""


class LandingPieces(Pieces):
    """A block whose pieces are folded into a digest as they land, by one thread at a time."""

    def __init__(self, requests: list[Any], buffer: np.ndarray, helper: DigestHelper) -> None:
        super().__init__(requests)
        self._buffers = cut(buffer)
        self._helper = helper
        self._hasher = xxhash.xxh3_128()
        self._num_folded = 0
        self._lock = threading.Lock()
        self._is_taken = False
        """Guarded by the lock: some thread folds pieces of this block."""

    @property
    def completed(self) -> bool:
        """True when all pieces have landed and are folded.

        Folds one piece when the helper has other work or does not run, and pieces pile up or none is left to land.
        """
        has_landed = super().completed
        lag = self._num_completed - self._num_folded
        if lag and not self._is_taken and not self._helper.offer(self) and (has_landed or lag >= LAG_PIECES_MAX):
            self.fold(max_pieces=1)
        return has_landed and self._num_folded == len(self.requests)

    def fold(self, *, max_pieces: int, patience_s: float = 0.0) -> None:
        """Folds landed pieces, unless another thread is at it; waits up to ``patience_s`` for each that has not landed.

        Pieces that land meanwhile are folded too.
        """
        with self._lock:
            if self._is_taken:
                return
            self._is_taken = True
        try:
            waited_s = 0.0
            while max_pieces and self._num_folded < len(self.requests):
                if self._num_folded < self._num_completed:
                    self._hasher.update(self._buffers[self._num_folded].data)
                    self._num_folded += 1
                    max_pieces -= 1
                    waited_s = 0.0
                elif waited_s < patience_s:
                    # A timer on this core; being woken by the mover for each piece would cost the mover.
                    time.sleep(LOOK_S)
                    waited_s += LOOK_S
                else:
                    return
        finally:
            with self._lock:
                self._is_taken = False

    def digest(self) -> bytes:
        """Returns the 16 bytes of xxh3-128 of the whole block; it must be ``completed``."""
        assert self._num_folded == len(self.requests), (self._num_folded, len(self.requests))
        return self._hasher.digest()


class DigestHelper:
    """A thread that folds pieces of one block at a time and calls ``on_done`` after each. Ends with ``close``."""

    def __init__(self, on_done: Callable[[], None]) -> None:
        self._on_done = on_done
        self._work: LandingPieces | None = None
        self._is_closing = False
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kopir-digest", daemon=True)
        self._thread.start()

    def offer(self, block: LandingPieces) -> bool:
        """Gives ``block`` to the helper. Returns False when that one has work or is closed."""
        with self._condition:
            if self._work is not None or self._is_closing:
                return False
            self._work = block
            self._condition.notify()
        return True

    def close(self) -> None:
        """Ends the thread after what it is at. Safe to call twice."""
        with self._condition:
            self._is_closing = True
            self._condition.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._condition:
                while self._work is None and not self._is_closing:
                    self._condition.wait()
                block = self._work
            if block is None:
                return
            block.fold(max_pieces=len(block.requests), patience_s=PATIENCE_S)
            with self._condition:
                self._work = None
            self._on_done()
