"""The driver of the disk tier: verified reads, damage, a disk that fails in every way, bounds."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from disk_workload import BLOCK_BYTES, NUM_SLOTS, block_hash_of, content_of

from kvstore.core.disk_slots import NO_ORIGIN, DiskIndex
from kvstore.core.eviction import LruPolicy
from kvstore.core.ids import BlockDigest, TenantId
from kvstore.core.quota import TenantBook
from kvstore.core.slot_states import SlotState
from kvstore.digest import block_digest
from kvstore.store.disk.file import FILE_NAME, open_disk
from kvstore.store.disk.file_io import FileIo
from kvstore.store.disk.layout import slots_start, stride_bytes
from kvstore.store.disk.tier import BlockToWrite, DiskTier

TENANT = TenantId("t")


class FaultyIo(FileIo):
    """A real file whose next operations fail or wait, as the test says."""

    fail_write: OSError | None = None
    fail_read: OSError | None = None
    fail_sync: OSError | None = None
    gate: threading.Event | None = None
    read_gate: threading.Event | None = None

    def write(self, data: Any, offset: int, *, bulk: bool = False) -> None:
        if self.gate is not None:
            assert self.gate.wait(20)
        if self.fail_write is not None:
            raise self.fail_write
        super().write(data, offset, bulk=bulk)

    def read_into(self, buffer: Any, offset: int, *, bulk: bool = False) -> None:
        if self.read_gate is not None and bulk:
            assert self.read_gate.wait(20)
        if self.fail_read is not None and bulk:
            raise self.fail_read
        super().read_into(buffer, offset, bulk=bulk)

    def sync(self) -> None:
        if self.fail_sync is not None:
            raise self.fail_sync
        super().sync()


class Bench:
    """One tier on a real file, and what can be done to it."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.path = folder / FILE_NAME
        self.io: FaultyIo

        def make_io(path: Path) -> FaultyIo:
            self.io = FaultyIo(path)
            return self.io

        file = open_disk(folder, block_bytes=BLOCK_BYTES, num_slots=NUM_SLOTS, make_io=make_io)
        index = DiskIndex(
            NUM_SLOTS, policy=LruPolicy(NUM_SLOTS), book=TenantBook(), block_bytes=BLOCK_BYTES, recovered=file.recovered
        )
        self.tier = DiskTier(file, index, loop=asyncio.get_running_loop(), **options)

    def offer(self, number: int, *, digest: BlockDigest | None = None) -> bool:
        block = BlockToWrite(block_hash_of(number), digest or block_digest(content_of(number)), TENANT, NO_ORIGIN)
        return self.tier.offer(block, content_of(number))

    async def put(self, *numbers: int) -> None:
        for number in numbers:
            assert self.offer(number)
        await self.tier.flush()

    async def read(self, number: int) -> tuple[str, bytes]:
        buffer = bytearray(BLOCK_BYTES)
        return await self.tier.read(block_hash_of(number), buffer), bytes(buffer)

    def damage(self, number: int) -> int:
        """Flips one byte of a stored block behind the tier's back; returns its slot."""
        record = self.tier.index.find(block_hash_of(number))
        assert record is not None
        with self.path.open("r+b") as file:
            place = slots_start(NUM_SLOTS) + record.slot * stride_bytes(BLOCK_BYTES) + BLOCK_BYTES // 2
            file.seek(place)
            byte = file.read(1)
            file.seek(place)
            file.write(bytes([byte[0] ^ 0x40]))
        return record.slot


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.io.gate = None
    await bench.tier.close()


async def test_what_was_offered_can_be_read_verified(bench: Bench) -> None:
    """A block is found only once it is whole on the disk; its bytes come back; an unknown one is missing."""
    bench.io.gate = threading.Event()
    assert bench.offer(1)
    assert bench.tier.holds(block_hash_of(1)) and bench.tier.can_read(block_hash_of(1)) is None
    bench.io.gate.set()
    await bench.tier.flush()
    assert await bench.read(1) == ("ok", content_of(1))
    assert (await bench.read(2))[0] == "missing"
    bench.tier.index.check_invariants()


