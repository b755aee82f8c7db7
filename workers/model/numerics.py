"""Whether and how this machine keeps the promise of equal bits, found out by trying.

Owns the probe: a fixed little sequence is run in several ways that must agree bit by bit, and the bits themselves
become a digest. Two workers whose digests differ (another processor, library or checkpoint) would not continue each
other's KV exactly; the digest is part of the fingerprint for that reason. It never changes how the engine computes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from workers.core.sequence import num_blocks_for
from workers.engine import Engine, SeqChunk
from workers.kv_pool import KvPool
from workers.model.model import Model

PROBE_TOKENS: Final = 75
"""More than one padding step of keys, and not a multiple of any tile."""

PROBE_STRIDE: Final = 7919
"""Spreads the probe's token ids over the vocabulary."""


@dataclass(frozen=True, slots=True)
class Numerics:
    """What the probe found. ``kernels`` names the code that computes; ``digest`` stands for the bits it makes."""

    kernels: str
    is_batch_invariant: bool
    digest: str

    def fingerprint(self) -> dict[str, str]:
        """Returns the fields that must agree between two workers that exchange KV."""
        return {
            "kernels": self.kernels,
            "batch_invariant": "yes" if self.is_batch_invariant else "no",
            "numerics": self.digest,
        }


def probe(model: Model, *, block_tokens: int, dtype: str, threads: int | None = None) -> Numerics:
    """Runs the probe on a small pool of its own. Takes about as long as six decode steps."""
    layout = model.config.kv_layout(block_tokens, "bfloat16" if dtype == "bfloat16" else "float32")
    length = min(PROBE_TOKENS, model.max_positions)
    tokens = [(index * PROBE_STRIDE) % model.config.vocab_size for index in range(length)]
    num_blocks = num_blocks_for(length, block_tokens)
    pool = KvPool(layout, 2 * num_blocks)
    engine = Engine(model, pool, threads=threads)
    whole, pieces = list(range(num_blocks)), list(range(2 * num_blocks - 1, num_blocks - 1, -1))
    expected = engine.forward([SeqChunk(tokens, 0, whole)])[0].clone()
    got = _run_in_pieces(engine, tokens, pieces, whole)
    same_kv = torch.equal(pool.tensor[whole].view(torch.uint8), pool.tensor[pieces].view(torch.uint8))
    digest = hashlib.blake2b(expected.numpy().tobytes(), digest_size=16)
    digest.update(pool.bytes_view[:num_blocks].tobytes())
    is_invariant = torch.equal(expected, got) and same_kv and model.sums_are_invariant()
    return Numerics(model.kernels, is_invariant, digest.hexdigest())


def _run_in_pieces(engine: Engine, tokens: list[int], table: list[int], company: list[int]) -> Tensor:
    """Computes the same sequence in another pool area: odd chunks, then single tokens beside another sequence."""
    length = len(tokens)
    first, second = length // 4, length - 2
    engine.forward([SeqChunk(tokens[:first], 0, table, False)])
    engine.forward([SeqChunk(tokens[first:second], first, table, False)])
    engine.forward([SeqChunk(tokens[second : length - 1], second, table, False)])
    beside = SeqChunk(tokens[:1], 0, company)
    return engine.forward([beside, SeqChunk(tokens[length - 1 :], length - 1, table)])[1]
