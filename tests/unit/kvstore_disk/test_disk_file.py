"""The disk file: geometry, identity, the lock, and headers that prove nothing."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from disk_workload import BLOCK_BYTES, NUM_SLOTS, block_hash_of, content_of

from kvstore.core.disk_slots import DiskBlock
from kvstore.core.ids import TenantId
from kvstore.digest import block_digest
from kvstore.errors import EnvironmentProblem
from kvstore.store.disk import file as disk_file
from kvstore.store.disk.file import FILE_NAME, DiskFile, DiskWrite, open_disk
from kvstore.store.disk.file_io import page_buffer
from kvstore.store.disk.layout import (
    HEADER_BYTES,
    file_bytes,
    header_offset,
    num_slots_in,
    slots_start,
    stride_bytes,
)


def make_disk(folder: Path, num_slots: int = NUM_SLOTS) -> DiskFile:
    return open_disk(folder, block_bytes=BLOCK_BYTES, num_slots=num_slots)


def make_write(slot: int, number: int, generation: int = 1) -> DiskWrite:
    payload = page_buffer(stride_bytes(BLOCK_BYTES))
    payload[:BLOCK_BYTES] = content_of(number)
    digest = block_digest(content_of(number))
    return DiskWrite(DiskBlock(slot, generation, block_hash_of(number), digest, TenantId("é" * 32)), payload)


def test_blocks_are_there_after_a_restart_with_tenant_and_digest(tmp_path: Path) -> None:
    """What was written is what the next node recovers, and its bytes are the block's."""
    disk = make_disk(tmp_path)
    writes = [make_write(4, 7), make_write(0, 8, generation=2)]
    disk.write(writes)
    disk.close()
    again = make_disk(tmp_path)
    assert again.recovered == (writes[1].block, writes[0].block)
    buffer = page_buffer(again.stride_bytes)
    again.read(4, buffer)
    assert bytes(buffer[:BLOCK_BYTES]) == content_of(7)
    assert again.num_torn == 0
    again.erase([4])
    again.close()
    last = make_disk(tmp_path)
    assert [block.slot for block in last.recovered] == [0]
    last.close()


def test_the_whole_file_is_allocated_at_creation_and_never_grows(tmp_path: Path) -> None:
    """Bounded from the start: a full file system is an event at the start, not in a year."""
    disk = make_disk(tmp_path)
    facts = (tmp_path / FILE_NAME).stat()
    assert facts.st_size == file_bytes(BLOCK_BYTES, NUM_SLOTS) and facts.st_blocks * 512 >= facts.st_size
    disk.write([make_write(slot, slot + 1) for slot in range(NUM_SLOTS)])
    assert (tmp_path / FILE_NAME).stat().st_size == facts.st_size
    disk.close()


@pytest.mark.parametrize("at", [0, 3, 20, 24, 40, 75, 90, 110, 200, HEADER_BYTES - 1])
def test_a_header_with_any_damaged_byte_is_torn(tmp_path: Path, at: int) -> None:
    """No field of a header is used unless all of it proves itself."""
    disk = make_disk(tmp_path)
    disk.write([make_write(2, 5), make_write(3, 6)])
    disk.close()
    path = tmp_path / FILE_NAME
    data = bytearray(path.read_bytes())
    data[header_offset(2) + at] ^= 1
    path.write_bytes(data)
    again = make_disk(tmp_path)
    assert [block.slot for block in again.recovered] == [3] and again.num_torn == 1
    again.close()


def test_a_header_in_another_slot_or_from_another_file_is_stale(tmp_path: Path) -> None:
    """Whole headers that do not belong where they lie: misplaced writes, space that another file had before."""
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        disk = make_disk(folder)
        disk.write([make_write(2, 5)])
        disk.close()
    data = bytearray((first / FILE_NAME).read_bytes())
    header = data[header_offset(2) : header_offset(3)]
    data[header_offset(1) : header_offset(2)] = header
    (first / FILE_NAME).write_bytes(data)
    foreign = bytearray((second / FILE_NAME).read_bytes())
    foreign[header_offset(2) : header_offset(3)] = header
    (second / FILE_NAME).write_bytes(foreign)
    disk, other = make_disk(first), make_disk(second)
    assert [block.slot for block in disk.recovered] == [2] and disk.num_torn == 1
    assert other.recovered == () and other.num_torn == 1
    disk.close()
    other.close()


def test_a_second_node_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    """Two writers on one file would destroy each other's blocks."""
    disk = make_disk(tmp_path)
    with pytest.raises(EnvironmentProblem, match=r"kv\.disk_path: .* is in use by another store node"):
        make_disk(tmp_path)
    disk.close()
    make_disk(tmp_path).close()


def test_a_file_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    """Nothing is overwritten because it has the name that we use."""
    path = tmp_path / FILE_NAME
    path.write_bytes(b"precious" * 1000)
    with pytest.raises(EnvironmentProblem, match="is not a disk tier of Kopir"):
        make_disk(tmp_path)
    assert path.read_bytes() == b"precious" * 1000


def test_another_geometry_replaces_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is a cache: a new size begins empty, with one event that says so."""
    disk = make_disk(tmp_path)
    disk.write([make_write(2, 5)])
    disk.close()
    other = make_disk(tmp_path, NUM_SLOTS + 1)
    assert other.recovered == () and other.num_slots == NUM_SLOTS + 1
    other.close()
    assert len([record for record in caplog.records if record.message.startswith("store_disk_replaced")]) == 1


def test_a_creation_that_ran_out_of_space_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENOSPC at creation: the error, no half file, and the lock free again."""

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(disk_file.os, "posix_fallocate", full)
        with pytest.raises(OSError, match="No space left"):
            make_disk(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    make_disk(tmp_path).close()


@pytest.mark.parametrize("block_bytes", [1, 4096, 5000, 368_640])
def test_the_file_takes_at_most_what_was_asked(block_bytes: int) -> None:
    """The largest number of slots that fit, headers and all."""
    for disk_bytes in (0, 4096, 100_000, 3 << 20, (64 << 20) + 17):
        num_slots = num_slots_in(disk_bytes, block_bytes)
        assert num_slots == 0 or file_bytes(block_bytes, num_slots) <= disk_bytes
        assert file_bytes(block_bytes, num_slots + 1) > disk_bytes
    assert slots_start(3) % 4096 == 0
