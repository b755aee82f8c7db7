"""Requests through store, workers, transport, relay and driver: tokens exact, books balanced, nothing left held."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from mini_cluster import LEASE_MS, SETTLE_S, MiniCluster, collect, make_spec, until

from cluster.ingress.api.backend import TokenBatch
from cluster.ingress.api.errors import ApiError, InvalidRequest, NotReady, Overloaded, UpstreamFailed

MakeCluster = Callable[..., MiniCluster]


async def test_prefill_and_decode_give_the_tokens_of_a_plain_run(make_cluster: MakeCluster) -> None:
    """C6: over hand-off, cold, for prompts around the edges of blocks and chunks."""
    cluster = make_cluster()
    await cluster.start("prefill", "decode")
    for number, num_prompt in enumerate((1, 15, 16, 17, 63, 64, 65, 200)):
        spec = make_spec(num_prompt, salt=num_prompt)
        generation = await cluster.submit(spec, f"req-{number}")
        assert await collect(generation) == (cluster.golden(spec), "length"), num_prompt
        assert generation.cached_tokens == 0
    await cluster.at_rest()


@pytest.mark.parametrize("num_prompt", [48, 50, 64])
async def test_a_cached_prefix_gives_the_same_tokens(make_cluster: MakeCluster, num_prompt: int) -> None:
    """C1, C6: the second run computes only the tail; one token is always computed."""
    cluster = make_cluster()
    await cluster.start("prefill", "decode")
    spec = make_spec(num_prompt)
    first = await collect(await cluster.submit(spec, "req-1"))
    await cluster.at_rest()
    again = await cluster.submit(spec, "req-2")
    assert await collect(again) == first == (cluster.golden(spec), "length")
    assert again.cached_tokens == min(num_prompt // 16 * 16, num_prompt - 1)
    longer = msgspec.structs.replace(spec, prompt_token_ids=(*spec.prompt_token_ids, 7, 8, 9))
    generation = await cluster.submit(longer, "req-3")
    assert (await collect(generation))[0] == cluster.golden(longer)
    assert generation.cached_tokens == num_prompt // 16 * 16


async def test_another_worker_hits_what_one_computed(make_cluster: MakeCluster) -> None:
    """C1: blocks outlive the worker that made them."""
    cluster = make_cluster()
    await cluster.start("prefill", "decode")
    spec = make_spec(100)
    first = await collect(await cluster.submit(spec, "req-1"))
    await cluster.at_rest()
    worker, join = cluster.workers.pop("prefill-0")
    await asyncio.to_thread(worker.close)
    await cluster.add_worker("prefill")
    cluster.gone.append(join.incarnation)
    cluster.publish_view()
    await until(lambda: cluster.backend.ready().ready)
    generation = await cluster.submit(spec, "req-2")
    assert await collect(generation) == first
    assert generation.cached_tokens == 96


async def test_a_combined_worker_gives_the_same_tokens(make_cluster: MakeCluster) -> None:
    """F26: without a hand-off between processes nothing changes; the cache works as well."""
    cluster = make_cluster()
    await cluster.start("combined")
    for number, max_tokens in enumerate((1, 2, 3, 16, 17)):
        spec = make_spec(70, max_tokens)
        tokens, end = await collect(await cluster.submit(spec, f"req-{number}"))
        assert (tokens, end) == (cluster.golden(spec), "length")
        assert len(tokens) == max_tokens
        await cluster.at_rest()
    again = await cluster.submit(make_spec(70, 5), "req-again")
    await collect(again)
    assert again.cached_tokens == 64


async def test_many_at_once_wait_for_blocks_and_all_finish(make_cluster: MakeCluster) -> None:
    """A pool for two requests serves twelve; sampled streams do not depend on their company."""
    cluster = make_cluster()
    await cluster.start("prefill", "decode", pool_blocks=12)
    specs = [make_spec(50, 30, salt=n, temperature=0.9, seed=n) for n in range(12)]
    generations = [await cluster.submit(spec, f"req-{n}") for n, spec in enumerate(specs)]
    results = await asyncio.gather(*(collect(generation) for generation in generations))
    assert [tokens for tokens, _ in results] == [cluster.golden(spec) for spec in specs]
    await cluster.at_rest()


async def test_a_stop_token_ends_the_stream_also_as_the_first_token(make_cluster: MakeCluster) -> None:
    """F20: when prefill's own token is the stop token, decode never starts and nothing waits."""
    cluster = make_cluster()
    await cluster.start("prefill", "decode")
    golden = cluster.golden(make_spec(40, 10))
    for number in (0, 4):
        spec = msgspec.structs.replace(make_spec(40, 10), stop_token_ids=(golden[number],))
        expected = golden[: golden.index(golden[number]) + 1]
        assert await collect(await cluster.submit(spec, f"req-{number}")) == (expected, "stop")
    await cluster.at_rest()


