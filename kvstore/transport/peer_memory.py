"""The memory of another process of this host, read by system call: the reader copies, the other side does nothing.

A process describes itself by its id and by a random mark at an address that it tells. Whoever opens it holds a
descriptor of the process, reads the mark, and then sees that the process still lives: the process with that id is the
one that was meant, and stays so for as long as the descriptor says that it lives. Every read ends with that question,
because a process id may be given to another process once its owner is gone.

Nothing can be written through this module.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import select
import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from kvstore.errors import PeerLost

MARK_BYTES = 16
SEGMENTS_MAX = 1024
"""The kernel takes no more in one call (``IOV_MAX``)."""

Segment = tuple[int, int, int]
"""Address here, address in the peer, bytes."""


class MemoryAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where a process can be found, and its mark at an address in its memory."""

    pid: int
    mark_address: int
    mark: bytes


class OwnMemory:
    """What this process says about its memory. The mark lives as long as this object."""

    def __init__(self) -> None:
        mark = secrets.token_bytes(MARK_BYTES)
        self._mark = np.frombuffer(mark, np.uint8).copy()
        self.address = MemoryAddress(os.getpid(), address_of(self._mark), mark)


class PeerMemory:
    """See the module. Life cycle: opened -> ``copy`` ... -> ``close``. One thread."""

    def __init__(self, address: MemoryAddress) -> None:
        """Raises: PeerLost when the process is gone, is another one, or lets nobody read."""
        self._pid = address.pid
        # Each an array of ``struct iovec``: address and length, one machine word each.
        self._from, self._into = bytearray(SEGMENTS_MAX * _IOVEC.size), bytearray(SEGMENTS_MAX * _IOVEC.size)
        self._from_pointer, self._into_pointer = (
            ctypes.c_void_p(address_of(np.frombuffer(vectors, np.uint8))) for vectors in (self._from, self._into)
        )
        try:
            self._read = _read_call()
            self._process = os.pidfd_open(address.pid)
        except (OSError, AttributeError, OverflowError) as error:
            raise PeerLost(f"process {address.pid} cannot be opened: {error}") from error
        self._poll = select.poll()
        self._poll.register(self._process, select.POLLIN)
        mark = np.zeros(MARK_BYTES, np.uint8)
        try:
            self.copy(address_of(mark), address.mark_address, MARK_BYTES)
            self.check_alive()
            if mark.tobytes() != address.mark:
                raise PeerLost(f"process {address.pid} is another one")
        except PeerLost:
            self.close()
            raise

    def copy(self, into: int, source: int, num_bytes: int) -> None:
        """Copies from ``source`` in the peer to ``into`` here, both addresses. Modifies: the memory at ``into``.

        The bytes mean something only once ``check_alive`` has passed. Raises: PeerLost.
        """
        done = 0
        while done < num_bytes:
            size = num_bytes - done
            _IOVEC.pack_into(self._into, 0, into + done, size)
            _IOVEC.pack_into(self._from, 0, source + done, size)
            done += self._call(1)

    def copy_all(self, segments: Sequence[Segment]) -> None:
        """Copies up to ``SEGMENTS_MAX`` segments in as few calls as the kernel allows, see ``copy``."""
        while segments:
            assert len(segments) <= SEGMENTS_MAX, len(segments)
            words_into = [word for into, _, size in segments for word in (into, size)]
            words_from = [word for _, source, size in segments for word in (source, size)]
            format = f"{len(words_into)}N"
            struct.pack_into(format, self._into, 0, *words_into)
            struct.pack_into(format, self._from, 0, *words_from)
            segments = _after(segments, self._call(len(segments)))

    def _call(self, count: int) -> int:
        """Returns how many bytes the kernel copied. Raises: PeerLost when none."""
        got: int = self._read(self._pid, self._into_pointer, count, self._from_pointer, count, 0)
        if got <= 0:
            reason = os.strerror(ctypes.get_errno()) if got < 0 else "nothing to read"
            raise PeerLost(f"the memory of process {self._pid} cannot be read: {reason}")
        return got

    def check_alive(self) -> None:
        """Raises: PeerLost when the process has ended, so that its id may mean another one."""
        if self._poll.poll(0):
            raise PeerLost(f"process {self._pid} has ended")

    def close(self) -> None:
        os.close(self._process)


_IOVEC = struct.Struct("2N")


def _read_call() -> Any:
    call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    call.restype = ctypes.c_ssize_t
    call.argtypes = (
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    )
    return call


def _after(segments: Sequence[Segment], num_bytes: int) -> list[Segment]:
    """Returns what of ``segments`` is left when their first ``num_bytes`` are done."""
    for index, (into, source, size) in enumerate(segments):
        if num_bytes < size:
            rest = (into + num_bytes, source + num_bytes, size - num_bytes)
            return [rest, *segments[index + 1 :]]
        num_bytes -= size
    return []


def address_of(array: np.ndarray) -> int:
    """Returns the address of the first byte of ``array``."""
    address: int = array.__array_interface__["data"][0]
    return address
