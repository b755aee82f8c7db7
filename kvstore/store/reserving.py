"""The one way to slots of the host slab: for clients, for blocks of the disk and for blocks of other nodes alike.

Owns the order of its steps: what is overdue ends first; a tenant at its quota gives up its oldest blocks of the disk;
slots are reserved; and what was evicted for them is copied down before anybody is told to write there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvstore.core.ids import BlockHash, TenantId
from kvstore.core.slab_index import HolderId, ReserveOutcome, SlabIndex


class Below(Protocol):
    """What the tier below does when slots are given out above it."""

    def make_room(self, tenant: TenantId, num_blocks: int, *, keep: Sequence[BlockHash] = ()) -> None:
        """Lets a tenant at its quota have so many blocks more above; ``keep`` stays below."""

    def take_evicted(self) -> None:
        """Copies down what the index has just evicted."""


class SlotReserver:
    """Gives out the slots of one slab. Belongs to the node's loop."""

    def __init__(self, index: SlabIndex, *, clock_ns: Callable[[], int], on_reserved: Callable[[], None]) -> None:
        """``on_reserved`` is called when there may be a new deadline in the index."""
        self._index = index
        self._clock_ns = clock_ns
        self._on_reserved = on_reserved
        self.below: Below | None = None

    def reserve(
        self,
        hashes: Sequence[BlockHash],
        *,
        writer: HolderId,
        deadline_ns: int,
        tenant: TenantId,
        parent: BlockHash | None = None,
        ends_prompt: bool = True,
        is_put: bool = False,
    ) -> tuple[ReserveOutcome, ...]:
        """Like ``SlabIndex.reserve``; the bytes of what leaves for these blocks are safe when it returns."""
        self._index.expire(self._clock_ns())
        if self.below is not None:
            new = [block_hash for block_hash in dict.fromkeys(hashes) if not self._index.is_known(block_hash)]
            if new:
                self.below.make_room(tenant, min(len(new), self._index.num_slots), keep=new)
        outcomes = self._index.reserve(
            hashes,
            writer=writer,
            deadline_ns=deadline_ns,
            tenant=tenant,
            parent=parent,
            ends_prompt=ends_prompt,
            is_put=is_put,
        )
        if self.below is not None:
            self.below.take_evicted()
        self._on_reserved()
        return outcomes