async def test_what_can_never_fit_is_refused_at_the_door(make_cluster: MakeCluster) -> None:
    """A pool smaller than the context: a clear 400, and nothing was started."""
    cluster = make_cluster()
    await cluster.start("prefill", "decode", pool_blocks=8)
    with pytest.raises(InvalidRequest, match="more than the pools"):
        await cluster.submit(make_spec(100, 100))
    assert cluster.backend.streams() == []
    assert (await collect(await cluster.submit(make_spec(100, 20), "req-2")))[1] == "length"


async def test_the_queue_is_bounded(make_cluster: MakeCluster) -> None:
    """More than ``max_queued_requests`` is 429, and room comes back."""
    cluster = make_cluster(**{"limits.max_queued_requests": 2})
    await cluster.start("prefill", "decode")
    running = [await cluster.submit(make_spec(salt=n), f"req-{n}") for n in range(2)]
    with pytest.raises(Overloaded):
        await cluster.submit(make_spec(), "req-9")
    await asyncio.gather(*(collect(generation) for generation in running))
    await collect(await cluster.submit(make_spec(), "req-10"))


@pytest.mark.parametrize("moment", ["at once", "after the first token"])
async def test_a_client_that_leaves_frees_everything(make_cluster: MakeCluster, moment: str) -> None:
    """B5: upstream is cancelled in each phase; generated = delivered + discarded."""
    cluster = make_cluster()
    await cluster.start("prefill", "decode")
    for number in range(6):
        generation = await cluster.submit(make_spec(300, 200, salt=number), f"req-{number}")
        if moment != "at once":
            assert isinstance(await generation.next(), TokenBatch)
            generation.mark_first_delta()
            generation.delivered(1)
        await generation.cancel("client_gone")
    await cluster.at_rest()
    record = await cluster.backend.request_record("req-0", tenant="t")
    assert record is not None and record["phase"] == "cancelled"
    assert record["delivered_output_tokens"] == (0 if moment == "at once" else 1)
    sums = {
        name: cluster.registry.get_sample_value(f"kopir_{name}_total") or 0
        for name in ("accounted_generated_tokens", "accounted_delivered_tokens")
    }
    discarded = cluster.registry.get_sample_value("kopir_discarded_tokens_total", {"reason": "client_gone"}) or 0
    assert sums["accounted_generated_tokens"] == sums["accounted_delivered_tokens"] + discarded


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_cancel_by_id_ends_the_answer_of_its_client(make_cluster: MakeCluster, has_begun: bool) -> None:
    """Somebody else cancels: the client that still reads gets an end, and nothing is left held."""
    cluster = make_cluster(**{"limits.max_stream_backlog_tokens": 4})
    await cluster.start("prefill", "decode")
    generation = await cluster.submit(make_spec(40, 200))
    num_read = 0
    if has_begun:
        num_read = len((await generation.next()).token_ids)
        generation.mark_first_delta()
        generation.delivered(num_read)
        machine = cluster.backend._running["req-1"].machine
        await until(lambda: machine.current.num_received > num_read)
    record = await cluster.backend.cancel("req-1", tenant="t")
    assert record is not None and record["phase"] == "cancelled"
    if has_begun:
        while isinstance(event := await generation.next(), TokenBatch):
            num_read += len(event.token_ids)
        assert event.reason == "cancelled"
        assert num_read == record["delivered_output_tokens"], "the client read more than the closed books say"
    else:
        with pytest.raises(UpstreamFailed, match="was cancelled"):
            while True:
                assert isinstance(await generation.next(), TokenBatch)
    await cluster.at_rest()


