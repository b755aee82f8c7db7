"""One pass over a pool of blocks: counts and places of everything that may not be there.

Owns the interface of scanners and the NumPy reference. A scanner only measures; what the figures mean is the
checker's matter (``kernels.checker``), so that host and device give the same verdict from the same figures. It never
writes to the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Protocol

import numpy as np
import xxhash

from kernels.layout import KVLayout, LayoutError
from kernels.pattern import CANARY_BITS, NON_FINITE_MASK, expected_bits

DIGEST_BYTES: Final = 16


class Field(IntEnum):
    """Columns of a scan. Counts are of elements (``PAD`` of bytes); places are byte offsets inside the block.

    The place of something that was not found is ``block_bytes`` for a first place and -1 for a last one.
    """

    NON_FINITE = 0
    NON_FINITE_FIRST = 1
    CANARY = 2
    CANARY_FIRST = 3
    TAIL = 4
    TAIL_FIRST = 5
    PAD = 6
    PAD_FIRST = 7
    PROBE = 8
    PROBE_FIRST = 9
    BAD_FIRST = 10
    BAD_LAST = 11


FIRSTS: Final = (
    Field.NON_FINITE_FIRST,
    Field.CANARY_FIRST,
    Field.TAIL_FIRST,
    Field.PAD_FIRST,
    Field.PROBE_FIRST,
    Field.BAD_FIRST,
)


@dataclass(frozen=True, slots=True)
class ScanRequest:
    """What to look at.

    Attributes:
        slots: places in the pool, int64, shape (n,).
        num_tokens: written tokens of each of them, int64, shape (n,), in [1, block_tokens].
        fill: the byte that unwritten tails and padding hold.
        keys: keys of the probe pattern, uint32, shape (n, 2); None where the content is not a pattern.
    """

    slots: np.ndarray
    num_tokens: np.ndarray
    fill: int = 0
    keys: np.ndarray | None = None


class Scanner(Protocol):
    """Measures a pool where it lies. ``pool``: uint8, shape (num_blocks, block_bytes), C-contiguous."""

    name: str

    def admit(self, pool: Any, layout: KVLayout) -> int:
        """Returns the number of blocks. Raises LayoutError for a pool that this scanner cannot read."""

    def scan(self, pool: Any, layout: KVLayout, request: ScanRequest) -> np.ndarray:
        """Returns int64, shape (n, len(Field))."""

    def digests(self, pool: Any, slots: np.ndarray) -> np.ndarray:
        """Returns the xxh3-128 of whole blocks, uint8, shape (n, 16), big endian."""

    def fetch(self, pool: Any, slots: Sequence[int]) -> np.ndarray:
        """Returns a host copy of blocks, uint8, shape (n, block_bytes)."""


def empty_result(layout: KVLayout, num_blocks: int) -> np.ndarray:
    """Returns the scan of blocks in which nothing was found."""
    result = np.zeros((num_blocks, len(Field)), np.int64)
    result[:, list(FIRSTS)] = layout.block_bytes
    result[:, Field.BAD_LAST] = -1
    return result


def check_shape(pool: Any, layout: KVLayout, *, contiguous: bool) -> int:
    """Returns the number of blocks. Raises LayoutError naming what is wrong with the array."""
    if str(pool.dtype) != "uint8":
        raise LayoutError("pool.dtype", str(pool.dtype), "must be uint8: a pool is checked as bytes")
    if pool.ndim != 2 or pool.shape[1] != layout.block_bytes:
        raise LayoutError("pool.shape", tuple(pool.shape), f"must be (num_blocks, {layout.block_bytes})")
    if pool.shape[0] == 0:
        raise LayoutError("pool.shape", tuple(pool.shape), "an empty pool proves nothing")
    if not contiguous:
        raise LayoutError("pool.strides", tuple(pool.strides), "must be C-contiguous; a strided view is not a pool")
    return int(pool.shape[0])


class NumpyScanner:
    """The reference: host memory, one block after the other so that a block stays in the cache between its passes."""

    name = "numpy"

    def admit(self, pool: Any, layout: KVLayout) -> int:
        if not isinstance(pool, np.ndarray):
            device = "a GPU" if hasattr(pool, "__cuda_array_interface__") else type(pool).__name__
            raise LayoutError("pool.device", device, "this scanner reads numpy arrays in host memory")
        return check_shape(pool, layout, contiguous=pool.flags.c_contiguous)

    def scan(self, pool: Any, layout: KVLayout, request: ScanRequest) -> np.ndarray:
        result = empty_result(layout, len(request.slots))
        plain = layout.row_stride_bytes == layout.row_bytes and request.keys is None
        bits = np.dtype(f"u{layout.item_bytes}")
        scratch = np.empty(layout.block_bytes // layout.item_bytes, bits)
        mask = bits.type(NON_FINITE_MASK[layout.dtype])
        for row, slot in enumerate(request.slots):
            block = pool[slot]
            is_full = request.num_tokens[row] == layout.block_tokens
            if plain and is_full and not _any_non_finite(block.view(bits), mask, scratch):
                continue
            key = None if request.keys is None else request.keys[row]
            _scan_block(block, layout, int(request.num_tokens[row]), request.fill, key, result[row])
        return result

    def digests(self, pool: Any, slots: np.ndarray) -> np.ndarray:
        joined = b"".join(xxhash.xxh3_128_digest(pool[slot]) for slot in slots)
        return np.frombuffer(joined, np.uint8).reshape(-1, DIGEST_BYTES)

    def fetch(self, pool: Any, slots: Sequence[int]) -> np.ndarray:
        return np.array(pool[list(slots)])


def _any_non_finite(elements: np.ndarray, mask: np.unsignedinteger, scratch: np.ndarray) -> bool:
    """True when an element has all bits of the mask. Modifies: ``scratch``, same shape and type."""
    np.bitwise_and(elements, mask, out=scratch)
    return bool(scratch.max() == mask)


def _scan_block(
    block: np.ndarray, layout: KVLayout, num_tokens: int, fill: int, key: np.ndarray | None, out: np.ndarray
) -> None:
    """Measures one block. Modifies: ``out``, one row of a scan that holds nothing found yet."""
    view = layout.logical_view(block)
    written, tail = view[:, :, :, :num_tokens], view[:, :, :, num_tokens:]
    mask = view.dtype.type(NON_FINITE_MASK[layout.dtype])
    wrong = None
    if key is not None:
        wrong = written != expected_bits(layout, key)[:, :, :, :num_tokens]
        _note(wrong, layout, 0, out, Field.PROBE)
    # A pattern is finite and never the canary: where it is right there is nothing else to look for.
    if wrong is None or out[Field.PROBE]:
        canary = written == view.dtype.type(CANARY_BITS[layout.dtype])
        _note(((written & mask) == mask) & ~canary, layout, 0, out, Field.NON_FINITE)
        _note(canary, layout, 0, out, Field.CANARY)
    if tail.size:
        filled = np.frombuffer(bytes([fill]) * layout.item_bytes, view.dtype)[0]
        _note(tail != filled, layout, num_tokens, out, Field.TAIL)

    width = layout.row_stride_bytes - layout.row_bytes
    if width:
        rows = block.reshape(layout.num_rows, layout.row_stride_bytes)
        pad = np.flatnonzero((rows[:, layout.row_bytes :] != fill).reshape(-1))
        if len(pad):
            places = pad // width * layout.row_stride_bytes + layout.row_bytes + pad % width
            _write_down(places, out, Field.PAD)


def _note(found: np.ndarray, layout: KVLayout, first_token: int, out: np.ndarray, field: Field) -> None:
    """Writes down the elements that are True; axes as in ``AXES``, tokens counted from ``first_token``."""
    if found.any():
        index = np.argwhere(found)
        index[:, 3] += first_token
        _write_down(index @ np.array(layout.strides_bytes, np.int64), out, field)


def _write_down(places: np.ndarray, out: np.ndarray, field: Field) -> None:
    """Modifies: count and first place of the kind, first and last place of everything."""
    first, last = int(places.min()), int(places.max())
    out[field], out[field + 1] = len(places), first
    out[Field.BAD_FIRST] = min(int(out[Field.BAD_FIRST]), first)
    out[Field.BAD_LAST] = max(int(out[Field.BAD_LAST]), last)
