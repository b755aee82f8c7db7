"""What an operator asks a store node: which blocks are where, and are they whole. Owns nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec
import numpy as np

from kernels.checker import Kind, Violation
from kvstore.core.disk_slots import ORIGIN_BYTES
from kvstore.core.slab_index import SlabIndex
from kvstore.core.slot_table import SlotRecord
from kvstore.digest import block_digest
from kvstore.store.content import ContentChecks, check, named_swap
from kvstore.store.lower_edge import LowerEdge
from kvstore.store.messages import (
    MAX_VIOLATIONS,
    BlockInfo,
    BlockList,
    BlocksVerified,
    BlockViolation,
    ListBlocks,
    SlotRef,
    TierStat,
    VerifyBlocks,
)
from kvstore.store.slab import Slab

POOL_BYTES_MAX: Final = 32 << 20
"""So many bytes are checked at once: no more of the disk is in memory."""
SWAP_SEARCH_SLOTS: Final = 1 << 15
"""So many slots before and after a damaged one are looked at for the block whose bytes it holds."""


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


async def verify_blocks(
    ask: VerifyBlocks, *, slab: Slab, index: SlabIndex, edge: LowerEdge | None, content: ContentChecks
) -> BlocksVerified:
    """Reads every block in the slots that were asked for; damaged ones leave their tier as if a reader had met them."""
    total = _num_slots(ask.tier, index, edge)
    stop = min(total, ask.start_slot + ask.num_slots)
    damaged: list[SlotRef] = []
    violations: list[BlockViolation] = []
    num_checked = num_content = num_skipped = 0
    for run in _runs(ask, stop, slab=slab, index=index, edge=edge, content=content):
        pool, read = await _read(ask.tier, run, slab=slab, edge=edge)
        num_skipped += len(run) - len(read)
        if not read:
            continue
        checker = content.checker(_origin(ask.tier, read[0].slot, edge, content))
        digests, slots = [record.digest for record in read], [record.slot for record in read]
        found = await asyncio.to_thread(check, pool, digests, slots, checker)
        if any(violation.kind is Kind.DIGEST for violation in found):
            owners = _owners(ask.tier, slots[0], index, edge)
            found = [named_swap(violation, pool[violation.block], owners) for violation in found]
        wrong = {violation.block for violation in found}
        # Bytes that belong to another block by now accuse nobody.
        gone = {place for place in wrong if ask.tier == "host" and slab.table.read(slots[place]) != read[place]}
        found = [violation for violation in found if violation.block not in gone]
        num_checked += len(read) - len(gone)
        num_skipped += len(gone)
        num_known = 0 if checker is None else len(read) - len(gone)
        num_content += num_known
        content.count(num_known, found)
        for place in sorted({violation.block for violation in found}):
            damaged.append(_removed(ask.tier, read[place], index, edge))
        violations += [_as_message(violation, read[violation.block]) for violation in found]
    return BlocksVerified(
        n=ask.n,
        num_checked=num_checked,
        damaged=tuple(damaged),
        num_skipped=num_skipped,
        next_slot=stop if stop < total else None,
        num_content=num_content,
        violations=tuple(violations[:MAX_VIOLATIONS]),
    )


def skipped(ask: VerifyBlocks, index: SlabIndex, edge: LowerEdge | None) -> BlocksVerified:
    """Returns the answer when nothing of what was asked for could be looked at."""
    total = _num_slots(ask.tier, index, edge)
    stop = min(total, ask.start_slot + ask.num_slots)
    num_skipped = max(0, stop - ask.start_slot)
    return BlocksVerified(
        n=ask.n, num_checked=0, damaged=(), num_skipped=num_skipped, next_slot=stop if stop < total else None
    )


def _runs(
    ask: VerifyBlocks, stop: int, *, slab: Slab, index: SlabIndex, edge: LowerEdge | None, content: ContentChecks
) -> Iterator[list[SlotRecord]]:
    """Yields the blocks that are there now, in pools of neighbouring slots with one origin."""
    longest = max(1, POOL_BYTES_MAX // slab.block_bytes)
    run: list[SlotRecord] = []
    origin = b""
    for slot in range(ask.start_slot, stop):
        record = _record(ask.tier, slot, index, edge)
        if record is None:
            continue
        its_origin = _origin(ask.tier, slot, edge, content)
        if run and (run[-1].slot + 1 != slot or its_origin != origin or len(run) == longest):
            yield run
            run = []
        run.append(record)
        origin = its_origin
    if run:
        yield run


async def _read(
    tier: str, run: list[SlotRecord], *, slab: Slab, edge: LowerEdge | None
) -> tuple[np.ndarray, list[SlotRecord]]:
    """Returns the bytes of a run, uint8, shape (n, block_bytes), and which blocks they are: what cannot be read is not.

    What the disk finds damaged while it reads leaves it at once.
    """
    if tier == "host":
        return slab.run(run[0].slot, len(run)), run
    pool = np.empty((len(run), slab.block_bytes), np.uint8)
    read: list[SlotRecord] = []
    for record in run:
        result = None if edge is None else await edge.disk.check(record.slot, memoryview(pool[len(read)]))
        if result in ("ok", "damaged"):
            read.append(record)
    return pool[: len(read)], read


def _removed(tier: str, record: SlotRecord, index: SlabIndex, edge: LowerEdge | None) -> SlotRef:
    """Takes a damaged block out of its tier."""
    if tier == "host":
        index.report_corrupt(record.block_hash, slot=record.slot, generation=record.generation)
    elif edge is not None:
        edge.disk.damaged(record)
    return SlotRef(record.block_hash, record.slot, record.generation)


def _as_message(violation: Violation, record: SlotRecord) -> BlockViolation:
    at = violation.at
    return BlockViolation(
        block_hash=record.block_hash,
        slot=record.slot,
        kind=violation.kind.value,
        count=violation.count,
        offset_bytes=violation.offset_bytes,
        layer=None if at is None else at.layer,
        kv=None if at is None else at.kv,
        kv_head=None if at is None else at.kv_head,
        token=None if at is None else at.token,
        detail=violation.detail,
    )


def _owners(tier: str, near: int, index: SlabIndex, edge: LowerEdge | None) -> dict[bytes, int]:
    """Returns digest -> slot of the blocks around a damaged one, of which it may be a copy."""
    slots = range(max(0, near - SWAP_SEARCH_SLOTS), min(_num_slots(tier, index, edge), near + SWAP_SEARCH_SLOTS))
    records = [record for slot in slots if (record := _record(tier, slot, index, edge)) is not None]
    return {record.digest: record.slot for record in records}


def _origin(tier: str, slot: int, edge: LowerEdge | None, content: ContentChecks) -> bytes:
    return content.origins.of(slot) if tier == "host" or edge is None else edge.disk.index.origin_of(slot)


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
