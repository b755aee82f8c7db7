"""Attention over a paged KV pool, in which a row's result depends on its own sequence and position alone.

Owns how keys and values are gathered, tiled and summed. Per row: scores against all earlier keys in order, one
softmax, one weighted sum over the values in tiles of ``KEY_TILE`` positions, added in order. Keys behind a row's
position are masked to minus infinity, which makes their weights exact zeros; adding exact zeros changes nothing, so
tiles and tails may be padded freely. What is left is the order of the sums inside the products, which
``workers.model.linear`` fixes.

Two paths with equal bits: long chunks go head by head over tiles of queries. Single queries of many sequences go
together, all query heads of a sequence against all of its KV heads at once; what does not belong together is computed
and dropped, which costs multiplications and saves calls.

It never decides which blocks a sequence has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from workers.model.linear import MIN_ROWS, padded_rows, product

QUERY_TILE: Final = 128
"""Positions of one query tile; tiles begin at multiples of it."""

KEY_STEP: Final = 64
"""Key counts are padded to multiples of this: fewer kernels to build."""


KEY_TILE: Final = 512
"""Positions whose weighted values are summed in one product. Longer sums would be cut by oneDNN at places that depend
on their padded length (measured: one piece up to 1,024, pieces of 512 beyond), and so would their bits."""


@dataclass(frozen=True, slots=True)
class Span:
    """Rows [first_row, end_row) of a batch that are positions [start_position, ...) of one sequence.

    ``blocks``: the slots that hold positions [0, end_position), int64, padded with the sequence's own last slot to
    whole ``KEY_STEP`` positions.
    """

    first_row: int
    end_row: int
    start_position: int
    blocks: Tensor

    @property
    def num_rows(self) -> int:
        return self.end_row - self.first_row


@dataclass(frozen=True, slots=True)
class SingleGroup:
    """Single-row sequences of similar length, computed together.

    ``rows``: their rows in the batch; None when they are the whole batch in order. ``blocks``: slots, shape (batch,
    num_blocks). ``mask``: float32, (batch, 1, num_keys), 0 up to the row's position and minus infinity after it.
    """

    rows: Tensor | None
    blocks: Tensor
    mask: Tensor


def padded_table(block_table: Sequence[int], num_keys: int, block_tokens: int) -> list[int]:
    """Returns the slots of [0, num_keys), then the last of them again up to a whole ``KEY_STEP``."""
    num_blocks = -(-num_keys // block_tokens)
    padded = -(-(-(-num_keys // KEY_STEP) * KEY_STEP) // block_tokens)
    table = list(block_table[:num_blocks])
    # Its own block and not just any: another request's bytes may be under way at this moment.
    return table + table[-1:] * (padded - num_blocks)


def make_single_group(
    rows: list[int] | None, num_keys: list[int], tables: list[list[int]], block_tokens: int
) -> SingleGroup:
    """Builds the group of ``rows``; ``num_keys`` counts each row's visible positions, itself included."""
    width = max(len(table) for table in tables)
    blocks = torch.tensor([table + table[-1:] * (width - len(table)) for table in tables])
    limits = torch.tensor(num_keys)[:, None]
    mask = torch.zeros(len(tables), width * block_tokens)
    mask.masked_fill_(torch.arange(width * block_tokens)[None] >= limits, float("-inf"))
    return SingleGroup(None if rows is None else torch.tensor(rows), blocks, mask[:, None])


