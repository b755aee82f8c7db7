"""Losses in mid-request: silent workers, broken links, dead engines. Tokens exact, nothing twice, nothing left held."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from mini_cluster import LEASE_MS, SETTLE_S, MiniCluster, collect, make_spec, until

from cluster.core.journal import replay
from cluster.ingress.api.backend import Ended, Generation, Interrupted, Restarted, TokenBatch
from cluster.ingress.api.errors import UpstreamFailed
from cluster.ingress.relay import WorkerLink
from kvstore.core.messages import AttemptFault, Frame, Prefill
from kvstore.errors import DeadlineExceeded, PeerLost
from kvstore.net.host import boottime_ns
from workers import decode_attempt
from workers.kv_link import KvDialer, KvPeer
from workers.spec import DecodeAddress

MakeCluster = Callable[..., MiniCluster]
BACKLOG = "limits.max_stream_backlog_tokens"
HOUR_NS = 3600 * 10**9


@contextmanager
def stopped(cluster: MiniCluster, name: str) -> Iterator[None]:
    """While entered, a worker hears and says nothing, with every connection open: as after SIGSTOP."""
    go_on = threading.Event()
    worker = cluster.worker(name)
    for thread in (worker._links, worker._leases):
        thread.call(go_on.wait, SETTLE_S)
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


async def leases_have_their_lines(cluster: MiniCluster) -> None:
    """Waits until each worker renews over a connection of its own: that is what these tests are about."""
    lines = [link.leases for name in cluster.workers for link, _ in cluster.worker(name)._ingresses.values()]
    assert len(lines) == len(cluster.workers)
    await until(lambda: all(line.is_up for line in lines))


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


async def test_a_link_loop_that_stands_still_loses_no_lease(make_cluster: MakeCluster) -> None:
    """Stopped for longer than its lease, with the renewal going on beside it: the stream is whole."""
    cluster = make_cluster(**{"attempts.lease_ms": 600, BACKLOG: 4})
    await cluster.start("prefill", "decode", lease_ms=600)
    await leases_have_their_lines(cluster)
    spec = make_spec(40, 60)
    generation = await cluster.submit(spec)
    tokens = await first_delta(generation)
    go_on = threading.Event()
    cluster.worker("decode-0")._links.call(go_on.wait, SETTLE_S)
    await asyncio.to_thread(threading.Event().wait, 2.0)
    go_on.set()
    assert await read_on(generation, tokens) == Ended("length")
    assert tokens == cluster.golden(spec)
    await cluster.at_rest()


async def test_an_ingress_loop_that_stands_still_costs_no_lease(make_cluster: MakeCluster) -> None:
    """The loop of the ingress does nothing for three leases: grants go out beside it, and nobody is judged for it."""
    cluster = make_cluster(**{"attempts.lease_ms": 600, BACKLOG: 4})
    await cluster.start("prefill", "decode", lease_ms=600)
    await leases_have_their_lines(cluster)
    spec = make_spec(40, 60)
    generation = await cluster.submit(spec)
    tokens = await first_delta(generation)
    threading.Event().wait(2.0)
    assert await read_on(generation, tokens) == Ended("length")
    assert tokens == cluster.golden(spec)
    await cluster.at_rest()


async def test_a_lease_thread_that_stands_still_stops_the_stream(make_cluster: MakeCluster) -> None:
    """What the thread does not renew runs out, however well the link and the engine are: the holder itself stops."""
    cluster = make_cluster(**{"attempts.lease_ms": 600, BACKLOG: 4})
    await cluster.start("prefill", "decode", lease_ms=600)
    generation = await cluster.submit(make_spec(40, 400))
    tokens = await first_delta(generation)
    worker = cluster.worker("decode-0")
    go_on = threading.Event()
    worker._leases.call(go_on.wait, SETTLE_S)
    try:
        end = await asyncio.wait_for(read_on(generation, tokens), SETTLE_S)
        assert isinstance(end, Interrupted) and end.reason == "lease_expired"
    finally:
        go_on.set()
    await cluster.at_rest()


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
    # What comes over this connection from here on never arrives, also what was read before it broke.
    old_link = cluster.backend._relay.links[join.incarnation]
    deliver = cluster.backend.on_message

    def swallow(link: WorkerLink, message: Any) -> None:
        if link is not old_link or not isinstance(message, Frame):
            deliver(link, message)

    monkeypatch.setattr(cluster.backend, "on_message", swallow)
    seen = (await cluster.statuses())["decode-0"].counters["tokens_published"]
    while (await cluster.statuses())["decode-0"].counters["tokens_published"] < seen + 8:
        await asyncio.sleep(0)
    old_link.abort()
    end = await asyncio.wait_for(read_on(generation, tokens), SETTLE_S)
    assert isinstance(end, Interrupted) and end.reason == "network_cut"
    assert machine.num_delivered == len(tokens)
    await cluster.at_rest()
    assert replay(machine.journal.entries).is_sufficient


# --- combined workers -----------------------------------------------------------------------------------------------


async def test_an_order_that_died_with_its_link_is_given_again(make_cluster: MakeCluster) -> None:
    """The decode side of a combined worker holds the lease of both: nothing else would ever miss the lost prefill."""
    cluster = make_cluster()
    await cluster.start("combined")
    await leases_have_their_lines(cluster)
    link = cluster.backend._relay.links[cluster.workers["combined-0"][1].incarnation]
    send = link.send

    def lose(message: Any) -> bool:
        if isinstance(message, Prefill):
            # Before its first grant an attempt may be given up at once. The lease threads need no loop for theirs.
            deadline = time.monotonic() + SETTLE_S
            while (link.leases.safe_after_ns(message.attempt_id, message.epoch) or 0) <= boottime_ns():
                assert time.monotonic() < deadline, "never granted"
                time.sleep(0.001)
            link.abort()
            return True
        return send(message)

    link.send = lose  # type: ignore[method-assign]
    spec = make_spec(100)
    answer = await asyncio.wait_for(collect(await cluster.submit(spec)), SETTLE_S)
    assert answer == (cluster.golden(spec), "length")
    assert len((await record_of(cluster))["attempts"]) == 1


async def test_a_fault_that_nobody_heard_of_ends_with_the_lease(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefill that failed takes its own decode side along, so that the attempt is held by nobody and lapses."""
    cluster = make_cluster()
    await cluster.start("combined")
    fail_engine(cluster, "combined-0", times=1)
    deliver = cluster.backend.on_message

    def swallow(link: WorkerLink, message: Any) -> None:
        if not isinstance(message, AttemptFault):
            deliver(link, message)

    monkeypatch.setattr(cluster.backend, "on_message", swallow)
    spec = make_spec(100)
    answer = await asyncio.wait_for(collect(await cluster.submit(spec)), SETTLE_S)
    assert answer == (cluster.golden(spec), "length")
    assert len((await record_of(cluster))["attempts"]) == 2


