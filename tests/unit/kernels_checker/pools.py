"""Random layouts and pools, and every way to damage one; shared by the tests of scanners and of the checker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import xxhash

from kernels.checker import Claim
from kernels.layout import ITEM_BYTES, KVLayout, alternatives
from kernels.pattern import CANARY_BITS, NON_FINITE_MASK, block_keys, expected_bits, write_pattern


@dataclass
class Pool:
    """A pool of probe patterns with what it claims to be."""

    layout: KVLayout
    bytes: np.ndarray
    claim: Claim

    def copy(self) -> Pool:
        return Pool(self.layout, self.bytes.copy(), self.claim)

    @property
    def tokens(self) -> np.ndarray:
        return np.asarray(self.claim.num_tokens)

    def digests(self) -> list[bytes]:
        return [xxhash.xxh3_128_digest(block) for block in self.bytes]


def random_layout(rng: np.random.Generator) -> KVLayout:
    """A small layout of any order, type, alignment and shard."""
    heads = int(rng.integers(1, 5))
    sizes = [size for size in (1, 2, 3, 4, 8) if heads % size == 0 or size % heads == 0]
    tp_size = int(rng.choice(sizes))
    return KVLayout(
        num_layers=int(rng.integers(1, 4)),
        num_kv_heads=heads,
        head_size=int(rng.choice([1, 2, 4, 6, 8, 16])),
        block_tokens=int(rng.choice([1, 2, 4, 8])),
        dtype=str(rng.choice(list(ITEM_BYTES))),  # type: ignore[arg-type]
        token_order=str(rng.choice(["HND", "NHD"])),  # type: ignore[arg-type]
        kv_together=bool(rng.integers(2)),
        row_align_bytes=int(rng.choice([1, 1, 8, 32])),
        tp_size=tp_size,
        tp_rank=int(rng.integers(tp_size)),
    )


def random_pool(rng: np.random.Generator, layout: KVLayout | None = None) -> Pool:
    """A clean pool: patterns in the written tokens, the fill byte in tails and padding."""
    layout = random_layout(rng) if layout is None else layout
    num_blocks = int(rng.integers(1, 5))
    tokens = rng.integers(1, layout.block_tokens + 1, num_blocks)
    fill = int(rng.choice([0, 0xFF, 0x5A]))
    seed = int(rng.integers(0, 1 << 63))
    data = np.full((num_blocks, layout.block_bytes), fill, np.uint8)
    write_pattern(data, layout, seed=seed, num_tokens=tokens)
    return Pool(layout, data, Claim(num_tokens=tokens, probe_seed=seed, fill=fill))


def flip_bit(pool: Pool, rng: np.random.Generator) -> str | None:
    """One bit anywhere: element, tail or padding."""
    slot, place = int(rng.integers(len(pool.bytes))), int(rng.integers(pool.layout.block_bytes))
    pool.bytes[slot, place] ^= np.uint8(1 << int(rng.integers(8)))
    return "any"


def _written(pool: Pool, rng: np.random.Generator) -> tuple[np.ndarray, tuple[int, ...]]:
    slot = int(rng.integers(len(pool.bytes)))
    shape = pool.layout.shape
    index = tuple(int(rng.integers(size)) for size in (*shape[:3], int(pool.tokens[slot]), shape[4]))
    return pool.layout.logical_view(pool.bytes[slot]), index


def change_element(pool: Pool, rng: np.random.Generator) -> str | None:
    """One element gets other bits."""
    view, index = _written(pool, rng)
    view[index] ^= view.dtype.type(int(rng.integers(1, 1 << 8 * pool.layout.item_bytes)))
    return "any"


def put_nan(pool: Pool, rng: np.random.Generator) -> str | None:
    view, index = _written(pool, rng)
    view[index] = NON_FINITE_MASK[pool.layout.dtype]
    return "not_finite"


def leave_unwritten(pool: Pool, rng: np.random.Generator) -> str | None:
    view, index = _written(pool, rng)
    view[index] = CANARY_BITS[pool.layout.dtype]
    return "unwritten"


def touch_tail(pool: Pool, rng: np.random.Generator) -> str | None:
    partial = np.flatnonzero(pool.tokens < pool.layout.block_tokens)
    if not len(partial):
        return None
    slot = int(rng.choice(partial))
    token = int(rng.integers(pool.tokens[slot], pool.layout.block_tokens))
    view = pool.layout.logical_view(pool.bytes[slot])[:, :, :, token]
    place = tuple(int(rng.integers(size)) for size in view.shape)
    view[place] ^= view.dtype.type(1)
    return "tail_touched"


def swap_blocks(pool: Pool, rng: np.random.Generator) -> str | None:
    if len(pool.bytes) < 2:
        return None
    one, other = rng.choice(len(pool.bytes), 2, replace=False)
    pool.bytes[[one, other]] = pool.bytes[[other, one]]
    return "swapped"


def run_over_border(pool: Pool, rng: np.random.Generator) -> str | None:
    """A write that ran from the end of one block into the next."""
    if len(pool.bytes) < 2:
        return None
    slot = int(rng.integers(len(pool.bytes) - 1))
    item = pool.layout.item_bytes
    flat = pool.bytes.reshape(-1)
    border = (slot + 1) * pool.layout.block_bytes
    flat[border - item : border + item] ^= 0x15
    return "boundary"


def write_as(field: str) -> Callable[[Pool, np.random.Generator], str | None]:
    """Blocks written by somebody who took one field of the layout for another."""
    kinds = {"token_order": "axis_order", "kv_together": "axis_order", "row_align_bytes": "stride"}
    kinds |= {"tp_rank": "shard", "dtype": "dtype"}

    def damage(pool: Pool, rng: np.random.Generator) -> str | None:
        writers = [other for name, other in alternatives(pool.layout) if name == field]
        if not writers:
            return None
        writer = writers[int(rng.integers(len(writers)))]
        seed = pool.claim.probe_seed
        assert seed is not None
        for slot, key in enumerate(block_keys(writer, seed, range(len(pool.bytes)))):
            count = int(pool.tokens[slot])
            block = np.full(writer.block_bytes, pool.claim.fill, np.uint8)
            writer.logical_view(block)[:, :, :, :count] = expected_bits(writer, key)[:, :, :, :count]
            size = min(writer.block_bytes, pool.layout.block_bytes)
            pool.bytes[slot] = pool.claim.fill
            pool.bytes[slot, :size] = block[:size]
        return kinds[field]

    damage.__name__ = f"write_as_{field}"
    return damage


DAMAGES: list[Callable[[Pool, np.random.Generator], str | None]] = [
    flip_bit,
    change_element,
    put_nan,
    leave_unwritten,
    touch_tail,
    swap_blocks,
    run_over_border,
    *(write_as(field) for field in ("token_order", "kv_together", "row_align_bytes", "tp_rank", "dtype")),
]