async def test_a_stop_string_cancels_upstream(make_cluster: MakeCluster) -> None:
    """The rest is not wanted: decode stops, the request is finished and not cancelled."""
    cluster = make_cluster()
    await cluster.start("prefill", "decode")
    generation = await cluster.submit(make_spec(40, 400))
    await generation.next()
    generation.mark_first_delta()
    await generation.finish_stop()
    generation.delivered(0)
    generation.completed()
    await cluster.at_rest()
    record = await cluster.backend.request_record("req-1", tenant="t")
    assert record is not None and record["phase"] == "finished"
    assert record["attempts"][0]["end_reason"] == "stop_string"


async def test_a_slow_reader_holds_decode_back(make_cluster: MakeCluster) -> None:
    """Credit: decode computes no further than the backlog while nobody reads, and goes on when somebody does."""
    cluster = make_cluster(**{"limits.max_stream_backlog_tokens": 8})
    await cluster.start("prefill", "decode")
    spec = make_spec(40, 60)
    generation = await cluster.submit(spec)
    await until(lambda: cluster.backend._running["req-1"].machine.current.num_received == 8)
    # The engine answers the probe after the step it might have done: it has done none.
    assert (await cluster.statuses())["decode-0"].counters["tokens_published"] == 8
    assert await collect(generation) == (cluster.golden(spec), "length")
    await cluster.at_rest()


async def test_an_engine_fault_before_the_first_delta_is_an_error(make_cluster: MakeCluster) -> None:
    """Nothing was sent: an ordinary HTTP error, and the pair serves the next request."""
    cluster = make_cluster()
    await cluster.start("prefill", "decode")
    with fail_engine(cluster, "prefill-0"), pytest.raises(UpstreamFailed):
        await collect(await cluster.submit(make_spec(), "req-1"))
    await cluster.at_rest()
    assert (await collect(await cluster.submit(make_spec(), "req-2")))[1] == "length"


async def test_an_engine_fault_after_the_first_delta_interrupts(make_cluster: MakeCluster) -> None:
    """A6: no second generation; the stream says why it ended."""
    cluster = make_cluster(**{"limits.max_stream_backlog_tokens": 4})
    await cluster.start("prefill", "decode")
    generation = await cluster.submit(make_spec(40, 100))
    first = await generation.next()
    assert isinstance(first, TokenBatch)
    generation.mark_first_delta()
    generation.delivered(1)
    with fail_engine(cluster, "decode-0"):
        while isinstance(event := await generation.next(), TokenBatch):
            pass
    assert (type(event).__name__, event.reason) == ("Interrupted", "engine_fault")
    await cluster.at_rest()
    record = await cluster.backend.request_record("req-1", tenant="t")
    assert record is not None
    assert len(record["attempts"]) == 1
    assert record["interruption"]["delivered_output_tokens"] == 1
    assert record["interruption"]["retryable"] is False


class fail_engine:
    """While entered, the engine of one worker raises instead of computing."""

    def __init__(self, cluster: MiniCluster, name: str) -> None:
        self._engine = cluster.worker(name)._engine._engine

    def __enter__(self) -> None:
        def fail(chunks: Any) -> Any:
            raise RuntimeError("planted fault")

        self._engine.forward = fail

    def __exit__(self, *_: object) -> None:
        del self._engine.forward


async def test_a_gateway_that_dies_leaves_nothing_behind(make_cluster: MakeCluster) -> None:
    """B8: nobody cancels and nobody renews; decode and prefill stop and free everything by themselves."""
    cluster = make_cluster()
    await cluster.start("prefill", "decode")
    for number in range(3):
        await cluster.submit(make_spec(300, 200, salt=number), f"req-{number}")
    await until(lambda: cluster.backend._running["req-0"].machine.current.num_received > 0)
    # The relay's sockets close and nothing answers any more, as after a SIGKILL.
    await cluster.backend._relay.close()
    deadline = asyncio.get_running_loop().time() + SETTLE_S
    while any(s.used_blocks or s.running or s.leases for s in (await cluster.statuses()).values()):
        assert asyncio.get_running_loop().time() < deadline, await cluster.statuses()
        await asyncio.sleep(0.01)


