"""How often a stream is written to.

A write costs about as much as thirty tokens: it passes the hop between ingress and proxy as a message of its own. So a
stream that has more tokens than readers could tell apart is written to at most every ``pause_s``, with all events that
came meanwhile, one for each token. A stream slower than that is never held back, and the first write of a stream never.
Owns the number of streams under way; belongs to one event loop.
"""

from __future__ import annotations

from typing import Final

WRITES_PER_S: Final = 1200
"""Of all streams of an ingress together, as long as none waits longer than ``PAUSE_S_MAX``."""
PAUSE_S_MAX: Final = 0.02
"""Fifty times a second is smooth to a reader."""


class WritePace:
    """The pause between two writes of one stream: longer, the more streams there are."""

    def __init__(self) -> None:
        self._num_streams = 0

    @property
    def pause_s(self) -> float:
        """Seconds from one write of a stream to the next one."""
        return min(PAUSE_S_MAX, self._num_streams / WRITES_PER_S)

    def joined(self) -> None:
        """A stream has had its first write."""
        self._num_streams += 1

    def left(self) -> None:
        """It has ended."""
        assert self._num_streams > 0, "a stream left that never joined"
        self._num_streams -= 1
