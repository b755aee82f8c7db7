"""Least recently used first."""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.core.eviction.slot_lists import SlotLists
from kvstore.core.ids import BlockHash


class LruPolicy:
    """One list, 8 bytes per slot, every event O(1). Admits everything."""

    def __init__(self, num_slots: int) -> None:
        self._list = SlotLists(num_slots)

    def on_insert(self, slot: int, block_hash: BlockHash, *, parent: int | None = None, is_tail: bool = False) -> None:
        """Makes the slot the newest."""
        self._list.append(slot)

    def on_hit(self, slot: int, block_hash: BlockHash, *, parent: int | None = None, is_tail: bool = False) -> None:
        """Makes the slot the newest."""
        self._list.unlink(slot)
        self._list.append(slot)

    def on_refused(self, block_hash: BlockHash, *, is_tail: bool = False) -> None:
        """Nothing to remember."""

    def on_remove(self, slot: int, block_hash: BlockHash) -> None:
        """Forgets the slot."""
        self._list.unlink(slot)

    def admits(self, block_hash: BlockHash, *, is_tail: bool = False) -> bool:
        """Always: the newest block is worth most."""
        return True

    def victims(self) -> Iterator[int]:
        """Yields slots, least recently used first."""
        return self._list.slots()
