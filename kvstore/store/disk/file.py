"""The file of a disk tier: created whole, locked, recovered from its headers, written in an order.

Owns the file, its lock and the order of writes. Life cycle: ``open_disk`` -> ``recovered`` is taken -> writes and reads
by slot -> ``close``. It decides nothing: which block goes where is the ``DiskIndex``'s business. Calls block and belong
to threads; writes come from one thread at a time, reads from any number.

Order of one batch, each step on the medium before the next begins (with ``sync``):

    1. headers of slots that are given to another block are erased
    2. payloads
    3. headers

So whenever the process, or the power, ends: a header that proves itself has its payload. Without ``sync`` the order
holds for the death of the process only; after a power cut a header may lack its payload, which the digest shows.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.core.disk_slots import DiskBlock
from kvstore.errors import EnvironmentProblem, ProtocolError
from kvstore.store.disk.file_io import DiskIo, FileIo
from kvstore.store.disk.layout import (
    EMPTY_HEADER,
    HEADER_BYTES,
    MAX_DISK_BYTES,
    STORE_ID_BYTES,
    SUPERBLOCK_BYTES,
    Superblock,
    file_bytes,
    header_offset,
    pack_header,
    read_headers,
    read_superblock,
    slots_start,
    stride_bytes,
)

logger = logging.getLogger(__name__)

FILE_NAME = "blocks.kopir"
LOCK_NAME = "lock"


@dataclass(frozen=True, slots=True)
class DiskWrite:
    """One block to write. ``payload``: whole pages, ``stride_bytes`` long."""

    block: DiskBlock
    payload: memoryview


class DiskFile:
    """One open disk file."""

    def __init__(self, io: DiskIo, superblock: Superblock, *, sync: bool = True, lock_fd: int | None = None) -> None:
        """Reads the headers. ``sync``: every step of a batch is on the medium before the next. Raises: OSError."""
        self._io = io
        self._superblock = superblock
        self._sync = sync
        self._lock_fd = lock_fd
        self._start = slots_start(superblock.num_slots)
        self._stride = stride_bytes(superblock.block_bytes)
        self._has_header = bytearray(superblock.num_slots)
        """Slots whose header in the file may not be empty."""
        self.num_torn = 0
        """Headers that proved nothing when the file was opened."""
        self.recovered: tuple[DiskBlock, ...] = self._read_headers()

    @property
    def block_bytes(self) -> int:
        """Size of one block."""
        return self._superblock.block_bytes

    @property
    def num_slots(self) -> int:
        """How many blocks fit."""
        return self._superblock.num_slots

    @property
    def stride_bytes(self) -> int:
        """Size of the buffers of reads and writes: a block in whole pages."""
        return self._stride

    def write(self, batch: Sequence[DiskWrite]) -> None:
        """Writes whole blocks; when it returns they will be found after a crash. Raises: OSError.

        The slots are different ones; nobody reads them meanwhile.
        """
        self.erase([write.block.slot for write in batch])
        for write in batch:
            self._io.write(write.payload, self._start + write.block.slot * self._stride, bulk=True)
        self._barrier()
        for write in batch:
            slot = write.block.slot
            self._has_header[slot] = True
            header = pack_header(
                write.block, store_id=self._superblock.store_id, block_bytes=self._superblock.block_bytes
            )
            self._io.write(header, header_offset(slot))
        self._barrier()

    def erase(self, slots: Sequence[int]) -> None:
        """Makes these slots empty for whoever opens the file next. Raises: OSError."""
        written = [slot for slot in slots if self._has_header[slot]]
        for slot in written:
            self._io.write(EMPTY_HEADER, header_offset(slot))
        if written:
            self._barrier()
        for slot in written:
            self._has_header[slot] = False

    def read(self, slot: int, into: Any) -> None:
        """Reads one payload. ``into``: ``stride_bytes`` at a page boundary. Modifies: ``into``. Raises: OSError."""
        self._io.read_into(into, self._start + slot * self._stride, bulk=True)

    def close(self) -> None:
        """Closes the file and lets the next node have it. Safe to call twice."""
        self._io.close()
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _barrier(self) -> None:
        if self._sync:
            self._io.sync()

    def _read_headers(self) -> tuple[DiskBlock, ...]:
        data = bytearray(self.num_slots * HEADER_BYTES)
        self._io.read_into(data, header_offset(0))
        blocks = []
        for slot, block in read_headers(memoryview(data), self._superblock):
            self._has_header[slot] = True
            if block is None:
                self.num_torn += 1
            else:
                blocks.append(block)
        return tuple(blocks)


def open_disk(
    folder: Path,
    *,
    block_bytes: int,
    num_slots: int,
    sync: bool = True,
    make_io: Callable[[Path], DiskIo] = FileIo,
) -> DiskFile:
    """Opens the disk file in ``folder``, creating folder and file where they are missing.

    A file of another geometry or version is replaced: it is a cache. All its space is allocated now.
    Raises: EnvironmentProblem if another process has it, or if the file there is not ours; OSError.
    """
    assert num_slots >= 1 and file_bytes(block_bytes, num_slots) <= MAX_DISK_BYTES, (block_bytes, num_slots)
    folder.mkdir(parents=True, exist_ok=True)
    lock_fd = _lock(folder)
    try:
        path = folder / FILE_NAME
        superblock = _existing(path, block_bytes, num_slots)
        if superblock is None:
            superblock = _create(path, block_bytes, num_slots)
        io = make_io(path)
        try:
            return DiskFile(io, superblock, sync=sync, lock_fd=lock_fd)
        except BaseException:
            io.close()
            raise
    except BaseException:
        os.close(lock_fd)
        raise


def _lock(folder: Path) -> int:
    """Returns the lock of the folder; the kernel drops it with the process, whatever killed it."""
    fd = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise EnvironmentProblem(
            f"kv.disk_path: {folder} is in use by another store node; give each node a folder of its own"
        ) from error
    return fd


def _existing(path: Path, block_bytes: int, num_slots: int) -> Superblock | None:
    """Returns the superblock of a file that can be used; None when there is none, or one of another geometry."""
    try:
        with path.open("rb") as file:
            data = file.read(SUPERBLOCK_BYTES)
            size_bytes = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return None
    try:
        superblock = read_superblock(data)
    except ProtocolError as error:
        raise EnvironmentProblem(f"kv.disk_path: {path} is not a disk tier of Kopir ({error}); move it away") from error
    wanted = Superblock(store_id=superblock.store_id, block_bytes=block_bytes, num_slots=num_slots)
    if superblock == wanted and size_bytes == file_bytes(block_bytes, num_slots):
        return superblock
    logger.warning(
        "store_disk_replaced path=%s version=%d block_bytes=%d slots=%d bytes=%d wanted_block_bytes=%d wanted_slots=%d",
        path, superblock.version, superblock.block_bytes, superblock.num_slots, size_bytes, block_bytes, num_slots,
    )  # fmt: skip
    path.unlink()
    return None


def _create(path: Path, block_bytes: int, num_slots: int) -> Superblock:
    """Makes the file under another name, so that nobody ever sees half of one."""
    superblock = Superblock(store_id=secrets.token_bytes(STORE_ID_BYTES), block_bytes=block_bytes, num_slots=num_slots)
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(fd, 0, file_bytes(block_bytes, num_slots))
        os.pwrite(fd, superblock.pack(), 0)
        os.fsync(fd)
        partial.rename(path)
        _sync_folder(path.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    return superblock


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
