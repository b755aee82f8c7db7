"""What an operator asks a store node: which blocks are where, and are they whole. Owns nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec

from kvstore.core.disk_slots import ORIGIN_BYTES
from kvstore.core.slab_index import SlabIndex
from kvstore.core.slot_table import SlotRecord
from kvstore.digest import block_digest, verify
from kvstore.store.lower_edge import LowerEdge
from kvstore.store.messages import (
    BlockInfo,
    BlockList,
    BlocksVerified,
    ListBlocks,
    SlotRef,
    TierStat,
    VerifyBlocks,
)
from kvstore.store.slab import Slab


def origin_of(namespace: str, fingerprint: Mapping[str, str]) -> bytes:
    """Returns 16 bytes that stand for namespace and fingerprint together."""
    return block_digest(msgspec.msgpack.encode([namespace, sorted(fingerprint.items())]))[:ORIGIN_BYTES]


def disk_stat(edge: LowerEdge, block_bytes: int) -> TierStat:
    """Returns the disk's entry of the tiers."""
    counts = edge.disk.index.counts()
    return TierStat(
        name="disk",
        blocks=counts.total,
        used_blocks=counts.used,
        bytes=counts.total * block_bytes,
        state=edge.disk.state,
        why=edge.disk.why,
        quarantined_blocks=counts.quarantined,
        counters=edge.counters(),
    )


def list_blocks(ask: ListBlocks, index: SlabIndex, edge: LowerEdge | None) -> BlockList:
    """Returns the blocks in the slots that were asked for. A tier that is not there is empty."""
    total = _num_slots(ask.tier, index, edge)
    stop = min(total, ask.start_slot + ask.num_slots)
    blocks = []
    for slot in range(ask.start_slot, stop):
        record = _record(ask.tier, slot, index, edge)
        if record is not None:
            tenant = _tenant(ask.tier, slot, index, edge)
            blocks.append(BlockInfo(record.block_hash, slot, record.generation, record.digest, tenant))
    return BlockList(n=ask.n, blocks=tuple(blocks), next_slot=stop if stop < total else None)


async def verify_blocks(ask: VerifyBlocks, *, slab: Slab, index: SlabIndex, edge: LowerEdge | None) -> BlocksVerified:
    """Reads every block in the slots that were asked for; damaged ones leave their tier as if a reader had met them."""
    total = _num_slots(ask.tier, index, edge)
    stop = min(total, ask.start_slot + ask.num_slots)
    damaged: list[SlotRef] = []
    num_checked = num_skipped = 0
    for slot in range(ask.start_slot, stop):
        record = _record(ask.tier, slot, index, edge)
        if record is None:
            continue
        is_whole = await _is_whole(ask.tier, record, slab=slab, index=index, edge=edge)
        num_checked += is_whole is not None
        num_skipped += is_whole is None
        if is_whole is False:
            damaged.append(SlotRef(record.block_hash, slot, record.generation))
    return BlocksVerified(
        n=ask.n,
        num_checked=num_checked,
        damaged=tuple(damaged),
        num_skipped=num_skipped,
        next_slot=stop if stop < total else None,
    )


async def _is_whole(
    tier: str, record: SlotRecord, *, slab: Slab, index: SlabIndex, edge: LowerEdge | None
) -> bool | None:
    """Returns None when the block could not be read, or left while it was looked at."""
    if tier == "disk":
        result = None if edge is None else await edge.disk.check(record.slot)
        return {"ok": True, "damaged": False}.get(result or "")
    is_whole = await asyncio.to_thread(verify, slab.slot(record.slot), record.digest)
    if not is_whole and slab.table.read(record.slot) != record:
        return None
    if not is_whole:
        index.report_corrupt(record.block_hash, slot=record.slot, generation=record.generation)
    return is_whole


def _num_slots(tier: str, index: SlabIndex, edge: LowerEdge | None) -> int:
    if tier == "host":
        return index.num_slots
    return 0 if edge is None else edge.disk.index.num_slots


def _record(tier: str, slot: int, index: SlabIndex, edge: LowerEdge | None) -> SlotRecord | None:
    if tier == "host":
        return index.record_at(slot)
    return None if edge is None else edge.disk.index.record_at(slot)


def _tenant(tier: str, slot: int, index: SlabIndex, edge: LowerEdge | None) -> str:
    if tier == "host" or edge is None:
        return str(index.tenant_of_slot(slot))
    return str(edge.disk.index.tenant_of(slot))