async def test_blocks_are_nobodys_while_the_engine_computes_in_them(make_cluster: MakeCluster) -> None:
    """The ingress is gone in the middle of a step: what that step still writes into goes to no other attempt.

    The end of its reservation does not give it away either.
    """
    cluster = make_cluster()
    await cluster.start("combined")
    worker = cluster.worker("combined-0")
    computing, go_on = threading.Event(), threading.Event()
    right = worker._engine._engine.forward

    def slow(chunks: Any) -> Any:
        computing.set()
        go_on.wait(SETTLE_S)
        return right(chunks)

    worker._engine._engine.forward = slow  # type: ignore[method-assign]
    await cluster.submit(make_spec(100))
    assert await asyncio.to_thread(computing.wait, SETTLE_S)
    await asyncio.to_thread(worker.remove_ingress, cluster.address.incarnation)
    worker._decode._clock_ns = lambda: boottime_ns() + HOUR_NS

    async def tick() -> None:
        worker._decode.on_tick()

    await asyncio.to_thread(worker._links.run, tick(), deadline_s=SETTLE_S)
    held = worker._pool.counts()
    go_on.set()
    assert held.available < held.total, "freed in the middle of a step"
    await until(lambda: worker._pool.counts().available == held.total)


# --- another attempt ------------------------------------------------------------------------------------------------


class fail_engine:
    """From now on the engine of one worker raises instead of computing; ``times`` None: for ever."""

    def __init__(self, cluster: MiniCluster, name: str, times: int | None = None) -> None:
        engine = cluster.worker(name)._engine._engine
        self.num_failed = 0
        right = engine.forward

        def forward(chunks: Any) -> Any:
            if times is not None and self.num_failed >= times:
                return right(chunks)
            self.num_failed += 1
            raise RuntimeError("planted fault")

        engine.forward = forward


async def record_of(cluster: MiniCluster, request_id: str = "req-1") -> dict[str, Any]:
    """Returns the closed record of a request; its journal explains every decision."""
    await cluster.at_rest()
    record = await cluster.backend.request_record(request_id, tenant="t")
    assert record is not None
    replayed = replay(record["events"])
    assert replayed.is_sufficient, record["events"]
    return record


def publishing(record: dict[str, Any]) -> list[tuple[int, int]]:
    """Returns the spans in which each attempt could publish, by the ingress's clock."""
    fenced: dict[int, int] = {}
    for entry in record["events"]:
        if entry["event"] == "fenced":
            fenced[entry["epoch"]] = max(fenced.get(entry["epoch"], 0), entry["at_ns"])
    return [(attempt["started_ns"], fenced[attempt["epoch"]]) for attempt in record["attempts"]]


