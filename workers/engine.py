"""The engine: runs chunks of sequences through the model over a paged pool.

Owns the model, the memory pool's use and the thread budget of its passes. Holds no state about sequences: a chunk
says where its tokens are. Results are bitwise the same for any chunking, any company and any prefix already in the
pool. Not for use from two threads at once. It never allocates blocks and never samples.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kvstore.errors import BadInput
from workers.core.sequence import (
    EngineLimits,
    SeqChunk,
    check_chunk,
    chunk_bounds,
    completed_blocks,
    num_blocks_for,
)
from workers.kv_pool import KvPool
from workers.model.model import Model

__all__ = ["Engine", "PrefillStep", "SeqChunk"]

FIRST_PASS_TOKENS: Final = 32
"""Enough to start the threads and to touch all weights."""


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """One chunk of a prefill is done: positions [start, end) are in the pool.

    ``completed_blocks``: indexes into the block table that became full with this chunk. ``logits``: float32
    (vocab_size,), with the last chunk only.
    """

    start: int
    end: int
    completed_blocks: range
    logits: Tensor | None


class Engine:
    """Runs a decoder over a pool with ``threads`` compute threads."""

    def __init__(self, model: Model, pool: KvPool, *, threads: int | None = None) -> None:
        expected = model.config.kv_layout(pool.layout.block_tokens, pool.layout.dtype)
        if pool.layout != expected:
            raise BadInput("layout", pool.layout, f"the model needs {expected}")
        if threads is not None and threads < 1:
            raise BadInput("threads", threads, "must be at least 1")
        self.model = model
        self.pool = pool
        self.threads = threads
        self.limits = EngineLimits(
            vocab_size=model.config.vocab_size,
            max_positions=model.max_positions,
            num_blocks=pool.num_blocks,
            block_tokens=pool.layout.block_tokens,
        )
        self._thread_id: int | None = None

    def forward(self, chunks: Sequence[SeqChunk]) -> Tensor:
        """Runs the chunks as one batch and returns float32 logits (chunks that want logits, vocab_size), in order.

        Modifies: the pool, at the positions of the chunks. Raises BadInput for a chunk that cannot be run; then
        nothing was computed. Two chunks must not belong to one sequence.
        """
        if not chunks:
            raise BadInput("chunks", [], "a batch needs at least one chunk")
        for chunk in chunks:
            check_chunk(chunk, self.limits)
        self._set_threads()
        with torch.inference_mode():
            logits = self.model.run(chunks, self.pool, threads=self.threads or torch.get_num_threads())
            return torch.empty(0, self.limits.vocab_size) if logits is None else logits

    def prefill(
        self, token_ids: Sequence[int], block_table: Sequence[int], *, start: int = 0, chunk_tokens: int = 512
    ) -> Iterator[PrefillStep]:
        """Computes positions [start, len(token_ids)) chunk by chunk and yields after each.

        ``start``: how many positions are in the pool already, below ``len(token_ids)``. Raises as ``forward``.
        """
        if not 0 <= start < len(token_ids):
            raise BadInput("start", start, f"must lie in [0, {len(token_ids)}): one token is always computed")
        for first, end in chunk_bounds(start, len(token_ids), chunk_tokens):
            is_last = end == len(token_ids)
            logits = self.forward([SeqChunk(token_ids[first:end], first, block_table, is_last)])
            done = completed_blocks(first, end, self.limits.block_tokens)
            yield PrefillStep(first, end, done, logits[0] if is_last else None)

    def decode_step(self, tokens: Sequence[tuple[int, int, Sequence[int]]]) -> Tensor:
        """Runs one ``(token_id, position, block_table)`` of each sequence; returns float32 (sequences, vocab_size)."""
        return self.forward([SeqChunk((token_id,), position, table) for token_id, position, table in tokens])

    def warm_up(self, *, chunk_tokens: int = 512, batch_sizes: Sequence[int] = (1, 2, 4, 8)) -> None:
        """Runs each class of shapes once, so that no request pays for building kernels; a short pass if none are built.

        Call it before the first sequence owns a block. Modifies: the pool, which is zero again afterwards.
        """
        if not self.model.builds_kernels:
            chunk_tokens, batch_sizes = min(chunk_tokens, FIRST_PASS_TOKENS), ()
        block_tokens = self.limits.block_tokens
        capacity = min(self.limits.max_positions, self.limits.num_blocks * block_tokens)
        length = min(chunk_tokens, capacity)
        table = range(num_blocks_for(length, block_tokens))
        self.forward([SeqChunk([0] * length, 0, table)])
        for size in batch_sizes:
            # The same position of the same blocks by several rows: equal bits are written, nothing depends on them.
            self.forward([SeqChunk((0,), length - 1, table)] * size)
        self.pool.tensor[: len(table)].zero_()

    def _set_threads(self) -> None:
        # OpenMP keeps its thread count per calling thread, so it is set on the thread that computes.
        if self.threads is not None and self._thread_id != threading.get_ident():
            torch.set_num_threads(self.threads)
            self._thread_id = threading.get_ident()
