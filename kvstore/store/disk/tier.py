"""The disk tier of one store node: takes blocks in, gives them back verified, and switches itself off when it must.

Owns the disk file, its index, the buffers of writes under way, and its threads' time: one that writes, a few that
read. Everything else happens on the node's loop. Nothing here waits for the disk on that loop: ``offer`` copies the
block into a buffer and returns; when no buffer is free the block is not taken. A read is verified against the digest
before anybody sees it; a block that fails is a miss, its slot is quarantined and ``damaged_blocks`` counts it.

States: ``on`` -> ``read_only`` (no space, read-only file system: what is there can be read) -> ``off`` (any other
error of the disk: nothing is trusted any more). Each change is one log event; there is no way back but a restart.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from kvstore.core.counters import Counters
from kvstore.core.disk_slots import DiskBlock, DiskGrant, DiskIndex
from kvstore.core.ids import BlockDigest, BlockHash, TenantId
from kvstore.core.slot_table import SlotRecord
from kvstore.core.tiering import LowerTier
from kvstore.digest import verify
from kvstore.store.copying import copy_block
from kvstore.store.disk.file import DiskFile, DiskWrite
from kvstore.store.disk.file_io import page_buffer
from kvstore.store.disk.layout import TENANT_BYTES_MAX

logger = logging.getLogger(__name__)

MAX_PENDING_WRITES = 64
PENDING_BYTES_MAX = 128 << 20
WRITES_PER_BATCH = 16
READ_THREADS = 4
MAX_PENDING_READS = 1024
CLOSE_DEADLINE_S = 3.0
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM})

DiskState = Literal["on", "read_only", "off"]
ReadResult = Literal["ok", "missing", "damaged", "failed", "busy"]


@dataclass(frozen=True, slots=True)
class BlockToWrite:
    """A block that may go down: whose, what it must read like, and what it came from."""

    block_hash: BlockHash
    digest: BlockDigest
    tenant: TenantId
    origin: bytes


@dataclass(slots=True)
class TierCounters(Counters):
    """What the driver did; each only grows. ``DiskCounters`` counts what became of the slots."""

    written_blocks: int = 0
    read_blocks: int = 0
    damaged_above: int = 0
    """Blocks that did not have their digest before they were written: damaged in the tier above."""
    io_errors: int = 0
    switched_off: int = 0
    """Changes to a lesser state."""


@dataclass(frozen=True, slots=True)
class _Pending:
    block: BlockToWrite
    grant: DiskGrant
    payload: memoryview


class DiskTier:
    """One per store node. Life cycle: made -> offers and reads -> ``close``. Belongs to one event loop."""

    def __init__(
        self,
        file: DiskFile,
        index: DiskIndex,
        *,
        loop: asyncio.AbstractEventLoop,
        max_pending_writes: int = MAX_PENDING_WRITES,
    ) -> None:
        """Takes the file over. ``index`` was made from ``file.recovered``."""
        self._file = file
        self.index = index
        self._loop = loop
        self._max_pending = max(1, min(max_pending_writes, PENDING_BYTES_MAX // file.stride_bytes))
        self._buffers: list[memoryview] = []
        self._num_buffers = 0
        self._pending: deque[_Pending] = deque()
        self._writing: asyncio.Task[None] | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="store-disk-write")
        self._readers = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="store-disk-read")
        self._read_buffer = threading.local()
        self._num_reads = 0
        self._erasures: set[asyncio.Future[None]] = set()
        self._is_closed = False
        self.state: DiskState = "on"
        self.on_progress: Callable[[], None] = _nothing
        """Called after each batch of writes: there is room for others."""
        self.why = ""
        """Why the state is not ``on``."""
        self.counters = TierCounters()

    # --- what the node knows ------------------------------------------------------------------------------

    def lower(self) -> LowerTier:
        """Returns what the policy of the edge above needs to know."""
        return LowerTier(
            total=self.index.num_slots,
            free=self.index.num_free,
            pending_writes=self._num_buffers - len(self._buffers),
            accepts_writes=self.state == "on",
        )

    @property
    def max_pending_writes(self) -> int:
        """So many writes may be under way."""
        return self._max_pending

    def holds(self, block_hash: BlockHash) -> bool:
        """Returns True when the block is on the disk or on its way there."""
        return block_hash in self.index or self.index.is_writing(block_hash)

    def can_read(self, block_hash: BlockHash) -> SlotRecord | None:
        """Returns where a block is that can be read now, or None."""
        return None if self.state == "off" else self.index.find(block_hash)

    def stat(self) -> dict[str, int]:
        """Returns the counters of driver and index."""
        return {**self.index.counters.to_dict(), **self.counters.to_dict(), "torn_headers": self._file.num_torn}

    # --- writing ------------------------------------------------------------------------------------------

    def offer(self, block: BlockToWrite, source: Any) -> bool:
        """Copies ``source`` (``block_bytes``) and writes it soon. False: not taken; nothing happened.

        The caller has asked the policy, and the block is not ``held`` yet.
        """
        if self.state != "on" or len(block.tenant.encode()) > TENANT_BYTES_MAX:
            return False
        buffer = self._take_buffer()
        if buffer is None:
            return False
        grant = self.index.reserve(block.block_hash, tenant=block.tenant, origin=block.origin)
        if grant is None:
            self._buffers.append(buffer)
            return False
        copy_block(buffer[: self._file.block_bytes], source)
        self._pending.append(_Pending(block, grant, buffer))
        if self._writing is None:
            self._writing = self._loop.create_task(self._write_pending())
        return True

    async def flush(self) -> None:
        """Returns when everything offered so far is written or given up."""
        while self._writing is not None:
            await asyncio.shield(self._writing)

    async def _write_pending(self) -> None:
        try:
            while self._pending:
                batch = [self._pending.popleft() for _ in range(min(WRITES_PER_BATCH, len(self._pending)))]
                try:
                    written = await self._loop.run_in_executor(self._writer, self._write_batch, batch)
                except OSError as error:
                    written = None
                    self._switch_off(error, "write")
                self._batch_ended(batch, written)
                self.on_progress()
                if self.state != "on":
                    rest = list(self._pending)
                    self._pending.clear()
                    self._batch_ended(rest, None)
        finally:
            self._writing = None

    def _write_batch(self, batch: list[_Pending]) -> set[int]:
        """Writer thread: writes what still has its digest; returns the slots that were written."""
        # A block that was damaged above must not become one that the disk seems to have damaged.
        whole = [p for p in batch if verify(p.payload[: self._file.block_bytes], p.block.digest)]
        self._file.write([DiskWrite(_disk_block(p), p.payload) for p in whole])
        return {p.grant.slot for p in whole}

    def _batch_ended(self, batch: list[_Pending], written: set[int] | None) -> None:
        for pending in batch:
            self._buffers.append(pending.payload)
            block = pending.block
            if written is not None and pending.grant.slot in written:
                self.index.commit(block.block_hash, pending.grant, block.digest)
                self.counters.written_blocks += 1
                continue
            self.index.abort(block.block_hash, pending.grant)
            if written is not None:
                self.counters.damaged_above += 1
                logger.error("store_block_corrupt hash=%s found=before_disk", block.block_hash.hex())

    def _take_buffer(self) -> memoryview | None:
        if self._buffers:
            return self._buffers.pop()
        if self._num_buffers >= self._max_pending:
            return None
        self._num_buffers += 1
        return page_buffer(self._file.stride_bytes)

    # --- reading ------------------------------------------------------------------------------------------

    async def read(self, block_hash: BlockHash, into: Any, *, damaged_too: bool = False) -> ReadResult:
        """Reads one block, verified; no hit. ``into``: ``block_bytes``. Modifies: ``into``, only when it is ``ok``.

        ``damaged_too``: also when it is ``damaged``, for who wants to know how.
        """
        record = self.can_read(block_hash)
        if record is None:
            return "missing"
        if self._num_reads >= MAX_PENDING_READS:
            return "busy"
        self._num_reads += 1
        self.index.pin(record.slot)
        try:
            is_whole = await self._loop.run_in_executor(self._readers, self._read_one, record, into, damaged_too)
        except OSError as error:
            self._switch_off(error, "read")
            return "failed"
        finally:
            self._num_reads -= 1
            self.index.unpin(record.slot)
        if not is_whole:
            self.damaged(record)
            return "damaged"
        self.counters.read_blocks += 1
        return "ok"

    async def check(self, slot: int, into: Any = None) -> ReadResult | None:
        """Reads the block of one slot and compares its digest; a damaged one is quarantined. None: nothing there.

        Modifies: ``into``, which gets the bytes, damaged or not.
        """
        block = self.index.block_at(slot)
        if block is None or self.state == "off":
            return None
        return await self.read(block.block_hash, into, damaged_too=True)

    def _read_one(self, record: SlotRecord, into: Any, damaged_too: bool) -> bool:
        """Reader thread: returns False when the bytes do not have their digest; without ``damaged_too`` copies none."""
        buffer = getattr(self._read_buffer, "pages", None)
        if buffer is None:
            buffer = self._read_buffer.pages = page_buffer(self._file.stride_bytes)
        self._file.read(record.slot, buffer)
        payload = buffer[: self._file.block_bytes]
        is_whole = verify(payload, record.digest)
        if into is not None and (is_whole or damaged_too):
            copy_block(into, payload)
        return is_whole

    def damaged(self, record: SlotRecord) -> None:
        """This block is not what it should be: it is gone and its slot kept out of use. Not twice for one life."""
        if self.index.quarantine(record.slot, record.generation):
            logger.error("store_disk_damaged hash=%s slot=%d", record.block_hash.hex(), record.slot)
            self._erase([record.slot])

    # --- leaving ------------------------------------------------------------------------------------------

    def make_room(self, tenant: TenantId, num_bytes: int, *, keep: Sequence[BlockHash] = ()) -> None:
        """Drops a tenant's oldest blocks, but none of ``keep``, while its quota has less than so many bytes left."""
        records = map(self.index.find, keep)
        slots = {record.slot for record in records if record is not None}
        self._erase(list(self.index.make_room(tenant, num_bytes, keep=slots)))

    def release_quarantined(self) -> int:
        """Puts quarantined slots back into use. Returns how many."""
        return len(self.index.release_quarantined())

    def _erase(self, slots: list[int]) -> None:
        """Empties headers for the next node. The write path erases again what is given out before this is done."""
        if not slots or self.state != "on":
            return
        # Through the writer thread: it alone writes, so an erasure never follows the header of the slot's next life.
        erasure = self._loop.run_in_executor(self._writer, self._file.erase, slots)
        self._erasures.add(erasure)
        erasure.add_done_callback(self._erased)

    def _erased(self, erasure: asyncio.Future[None]) -> None:
        self._erasures.discard(erasure)
        error = None if erasure.cancelled() else erasure.exception()
        if isinstance(error, OSError):
            self._switch_off(error, "erase")

    def _switch_off(self, error: OSError, doing: str) -> None:
        self.counters.io_errors += 1
        state: DiskState = "read_only" if error.errno in _FULL and doing != "read" else "off"
        if self.state == "off" or state == self.state:
            return
        self.state = state
        self.why = f"{doing}: {error.strerror or error}"
        self.counters.switched_off += 1
        logger.error(
            "store_disk_off state=%s doing=%s errno=%s error=%s",
            state, doing, errno.errorcode.get(error.errno or 0, error.errno), error,
        )  # fmt: skip

    async def close(self) -> None:
        """Finishes what was offered, within a deadline, and closes the file. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            async with asyncio.timeout(CLOSE_DEADLINE_S):
                await self.flush()
                if self._erasures:
                    await asyncio.gather(*self._erasures, return_exceptions=True)
                await self._loop.run_in_executor(self._writer, _nothing)
                while self._num_reads:
                    await self._loop.run_in_executor(self._readers, _nothing)
        except TimeoutError:
            # The threads are stuck in the kernel; the file stays open for them and ends with the process.
            logger.error("store_disk_stuck pending_writes=%d reads=%d", len(self._pending), self._num_reads)
            self._writer.shutdown(wait=False, cancel_futures=True)
            self._readers.shutdown(wait=False, cancel_futures=True)
            return
        self.state, self.why = "off", "closed"
        self._writer.shutdown()
        self._readers.shutdown()
        self._file.close()


def _disk_block(pending: _Pending) -> DiskBlock:
    block, grant = pending.block, pending.grant
    return DiskBlock(grant.slot, grant.generation, block.block_hash, block.digest, block.tenant, block.origin)


def _nothing() -> None:
    """Does nothing; in a pool it runs when everything before it has begun or ended."""
