"""The host slab: one file of shared memory, cut into block slots, mapped by every local process that uses it.

Owns the file and its mapping; knows nothing of leases, and of hashes only where their table lies. The node creates the
slab and unlinks it at its exit; workers only open it, so the death of a worker changes nothing. It is a plain file on
the shared-memory file system (not ``multiprocessing.shared_memory``, whose resource tracker would unlink it with the
first reader that ends). The node holds an exclusive lock on the file for its whole life: a slab that can be
locked belongs to a dead node and is removed by the next node that starts (``remove_dead_slabs``). The kernel drops
the lock with the process, whatever killed it, so no pid is compared.

Byte layout of the file:

    [0, 4096)                        header: MessagePack of ``SlabHeader`` behind a 4-byte little-endian length
    [4096, 4096 + table)             the ``SlotTable`` of the index, in whole pages; only the node writes it
    [slots + slot * stride, ...)     slot, ``block_bytes`` long; stride = block_bytes rounded up to 64

Every page is allocated at creation, so that a full machine is an error then and not a bus error in a worker later.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import struct
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import psutil
from msgspec import Meta, Struct

from kvstore.core.slot_table import SlotTable, table_bytes
from kvstore.errors import EnvironmentProblem, ProtocolError

SHM_DIR = Path("/dev/shm")
SLAB_PREFIX = "kopir-slab-"
SLAB_VERSION = 2
HEADER_BYTES = 4096
SLOT_ALIGNMENT_BYTES = 64
PAGE_BYTES = 4096
MAX_SLAB_BYTES = 1 << 46

_MAGIC = "kopir-slab"
_LENGTH = struct.Struct("<I")
_CGROUP = Path("/sys/fs/cgroup")


class SlabHeader(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a slab file says about itself."""

    magic: str = _MAGIC
    version: int = SLAB_VERSION
    incarnation: Annotated[str, Meta(max_length=128)]
    block_bytes: Annotated[int, Meta(ge=1)]
    num_blocks: Annotated[int, Meta(ge=1)]


class Slab:
    """One mapped slab. Made by ``create_slab`` (the node) or ``open_slab`` (everybody else)."""

    def __init__(self, path: Path, header: SlabHeader, mapping: mmap.mmap, *, owner_fd: int | None) -> None:
        self.path = path
        self.incarnation = header.incarnation
        self.block_bytes = header.block_bytes
        self.num_blocks = header.num_blocks
        self._stride = slot_stride_bytes(header.block_bytes)
        self._mapping = mapping
        self._bytes = memoryview(mapping)
        self._slots_start = _slots_start(header.num_blocks)
        table_end = HEADER_BYTES + table_bytes(header.num_blocks)
        self.table = SlotTable(header.num_blocks, self._bytes[HEADER_BYTES:table_end])
        """Which block is in which slot. Written by the node's ``SlabIndex`` alone, read by everybody."""
        self._owner_fd = owner_fd

    @property
    def slab_bytes(self) -> int:
        """Size of the whole file in bytes."""
        return len(self._mapping)

    def slot(self, slot: int) -> memoryview:
        """Returns a writable view of one slot: ``block_bytes`` bytes, shared with every process.

        The view keeps the mapping alive. Raises: IndexError when there is no such slot.
        """
        if not 0 <= slot < self.num_blocks:
            raise IndexError(f"slot {slot} of a slab with {self.num_blocks} slots")
        start = self._slots_start + slot * self._stride
        return self._bytes[start : start + self.block_bytes]

    def run(self, first: int, num_slots: int) -> np.ndarray:
        """Returns a read-only array of neighbouring slots, uint8, shape (num_slots, block_bytes), without a copy.

        Its rows are ``stride`` bytes apart. Raises: IndexError when there are no such slots.
        """
        if num_slots < 1 or first < 0 or first + num_slots > self.num_blocks:
            raise IndexError(f"slots {first} to {first + num_slots} of a slab with {self.num_blocks} slots")
        start = self._slots_start + first * self._stride
        shape, strides = (num_slots, self.block_bytes), (self._stride, 1)
        array: np.ndarray = np.ndarray(shape, np.uint8, buffer=self._bytes, offset=start, strides=strides)
        array.flags.writeable = False
        return array

    def touch_pages(self) -> None:
        """Reads one byte of every page, so that no later copy waits for a page fault. Lets other threads run."""
        np.frombuffer(self._bytes, dtype=np.uint8)[::PAGE_BYTES].max()

    def close(self) -> None:
        """Unlinks the file if this process is its owner, and drops the mapping once no view of it is left."""
        if self._owner_fd is not None:
            self.path.unlink(missing_ok=True)
            os.close(self._owner_fd)
            self._owner_fd = None
        try:
            self.table.close()
            self._bytes.release()
            self._mapping.close()
        except BufferError:
            # Somebody still holds a view; the memory goes with the last one.
            pass


