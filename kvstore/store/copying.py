"""One memory copy or erasure of a block, without holding the interpreter lock.

Owns nothing. The first touch of a slab page in a process is a page fault; other threads go on meanwhile.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def copy_block(destination: Any, source: Any) -> None:
    """Copies all bytes of ``source`` into ``destination``: two contiguous buffers of the same size.

    Raises: ValueError when the sizes differ or the destination is read-only.
    """
    np.copyto(_as_bytes(destination), _as_bytes(source))


def zero_block(destination: Any) -> None:
    """Sets all bytes of a writable contiguous buffer to zero."""
    _as_bytes(destination).fill(0)


def _as_bytes(buffer: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(buffer, dtype=np.uint8)
