"""The probe pattern: bits that say which element they belong to.

Owns one function of (seed, block, layer, k/v, head, token, element). A pool that was filled with it proves its
layout to whoever knows the seed: every element that lies elsewhere, or was read as another type, differs. Values
are always finite, so that a pattern never looks like damage. The CUDA kernels compute the same bits (``scan.cu``).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final

import numpy as np

from kernels.layout import ITEM_BYTES, KVLayout, LayoutError

NON_FINITE_MASK: Final[dict[str, int]] = {
    "float32": 0x7F80_0000,
    "bfloat16": 0x7F80,
    "float16": 0x7C00,
    "float8_e4m3": 0x7F,
}
"""An element is NaN or infinite exactly when all these bits are set."""

CLEARED_BIT: Final[dict[str, int]] = {
    "float32": 0x4000_0000,
    "bfloat16": 0x4000,
    "float16": 0x4000,
    "float8_e4m3": 0x40,
}
"""The bit that the pattern clears in an element that would not be finite."""

CANARY_BITS: Final[dict[str, int]] = {
    "float32": 0xFFCA_CACA,
    "bfloat16": 0xFFCA,
    "float16": 0xFFCA,
    "float8_e4m3": 0xFF,
}
"""What an element holds that nobody has written: a NaN of its own, so that no honest computation leaves it behind."""

DTYPE_CODE: Final[dict[str, int]] = {"float32": 1, "bfloat16": 2, "float16": 3, "float8_e4m3": 4}

_MASK64: Final = (1 << 64) - 1
MAX_SEED: Final = _MASK64


def _mixed64(value: int) -> int:
    """SplitMix64's finaliser. Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK64
    return value ^ (value >> 31)


def block_keys(layout: KVLayout, seed: int, block_ids: Iterable[int]) -> np.ndarray:
    """Returns the keys of blocks, shape (n, 2), uint32: an element's bits follow from its block's two words.

    Raises LayoutError for a seed that does not fit into 64 bits.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= MAX_SEED:
        raise LayoutError("seed", seed, "must be a whole number of 64 bits")
    base = _mixed64(seed ^ _mixed64(DTYPE_CODE[layout.dtype]))
    keys = [_mixed64((base + 0x9E3779B97F4A7C15 * (int(block_id) + 1)) & _MASK64) for block_id in block_ids]
    return np.array([(key & 0xFFFF_FFFF, key >> 32) for key in keys], np.uint32).reshape(-1, 2)


@lru_cache(maxsize=16)
def logical_index(layout: KVLayout) -> np.ndarray:
    """Returns each element's number, shape ``layout.shape``, uint32; heads count over the whole model."""
    sizes = (layout.num_layers, 2, layout.num_kv_heads, layout.block_tokens, layout.head_size)
    first = layout.first_kv_head
    index = np.arange(np.prod(sizes, dtype=np.int64), dtype=np.int64).astype(np.uint32).reshape(sizes)
    index = np.ascontiguousarray(index[:, :, first : first + layout.shard_kv_heads])
    index.flags.writeable = False
    return index


def pattern_bits(dtype: str, index: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Returns the bits of elements ``index`` (uint32) in blocks whose key words are ``low`` and ``high``, broadcast.

    Returns: unsigned integers of the element's size, always finite numbers of ``dtype``.
    """
    x = index * np.uint32(0x9E3779B1) + low
    scratch = x >> np.uint32(16)
    x ^= scratch
    x *= np.uint32(0x7FEB352D)
    np.right_shift(x, np.uint32(15), out=scratch)
    x ^= scratch
    x *= np.uint32(0x846CA68B)
    np.right_shift(x, np.uint32(16), out=scratch)
    x ^= scratch
    x ^= high
    # The upper bits are taken for short types: they depend on every bit of the index.
    size_bits = 8 * ITEM_BYTES[dtype]
    bits: np.ndarray = (x >> np.uint32(32 - size_bits)).astype(f"u{ITEM_BYTES[dtype]}")
    mask = bits.dtype.type(NON_FINITE_MASK[dtype])
    bits[(bits & mask) == mask] &= bits.dtype.type(~CLEARED_BIT[dtype] & ((1 << size_bits) - 1))
    return bits


def expected_bits(layout: KVLayout, key: np.ndarray) -> np.ndarray:
    """Returns the pattern of one block, shape ``layout.shape``, as unsigned integers of the element's size."""
    return pattern_bits(layout.dtype, logical_index(layout), key[0], key[1])


def expected_first_rows(layout: KVLayout, keys: np.ndarray) -> np.ndarray:
    """Returns the first head vector of several blocks, shape (n, head_size); ``keys`` has shape (n, 2)."""
    index = logical_index(layout)[0, 0, 0, 0]
    return pattern_bits(layout.dtype, index[None], keys[:, :1], keys[:, 1:])


def canary_block(layout: KVLayout) -> np.ndarray:
    """Returns one block that nobody has written: every element the canary, padding too. Shape (block_bytes,)."""
    item = np.array([CANARY_BITS[layout.dtype]], f"<u{layout.item_bytes}").view(np.uint8)
    return np.resize(item, layout.block_bytes)


def write_pattern(
    pool: np.ndarray,
    layout: KVLayout,
    *,
    seed: int,
    num_tokens: np.ndarray | None = None,
    block_ids: Iterable[int] | None = None,
) -> None:
    """Writes the probe pattern into every block of a pool.

    Args:
        pool: uint8, shape (num_blocks, block_bytes), writable. Modifies: the elements of written tokens only.
        num_tokens: tokens to write per block, shape (num_blocks,); all of them without it.
        block_ids: the number that each block claims to be; 0, 1, 2 and so on without it.
    Raises LayoutError for a pool that cannot be written.
    """
    if not pool.flags.writeable:
        raise LayoutError("pool", "read-only", "the probe pattern must be written into it")
    ids = range(len(pool)) if block_ids is None else block_ids
    for slot, key in enumerate(block_keys(layout, seed, ids)):
        count = layout.block_tokens if num_tokens is None else int(num_tokens[slot])
        layout.logical_view(pool[slot])[:, :, :, :count] = expected_bits(layout, key)[:, :, :, :count]