def slot_stride_bytes(block_bytes: int) -> int:
    """Returns the distance between two slots: ``block_bytes`` rounded up to a cache line."""
    return -(-block_bytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES


def slab_file_bytes(block_bytes: int, num_blocks: int) -> int:
    """Returns the size of the file of a slab."""
    return _slots_start(num_blocks) + num_blocks * slot_stride_bytes(block_bytes)


def _slots_start(num_blocks: int) -> int:
    return HEADER_BYTES + -(-table_bytes(num_blocks) // PAGE_BYTES) * PAGE_BYTES


def create_slab(*, incarnation: str, block_bytes: int, num_blocks: int, shm_dir: Path = SHM_DIR) -> Slab:
    """Removes slabs of dead nodes, then allocates, locks and maps a new one.

    Raises: EnvironmentProblem naming the field, the sizes and what to do when shared memory is missing or too small.
    """
    size_bytes = slab_file_bytes(block_bytes, num_blocks)
    assert block_bytes >= 1 and num_blocks >= 1 and size_bytes <= MAX_SLAB_BYTES, (block_bytes, num_blocks)
    if not shm_dir.is_dir():
        raise EnvironmentProblem(f"store.host_bytes: {shm_dir} is missing; mount a shared-memory file system there")
    remove_dead_slabs(shm_dir)
    check_room(size_bytes, shm_dir)
    path = shm_dir / f"{SLAB_PREFIX}{incarnation}"
    fd = _create_locked(path)
    try:
        _allocate(fd, size_bytes, shm_dir)
        mapping = mmap.mmap(fd, size_bytes)
        header = SlabHeader(incarnation=incarnation, block_bytes=block_bytes, num_blocks=num_blocks)
        payload = msgspec.msgpack.encode(header)
        mapping[: _LENGTH.size + len(payload)] = _LENGTH.pack(len(payload)) + payload
    except BaseException:
        path.unlink(missing_ok=True)
        os.close(fd)
        raise
    return Slab(path, header, mapping, owner_fd=fd)


def open_slab(path: Path) -> Slab:
    """Maps the slab of a running node.

    Raises: EnvironmentProblem if it cannot be opened (the node is gone, or another user's); ProtocolError if the file
    is not a whole slab of this version.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise EnvironmentProblem(f"slab {path} cannot be opened: {error.strerror}") from error
    try:
        size_bytes = os.fstat(fd).st_size
        if not HEADER_BYTES < size_bytes <= MAX_SLAB_BYTES:
            raise ProtocolError(f"slab {path} has {size_bytes} bytes")
        mapping = mmap.mmap(fd, size_bytes)
    finally:
        os.close(fd)
    (length,) = _LENGTH.unpack(mapping[: _LENGTH.size])
    try:
        header = msgspec.msgpack.decode(
            mapping[_LENGTH.size : _LENGTH.size + min(length, HEADER_BYTES)], type=SlabHeader
        )
    except msgspec.MsgspecError as error:
        mapping.close()
        raise ProtocolError(f"slab {path} has no readable header: {error}") from error
    expected_bytes = slab_file_bytes(header.block_bytes, header.num_blocks)
    if header.magic != _MAGIC or header.version != SLAB_VERSION or expected_bytes != size_bytes:
        mapping.close()
        raise ProtocolError(f"slab {path}: version {header.version}, {size_bytes} bytes, {expected_bytes} expected")
    return Slab(path, header, mapping, owner_fd=None)


def remove_dead_slabs(shm_dir: Path = SHM_DIR) -> tuple[str, ...]:
    """Unlinks every slab of this user whose node is dead. Returns their file names. Safe beside living nodes."""
    removed = []
    for path in sorted(shm_dir.glob(f"{SLAB_PREFIX}*")):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            # Gone meanwhile, a link, or another user's: none of ours to remove.
            continue
        try:
            if stat.S_ISREG(os.fstat(fd).st_mode) and os.fstat(fd).st_uid == os.getuid():
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
                removed.append(path.name)
        except BlockingIOError:
            pass
        finally:
            os.close(fd)
    return tuple(removed)


def check_room(size_bytes: int, shm_dir: Path = SHM_DIR) -> None:
    """Raises: EnvironmentProblem when the file system or the machine's memory has less than ``size_bytes`` left."""
    facts = os.statvfs(shm_dir)
    free_bytes = facts.f_bavail * facts.f_frsize
    if free_bytes < size_bytes:
        raise EnvironmentProblem(
            f"store.host_bytes: the slab needs {_mib(size_bytes)} but {shm_dir} has {_mib(free_bytes)} free; "
            f"lower store.host_bytes or enlarge {shm_dir} (for a container: --shm-size)"
        )
    available_bytes = _available_memory_bytes()
    if available_bytes < size_bytes:
        raise EnvironmentProblem(
            f"store.host_bytes: the slab needs {_mib(size_bytes)} but only {_mib(available_bytes)} of memory are "
            "available; lower store.host_bytes"
        )


def _create_locked(path: Path) -> int:
    """Returns the descriptor of a new file that nobody can mistake for a dead node's."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        # Between creation and lock another node's sweep may have taken the file for a dead one.
        if path.exists() and path.stat().st_ino == os.fstat(fd).st_ino:
            return fd
        os.close(fd)


def _allocate(fd: int, size_bytes: int, shm_dir: Path) -> None:
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM):
            raise
        raise EnvironmentProblem(
            f"store.host_bytes: {shm_dir} ran out while {_mib(size_bytes)} were allocated; lower store.host_bytes"
        ) from error


def _available_memory_bytes() -> int:
    """Returns what the machine, or the control group this process is confined to, still has."""
    available_bytes = int(psutil.virtual_memory().available)
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            used_bytes = int((_CGROUP / "memory.current").read_text())
            available_bytes = min(available_bytes, max(0, int(limit) - used_bytes))
    except (OSError, ValueError):
        # No control group of version 2 here: the machine's own figure stands.
        pass
    return available_bytes


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB"