async def test_a_lost_link_interrupts_only_when_the_lease_is_over(make_cluster: MakeCluster) -> None:
    """B3: a cut connection proves nothing; the stream ends as ``network_cut`` after the lease."""
    cluster = make_cluster(**{"limits.max_stream_backlog_tokens": 4})
    await cluster.start("prefill", "decode")
    generation = await cluster.submit(make_spec(40, 100))
    await generation.next()
    generation.mark_first_delta()
    decode, join = cluster.workers["decode-0"]
    # The worker cannot dial again: as if the network between them were gone.
    link, task = decode._ingresses[cluster.address.incarnation]
    decode._links.call(task.cancel)
    started = asyncio.get_running_loop().time()
    while isinstance(event := await generation.next(), TokenBatch):
        pass
    waited_s = asyncio.get_running_loop().time() - started
    assert (type(event).__name__, event.reason) == ("Interrupted", "network_cut")
    assert waited_s > LEASE_MS / 1000 / 2, "ended before the lease could be over"
    del join, link


async def test_without_its_store_a_worker_goes_on(make_cluster: MakeCluster) -> None:
    """A lost store is a miss, never an error; what lies in the worker's own pool is found without it."""
    cluster = make_cluster()
    await cluster.start("prefill", "decode")
    spec = make_spec(100)
    first = await collect(await cluster.submit(spec, "req-1"))
    assert cluster.store is not None
    await asyncio.to_thread(cluster.store.close)
    again = await cluster.submit(spec, "req-2")
    assert await collect(again) == first
    assert again.cached_tokens == 96
    await cluster.at_rest()
    cluster.flush_pools()
    cold = await cluster.submit(spec, "req-3")
    assert await collect(cold) == first
    assert cold.cached_tokens == 0
    await cluster.at_rest()


async def test_without_workers_nothing_is_admitted(make_cluster: MakeCluster) -> None:
    """503 with the reason, at once."""
    cluster = make_cluster()
    assert not cluster.backend.ready().ready
    generation = await cluster.submit(make_spec())
    with pytest.raises(NotReady, match="no connected pair"):
        await generation.next()
    assert cluster.backend.streams() == []


async def test_records_are_for_their_own_tenant(make_cluster: MakeCluster) -> None:
    """Another tenant's request does not exist."""
    cluster = make_cluster()
    await cluster.start("prefill", "decode")
    await collect(await cluster.submit(make_spec()))
    assert await cluster.backend.request_record("req-1", tenant="other") is None
    record = await cluster.backend.request_record("req-1", tenant="t")
    assert record is not None
    assert record["attempts"][0]["prefill"]["worker_id"] == "prefill-0"
    assert (record["model_revision"], record["lease_ms"]) == ("tiny@1", LEASE_MS)
    assert record["cached_tokens_by_tier"] == {}
    assert [entry["event"] for entry in record["events"]][:1] == ["attempt_started"]
    assert issubclass(NotReady, ApiError)


async def test_the_choice_of_a_pair_is_in_the_journal_with_its_numbers(make_cluster: MakeCluster) -> None:
    """Every prefill side that could have taken it: wait, missing tokens, predicted time to the first token."""
    cluster = make_cluster()
    await cluster.start("prefill", "prefill", "decode")
    await collect(await cluster.submit(make_spec()))
    record = await cluster.backend.request_record("req-1", tenant="t")
    assert record is not None
    (choice,) = [entry for entry in record["events"] if entry["event"] == "routing"]
    assert (choice["epoch"], choice["decode"]) == (1, "decode-0")
    assert choice["prefill"] == record["attempts"][0]["prefill"]["worker_id"]
    assert {weighed["worker_id"] for weighed in choice["weighed"]} == {"prefill-0", "prefill-1"}
    for weighed in choice["weighed"]:
        assert weighed["predicted_ttft_ms"] > 0
        assert weighed["missing_tokens"] == record["prompt_tokens"]
    router = cluster.backend._placement.router
    assert router.rates.prefill_ns_per_token(record["attempts"][0]["prefill"]["incarnation"]) > 0
    assert cluster.backend._placement._caches.fingerprint is not None


async def test_a_worker_of_another_model_is_refused_by_field(make_cluster: MakeCluster, tmp_path: Any) -> None:
    """C2: prefill and decode whose weights differ never exchange a block."""
    from kvstore.errors import FingerprintMismatch

    cluster = make_cluster()
    await cluster.start("prefill", "decode")
    other = tmp_path / "other"
    other.mkdir()
    for file in cluster.model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    from safetensors.torch import load_file, save_file

    weights = load_file(other / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"] *= 1.01
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FingerprintMismatch, match="weights_digest"):
        await cluster.add_worker("decode", model_path=str(other))
