"""Positioned reads and writes on one file, with the page cache and past it.

Owns two descriptors of one file. Headers are small and go through the page cache; payloads (``bulk``) go past it where
the file system allows (O_DIRECT): a block that was just read or written lies in the slab anyway, and
another copy in the page cache would only push something else out. Every call blocks; callers are threads.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import Any, Protocol

from kvstore.store.disk.layout import PAGE_BYTES


class DiskIo(Protocol):
    """What the disk file needs of the operating system. Tests put damage, full disks and power cuts here."""

    def write(self, data: Any, offset: int, *, bulk: bool = False) -> None:
        """Writes all of ``data``. With ``bulk``: buffer, length and offset are whole pages. Raises: OSError."""

    def read_into(self, buffer: Any, offset: int, *, bulk: bool = False) -> None:
        """Fills ``buffer``. Modifies: ``buffer``. Raises: OSError, also when the file ends before."""

    def sync(self) -> None:
        """Returns once every earlier write is on the medium. Raises: OSError."""

    def close(self) -> None:
        """Closes the file."""


class FileIo:
    """``DiskIo`` on a real file."""

    def __init__(self, path: Path) -> None:
        """Opens an existing file. Raises: OSError."""
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._direct_fd = _open_direct(path)

    @property
    def is_direct(self) -> bool:
        """True when bulk transfers go past the page cache."""
        return self._direct_fd is not None

    def write(self, data: Any, offset: int, *, bulk: bool = False) -> None:
        fd = self._descriptor(bulk)
        left = memoryview(data).cast("B")
        while left:
            num_written = os.pwrite(fd, left, offset)
            if num_written == 0:
                raise OSError(errno.EIO, "nothing was written")
            left, offset = left[num_written:], offset + num_written

    def read_into(self, buffer: Any, offset: int, *, bulk: bool = False) -> None:
        fd = self._descriptor(bulk)
        left = memoryview(buffer).cast("B")
        while left:
            num_read = os.preadv(fd, [left], offset)
            if num_read == 0:
                raise OSError(errno.EIO, "the file ends before its last slot")
            left, offset = left[num_read:], offset + num_read

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def close(self) -> None:
        for fd in (self._fd, self._direct_fd):
            if fd is not None:
                os.close(fd)
        self._fd, self._direct_fd = -1, None

    def _descriptor(self, bulk: bool) -> int:
        return self._direct_fd if bulk and self._direct_fd is not None else self._fd


def page_buffer(num_bytes: int) -> memoryview:
    """Returns zeroed memory that begins at a page, as transfers past the page cache need it."""
    return memoryview(mmap.mmap(-1, -(-num_bytes // PAGE_BYTES) * PAGE_BYTES))


def _open_direct(path: Path) -> int | None:
    """Returns a descriptor past the page cache; None where the file system has none (some take the flag and fail)."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECT)
    except OSError:
        return None
    try:
        os.preadv(fd, [page_buffer(PAGE_BYTES)], 0)
    except OSError:
        os.close(fd)
        return None
    return fd
