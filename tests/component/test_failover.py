"""Losses in mid-request: silent workers, broken links, dead engines. Tokens exact, nothing twice, nothing left held."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from mini_cluster import LEASE_MS, SETTLE_S, MiniCluster, make_spec, until

from cluster.core.journal import replay
from cluster.ingress.api.backend import Ended, Generation, Interrupted, TokenBatch
from workers import decode_attempt

MakeCluster = Callable[..., MiniCluster]
BACKLOG = "limits.max_stream_backlog_tokens"


@contextmanager
def stopped(cluster: MiniCluster, name: str) -> Iterator[None]:
    """While entered, a worker hears and says nothing, with every connection open: as after SIGSTOP."""
    go_on = threading.Event()
    cluster.worker(name)._links.call(go_on.wait, SETTLE_S)
    try:
        yield
    finally:
        go_on.set()


async def first_delta(generation: Generation) -> list[int]:
    """Reads up to the first token and crosses the boundary with it."""
    event = await generation.next()
    assert isinstance(event, TokenBatch)
    generation.mark_first_delta()
    generation.delivered(len(event.token_ids))
    return list(event.token_ids)


async def read_on(generation: Generation, tokens: list[int]) -> Ended | Interrupted:
    """Reads the rest after ``first_delta``; tokens continue exactly."""
    while isinstance(event := await generation.next(), TokenBatch):
        assert event.first_index == len(tokens)
        tokens += event.token_ids
        generation.delivered(len(tokens))
    if isinstance(event, Ended):
        generation.completed()
    assert isinstance(event, Ended | Interrupted), event
    return event


async def test_a_stopped_decode_interrupts_when_its_lease_is_over(make_cluster: MakeCluster) -> None:
    """B4: no connection breaks, nobody is dead; the stream still ends, no earlier than the lease allows."""
    cluster = make_cluster(**{BACKLOG: 4})
    await cluster.start("prefill", "decode")
    generation = await cluster.submit(make_spec(40, 400))
    tokens = await first_delta(generation)
    loop = asyncio.get_running_loop()
    with stopped(cluster, "decode-0"):
        started_s = loop.time()
        end = await asyncio.wait_for(read_on(generation, tokens), SETTLE_S)
        assert loop.time() - started_s > LEASE_MS / 1000 / 2, "ended before the lease could be over"
    assert isinstance(end, Interrupted) and end.reason == "lease_expired"
    await cluster.at_rest()
    record = await cluster.backend.request_record("req-1", tenant="t")
    assert record is not None and len(record["attempts"]) == 1
    assert record["interruption"]["delivered_output_tokens"] == record["delivered_output_tokens"] == len(tokens)


async def test_a_worker_that_is_slow_is_not_dead(make_cluster: MakeCluster) -> None:
    """B2: stopped again and again for less than its lease, nothing is lost, repeated or broken off."""
    cluster = make_cluster(**{"attempts.lease_ms": 3000})
    await cluster.start("prefill", "decode", lease_ms=3000)
    spec = make_spec(40, 60)
    generation = await cluster.submit(spec)
    tokens = await first_delta(generation)
    for _ in range(3):
        with stopped(cluster, "decode-0"):
            await asyncio.to_thread(threading.Event().wait, 0.1)
    assert await read_on(generation, tokens) == Ended("length")
    assert tokens == cluster.golden(spec)
    await cluster.at_rest()


@pytest.mark.parametrize("side", ["ingress", "worker"])
async def test_a_broken_link_loses_and_doubles_nothing(make_cluster: MakeCluster, side: str) -> None:
    """B3, contract 7: the worker is back within its lease and sends again what died with the connection."""
    cluster = make_cluster(**{"attempts.lease_ms": 3000, BACKLOG: 64})
    await cluster.start("prefill", "decode", lease_ms=3000)
    worker, join = cluster.workers["decode-0"]
    link, _ = worker._ingresses[cluster.address.incarnation]
    specs = [make_spec(40, 300, salt=number) for number in range(3)]
    generations = [await cluster.submit(spec, f"req-{number}") for number, spec in enumerate(specs)]
    tokens = [await first_delta(generation) for generation in generations]
    reading = asyncio.gather(*(read_on(*pair) for pair in zip(generations, tokens, strict=True)))
    num_cuts = 0
    while not reading.done():
        number = min(len(got) for got in tokens)
        relay_link = cluster.backend._relay.links.get(join.incarnation)
        if relay_link is not None and num_cuts < 8:
            num_cuts += 1
            if side == "ingress":
                relay_link.abort()
            else:
                worker._links.call(lambda: link._channel is not None and link._channel.abort())
        await until(lambda seen=number: reading.done() or min(len(got) for got in tokens) > seen + 8)
    assert await reading == [Ended("length")] * 3
    assert num_cuts >= 4
    assert tokens == [cluster.golden(spec) for spec in specs]
    await cluster.at_rest()
    for number in range(3):
        record = await cluster.backend.request_record(f"req-{number}", tenant="t")
        assert record is not None and len(record["attempts"]) == 1 and record["phase"] == "finished"


async def test_what_the_ring_no_longer_has_is_a_fault(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gap is never patched: the stream ends by an honest error instead."""
    cluster = make_cluster(**{"attempts.lease_ms": 3000})
    await cluster.start("prefill", "decode", lease_ms=3000)
    monkeypatch.setattr(decode_attempt, "RING_TOKENS_MAX", 2)
    _, join = cluster.workers["decode-0"]
    generation = await cluster.submit(make_spec(40, 400))
    tokens = await first_delta(generation)
    machine = cluster.backend._running["req-1"].machine
    # What the ingress counts from here on never arrives, as if the old connection had swallowed it.
    monkeypatch.setattr(cluster.backend, "_on_frame", lambda frame: None)
    seen = (await cluster.statuses())["decode-0"].counters["tokens_published"]
    while (await cluster.statuses())["decode-0"].counters["tokens_published"] < seen + 8:
        await asyncio.sleep(0)
    monkeypatch.undo()
    cluster.backend._relay.links[join.incarnation].abort()
    end = await asyncio.wait_for(read_on(generation, tokens), SETTLE_S)
    assert isinstance(end, Interrupted) and end.reason == "network_cut"
    assert machine.num_delivered == len(tokens)
    await cluster.at_rest()
    assert replay(machine.journal.entries).is_sufficient