def assert_one_after_the_other(record: dict[str, Any]) -> None:
    """H6: no two attempts could publish at the same time."""
    spans = publishing(record)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans)), spans


async def test_prefill_fails_and_another_answers_whole(make_cluster: MakeCluster) -> None:
    """H1: one complete answer after one more attempt, on the other prefill worker, with the same tokens."""
    cluster = make_cluster()
    await cluster.start("prefill", "prefill", "decode")
    fail_engine(cluster, "prefill-0")
    spec = make_spec(100)
    assert await collect(await cluster.submit(spec)) == (cluster.golden(spec), "length")
    record = await record_of(cluster)
    assert [attempt["prefill"]["worker_id"] for attempt in record["attempts"]] == ["prefill-0", "prefill-1"]
    assert [attempt["epoch"] for attempt in record["attempts"]] == [1, 2]
    assert record["attempts"][0]["end_reason"] == "engine_fault"
    assert_one_after_the_other(record)


@pytest.mark.parametrize("error", [PeerLost("unreachable"), DeadlineExceeded("too late"), TimeoutError()])
async def test_a_way_that_cannot_be_opened_blames_both_ends(make_cluster: MakeCluster, error: Exception) -> None:
    """Nobody knows which of them ails: the next attempt has neither."""
    cluster = make_cluster()
    await cluster.start("prefill", "prefill", "decode", "decode")
    errors = [error]
    for name in ("prefill-0", "prefill-1"):
        side = cluster.worker(name)._prefill
        assert side is not None
        fail_first(side._dialer, errors)
    spec = make_spec(100)
    assert await collect(await cluster.submit(spec)) == (cluster.golden(spec), "length")
    first, second = (await record_of(cluster))["attempts"]
    assert first["end_reason"] == "transfer_failed" and not errors
    assert all(first[role]["worker_id"] != second[role]["worker_id"] for role in ("prefill", "decode"))


def fail_first(dialer: KvDialer, errors: list[Exception]) -> None:
    """Lets whoever dials next fail, once for each of ``errors``."""
    dial = dialer.link

    async def link(address: DecodeAddress) -> KvPeer:
        if errors:
            raise errors.pop()
        return await dial(address)

    dialer.link = link  # type: ignore[method-assign]


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_that_nobody_saw_are_void(make_cluster: MakeCluster, stream: bool) -> None:
    """H2: decode is lost with tokens at the ingress and none with the client; the new run starts from the first."""
    cluster = make_cluster(**{BACKLOG: 6})
    await cluster.start("prefill", "decode", "decode")
    spec = make_spec(40, 60, temperature=0.8, seed=7)
    generation = await cluster.submit(spec, stream=stream)
    machine = cluster.backend._running["req-1"].machine
    await until(lambda: machine.current.num_received == 6)
    first = machine.current
    fail_engine(cluster, first.workers["decode"].worker_id)
    # The client asks for more, so that the lost worker computes, and fails.
    event = await generation.next()
    assert isinstance(event, TokenBatch)
    while not isinstance(event := await generation.next(), Restarted):
        assert isinstance(event, TokenBatch)
    assert await collect(generation) == (cluster.golden(spec), "length")
    record = await record_of(cluster)
    first_ref, second_ref = (attempt["decode"]["worker_id"] for attempt in record["attempts"])
    assert first_ref != second_ref
    # Its prefill was not at fault: it is used again, and finds its own blocks in the store.
    assert len({attempt["prefill"]["incarnation"] for attempt in record["attempts"]}) == 1
    assert_one_after_the_other(record)


async def test_a_stopped_prefill_is_waited_out_then_another_answers(make_cluster: MakeCluster) -> None:
    """H4: nobody can be asked whether the old attempt runs; its lease is, and then the input goes elsewhere."""
    cluster = make_cluster()
    await cluster.start("prefill", "prefill", "decode")
    spec = make_spec(100)
    with stopped(cluster, "prefill-0"):
        assert await collect(await cluster.submit(spec)) == (cluster.golden(spec), "length")
    record = await record_of(cluster)
    assert [attempt["end_reason"] for attempt in record["attempts"]] == ["lease_expired", "length"]
    assert record["attempts"][1]["started_ns"] >= LEASE_MS * 1_000_000
    assert_one_after_the_other(record)


