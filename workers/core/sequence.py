"""Where the tokens of a sequence live in a paged pool, and one piece of work of the engine.

Pure. Position p of a sequence lies in block ``block_table[p // block_tokens]`` at offset ``p % block_tokens``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.errors import BadInput


@dataclass(frozen=True, slots=True)
class SeqChunk:
    """Tokens of one sequence to run through the model: positions [start_position, start_position + len).

    ``block_table`` covers at least all positions up to the end of the chunk; KV of [0, start_position) is in the
    pool already. ``want_logits`` asks for the logits that follow the chunk's last token.
    """

    token_ids: Sequence[int]
    start_position: int
    block_table: Sequence[int]
    want_logits: bool = True

    @property
    def end_position(self) -> int:
        """First position after the chunk: also the number of positions that attention sees at its end."""
        return self.start_position + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What a chunk is checked against."""

    vocab_size: int
    max_positions: int
    num_blocks: int
    block_tokens: int


def check_chunk(chunk: SeqChunk, limits: EngineLimits) -> None:
    """Raises BadInput naming the field when a chunk would read or write outside its sequence."""
    if not chunk.token_ids:
        raise BadInput("token_ids", list(chunk.token_ids), "a chunk needs at least one token")
    if chunk.start_position < 0:
        raise BadInput("start_position", chunk.start_position, "must not be negative")
    if chunk.end_position > limits.max_positions:
        raise BadInput("end_position", chunk.end_position, f"the context ends at {limits.max_positions}")
    if min(chunk.token_ids) < 0 or max(chunk.token_ids) >= limits.vocab_size:
        raise BadInput("token_ids", list(chunk.token_ids), f"ids must lie in [0, {limits.vocab_size})")
    num_needed = num_blocks_for(chunk.end_position, limits.block_tokens)
    if len(chunk.block_table) < num_needed:
        raise BadInput("block_table", list(chunk.block_table), f"{num_needed} blocks are needed")
    used = chunk.block_table[:num_needed]
    if min(used) < 0 or max(used) >= limits.num_blocks:
        raise BadInput("block_table", list(used), f"slots must lie in [0, {limits.num_blocks})")


def num_blocks_for(num_tokens: int, block_tokens: int) -> int:
    """Returns how many blocks ``num_tokens`` positions take."""
    return -(-num_tokens // block_tokens)


def slot_mapping(chunk: SeqChunk, block_tokens: int) -> tuple[list[int], list[int]]:
    """Returns for each token of the chunk its block slot and its offset inside that block."""
    positions = range(chunk.start_position, chunk.end_position)
    table = chunk.block_table
    return [table[p // block_tokens] for p in positions], [p % block_tokens for p in positions]


def completed_blocks(start_position: int, end_position: int, block_tokens: int) -> range:
    """Returns the indexes of the blocks whose last position lies in [start_position, end_position)."""
    return range(start_position // block_tokens, end_position // block_tokens)


def chunk_bounds(start: int, end: int, chunk_tokens: int) -> list[tuple[int, int]]:
    """Cuts [start, end) at multiples of ``chunk_tokens``, so that a later start meets the same borders."""
    if chunk_tokens < 1:
        raise BadInput("chunk_tokens", chunk_tokens, "must be at least 1")
    bounds = []
    while start < end:
        stop = min((start // chunk_tokens + 1) * chunk_tokens, end)
        bounds.append((start, stop))
        start = stop
    return bounds
