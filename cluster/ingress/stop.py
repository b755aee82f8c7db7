"""Stop strings: which text may be shown, and where it ends.

Owns the text that could still become a stop string; it is held back until it cannot. Works character by character, so
the result does not depend on how the text was cut into tokens or batches: the stop string that is complete first
wins, and of those complete at the same character the longest. One failure table (Knuth, Morris, Pratt) per stop
string makes it O(1) amortised per character and stop string.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.errors import BadInput

MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 1024


class StopMatcher:
    """Filters one stream of text. Use ``push`` until ``matched``, or ``flush`` at the end of the stream."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises: BadInput when a stop string is empty or there are too many."""
        if len(stops) > MAX_STOP_STRINGS:
            raise BadInput("stop", len(stops), f"at most {MAX_STOP_STRINGS} stop strings")
        if any(not 1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
            raise BadInput("stop", list(stops), f"stop strings have 1 to {MAX_STOP_CHARS} characters")
        self._stops = tuple(stops)
        self._tables = tuple(_failure_table(stop) for stop in stops)
        self._num_matching = [0] * len(stops)
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    @property
    def num_held_chars(self) -> int:
        """Characters that may yet be the start of a stop string."""
        return len(self._held)

    def push(self, text: str) -> str:
        """Takes new text and returns what may be shown now. On a match: what stands before the stop string."""
        assert self.matched is None, f"text after the stop string {self.matched!r}"
        buffer = self._held + text
        for position in range(len(self._held), len(buffer)):
            length = self._step(buffer[position])
            if length:
                self._held = ""
                self.matched = buffer[position + 1 - length : position + 1]
                return buffer[: position + 1 - length]
        num_shown = len(buffer) - max(self._num_matching, default=0)
        self._held = buffer[num_shown:]
        return buffer[:num_shown]

    def flush(self) -> str:
        """Ends the stream and returns what was held back."""
        text, self._held = self._held, ""
        self._num_matching = [0] * len(self._stops)
        return text

    def _step(self, char: str) -> int:
        """Takes one character; returns the length of the longest stop string that it completes, or 0."""
        longest = 0
        for index, stop in enumerate(self._stops):
            table, count = self._tables[index], self._num_matching[index]
            while count and stop[count] != char:
                count = table[count - 1]
            if stop[count] == char:
                count += 1
            if count == len(stop):
                longest = max(longest, count)
                count = 0  # the text is over, nothing reads this again
            self._num_matching[index] = count
        return longest

    def check_invariants(self) -> None:
        """Raises AssertionError when the held text is not the longest possible start of a stop string."""
        assert len(self._held) == max(self._num_matching, default=0), (self._held, self._num_matching)
        for stop, count in zip(self._stops, self._num_matching, strict=True):
            assert count < len(stop), (stop, count)
            assert self._held.endswith(stop[:count]), (self._held, stop, count)


def _failure_table(stop: str) -> tuple[int, ...]:
    """``table[i]``: length of the longest proper start of ``stop`` that ends at character ``i``."""
    table = [0]
    count = 0
    for char in stop[1:]:
        while count and stop[count] != char:
            count = table[count - 1]
        count += stop[count] == char
        table.append(count)
    return tuple(table[: len(stop)])