@pytest.mark.parametrize("roles", [("prefill", "prefill", "decode", "decode"), ("combined", "combined")])
async def test_after_the_boundary_nothing_runs_again(make_cluster: MakeCluster, roles: tuple[str, ...]) -> None:
    """H3: with a second pair at hand and budget left, the stream only ends, for the reason that the worker gives."""
    cluster = make_cluster(**{BACKLOG: 4})
    await cluster.start(*roles)
    generation = await cluster.submit(make_spec(40, 100))
    tokens = await first_delta(generation)
    fail_engine(cluster, cluster.backend._running["req-1"].machine.current.workers["decode"].worker_id)
    end = await read_on(generation, tokens)
    assert isinstance(end, Interrupted) and end.reason == "engine_fault"
    record = await record_of(cluster)
    assert len(record["attempts"]) == 1


async def test_the_second_failure_is_an_error(make_cluster: MakeCluster) -> None:
    """A budget of two attempts: the client is told, and told not to repeat it by itself."""
    cluster = make_cluster()
    await cluster.start("prefill", "decode")
    fail_engine(cluster, "prefill-0")
    with pytest.raises(UpstreamFailed, match="planted fault") as failed:
        await collect(await cluster.submit(make_spec()))
    assert (failed.value.status, failed.value.should_retry) == (502, False)
    assert len((await record_of(cluster))["attempts"]) == 2


async def test_the_same_worker_is_asked_again_when_it_is_the_only_one(make_cluster: MakeCluster) -> None:
    """A fault that passes costs one more attempt, not the answer."""
    cluster = make_cluster()
    await cluster.start("prefill", "decode")
    fail_engine(cluster, "prefill-0", times=1)
    spec = make_spec()
    assert await collect(await cluster.submit(spec)) == (cluster.golden(spec), "length")
    assert len((await record_of(cluster))["attempts"]) == 2


@pytest.mark.parametrize(
    ("settings", "client_retries", "why"),
    [
        ({"attempts.max_attempts": 1}, 0, "planted fault"),
        ({"attempts.cluster_retry_tokens_per_s": 0}, 0, "retry budget of all requests is spent"),
        ({"attempts.max_reprefill_tokens": 50}, 0, "would compute 100 prompt tokens, the limit is 50"),
        ({}, 1, "planted fault"),
    ],
)
async def test_what_forbids_another_attempt(
    make_cluster: MakeCluster, settings: dict[str, Any], client_retries: int, why: str
) -> None:
    """Policy, shared budget, price, and what the client's library has repeated already; the journal says which."""
    cluster = make_cluster(**settings)
    await cluster.start("prefill", "prefill", "decode")
    fail_engine(cluster, "prefill-0")
    generation = await cluster.submit(make_spec(100), client_retries=client_retries)
    with pytest.raises(UpstreamFailed, match=why) as failed:
        await collect(generation)
    assert (failed.value.status, failed.value.should_retry) == (502, False)
    record = await record_of(cluster)
    assert len(record["attempts"]) == 1
    (decision,) = (entry for entry in record["events"] if entry["event"] == "retry_decision")
    assert decision["allowed"] is False


async def test_a_retry_that_would_come_too_late_is_a_timeout(make_cluster: MakeCluster) -> None:
    """The deadline ends the request while it waits for a silent worker: 504, and nothing runs behind it."""
    cluster = make_cluster(**{"attempts.deadline_ms": LEASE_MS // 2})
    await cluster.start("prefill", "prefill", "decode")
    with stopped(cluster, "prefill-0"):
        with pytest.raises(UpstreamFailed) as failed:
            await collect(await cluster.submit(make_spec(100)))
        assert (failed.value.status, failed.value.code) == (504, "deadline_exceeded")
    assert len((await record_of(cluster))["attempts"]) == 1


async def test_a_worker_that_fails_everything_is_set_aside(make_cluster: MakeCluster) -> None:
    """F34: after a few failures requests go elsewhere at once; after its cool-down the worker is tried again."""
    cluster = make_cluster()
    await cluster.start("prefill", "prefill", "decode")
    failing = fail_engine(cluster, "prefill-0")
    num_attempts = []
    for number in range(50):
        await collect(await cluster.submit(make_spec(40, 4, salt=number), f"req-{number}"))
        record = await cluster.backend.request_record(f"req-{number}", tenant="t")
        assert record is not None
        num_attempts.append(len(record["attempts"]))
    assert failing.num_failed <= 5, num_attempts
    assert sum(num == 1 for num in num_attempts[10:]) >= 36, num_attempts
    await cluster.at_rest()
    incarnation = cluster.workers["prefill-0"][1].incarnation
    await until(lambda: incarnation not in cluster.backend._cool.set_aside(boottime_ns()))
    seen = failing.num_failed
    await collect(await cluster.submit(make_spec(40, 4, salt=99), "req-99"))
    assert failing.num_failed == seen + 1, "it was not probed again"
