"""A workload on a disk file, the record of what it promised, and two ways to be killed in the middle of it.

``SimulatedDisk`` is a medium with a volatile cache: a crash keeps what was synced and, of the rest, any subset of
512-byte sectors. ``MortalIo`` kills its own process inside a chosen write on a real file.
"""

from __future__ import annotations

import functools
import os
import random
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.core.disk_slots import DiskBlock, DiskIndex
from kvstore.core.eviction import LruPolicy
from kvstore.core.ids import BlockDigest, BlockHash, TenantId
from kvstore.core.quota import TenantBook
from kvstore.digest import block_digest
from kvstore.store.disk.file import DiskFile, DiskWrite
from kvstore.store.disk.file_io import FileIo, page_buffer
from kvstore.store.disk.layout import SECTOR_BYTES, Superblock, file_bytes, stride_bytes

BLOCK_BYTES = 3000
NUM_SLOTS = 6
STORE_ID = b"01234567"
SUPERBLOCK = Superblock(store_id=STORE_ID, block_bytes=BLOCK_BYTES, num_slots=NUM_SLOTS)


def block_hash_of(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


@functools.cache
def content_of(number: int) -> bytes:
    return random.Random(number).randbytes(BLOCK_BYTES)


class Crash(Exception):
    """The simulated machine lost its power."""


class SimulatedDisk:
    """``DiskIo`` in memory; loses its power inside write or sync number ``crash_at``."""

    def __init__(self, image: bytes, *, crash_at: int | None = None, seed: int = 0) -> None:
        self._durable = bytearray(image)
        self._view = bytearray(image)
        self._cached: list[tuple[int, bytes]] = []
        self._crash_at = crash_at
        self._random = random.Random(seed)
        self.num_steps = 0

    def write(self, data: Any, offset: int, *, bulk: bool = False) -> None:
        raw = bytes(data)
        self._cached.append((offset, raw))
        self._view[offset : offset + len(raw)] = raw
        self._step()

    def read_into(self, buffer: Any, offset: int, *, bulk: bool = False) -> None:
        view = memoryview(buffer).cast("B")
        view[:] = self._view[offset : offset + len(view)]

    def sync(self) -> None:
        self._step()
        self._durable[:] = self._view
        self._cached.clear()

    def close(self) -> None:
        pass

    def _step(self) -> None:
        if self.num_steps == self._crash_at:
            raise Crash
        self.num_steps += 1

    def after_crash(self) -> bytes:
        """Returns what is on the medium: of every cached write, each sector may have made it or not."""
        image = bytearray(self._durable)
        share = self._random.choice((0.0, 0.1, 0.5, 0.9, 1.0))
        for offset, data in self._cached:
            start = offset
            while start < offset + len(data):
                stop = min(offset + len(data), (start // SECTOR_BYTES + 1) * SECTOR_BYTES)
                if self._random.random() < share:
                    image[start:stop] = data[start - offset : stop - offset]
                start = stop
        return bytes(image)


class MortalIo(FileIo):
    """``DiskIo`` on a real file that kills this process in the middle of write number ``die_at``."""

    def __init__(self, path: Path, die_at: int) -> None:
        super().__init__(path)
        self._die_at = die_at

    def write(self, data: Any, offset: int, *, bulk: bool = False) -> None:
        if self._die_at == 0:
            half = bytes(data)[: len(data) // 2]
            os.pwrite(self._fd, half, offset)
            os.kill(os.getpid(), signal.SIGKILL)
        self._die_at -= 1
        super().write(data, offset, bulk=bulk)


@dataclass
class Promise:
    """What the workload was told: blocks that are committed, and those that were given up or are being replaced."""

    committed: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)

    def line(self) -> str:
        return ",".join(map(str, sorted(self.committed)))


class Workload:
    """Batches of blocks through a small file, with evictions, erasures and quarantine; all chosen by the seed."""

    def __init__(self, disk: DiskFile, *, seed: int, num_batches: int = 12) -> None:
        self._disk = disk
        self._random = random.Random(seed)
        self._num_batches = num_batches
        self.index = DiskIndex(
            disk.num_slots,
            policy=LruPolicy(disk.num_slots),
            book=TenantBook(),
            block_bytes=disk.block_bytes,
            recovered=disk.recovered,
        )
        self.promise = Promise({number_of(block) for block in disk.recovered})
        self._next = max(self.promise.committed, default=0) + 1

    def run(self, tell: Any = lambda promise: None) -> None:
        """Does everything; ``tell`` is called before each step that withdraws and after each that promises."""
        for _ in range(self._num_batches):
            self._write_batch(tell)
            if self._random.random() < 0.3 and self.promise.committed:
                self._quarantine(tell)
            if self._random.random() < 0.3:
                self.index.release_quarantined()
            self.index.check_invariants()

    def _write_batch(self, tell: Any) -> None:
        numbers = [self._next + offset for offset in range(self._random.randint(1, 3))]
        self._next += len(numbers)
        batch, grants = [], []
        for number in numbers:
            grant = self.index.reserve(block_hash_of(number), tenant=TenantId("t"))
            if grant is None:
                continue
            digest = block_digest(content_of(number))
            block = DiskBlock(grant.slot, grant.generation, block_hash_of(number), digest, TenantId("t"))
            payload = page_buffer(stride_bytes(BLOCK_BYTES))
            payload[:BLOCK_BYTES] = content_of(number)
            batch.append(DiskWrite(block, payload))
            grants.append((number, grant, digest))
        # What was evicted for this batch is not promised any more.
        self.promise.committed = {number_of(block) for block in self.index.blocks()}
        self.promise.written |= set(numbers)
        tell(self.promise)
        self._disk.write(batch)
        for number, grant, digest in grants:
            self.index.commit(block_hash_of(number), grant, digest)
            self.promise.committed.add(number)
        tell(self.promise)

    def _quarantine(self, tell: Any) -> None:
        block = self._random.choice(list(self.index.blocks()))
        self.index.quarantine(block.slot, block.generation)
        self.promise.committed.discard(number_of(block))
        tell(self.promise)
        self._disk.erase([block.slot])


def number_of(block: DiskBlock) -> int:
    return int.from_bytes(block.block_hash, "big")


def empty_image() -> bytes:
    return SUPERBLOCK.pack().ljust(file_bytes(BLOCK_BYTES, NUM_SLOTS), b"\0")


def check_recovered(disk: DiskFile, committed: set[int], *, what: str) -> None:
    """The claim: every block found is whole, and nothing that was promised is missing."""
    found = set()
    for block in disk.recovered:
        buffer = page_buffer(disk.stride_bytes)
        disk.read(block.slot, buffer)
        number = number_of(block)
        assert bytes(buffer[:BLOCK_BYTES]) == content_of(number), f"{what}: block {number} is not whole"
        assert block.digest == BlockDigest(block_digest(buffer[:BLOCK_BYTES])), f"{what}: digest of {number}"
        found.add(number)
    assert committed <= found, f"{what}: lost {sorted(committed - found)}, found {sorted(found)}"
