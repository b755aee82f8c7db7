"""What a tier tells its eviction policy, and what it asks: the one interface of all policies.

A policy knows slots, hashes and the order of events; it never knows bytes, clocks or leases. It proposes victims in
order and the owner of the tier takes the first one that nobody has pinned. Policies are pure state machines with
a fixed memory budget per slot, and deterministic: the same events give the same victims.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from kvstore.core.ids import BlockHash


class EvictionPolicy(Protocol):
    """Events of one tier, in the order in which they happen.

    Slots are in [0, num_slots). A slot is inserted before it is hit, and removed before it is inserted again.
    Blocks of one prefix are inserted, hit and refused leaf first, so that a parent is never older than its leaf.
    ``parent`` is the slot of the block before it in its prompt, None where nobody knows; it may hold a block that
    is still being written. ``is_tail`` marks the last block of the prompt that was asked for.
    """

    def on_insert(self, slot: int, block_hash: BlockHash, *, parent: int | None = None, is_tail: bool = False) -> None:
        """A block became visible in this slot. That is a visit of the block."""

    def on_hit(self, slot: int, block_hash: BlockHash, *, parent: int | None = None, is_tail: bool = False) -> None:
        """A reader was given this block. That is a visit of the block."""

    def on_refused(self, block_hash: BlockHash, *, is_tail: bool = False) -> None:
        """A block was asked for and computed, and has no slot. That is a visit of the block."""

    def on_remove(self, slot: int, block_hash: BlockHash) -> None:
        """The block left the tier: evicted, corrupt or dropped."""

    def admits(self, block_hash: BlockHash, *, is_tail: bool = False) -> bool:
        """Asked before a block is evicted for this one: is it worth a slot? Changes nothing."""

    def victims(self) -> Iterator[int]:
        """Yields every slot once, in the order in which they should leave. The owner stops at the first it can take.

        The policy is not changed while the iterator is in use.
        """