class Attention:
    """Attention of one model shape. ``kv``: the pool seen as (num_blocks, num_layers, 2, kv_heads, tokens, head)."""

    def __init__(self, *, num_heads: int, num_kv_heads: int, head_size: int) -> None:
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.group_size = num_heads // num_kv_heads
        self.head_size = head_size
        self.scale = head_size**-0.5

    def run_span(self, queries: Tensor, pool: Tensor, layer: int, span: Span) -> Tensor:
        """Returns the outputs of one span, float32, (span rows, num_heads, head_size), from its rotated queries."""
        blocks = _gather(pool, layer, span.blocks)
        # (2, kv_heads, num_keys, head_size); one copy sorts by head and widens.
        ordered = torch.empty(2, self.num_kv_heads, blocks.shape[1], *blocks.shape[3:])
        ordered.copy_(blocks.permute(0, 2, 1, 3, 4))
        keys, values = ordered.view(2, self.num_kv_heads, -1, self.head_size)
        # (kv_heads, group, rows, head_size)
        grouped = (queries * self.scale).view(-1, self.num_kv_heads, self.group_size, self.head_size)
        grouped = grouped.permute(1, 2, 0, 3)
        out = torch.empty(span.num_rows, self.num_kv_heads, self.group_size, self.head_size)
        by_head = out.permute(1, 2, 0, 3)
        for first, end in _query_tiles(span.start_position, span.start_position + span.num_rows):
            rows = slice(first - span.start_position, end - span.start_position)
            num_keys = min(-(-end // KEY_STEP) * KEY_STEP, keys.shape[1])
            mask = _causal_mask(first, end, num_keys)
            for head in range(self.num_kv_heads):
                tile = grouped[head, :, rows]
                by_head[head, :, rows] = self._tile(tile, keys[head, :num_keys], values[head, :num_keys], mask, first)
        return out.view(span.num_rows, self.num_heads, self.head_size)

    def _tile(self, tile: Tensor, keys: Tensor, values: Tensor, mask: Tensor, first: int) -> Tensor:
        """One query tile (group, rows, head_size) of one KV head; rows begin at position ``first``."""
        group, num_rows, head_size = tile.shape
        flat = tile.new_zeros(padded_rows(group * num_rows), head_size)
        flat[: group * num_rows].view(tile.shape).copy_(tile)
        scores = product(flat, keys)
        visible = scores[: group * num_rows].view(group, num_rows, -1)
        # Keys before the tile's first position are visible to every row of it.
        visible[:, :, first:].add_(mask)
        weights = torch.softmax(scores, -1)
        return _weighted_sum(weights, values)[: group * num_rows].view(tile.shape)

    def run_singles(self, queries: Tensor, pool: Tensor, layer: int, group: SingleGroup) -> Tensor:
        """Returns the outputs of single rows, float32, (batch, num_heads, head_size), from their rotated queries."""
        batch, num_blocks = group.blocks.shape
        num_kv, per_head = self.num_kv_heads, self.group_size
        # (2, batch, block, kv_head, token, head)
        blocks = _gather(pool, layer, group.blocks.view(-1)).view(2, batch, num_blocks, *pool.shape[3:])
        keys = blocks[0].float().view(batch, -1, self.head_size)
        # Values in order of position, because they are summed along it; the order of the keys is free.
        values = torch.empty(batch, num_blocks, pool.shape[4], num_kv, self.head_size)
        values.copy_(blocks[1].permute(0, 1, 3, 2, 4))
        values = values.view(batch, -1, num_kv * self.head_size)
        rows = queries * self.scale
        if self.num_heads < MIN_ROWS:
            rows = torch.cat((rows, rows), 1)
        scores = torch.stack([product(rows[i], keys[i]) for i in range(batch)])[:, : self.num_heads]
        scores = scores.reshape(batch, num_kv, per_head, num_blocks, num_kv, -1)
        # Each head keeps the scores of its own keys: (batch, kv_head, group, block, token), in order of position.
        own = scores.diagonal(dim1=1, dim2=4).permute(0, 4, 1, 2, 3)
        weights = torch.softmax(own.reshape(batch, self.num_heads, -1).add_(group.mask), -1)
        if self.num_heads < MIN_ROWS:
            weights = torch.cat((weights, weights), 1)
        out = torch.stack([_weighted_sum(weights[i], values[i]) for i in range(batch)])[:, : self.num_heads]
        out = out.reshape(batch, num_kv, per_head, num_kv, self.head_size).diagonal(dim1=1, dim2=3)
        return out.permute(0, 3, 1, 2).reshape(batch, self.num_heads, self.head_size)


def products_are_invariant(width: int) -> bool:
    """Tries sums of ``KEY_TILE`` terms: neither the row count nor zeros at the end may change a bit."""
    source = torch.Generator().manual_seed(1)
    weights, values = torch.rand(128, KEY_TILE, generator=source), torch.randn(KEY_TILE, width, generator=source)
    for num_keys in range(KEY_STEP, KEY_TILE + 1, KEY_STEP):
        padded = weights.clone()
        padded[:, num_keys:] = 0.0
        whole = product(padded, values.t())
        for num_rows in (2, 9, 48, 128):
            part = product(weights[:num_rows, :num_keys].contiguous(), values[:num_keys].t())
            if not torch.equal(part, whole[:num_rows]):
                return False
    return True


def _weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """Returns (rows, width) from (rows, num_keys) and (num_keys, width): tile after tile, in order of position."""
    num_keys = values.shape[0]
    if num_keys <= KEY_TILE:
        return product(weights, values.t())
    out = product(weights[:, :KEY_TILE].contiguous(), values[:KEY_TILE].t())
    for first in range(KEY_TILE, num_keys, KEY_TILE):
        tile = slice(first, first + KEY_TILE)
        out.add_(product(weights[:, tile].contiguous(), values[tile].t()))
    return out


def _gather(pool: Tensor, layer: int, slots: Tensor) -> Tensor:
    """Copies the keys, then the values of ``slots`` in one layer: (2, slots, kv_heads, tokens, head), pool's type."""
    first = (slots * pool.shape[1] + layer) * 2
    halves = pool.view(-1, *pool.shape[3:]).index_select(0, torch.cat((first, first + 1)))
    return halves.view(2, -1, *pool.shape[3:])


def _query_tiles(start: int, end: int) -> list[tuple[int, int]]:
    tiles = []
    while start < end:
        stop = min((start // QUERY_TILE + 1) * QUERY_TILE, end)
        tiles.append((start, stop))
        start = stop
    return tiles


def _causal_mask(first: int, end: int, num_keys: int) -> Tensor:
    """Returns (end - first, num_keys - first), float32: 0 where the key is not behind the row, else -inf."""
    keys = torch.arange(first, num_keys)[None]
    return torch.zeros(end - first, num_keys - first).masked_fill_(
        keys > torch.arange(first, end)[:, None], float("-inf")
    )
