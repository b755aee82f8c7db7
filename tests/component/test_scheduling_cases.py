"""Known failures of other schedulers, tried on whole requests: who leaves, who waits, who does not fit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from mini_cluster import VOCAB, MiniCluster, collect, make_spec, until

from cluster.ingress.api.errors import UpstreamFailed
from workers.paced import expected_tokens

MakeCluster = Callable[..., MiniCluster]


async def test_f37_closing_those_who_queue_leaves_the_active_one_alone(make_cluster: MakeCluster) -> None:
    """F37: one stream at a time; B and C leave the queue, A goes on to its end, D is served after it."""
    cluster = make_cluster()
    await cluster.start("prefill", "decode", max_num_seqs=1)
    a, b, c, d = specs = [make_spec(40, 200 if number == 0 else 20, salt=number + 1) for number in range(4)]
    golden = {number: cluster.golden(spec) for number, spec in enumerate(specs)}
    first = await cluster.submit(a, "req-a")
    event = await first.next()
    first.mark_first_delta()
    got = list(event.token_ids)  # type: ignore[union-attr]
    queued = [await cluster.submit(spec, f"req-{name}") for name, spec in (("b", b), ("c", c))]
    await asyncio.gather(*(generation.cancel("client_gone") for generation in queued))
    last = asyncio.ensure_future(collect(await cluster.submit(d, "req-d")))
    while len(got) < len(golden[0]):
        event = await first.next()
        got += event.token_ids  # type: ignore[union-attr]
        first.delivered(len(got))
    assert got == golden[0]
    assert await last == (golden[3], "length")
    first.completed()
    await cluster.at_rest()


async def test_f39_an_id_that_begins_like_another_is_another(make_cluster: MakeCluster) -> None:
    """F39: "job-1" is cancelled by its id while "job-10" runs; an empty id, or a part of one, cancels nothing."""
    cluster = make_cluster()
    await cluster.start("prefill", "decode")
    one, ten = make_spec(40, 300, salt=1), make_spec(40, 120, salt=2)
    golden = cluster.golden(ten)
    # Nobody reads it: it waits for credit and cannot end by itself.
    stuck = await cluster.submit(one, "job-1")
    longer = await cluster.submit(ten, "job-10")
    for nobody in ("", "job", "job-", "job-100"):
        assert await cluster.backend.cancel(nobody, tenant="t") is None
    assert {stream["request_id"] for stream in cluster.backend.streams()} == {"job-1", "job-10"}
    record = await cluster.backend.cancel("job-1", tenant="t")
    assert record is not None and record["phase"] == "cancelled"
    with pytest.raises(UpstreamFailed, match="cancelled"):
        await stuck.next()
    assert await collect(longer) == (golden, "length")
    await cluster.at_rest()


async def test_f75_a_head_that_does_not_fit_holds_up_nobody_whose_blocks_are_there(make_cluster: MakeCluster) -> None:
    """F75: a pool of 20 blocks, 10 cached blocks asked for behind 16 that must wait: both end, with their tokens."""
    for roles in (("prefill", "decode"), ("combined",)):
        cluster = make_cluster()
        await cluster.start(*roles, pool_blocks=20)
        holder, big, cached = make_spec(110, 60, salt=3), make_spec(256, 8, salt=4), make_spec(160, 8, salt=5)
        goldens = [cluster.golden(spec) for spec in (holder, big, cached)]
        assert (await collect(await cluster.submit(cached, "warm")))[0] == goldens[2]
        await cluster.at_rest()
        running = await cluster.submit(holder, "holder")
        held = cluster.backend._running["holder"].machine
        await until(lambda held=held: held.current.num_received > 0)  # type: ignore[misc]
        behind = [await cluster.submit(big, "big"), await cluster.submit(cached, "cached")]
        results = await asyncio.gather(*(collect(generation) for generation in (running, *behind)))
        assert [tokens for tokens, _ in results] == goldens
        assert behind[1].cached_tokens == 159
        await cluster.at_rest()


async def test_f77_shorts_beside_a_long_prompt_that_is_always_there(make_cluster: MakeCluster) -> None:
    """F77: long prompts one behind the other, 32 chunks each; a short one that comes meanwhile is answered first."""
    cluster = make_cluster()
    pace = {"engine": "paced", "step_ms": 1.0, "prefill_ms_per_token": 2.0}
    await cluster.start("prefill", "decode", chunk_tokens=16, **pace)
    order: list[str] = []

    async def ask(name: str, num_prompt: int, salt: int) -> None:
        spec = make_spec(num_prompt, 2, salt=salt)
        tokens, _ = await collect(await cluster.submit(spec, name))
        assert tokens == expected_tokens(spec.prompt_token_ids, 2, VOCAB), name
        order.append(name)

    for n in range(3):
        long = asyncio.ensure_future(ask(f"long-{n}", 480, 10 * n))
        await until(lambda: cluster.worker("prefill-0")._prefill.load()[0] > 0)  # type: ignore[union-attr]
        for m in range(2):
            await ask(f"short-{n}-{m}", 20, 10 * n + m + 1)
        await long
        assert order[-3:] == [f"short-{n}-0", f"short-{n}-1", f"long-{n}"], order
        await cluster.at_rest()
