"""Many doubly linked lists over the same slots, in two flat arrays. The part that the policies share.

Each slot is in one list at most. Every call is O(1); 8 bytes per slot and per list.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator


class SlotLists:
    """``num_lists`` ordered lists of slots in [0, num_slots); the head is what came first."""

    def __init__(self, num_slots: int, num_lists: int = 1) -> None:
        assert num_slots >= 1, num_slots
        assert num_lists >= 1, num_lists
        self._num_slots = num_slots
        # Entry num_slots + i is the sentinel of list i: its successor is the head, its predecessor the tail.
        self._next = array("i", range(num_slots + num_lists))
        self._previous = array("i", range(num_slots + num_lists))

    def append(self, slot: int, list_idx: int = 0) -> None:
        """Puts a slot that is in no list at the tail of one."""
        assert self._next[slot] == slot, f"slot {slot} is in a list already"
        sentinel = self._num_slots + list_idx
        tail = self._previous[sentinel]
        self._next[tail] = slot
        self._previous[slot] = tail
        self._next[slot] = sentinel
        self._previous[sentinel] = slot

    def unlink(self, slot: int) -> None:
        """Takes a slot out of its list; nothing happens to a slot that is in none."""
        before, after = self._previous[slot], self._next[slot]
        self._next[before] = after
        self._previous[after] = before
        self._next[slot] = slot
        self._previous[slot] = slot

    def head(self, list_idx: int = 0) -> int | None:
        """Returns the slot that came first, or None for an empty list."""
        slot = self._next[self._num_slots + list_idx]
        return slot if slot < self._num_slots else None

    def slots(self, list_idx: int = 0) -> Iterator[int]:
        """Yields the slots of one list, head first. The list is not changed meanwhile."""
        slot = self._next[self._num_slots + list_idx]
        while slot < self._num_slots:
            yield slot
            slot = self._next[slot]
