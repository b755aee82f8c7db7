"""Streams that outgrow their pool: preempted, brought back, and every token is the one a plain run gives."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from mini_cluster import SETTLE_S, MiniCluster, collect, make_spec, until
from transformers import LlamaForCausalLM

from cluster.ingress.api.backend import TokenBatch
from kvstore.core.quota import tenant_of

MakeCluster = Callable[..., MiniCluster]
SALT = bytes(range(32))


async def preemptions(cluster: MiniCluster) -> int:
    return sum(status.counters.get("preemptions", 0) for status in (await cluster.statuses()).values())


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("combined",)])
@pytest.mark.parametrize("with_store", [True, False])
async def test_preempted_streams_go_on_with_the_same_tokens(
    make_cluster: MakeCluster, roles: tuple[str, ...], with_store: bool
) -> None:
    """Six answers of 100 tokens in a pool for two of them: nothing is repeated, skipped or different.

    Greedy and sampled, with penalties that look at the whole output; blocks come back from the store, or are computed.
    """
    cluster = make_cluster()
    await cluster.start(*roles, pool_blocks=18)
    if not with_store:
        assert cluster.store is not None
        await asyncio.to_thread(cluster.store.close)
    specs = [
        make_spec(40, 100, salt=n, temperature=0.9 * (n % 2), seed=n, presence_penalty=0.5, repetition_penalty=1.1)
        for n in range(6)
    ]
    specs = [msgspec.structs.replace(spec, tenant_salt=SALT) for spec in specs]
    generations = [await cluster.submit(spec, f"req-{n}") for n, spec in enumerate(specs)]
    results = await asyncio.gather(*(collect(generation) for generation in generations))
    assert [tokens for tokens, _ in results] == [cluster.golden(spec) for spec in specs]
    await cluster.at_rest()
    assert await preemptions(cluster) > 0
    counters = [status.counters for status in (await cluster.statuses()).values()]
    assert (sum(c.get("resumed_loaded_tokens", 0) for c in counters) > 0) == with_store
    assert sum(c.get("resumed_computed_tokens", 0) for c in counters) > 0
    worker = cluster.worker(f"{roles[-1]}-0")
    used = await asyncio.to_thread(lambda: worker._links.run(worker._store.usage(), deadline_s=SETTLE_S))
    assert set(used or {}) == ({tenant_of(SALT)} if with_store else set()), "what was moved out is charged to nobody"


async def test_what_was_streamed_is_what_the_reference_would_choose(make_cluster: MakeCluster) -> None:
    """Re-scored by transformers in one pass over prompt and answer: no token of a preempted stream was spliced in.

    Two tokens whose reference logits differ by less than 1e-3 may change places: the reference rounds otherwise.
    """
    cluster = make_cluster()
    await cluster.start("prefill", "decode", pool_blocks=18)
    specs = [make_spec(40, 100, salt=n) for n in range(6)]
    generations = [await cluster.submit(spec, f"req-{n}") for n, spec in enumerate(specs)]
    results = await asyncio.gather(*(collect(generation) for generation in generations))
    await cluster.at_rest()
    assert await preemptions(cluster) > 0
    reference = LlamaForCausalLM.from_pretrained(cluster.model, dtype=torch.float32).eval()
    for spec, (tokens, _) in zip(specs, results, strict=True):
        assert len(tokens) == 100
        with torch.inference_mode():
            logits = reference(torch.tensor([[*spec.prompt_token_ids, *tokens]])).logits[0]
        rows = logits[len(spec.prompt_token_ids) - 1 : -1]
        chosen = rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        behind = rows.max(-1).values - chosen
        assert behind.max() < 1e-3, (spec.prompt_token_ids[:3], behind.argmax(), behind.max())


async def test_a_slow_reader_yields_and_comes_back(make_cluster: MakeCluster) -> None:
    """Nobody reads the first stream: its blocks go to the others; it ends right all the same once it is read."""
    cluster = make_cluster(**{"limits.max_stream_backlog_tokens": 40})
    await cluster.start("prefill", "decode", pool_blocks=12)
    slow, *others = specs = [make_spec(40, 100, salt=n) for n in range(3)]
    # Computed before: it would hold up this loop, and with it the renewal of the unread stream's lease.
    first, *goldens = [cluster.golden(spec) for spec in specs]
    unread = await cluster.submit(slow, "req-slow")
    await until(lambda: cluster.backend._running["req-slow"].machine.current.num_received == 40)
    for number, (spec, golden) in enumerate(zip(others, goldens, strict=True)):
        tokens, _ = await collect(await cluster.submit(spec, f"req-{number}"))
        assert tokens == golden
    assert await preemptions(cluster) > 0
    assert await collect(unread) == (first, "length")
    await cluster.at_rest()


@pytest.mark.parametrize("seed", range(3))
async def test_who_leaves_at_any_moment_leaves_nothing_behind(make_cluster: MakeCluster, seed: int) -> None:
    """Clients go while their streams run, are moved out, are away or come back; the others see nothing of it."""
    chooser = random.Random(seed)
    cluster = make_cluster()
    await cluster.start(*(("prefill", "decode") if seed % 2 else ("combined",)), pool_blocks=16)
    specs = [make_spec(chooser.randint(20, 70), 90, salt=n) for n in range(14)]
    leavers = set(chooser.sample(range(14), 8))

    async def ask(number: int) -> list[int]:
        generation = await cluster.submit(specs[number], f"req-{number}")
        if number not in leavers:
            return (await collect(generation))[0]
        tokens: list[int] = []
        for _ in range(chooser.randint(0, 80)):
            event = await generation.next()
            assert isinstance(event, TokenBatch)
            if not tokens:
                generation.mark_first_delta()
            tokens += event.token_ids
        await generation.cancel("client_gone")
        return tokens

    results = await asyncio.gather(*(ask(number) for number in range(14)))
    for number, tokens in enumerate(results):
        golden = cluster.golden(specs[number])
        assert tokens == (golden[: len(tokens)] if number in leavers else golden), number
    await cluster.at_rest()
    assert await preemptions(cluster) > 0


async def test_a_fault_while_coming_back_interrupts_that_stream_only(make_cluster: MakeCluster) -> None:
    """The engine fails over the tokens of a returning stream: it ends honestly, the streams beside it go on."""
    cluster = make_cluster()
    await cluster.start("prefill", "decode", pool_blocks=12)
    assert cluster.store is not None
    await asyncio.to_thread(cluster.store.close)
    engine = cluster.worker("decode-0")._engine._engine
    forward = engine.forward

    def fail_over_prompts(chunks: list[Any]) -> Any:
        # A decode worker computes several positions of a sequence only to bring it back.
        if any(len(chunk.token_ids) > 1 for chunk in chunks):
            raise RuntimeError("planted fault")
        return forward(chunks)

    engine.forward = fail_over_prompts  # type: ignore[method-assign]
    specs = [make_spec(40, 90, salt=n) for n in range(4)]
    generations = [await cluster.submit(spec, f"req-{n}") for n, spec in enumerate(specs)]
    results = await asyncio.gather(*(collect(generation) for generation in generations))
    ends = [end for _, end in results]
    assert "engine_fault" in ends and "length" in ends
    for spec, (tokens, end) in zip(specs, results, strict=True):
        golden = cluster.golden(spec)
        assert tokens == (golden if end == "length" else golden[: len(tokens)])
    await cluster.at_rest()
