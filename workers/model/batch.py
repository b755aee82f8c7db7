"""Chunks of sequences as the tensors of one forward pass of the torch decoder.

Owns the padding of rows and which single rows share an attention group. It never looks at weights or at the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from workers.core.sequence import SeqChunk, slot_mapping
from workers.model.attention import SingleGroup, Span, make_single_group, padded_table
from workers.model.linear import padded_rows

GROUP_RATIO_MAX: Final = 2
"""Single rows share one attention group while the longest table is at most this many times the shortest."""


GROUP_KEYS_MAX: Final = 4608
"""Keys of one attention group, padding included: its copies stay in the cache, and their memory is used again."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass. ``rows`` real rows come first; tensors are padded to ``padded_rows(rows)``.

    ``token_ids``, ``positions``: int64, padded. ``slots``, ``offsets``: int64, (rows,): where each row's KV goes.
    ``logit_rows``: int64 rows whose logits are wanted, in order; None for none.
    """

    num_rows: int
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    offsets: Tensor
    spans: tuple[Span, ...]
    singles: tuple[SingleGroup, ...]
    logit_rows: Tensor | None


def make_batch(chunks: Sequence[SeqChunk], block_tokens: int) -> Batch:
    """Returns the batch of ``chunks``, their rows in order."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    offsets: list[int] = []
    logit_rows: list[int] = []
    spans: list[Span] = []
    singles: list[tuple[int, SeqChunk]] = []
    for chunk in chunks:
        first = len(tokens)
        tokens.extend(chunk.token_ids)
        positions.extend(range(chunk.start_position, chunk.end_position))
        chunk_slots, chunk_offsets = slot_mapping(chunk, block_tokens)
        slots.extend(chunk_slots)
        offsets.extend(chunk_offsets)
        if chunk.want_logits:
            logit_rows.append(len(tokens) - 1)
        if len(chunk.token_ids) == 1:
            singles.append((first, chunk))
        else:
            table = padded_table(chunk.block_table, chunk.end_position, block_tokens)
            spans.append(Span(first, len(tokens), chunk.start_position, torch.tensor(table)))
    padding = [0] * (padded_rows(len(tokens)) - len(tokens))
    return Batch(
        num_rows=len(tokens),
        token_ids=torch.tensor(tokens + padding),
        positions=torch.tensor(positions + padding),
        slots=torch.tensor(slots),
        offsets=torch.tensor(offsets),
        spans=tuple(spans),
        singles=tuple(_group_singles(singles, len(tokens), block_tokens)),
        logit_rows=torch.tensor(logit_rows) if logit_rows else None,
    )


def _group_singles(singles: list[tuple[int, SeqChunk]], num_rows: int, block_tokens: int) -> list[SingleGroup]:
    """Groups single rows by length, so that padding to the longest of a group stays bounded."""
    entries = [
        (row, chunk.end_position, padded_table(chunk.block_table, chunk.end_position, block_tokens))
        for row, chunk in singles
    ]
    entries.sort(key=lambda entry: len(entry[2]))
    groups: list[SingleGroup] = []
    while entries:
        limit = len(entries[0][2]) * GROUP_RATIO_MAX
        members = [entries[0]]
        for entry in entries[1:]:
            num_keys = (len(members) + 1) * len(entry[2]) * block_tokens
            if len(entry[2]) > limit or num_keys > GROUP_KEYS_MAX:
                break
            members.append(entry)
        entries = entries[len(members) :]
        members.sort()
        rows = [row for row, _, _ in members]
        groups.append(
            make_single_group(
                None if len(rows) == num_rows else rows,
                [num_keys for _, num_keys, _ in members],
                [table for _, _, table in members],
                block_tokens,
            )
        )
    return groups
