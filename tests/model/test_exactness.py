"""Equal bits on the packaged model: however its tokens are computed, logits and KV are the same."""

from __future__ import annotations

import random

import pytest
import torch

from tests.model.conftest import MakeEngine, token_prompt
from workers.engine import Engine, SeqChunk
from workers.model.decoder import Decoder
from workers.model.numerics import probe

pytestmark = [pytest.mark.model, pytest.mark.timeout(400)]

LENGTH = 300
BLOCKS = 19
DTYPES = ["float32", "bfloat16"]


def cold_run(engine: Engine, tokens: list[int], table: list[int]) -> torch.Tensor:
    """Returns the last position's logits, computed in one chunk."""
    return engine.forward([SeqChunk(tokens, 0, table)])[0].clone()


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunk_size_and_thread_count_change_no_bit(make_engine: MakeEngine, dtype: str) -> None:
    """One chunk on two threads, and chunks of 7 to 256 tokens on one or two, agree in logits and blocks."""
    tokens = token_prompt(31, LENGTH)
    engine = make_engine(dtype, threads=2)
    whole = list(range(BLOCKS))
    expected = cold_run(engine, tokens, whole)
    expected_kv = engine.pool.bytes_view[whole].copy()
    for chunk_tokens, threads in ((7, 1), (16, 2), (64, 1), (100, 2), (256, 1), (512, 1)):
        other = make_engine(dtype, threads=threads)
        table = list(range(100, 100 - BLOCKS, -1))
        last = list(other.prefill(tokens, table, chunk_tokens=chunk_tokens))[-1]
        assert last.logits is not None
        assert torch.equal(last.logits, expected), (chunk_tokens, threads)
        assert (other.pool.bytes_view[table] == expected_kv).all(), (chunk_tokens, threads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prefix_from_another_pool_changes_no_bit(make_engine: MakeEngine, dtype: str) -> None:
    """Any number of cached blocks, moved as bytes, gives the cold run's logits; so does recomputing one token."""
    tokens = token_prompt(32, LENGTH)
    source, target = make_engine(dtype), make_engine(dtype)
    expected = cold_run(source, tokens, list(range(BLOCKS)))
    for cached_tokens in (16, 48, 160, 288, LENGTH - 1):
        table = list(range(60, 60 + BLOCKS))
        for block in range(-(-cached_tokens // 16)):
            target.pool.block_bytes_view(table[block])[:] = source.pool.block_bytes_view(block)
        last = list(target.prefill(tokens, table, start=cached_tokens, chunk_tokens=64))[-1]
        assert last.logits is not None
        assert torch.equal(last.logits, expected), cached_tokens
        for slot in table:
            target.pool.zero_block(slot)


@pytest.mark.parametrize("dtype", DTYPES)
def test_company_changes_no_bit(make_engine: MakeEngine, dtype: str) -> None:
    """A sequence decoded alone and in random batches of 1 to 8, beside prefill chunks, has the same logits."""
    chooser = random.Random(4)
    tokens = token_prompt(33, 150)
    alone, mixed = make_engine(dtype), make_engine(dtype)
    table = list(range(10))
    for engine in (alone, mixed):
        engine.forward([SeqChunk(tokens[:130], 0, table, False)])
    others = [list(range(20 + i * 10, 30 + i * 10)) for i in range(8)]
    for position in range(130, 150):
        single = SeqChunk(tokens[position : position + 1], position, table)
        company = [
            SeqChunk(token_prompt(position, chooser.choice([1, 1, 1, 9])), chooser.randrange(150), other)
            for other in chooser.sample(others, chooser.randrange(8))
        ]
        place = chooser.randrange(len(company) + 1)
        got = mixed.forward([*company[:place], single, *company[place:]])[place]
        assert torch.equal(got, alone.forward([single])[0]), position
    assert (alone.pool.bytes_view[table] == mixed.pool.bytes_view[table]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_writes_what_prefill_would(make_engine: MakeEngine, dtype: str) -> None:
    """Token by token or in one chunk: the same blocks, so that a decoded answer can be cached for its next turn."""
    tokens = token_prompt(34, 64)
    engine = make_engine(dtype)
    expected = cold_run(engine, tokens, list(range(4)))
    table = list(range(50, 54))
    engine.forward([SeqChunk(tokens[:20], 0, table, False)])
    for position in range(20, 64):
        logits = engine.decode_step([(tokens[position], position, table)])[0]
    assert torch.equal(logits, expected)
    assert (engine.pool.bytes_view[:4] == engine.pool.bytes_view[table]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_this_machine_keeps_the_promise(decoders: dict[str, Decoder], dtype: str) -> None:
    """The start-up probe finds the packaged model batch-invariant here, for one thread and for two alike."""
    found = [probe(decoders[dtype], block_tokens=16, dtype=dtype, threads=threads) for threads in (1, 2)]
    assert found[0].is_batch_invariant
    assert found[0] == found[1]
