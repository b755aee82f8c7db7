"""Attention over a paged KV pool, in which a row's result depends on its own sequence and position alone.

Owns how keys and values are gathered, tiled and summed. Per row: scores against all earlier keys in order, one
softmax, one weighted sum over the values in order. Keys behind a row's position are masked to minus infinity, which
makes their weights exact zeros; adding exact zeros changes nothing, so tiles and tails may be padded freely. What
is left is the order of the sums inside the products, which ``workers.model.linear`` fixes.

Two paths with equal bits: long chunks go head by head over tiles of queries; single queries of many sequences go
together, all heads of a group in one product (queries on a block diagonal, exact zeros elsewhere).

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

HEADS_PER_PRODUCT_MAX: Final = 4
"""KV heads that share one block-diagonal product; more would multiply too many zeros."""


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

    ``rows``: their rows in the batch. ``blocks``: slots, shape (batch, num_blocks). ``mask``: float32, shape
    (batch, 1, num_keys), 0 up to the row's position and minus infinity after it.
    """

    rows: Tensor
    blocks: Tensor
    mask: Tensor


def padded_table(block_table: Sequence[int], num_keys: int, block_tokens: int) -> list[int]:
    """Returns the slots of [0, num_keys), then the last of them again up to a whole ``KEY_STEP``."""
    num_blocks = -(-num_keys // block_tokens)
    padded = -(-(-(-num_keys // KEY_STEP) * KEY_STEP) // block_tokens)
    table = list(block_table[:num_blocks])
    # Its own block and not just any: another request's bytes may be under way at this moment.
    return table + table[-1:] * (padded - num_blocks)


def make_single_group(rows: list[int], num_keys: list[int], tables: list[list[int]], block_tokens: int) -> SingleGroup:
    """Builds the group of ``rows``; ``num_keys`` counts each row's visible positions, itself included."""
    width = max(len(table) for table in tables)
    blocks = torch.tensor([table + table[-1:] * (width - len(table)) for table in tables])
    limits = torch.tensor(num_keys)[:, None]
    mask = torch.zeros(len(rows), width * block_tokens)
    mask.masked_fill_(torch.arange(width * block_tokens)[None] >= limits, float("-inf"))
    return SingleGroup(torch.tensor(rows), blocks, mask[:, None])


class Attention:
    """Attention of one model shape. ``kv``: the pool seen as (num_blocks * num_layers, 2, kv_heads, tokens, head)."""

    def __init__(self, *, num_heads: int, num_kv_heads: int, head_size: int, num_layers: int) -> None:
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.group_size = num_heads // num_kv_heads
        self.head_size = head_size
        self.num_layers = num_layers
        self.heads_per_product = max(n for n in range(1, HEADS_PER_PRODUCT_MAX + 1) if num_kv_heads % n == 0)
        self.scale = head_size**-0.5

    def run_span(self, queries: Tensor, kv: Tensor, layer: int, span: Span) -> Tensor:
        """Returns the outputs of one span, float32, (span rows, num_heads, head_size), from its rotated queries."""
        blocks = kv.index_select(0, span.blocks * self.num_layers + layer)
        # (2, kv_heads, num_keys, head_size)
        ordered = blocks.permute(1, 2, 0, 3, 4).float().contiguous()
        keys, values = ordered.view(2, self.num_kv_heads, -1, self.head_size)
        # (kv_heads, group, rows, head_size)
        grouped = (queries * self.scale).view(-1, self.num_kv_heads, self.group_size, self.head_size)
        grouped = grouped.permute(1, 2, 0, 3)
        out = torch.empty(self.num_kv_heads, self.group_size, span.num_rows, self.head_size)
        for first, end in _query_tiles(span.start_position, span.start_position + span.num_rows):
            rows = slice(first - span.start_position, end - span.start_position)
            num_keys = min(-(-end // KEY_STEP) * KEY_STEP, keys.shape[1])
            mask = _causal_mask(first, end, num_keys)
            for head in range(self.num_kv_heads):
                tile = grouped[head, :, rows]
                out[head, :, rows] = self._tile(tile, keys[head, :num_keys], values[head, :num_keys], mask, first)
        return out.permute(2, 0, 1, 3).reshape(span.num_rows, self.num_heads, self.head_size)

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
        return product(weights, values.t())[: group * num_rows].view(tile.shape)

    def run_singles(self, queries: Tensor, kv: Tensor, layer: int, group: SingleGroup) -> Tensor:
        """Returns the outputs of single rows, float32, (batch, num_heads, head_size), from their rotated queries."""
        batch, width = group.blocks.shape
        shared, groups = self.heads_per_product, self.num_kv_heads // self.heads_per_product
        blocks = kv.index_select(0, (group.blocks * self.num_layers + layer).view(-1))
        blocks = blocks.view(batch, width, 2, groups, shared, -1, self.head_size)
        # (2, batch, groups, num_keys, shared * head_size)
        ordered = blocks.permute(2, 0, 3, 1, 5, 4, 6).float().contiguous()
        keys, values = ordered.view(2, batch * groups, -1, shared * self.head_size)
        num_rows = shared * self.group_size
        diagonal = queries.new_zeros(batch * groups, shared, self.group_size, shared, self.head_size)
        own = (queries * self.scale).view(batch * groups, shared, self.group_size, self.head_size)
        torch.diagonal(diagonal, dim1=1, dim2=3).copy_(own.permute(0, 2, 3, 1))
        rows = diagonal.view(batch * groups, num_rows, -1)
        if num_rows < MIN_ROWS:
            rows = torch.cat((rows, rows), 1)
        scores = torch.stack([product(rows[i], keys[i]) for i in range(batch * groups)])
        masked = scores.view(batch, -1, scores.shape[-1]).add_(group.mask)
        weights = torch.softmax(masked, -1).view(scores.shape)
        out = torch.stack([product(weights[i], values[i].t()) for i in range(batch * groups)])
        out = out[:, :num_rows].reshape(batch * groups, shared, self.group_size, shared, self.head_size)
        own_out = torch.diagonal(out, dim1=1, dim2=3).permute(0, 3, 1, 2)
        return own_out.reshape(batch, self.num_heads, self.head_size)


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