async def test_a_damaged_block_is_a_miss_counted_here_and_its_slot_is_not_used_again(
    bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk hop's own counter moves; nothing is copied out; the slot waits for ``gc``."""
    await bench.put(1, 2)
    slot = bench.damage(1)
    assert await bench.read(1) == ("damaged", bytes(BLOCK_BYTES))
    assert bench.tier.stat()["damaged_blocks"] == 1 and bench.tier.stat()["damaged_above"] == 0
    assert bench.tier.index.state_of(slot) is SlotState.QUARANTINED
    assert (await bench.read(1))[0] == "missing"
    assert any(record.message.startswith("store_disk_damaged") for record in caplog.records)
    await bench.put(*range(10, 10 + NUM_SLOTS - 1))
    assert bench.tier.index.state_of(slot) is SlotState.QUARANTINED
    assert bench.tier.release_quarantined() == 1
    assert bench.tier.index.state_of(slot) is SlotState.FREE
    await bench.tier.close()
    again = Bench(tmp_path)
    assert block_hash_of(1) not in again.tier.index
    await again.tier.close()


async def test_a_block_that_was_damaged_above_is_not_written_and_not_the_disks_fault(bench: Bench) -> None:
    """Hop by hop: the digest is looked at before the write, with a counter of its own."""
    assert bench.offer(1, digest=block_digest(content_of(2)))
    await bench.tier.flush()
    stat = bench.tier.stat()
    assert (stat["damaged_above"], stat["damaged_blocks"], stat["written_blocks"]) == (1, 0, 0)
    assert not bench.tier.holds(block_hash_of(1))


@pytest.mark.parametrize(
    ("number", "state"),
    [(errno.ENOSPC, "read_only"), (errno.EROFS, "read_only"), (errno.EDQUOT, "read_only"), (errno.EIO, "off")],
)
async def test_a_disk_that_takes_no_more_writes_is_one_event_and_no_error(
    bench: Bench, caplog: pytest.LogCaptureFixture, number: int, state: str
) -> None:
    """Everything under way is given up, nothing half is visible; what was whole stays readable."""
    await bench.put(1)
    bench.io.fail_write = OSError(number, "injected")
    for block in range(2, 6):
        assert bench.offer(block)
    await bench.tier.flush()
    assert bench.tier.state == state and "injected" in bench.tier.why
    assert not bench.offer(6)
    events = [record.message for record in caplog.records if record.message.startswith("store_disk_off")]
    assert len(events) == 1 and errno.errorcode[number] in events[0]
    assert all(not bench.tier.holds(block_hash_of(block)) for block in range(2, 7))
    assert (await bench.read(1))[0] == ("ok" if state == "read_only" else "missing")
    assert bench.tier.lower().accepts_writes is False and bench.tier.lower().pending_writes == 0
    bench.tier.index.check_invariants()


async def test_a_failed_sync_or_read_switches_everything_off(bench: Bench) -> None:
    """After such an error nobody knows what the medium holds."""
    await bench.put(1)
    bench.io.fail_sync = OSError(errno.EIO, "injected")
    assert bench.offer(2)
    await bench.tier.flush()
    assert bench.tier.state == "off" and not bench.tier.holds(block_hash_of(2))


async def test_a_read_error_is_a_miss(bench: Bench) -> None:
    """EIO while reading: this reader computes the block itself, and so do all after it."""
    await bench.put(1)
    bench.io.fail_read = OSError(errno.EIO, "injected")
    assert (await bench.read(1))[0] == "failed"
    assert bench.tier.state == "off" and (await bench.read(1))[0] == "missing"


async def test_writes_under_way_are_bounded(tmp_path: Path) -> None:
    """A slow disk holds so many buffers and no more; what does not fit is not taken."""
    bench = Bench(tmp_path, max_pending_writes=3)
    bench.io.gate = threading.Event()
    assert [bench.offer(number) for number in range(1, 6)] == [True, True, True, False, False]
    assert bench.tier.lower().pending_writes == 3
    bench.io.gate.set()
    await bench.tier.flush()
    assert bench.tier.lower().pending_writes == 0 and bench.offer(4)
    await bench.tier.close()


async def test_close_finishes_what_was_offered(tmp_path: Path) -> None:
    """A clean end loses nothing; the next node has it all."""
    bench = Bench(tmp_path)
    for number in range(1, NUM_SLOTS + 1):
        assert bench.offer(number)
    await bench.tier.close()
    again = Bench(tmp_path)
    assert again.tier.stat()["recovered_blocks"] == NUM_SLOTS
    for number in range(1, NUM_SLOTS + 1):
        assert await again.read(number) == ("ok", content_of(number))
    await again.tier.close()


async def test_a_block_that_is_read_is_not_overwritten(bench: Bench) -> None:
    """Reads pin their slot: churn goes around the two oldest blocks for as long as their readers are on their way."""
    await bench.put(*range(1, NUM_SLOTS + 1))
    bench.io.read_gate = threading.Event()
    reads = [asyncio.ensure_future(bench.read(number)) for number in (1, 2)]
    await asyncio.sleep(0)
    await bench.put(*range(20, 20 + NUM_SLOTS - 2))
    assert {number for number in range(1, 100) if bench.tier.holds(block_hash_of(number))} == {
        1, 2, *range(20, 20 + NUM_SLOTS - 2),
    }  # fmt: skip
    bench.io.read_gate.set()
    assert [await read for read in reads] == [("ok", content_of(1)), ("ok", content_of(2))]
    await bench.put(99)
    assert not bench.tier.holds(block_hash_of(1)), "a read is no hit, and its pin is gone"
    bench.tier.index.check_invariants()
