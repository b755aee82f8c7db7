"""What the engine needs of a loaded model, however it computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from workers.core.sequence import SeqChunk
from workers.kv_pool import KvPool
from workers.model.config import ModelConfig


class Model(Protocol):
    """A model whose rows do not depend on their company: ``Decoder`` or ``NativeDecoder``."""

    config: ModelConfig
    max_positions: int
    builds_kernels: bool
    """Whether the first pass of a shape is slower than the next, because it builds something."""

    @property
    def kernels(self) -> str:
        """A readable name of the code that computes: number format, library, instruction set, version."""

    def run(self, chunks: Sequence[SeqChunk], pool: KvPool, *, threads: int) -> Tensor | None:
        """Runs checked chunks as one batch and returns float32 logits (chunks that want logits, vocab_size), in order.

        None when no chunk wants any. Modifies: ``pool``, at the positions of the chunks.
        """

    def sums_are_invariant(self) -> bool:
        """Tries whether its sums of many terms depend on their company; ``workers.model.numerics`` asks."""
