"""Which block of a full tier leaves first: the policy interface, and LRU.

A policy knows slots, hashes and the order of events; it never knows bytes, clocks or leases. It proposes victims in
order and the owner of the tier takes the first one that nobody has pinned. Policies are pure state machines with
a fixed memory budget per slot.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Protocol

from kvstore.core.ids import BlockHash


class EvictionPolicy(Protocol):
    """What a tier tells its policy, and what it asks.

    Slots are in [0, num_slots). A slot is inserted before it is hit, and removed before it is inserted again.
    Blocks of one prefix are inserted and hit leaf first, so that a parent is never older than its leaf.
    """

    def on_insert(self, slot: int, block_hash: BlockHash) -> None:
        """A block became visible in this slot."""

    def on_hit(self, slot: int, block_hash: BlockHash) -> None:
        """A reader was given this block."""

    def on_remove(self, slot: int, block_hash: BlockHash) -> None:
        """The block left the tier: evicted, corrupt or dropped."""

    def victims(self) -> Iterator[int]:
        """Yields slots in the order in which they should leave. The owner stops at the first it can take.

        The policy is not changed while the iterator is in use.
        """


class LruPolicy:
    """Least recently used first: a doubly linked list inside two arrays, 8 bytes per slot, every event O(1)."""

    def __init__(self, num_slots: int) -> None:
        assert num_slots >= 1, num_slots
        # Entry num_slots is the sentinel: its successor is the oldest slot, its predecessor the newest.
        self._sentinel = num_slots
        self._next = array("i", range(num_slots + 1))
        self._previous = array("i", range(num_slots + 1))

    def on_insert(self, slot: int, block_hash: BlockHash) -> None:
        """Makes the slot the newest."""
        assert self._next[slot] == slot, f"slot {slot} inserted twice"
        self._append(slot)

    def on_hit(self, slot: int, block_hash: BlockHash) -> None:
        """Makes the slot the newest."""
        self._unlink(slot)
        self._append(slot)

    def on_remove(self, slot: int, block_hash: BlockHash) -> None:
        """Forgets the slot."""
        self._unlink(slot)

    def victims(self) -> Iterator[int]:
        """Yields slots, least recently used first."""
        slot = self._next[self._sentinel]
        while slot != self._sentinel:
            yield slot
            slot = self._next[slot]

    def _append(self, slot: int) -> None:
        newest = self._previous[self._sentinel]
        self._next[newest] = slot
        self._previous[slot] = newest
        self._next[slot] = self._sentinel
        self._previous[self._sentinel] = slot

    def _unlink(self, slot: int) -> None:
        before, after = self._previous[slot], self._next[slot]
        self._next[before] = after
        self._previous[after] = before
        self._next[slot] = slot
        self._previous[slot] = slot
