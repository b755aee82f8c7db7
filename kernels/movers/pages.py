"""What a mover reads or writes: the blocks of one sequence in a pool of one layout.

Owns the checks that have to hold before memory is touched. A contiguous tensor is the same thing: one block as long
as the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kernels.layout import KVLayout, LayoutError
from kernels.movers.conversions import BITS_DTYPES


@dataclass(frozen=True, slots=True)
class Pages:
    """Blocks of a pool in the order of their sequence.

    Attributes:
        pool: uint8, shape (num_blocks, block_bytes), contiguous, on any device.
        layout: of each block.
        block_table: int64, shape (n,), on the pool's device; position p lies in block
            ``block_table[p // block_tokens]``.
    Raises LayoutError naming what cannot be used.
    """

    pool: torch.Tensor
    layout: KVLayout
    block_table: torch.Tensor

    def __post_init__(self) -> None:
        pool, table = self.pool, self.block_table
        if pool.dtype != torch.uint8:
            raise LayoutError("pool.dtype", str(pool.dtype), "must be uint8: a pool is moved as bytes")
        if pool.ndim != 2 or pool.shape[1] != self.layout.block_bytes or not pool.shape[0]:
            raise LayoutError("pool.shape", tuple(pool.shape), f"must be (num_blocks, {self.layout.block_bytes})")
        if not pool.is_contiguous():
            raise LayoutError("pool.strides", pool.stride(), "must be contiguous; a strided view is not a pool")
        if table.dtype != torch.int64 or table.ndim != 1 or not table.numel():
            raise LayoutError("block_table", (tuple(table.shape), str(table.dtype)), "must be int64 of shape (n,)")
        if table.device != pool.device:
            raise LayoutError("block_table.device", str(table.device), f"the pool lies on {pool.device}")
        low, high = (int(value) for value in torch.aminmax(table))
        if low < 0 or high >= pool.shape[0]:
            raise LayoutError("block_table", low if low < 0 else high, f"must lie in [0, {pool.shape[0]})")

    @property
    def max_tokens(self) -> int:
        """Positions that the blocks can hold."""
        return int(self.block_table.numel()) * self.layout.block_tokens

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides in elements: block, then axes as in ``AXES``."""
        item = self.layout.item_bytes
        return tuple(step // item for step in (self.layout.block_bytes, *self.layout.strides_bytes))

    def bits(self) -> torch.Tensor:
        """Returns the pool as integers of the element's size, shape (num_blocks, elements), the same memory."""
        return self.pool.view(BITS_DTYPES[self.layout.item_bytes])

    def logical(self) -> torch.Tensor:
        """Returns elements as integers, shape (num_blocks, *layout.shape), the same memory."""
        return self.bits().as_strided((self.pool.shape[0], *self.layout.shape), self.strides)


def contiguous(layout: KVLayout, num_tokens: int, device: torch.device | str = "cpu") -> Pages:
    """Returns fresh zeroed memory for a whole sequence: one block of ``num_tokens`` positions."""
    if num_tokens < 1:
        raise LayoutError("num_tokens", num_tokens, "must be at least 1")
    whole = replace(layout, block_tokens=num_tokens)
    pool = torch.zeros(1, whole.block_bytes, dtype=torch.uint8, device=device)
    return Pages(pool, whole, torch.zeros(1, dtype=torch.int64, device=device))


def shared_heads(source: KVLayout, target: KVLayout) -> range:
    """Returns the model's heads that both hold. Raises LayoutError when they are not of one model or share none."""
    for name in ("num_layers", "num_kv_heads", "head_size"):
        if getattr(source, name) != getattr(target, name):
            raise LayoutError(name, getattr(target, name), f"the source has {getattr(source, name)}")
    first = max(source.first_kv_head, target.first_kv_head)
    end = min(source.first_kv_head + source.shard_kv_heads, target.first_kv_head + target.shard_kv_heads)
    if first >= end:
        raise LayoutError("tp_rank", target.tp_rank, f"holds no head of rank {source.tp_rank} of {source.tp_size}")
    return range(first, end)
