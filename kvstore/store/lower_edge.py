"""The edge between a node's host slab and its disk tier: carries out what the policy says about each block.

Owns the policy of the edge (``kvstore.core.tiering``) and the blocks that are on their way up. It copies down what the
host slab commits or evicts, when the policy says so, and brings blocks up for readers. Bytes of a block that comes up
go from the disk into a slot that this edge has reserved like any writer; nobody sees it before its digest was right.

Belongs to the node's loop. Nothing in it waits for the disk except ``bring_up``, within its caller's time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvstore.core.ids import BlockDigest, BlockHash, TenantId
from kvstore.core.slab_index import HolderId, ReserveOutcome, ReserveStatus, SlabIndex
from kvstore.core.slab_types import EvictedBlock
from kvstore.core.slot_origins import SlotOrigins
from kvstore.core.tiering import Demotion, EdgeLimits, TierEdge
from kvstore.store.disk.tier import BlockToWrite, DiskTier
from kvstore.store.reserving import SlotReserver
from kvstore.store.slab import Slab

logger = logging.getLogger(__name__)

HOLDER = HolderId("disk")
"""Writer of the slots that blocks from the disk are copied into."""
BRING_UP_BLOCKS_MAX = 1024
"""Blocks that one ask may bring up; who wants more asks again."""
LAST_WRITES_DEADLINE_S = 1.0
"""A node that stops takes so long at most to write down what is only in its slab."""
READ_RESERVATION_NS = 30_000_000_000
"""A read that takes longer is stuck; its slot is quarantined like that of any writer that does not answer."""


class LowerEdge:
    """Moves blocks between one slab and the disk tier below it."""

    def __init__(
        self,
        slab: Slab,
        index: SlabIndex,
        disk: DiskTier,
        *,
        loop: asyncio.AbstractEventLoop,
        clock_ns: Callable[[], int],
        reserver: SlotReserver,
        origins: SlotOrigins | None = None,
    ) -> None:
        """``index`` is made with ``tier_below``: it keeps what it evicts until ``take_evicted``.

        ``reserver`` gives out the slots of the same index, and tells this edge.
        ``origins``: of the slab's slots, shared with who else notes or reads them.
        """
        self._slab = slab
        self._index = index
        self.disk = disk
        self._loop = loop
        self._clock_ns = clock_ns
        self._reserver = reserver
        reserver.below = self
        limits = EdgeLimits(max_pending_writes=disk.max_pending_writes)
        self._policy = TierEdge(slab.num_blocks, disk.index.num_slots, limits=limits)
        self._coming: dict[BlockHash, asyncio.Task[None]] = {}
        self._origins = SlotOrigins(slab.num_blocks) if origins is None else origins
        self._later: dict[BlockHash, int] = {}
        """Committed blocks whose early copy has to wait, with their slots; at most one for each slot and a few gone."""
        disk.on_progress = self._write_later
        self._from_disk: set[int] = set()
        """Slots whose block came up from the disk and was not read since."""

    def counters(self) -> dict[str, int]:
        """Returns the counts of verdicts and of the disk."""
        return {**self._policy.counters.to_dict(), **self.disk.stat()}

    # --- down ---------------------------------------------------------------------------------------------

    def visited(self, hashes: Sequence[BlockHash]) -> None:
        """A reader asked for these blocks. Call once per request."""
        self._policy.on_visit(hashes)

    def committed(
        self, block_hash: BlockHash, *, slot: int, digest: BlockDigest, tenant: TenantId, origin: bytes
    ) -> None:
        """A worker's block is visible in the slab: copied down at once while there is room to spare."""
        self._origins.note(slot, origin)
        self._from_disk.discard(slot)
        if not self._write_early(block_hash, slot, digest, tenant):
            self._later[block_hash] = slot

    def _write_early(self, block_hash: BlockHash, slot: int, digest: BlockDigest, tenant: TenantId) -> bool:
        """Returns False when it is not the moment: ask again after the next batch of writes."""
        is_below = self.disk.holds(block_hash)
        verdict = self._policy.write_early(block_hash, lower=self.disk.lower(), is_below=is_below)
        if verdict is Demotion.WRITE:
            # What is not taken now is offered again when it is evicted.
            self._policy.wrote(is_taken=self._offer(block_hash, slot, digest, tenant), is_early=True)
        return verdict is not Demotion.LATER

    def _write_later(self) -> None:
        """The disk has done a batch: what could not be copied down at its commit has its turn, oldest first."""
        while self._later:
            block_hash, slot = next(iter(self._later.items()))
            record = self._index.record_at(slot)
            is_here = record is not None and record.block_hash == block_hash
            if is_here and record is not None:
                tenant = self._index.tenant_of_slot(slot)
                if not self._write_early(block_hash, slot, record.digest, tenant):
                    return
            del self._later[block_hash]

    def take_evicted(self) -> None:
        """Copies down what the index has just evicted, before anybody writes into those slots."""
        for block in self._index.take_evicted():
            self._evicted(block)

    def make_room(self, tenant: TenantId, num_blocks: int, *, keep: Sequence[BlockHash] = ()) -> None:
        """Drops the oldest blocks of a tenant at its quota, but none of ``keep``, so that others find room above."""
        self.disk.make_room(tenant, num_blocks * self._slab.block_bytes, keep=keep)

    def _evicted(self, block: EvictedBlock) -> None:
        self._from_disk.discard(block.slot)
        self._later.pop(block.block_hash, None)
        is_below = self.disk.holds(block.block_hash)
        if self._policy.demote(block.block_hash, lower=self.disk.lower(), is_below=is_below) is Demotion.WRITE:
            is_taken = self._offer(block.block_hash, block.slot, block.digest, block.tenant)
            self._policy.wrote(is_taken=is_taken, is_early=False)

    def _offer(self, block_hash: BlockHash, slot: int, digest: BlockDigest, tenant: TenantId) -> bool:
        return self.disk.offer(BlockToWrite(block_hash, digest, tenant, self._origins.of(slot)), self._slab.slot(slot))

    # --- up -----------------------------------------------------------------------------------------------

    async def bring_up(self, hashes: Sequence[BlockHash], *, timeout_s: float, ends_prompt: bool = True) -> bool:
        """Brings the blocks of a prefix that are only on the disk into the slab, as far as time and room go.

        ``ends_prompt``: the last of ``hashes`` is the last of its prompt.
        Returns True when all are settled, False when ``timeout_s`` is over; what is still under way arrives later.
        """
        prefix = self._known_prefix(hashes[:BRING_UP_BLOCKS_MAX])
        self._reserve(prefix, ends_prompt=ends_prompt and len(prefix) == len(hashes))
        waiting = [task for block_hash in prefix if (task := self._coming.get(block_hash)) is not None]
        if not waiting:
            return True
        _, late = await asyncio.wait(waiting, timeout=timeout_s)
        return not late

    def take_from_disk(self, slots: Iterable[int]) -> tuple[bool, ...]:
        """Returns for each slot whether its block came up from the disk and this is its first reader."""
        flags = []
        for slot in slots:
            flags.append(slot in self._from_disk)
            self._from_disk.discard(slot)
        return tuple(flags)

    def _known_prefix(self, hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        for num_known, block_hash in enumerate(hashes):
            if self._is_only_below(block_hash) and self.disk.can_read(block_hash) is None:
                return hashes[:num_known]
        return hashes

    def _is_only_below(self, block_hash: BlockHash) -> bool:
        """Returns True when the block is neither above nor on its way up."""
        return block_hash not in self._index and block_hash not in self._coming

    def _reserve(self, prefix: Sequence[BlockHash], *, ends_prompt: bool) -> None:
        """Takes slots for the blocks that are only below, and starts their reads.

        One run of such blocks after the other: each may push out what comes later in the prefix, never what comes
        before, or the leaves of a prefix in a small slab would keep its own beginning out.
        """
        stop = 0
        while stop < len(prefix):
            start = stop
            while start < len(prefix) and not self._is_only_below(prefix[start]):
                start += 1
            stop = start
            while stop < len(prefix) and self._is_only_below(prefix[stop]):
                stop += 1
            ends = ends_prompt and stop == len(prefix)
            if start == stop or not self._reserve_run(prefix[:stop], num_below=stop - start, ends_prompt=ends):
                return

    def _reserve_run(self, prefix: Sequence[BlockHash], *, num_below: int, ends_prompt: bool) -> bool:
        """Takes slots for the last ``num_below`` blocks of ``prefix``. False: there was not room for all of them."""
        record = self.disk.can_read(prefix[-num_below])
        if record is None:
            return False
        # All blocks of a prefix have the same tenant: its salt is in every hash.
        tenant = self.disk.index.tenant_of(record.slot)
        deadline_ns = self._clock_ns() + READ_RESERVATION_NS
        self.disk.index.hit(prefix[-num_below:])
        outcomes = self._reserver.reserve(
            prefix, writer=HOLDER, deadline_ns=deadline_ns, tenant=tenant, ends_prompt=ends_prompt
        )
        num_granted = 0
        for block_hash, outcome in zip(prefix, outcomes, strict=True):
            if outcome.status is ReserveStatus.GRANTED:
                num_granted += 1
                self._coming[block_hash] = self._loop.create_task(self._read(block_hash, outcome))
        return num_granted == num_below

    async def _read(self, block_hash: BlockHash, outcome: ReserveOutcome) -> None:
        slot, generation = outcome.slot, outcome.generation
        is_visible = False
        self._later.pop(block_hash, None)
        try:
            record = self.disk.can_read(block_hash)
            if record is None:
                return
            origin = self.disk.index.origin_of(record.slot)
            if await self.disk.read(block_hash, self._slab.slot(slot)) != "ok":
                return
            is_visible = self._index.commit(
                block_hash, slot=slot, generation=generation, digest=record.digest, writer=HOLDER, for_reader=True
            )
            if is_visible:
                self._origins.note(slot, origin)
                self._from_disk.add(slot)
        finally:
            if not is_visible:
                self._index.abort(block_hash, slot=slot, generation=generation, writer=HOLDER)
            del self._coming[block_hash]

    async def _write_rest(self) -> None:
        """Writes down what the next life of this node would miss; it does not push out what is down already."""
        for slot in range(self._index.num_slots):
            if self.disk.lower().free == 0 or self.disk.state != "on":
                return
            record = self._index.record_at(slot)
            if record is None or self.disk.holds(record.block_hash):
                continue
            if self.disk.lower().pending_writes >= self.disk.max_pending_writes:
                await self.disk.flush()
            self._offer(record.block_hash, slot, record.digest, self._index.tenant_of_slot(slot))
        await self.disk.flush()

    async def close(self) -> None:
        """Ends what is on its way up, takes down what is only above, within a deadline, and closes the disk."""
        try:
            async with asyncio.timeout(LAST_WRITES_DEADLINE_S):
                await self._write_rest()
        except TimeoutError:
            logger.info("store_disk_rest_dropped deadline_s=%g", LAST_WRITES_DEADLINE_S)
        await self.disk.close()
        tasks: list[asyncio.Task[Any]] = list(self._coming.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
