"""How often and when each block was asked for lately: a fixed-size table that also remembers blocks no longer held.

A set-associative table in flat arrays: ``WAYS`` entries per set, the set chosen by the block's hash, the entry that
was visited longest ago replaced first. About 10 bytes per entry, allocated once; every call is O(WAYS). A block is
recognised by 32 bits of its hash within its set: a mix-up of two blocks is possible (less than one in 10^8 look-ups)
and costs a wrong guess, never a wrong block.

Time is the number of visits noted so far, modulo 2**32; no clock is read.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from kvstore.core.ids import BlockHash

WAYS = 8
MAX_VISITS = 255
TIME_MASK = 0xFFFFFFFF
ENTRIES_MAX = 1 << 26


@dataclass(frozen=True, slots=True)
class Visits:
    """What the table knows of one block. ``num_visits`` stops counting at ``MAX_VISITS``."""

    num_visits: int
    age_visits: int
    """Visits of any block since its latest one."""


class VisitTable:
    """Block hash -> number of visits and time of the latest. Belongs to one thread."""

    def __init__(self, num_entries: int) -> None:
        """``num_entries`` in [1, ENTRIES_MAX] is rounded up to a power of two, at least ``WAYS``."""
        assert 1 <= num_entries <= ENTRIES_MAX, num_entries
        num_sets = 1
        while num_sets * WAYS < num_entries:
            num_sets *= 2
        self._set_mask = num_sets - 1
        # A count of 0 marks an empty entry; tag and time mean something only where the count is positive.
        self._tags = array("I", bytes(4 * num_sets * WAYS))
        self._last = array("I", bytes(4 * num_sets * WAYS))
        self._counts = bytearray(num_sets * WAYS)
        self._now = 0

    @property
    def num_entries(self) -> int:
        """How many blocks fit."""
        return len(self._tags)

    @property
    def now(self) -> int:
        """Visits noted so far, modulo 2**32."""
        return self._now

    def visit(self, block_hash: BlockHash) -> Visits | None:
        """Notes one visit. Returns what was known before it, or None for a block that is new or forgotten."""
        start, tag = self._place(block_hash)
        entry = self._find(start, tag)
        self._now = (self._now + 1) & TIME_MASK
        if entry is None:
            entry = self._oldest(start)
            self._tags[entry], self._counts[entry], self._last[entry] = tag, 1, self._now
            return None
        before = Visits(self._counts[entry], (self._now - self._last[entry]) & TIME_MASK)
        self._last[entry] = self._now
        if self._counts[entry] < MAX_VISITS:
            self._counts[entry] += 1
        return before

    def visit_all(self, hashes: Iterable[BlockHash]) -> None:
        """Notes one visit of each block."""
        for block_hash in hashes:
            self.visit(block_hash)

    def look(self, block_hash: BlockHash) -> Visits | None:
        """Returns what is known of a block; None when it is new or forgotten. Changes nothing."""
        entry = self._find(*self._place(block_hash))
        if entry is None:
            return None
        return Visits(self._counts[entry], (self._now - self._last[entry]) & TIME_MASK)

    def num_visits(self, block_hash: BlockHash) -> int:
        """Returns how often the block was asked for as far as the table remembers; 0 for an unknown one."""
        entry = self._find(*self._place(block_hash))
        return 0 if entry is None else self._counts[entry]

    def check_invariants(self) -> None:
        """Raises: AssertionError when a block is in the table twice."""
        for start in range(0, len(self._tags), WAYS):
            tags = [self._tags[entry] for entry in range(start, start + WAYS) if self._counts[entry]]
            assert len(tags) == len(set(tags)), f"set at {start} holds a block twice: {tags}"

    def _place(self, block_hash: BlockHash) -> tuple[int, int]:
        """Returns (first entry of the block's set, its tag). Sets and tags use different bytes of the hash."""
        start = (int.from_bytes(block_hash[:4], "little") & self._set_mask) * WAYS
        return start, int.from_bytes(block_hash[4:8], "little")

    def _find(self, start: int, tag: int) -> int | None:
        stop = start + WAYS
        try:
            entry = self._tags.index(tag, start, stop)
        except ValueError:
            return None
        # Tag 0 is also what an empty entry carries.
        while not self._counts[entry]:
            try:
                entry = self._tags.index(tag, entry + 1, stop)
            except ValueError:
                return None
        return entry

    def _oldest(self, start: int) -> int:
        return max(
            range(start, start + WAYS),
            key=lambda entry: (self._now - self._last[entry]) & TIME_MASK if self._counts[entry] else TIME_MASK + 1,
        )
