"""The paced engine: no model, steps of a fixed time, and tokens that show whether every KV byte arrived.

For tests and planning: what a cluster does under failures or load then depends on the times that were set and not on
the cores that a machine has. Tokens are placeholders, but not arbitrary: the KV of a position is a hash over all tokens
up to it, read back from the pool for the next one. A block that is lost, stale or another request's changes
every token from there on, so that a test that knows ``expected_tokens`` sees it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kvstore.errors import BadInput
from workers.core.sequence import EngineLimits, SeqChunk, check_chunk
from workers.kv_pool import KvPool
from workers.model.numerics import Numerics

CHOSEN_LOGIT: Final = 1e4
"""Far above all others: any temperature chooses the same token."""
CONTROL_TOKENS: Final = 10
"""Low ids are never chosen: they may be control tokens, or end the answer."""
_MASK: Final = (1 << 64) - 1
_HASH_BYTES: Final = 8


class PacedEngine:
    """Takes ``step_ms`` for each step with streams, and ``prefill_ms_per_token`` for each token of a prompt."""

    def __init__(
        self, pool: KvPool, *, vocab_size: int, max_positions: int, step_ms: float, prefill_ms_per_token: float
    ) -> None:
        if pool.layout.block_tokens * _HASH_BYTES > pool.block_bytes:
            raise BadInput("block_tokens", pool.layout.block_tokens, "a block has no room for one hash per token")
        self._step_s = step_ms / 1000
        self._prefill_s_per_token = prefill_ms_per_token / 1000
        self.limits = EngineLimits(
            vocab_size=vocab_size,
            max_positions=max_positions,
            num_blocks=pool.num_blocks,
            block_tokens=pool.layout.block_tokens,
        )
        self._hashes = pool.bytes_view[:, : pool.layout.block_tokens * _HASH_BYTES].view(np.uint64)
        """Shape (num_blocks, block_tokens): a view into the blocks themselves."""
        self._logits = torch.zeros(0, vocab_size)
        """Zero but for what ``_chosen`` names: filling a new one would be most of what a step costs."""
        self._chosen: list[int] = []

    def forward(self, chunks: Sequence[SeqChunk]) -> Tensor:
        """Runs the chunks as one step; returns float32 logits (chunks that want logits, vocab_size), in order.

        They are valid until the next call. Modifies: the pool, at the positions of the chunks. Raises: BadInput for a
        chunk that cannot be run.
        """
        until_s = time.monotonic() + self.duration_s(chunks)
        for chunk in chunks:
            check_chunk(chunk, self.limits)
        chosen = [self._run(chunk) for chunk in chunks]
        wanted = [token_id for token_id, chunk in zip(chosen, chunks, strict=True) if chunk.want_logits]
        logits = self._rows(wanted)
        # The time of a step is what this engine is for.
        time.sleep(max(0.0, until_s - time.monotonic()))
        return logits

    def duration_s(self, chunks: Sequence[SeqChunk]) -> float:
        """Returns how long a step with these chunks takes."""
        streams = [chunk for chunk in chunks if len(chunk.token_ids) == 1 and chunk.want_logits]
        num_prompt_tokens = sum(len(chunk.token_ids) for chunk in chunks) - len(streams)
        return (self._step_s if streams else 0.0) + num_prompt_tokens * self._prefill_s_per_token

    def _rows(self, token_ids: list[int]) -> Tensor:
        """Returns one row for each token, which is the only one that can be chosen from it."""
        if len(token_ids) > len(self._logits):
            self._logits, self._chosen = torch.zeros(len(token_ids), self.limits.vocab_size), []
        flat = self._logits.numpy()
        for row, token_id in enumerate(self._chosen):
            flat[row, token_id] = 0.0
        for row, token_id in enumerate(token_ids):
            flat[row, token_id] = CHOSEN_LOGIT
        self._chosen = token_ids
        return self._logits[: len(token_ids)]

    def _run(self, chunk: SeqChunk) -> int:
        block_tokens, table = self.limits.block_tokens, chunk.block_table
        position, value = chunk.start_position, 0
        if position:
            value = int(self._hashes[table[(position - 1) // block_tokens], (position - 1) % block_tokens])
        for token_id in chunk.token_ids:
            value = _mixed(value, token_id)
            self._hashes[table[position // block_tokens], position % block_tokens] = value
            position += 1
        return _token_of(value, self.limits.vocab_size)


def expected_tokens(prompt_token_ids: Sequence[int], num_tokens: int, vocab_size: int) -> list[int]:
    """Returns the tokens that a whole and undamaged run gives."""
    value = 0
    for token_id in prompt_token_ids:
        value = _mixed(value, token_id)
    tokens: list[int] = []
    for _ in range(num_tokens):
        tokens.append(_token_of(value, vocab_size))
        value = _mixed(value, tokens[-1])
    return tokens


def paced_numerics() -> Numerics:
    """Names the paced engine in a fingerprint, so that its blocks never meet a model's."""
    return Numerics(kernels="paced", is_batch_invariant=True, digest="paced")


def _mixed(value: int, token_id: int) -> int:
    value = (value ^ (token_id + 0x9E3779B97F4A7C15)) & _MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def _token_of(value: int, vocab_size: int) -> int:
    return CONTROL_TOKENS + value % (vocab_size - CONTROL_TOKENS)
