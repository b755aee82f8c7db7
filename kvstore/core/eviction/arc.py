"""ARC: recency and frequency, balanced by the ghosts that return.

Source: Megiddo, Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003. T1 holds what was asked for
once, T2 what was asked for again; B1 and B2 are the ghosts of each. A return from B1 makes T1's target larger, one
from B2 smaller.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from kvstore.core.eviction.ghosts import GhostList
from kvstore.core.eviction.slot_lists import SlotLists
from kvstore.core.ids import BlockHash

_T1, _T2 = 0, 1


class ArcPolicy:
    """Two lists of slots, two of ghosts; every event O(1). Admits everything."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._lists = SlotLists(num_slots, 2)
        self._num = [0, 0]
        self._where = bytearray(num_slots)
        self._ghosts = (GhostList(num_slots), GhostList(num_slots))
        self._t1_target = 0.0

    def on_insert(self, slot: int, block_hash: BlockHash, *, parent: int | None = None, is_tail: bool = False) -> None:
        """New blocks go to T1; a ghost that returns goes to T2 and moves the target."""
        b1, b2 = self._ghosts
        if block_hash in b1:
            self._t1_target = min(self._num_slots, self._t1_target + max(1.0, len(b2) / len(b1)))
            b1.discard(block_hash)
            self._put(slot, _T2)
        elif block_hash in b2:
            self._t1_target = max(0.0, self._t1_target - max(1.0, len(b1) / len(b2)))
            b2.discard(block_hash)
            self._put(slot, _T2)
        else:
            self._put(slot, _T1)
            self._trim()

    def on_hit(self, slot: int, block_hash: BlockHash, *, parent: int | None = None, is_tail: bool = False) -> None:
        """Makes the slot the newest of T2."""
        self._take(slot)
        self._put(slot, _T2)

    def on_refused(self, block_hash: BlockHash, *, is_tail: bool = False) -> None:
        """Nothing to remember."""

    def on_remove(self, slot: int, block_hash: BlockHash) -> None:
        """The block becomes a ghost of its list."""
        self._ghosts[self._where[slot]].add(block_hash)
        self._take(slot)
        self._trim()

    def admits(self, block_hash: BlockHash, *, is_tail: bool = False) -> bool:
        """Always."""
        return True

    def victims(self) -> Iterator[int]:
        """Yields T1's oldest while T1 is above its target, then T2's oldest, then the rest of T1."""
        surplus = self._num[_T1] - int(self._t1_target)
        t1 = self._lists.slots(_T1)
        above = (slot for _, slot in zip(range(max(0, surplus)), t1, strict=False))
        return chain(above, self._lists.slots(_T2), t1)

    def _trim(self) -> None:
        """|T1| + |B1| <= slots, and all four together <= 2 x slots."""
        b1, b2 = self._ghosts
        while len(b1) and self._num[_T1] + len(b1) > self._num_slots:
            b1.forget_oldest()
        while len(b2) and sum(self._num) + len(b1) + len(b2) > 2 * self._num_slots:
            b2.forget_oldest()

    def _put(self, slot: int, where: int) -> None:
        self._where[slot] = where
        self._num[where] += 1
        self._lists.append(slot, where)

    def _take(self, slot: int) -> None:
        self._num[self._where[slot]] -= 1
        self._lists.unlink(slot)
