"""Blocks that stay in the pools: found in place, sent only where they are missing, right or not used at all."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest
from mini_cluster import BLOCK_TOKENS, SETTLE_S, MiniCluster, collect, make_spec, until

from cluster.core.service_rates import ServiceRates
from cluster.ingress.api.errors import ApiError, UpstreamFailed
from kvstore.core.block_pool import SlotState
from kvstore.core.identity import prefix_hashes
from kvstore.core.messages import GenerationSpec

MakeCluster = Callable[..., MiniCluster]


def by_tier(generation: Any) -> dict[str, int]:
    return dict(generation.record()["cached_tokens_by_tier"])


async def counters(cluster: MiniCluster, name: str) -> dict[str, int]:
    return dict((await cluster.statuses())[name].counters)


def on_loop(cluster: MiniCluster, name: str, call: Callable[[Any], Any]) -> Any:
    """Calls ``call(worker)`` on the worker's link loop and waits for it."""
    worker = cluster.worker(name)

    async def run() -> Any:
        return call(worker)

    return worker._links.run(run(), deadline_s=10)


def hashes_of(cluster: MiniCluster, name: str, spec: GenerationSpec, output: tuple[int, ...] = ()) -> list[Any]:
    digest = cluster.worker(name)._fingerprint.digest()
    return prefix_hashes(digest, spec.tenant_salt, (*spec.prompt_token_ids, *output), BLOCK_TOKENS)


async def test_a_repeated_prompt_is_found_in_the_pool_and_hardly_travels(make_cluster: MakeCluster) -> None:
    """C1, C5: prefill finds it on the device without asking the store, decode has it: one block is sent."""
    cluster = make_cluster()
    await cluster.start("prefill", "decode")
    spec = make_spec(100)
    first = await cluster.submit(spec, "req-1")
    expected = await collect(first)
    assert by_tier(first) == {}
    await cluster.at_rest()
    before = await counters(cluster, "prefill-0")
    asked = cluster.worker("prefill-0")._store.counters.loaded_blocks
    again = await cluster.submit(spec, "req-2")
    assert await collect(again) == expected
    assert by_tier(again) == {"device": 96} and again.cached_tokens == 96
    await cluster.at_rest()
    after = await counters(cluster, "prefill-0")
    block_bytes = cluster.layout.block_bytes
    assert before["pushed_bytes"] == 7 * block_bytes
    assert after["pushed_bytes"] - before["pushed_bytes"] == block_bytes, "the tail alone travels"
    assert after["computed_tokens"] - before["computed_tokens"] == 4
    assert after["held_by_decode_blocks"] == 6
    assert (await counters(cluster, "decode-0"))["held_blocks"] == 6
    assert cluster.worker("prefill-0")._store.counters.loaded_blocks == asked
    assert all(status.cached_blocks > 0 for status in (await cluster.statuses()).values())


@pytest.mark.parametrize("where", ["prefill-0", "decode-0", "store"])
async def test_each_side_may_have_lost_its_part(make_cluster: MakeCluster, where: str) -> None:
    """C5, C6: whoever lost its blocks gets them from where they are; the tokens stay the same."""
    cluster = make_cluster()
    await cluster.start("prefill", "decode")
    spec = make_spec(96)
    expected = await collect(await cluster.submit(spec, "req-1"))
    await cluster.at_rest()
    before = (await counters(cluster, "prefill-0"))["pushed_bytes"]
    if where == "store":
        assert cluster.store is not None
        await asyncio.to_thread(cluster.store.close)
    else:
        on_loop(cluster, where, lambda worker: worker._pool.flush())
    again = await cluster.submit(spec, "req-2")
    assert await collect(again) == expected
    await cluster.at_rest()
    num_pushed = ((await counters(cluster, "prefill-0"))["pushed_bytes"] - before) // cluster.layout.block_bytes
    assert by_tier(again) == ({"host": 95} if where == "prefill-0" else {"device": 95})
    assert num_pushed == (6 if where == "decode-0" else 1)


async def test_streams_with_the_same_prefix_share_its_blocks(make_cluster: MakeCluster) -> None:
    """Eight streams of one long prompt fit into a decode pool that could never hold eight copies of it."""
    cluster = make_cluster()
    await cluster.start("prefill", "decode", pool_blocks=40)
    head = make_spec(320).prompt_token_ids
    specs = [
        msgspec.structs.replace(make_spec(1, 12, salt=n), prompt_token_ids=(*head, 20 + n, 30 + n)) for n in range(8)
    ]
    expected = [cluster.golden(spec) for spec in specs]
    assert (await collect(await cluster.submit(specs[0], "req-first")))[0] == expected[0]
    await cluster.at_rest()
    generations = [await cluster.submit(spec, f"req-{n}") for n, spec in enumerate(specs)]
    results = await asyncio.gather(*(collect(generation) for generation in generations))
    assert [tokens for tokens, _ in results] == expected
    assert all(generation.cached_tokens == 320 for generation in generations)
    await cluster.at_rest()
    assert (await counters(cluster, "decode-0"))["held_blocks"] == 8 * 20


async def test_a_prompt_that_shares_half_moves_half(make_cluster: MakeCluster) -> None:
    """C5: four of eight blocks are known on both sides: four are computed, and four travel."""
    cluster = make_cluster()
    await cluster.start("prefill", "decode")
    first = make_spec(128)
    await collect(await cluster.submit(first, "req-1"))
    await cluster.at_rest()
    before = await counters(cluster, "prefill-0")
    head, tail = first.prompt_token_ids[:64], make_spec(64, salt=9).prompt_token_ids
    second = msgspec.structs.replace(first, prompt_token_ids=(*head, *tail))
    again = await cluster.submit(second, "req-2")
    assert await collect(again) == (cluster.golden(second), "length")
    assert by_tier(again) == {"device": 64}
    await cluster.at_rest()
    after = await counters(cluster, "prefill-0")
    assert after["pushed_bytes"] - before["pushed_bytes"] == 4 * cluster.layout.block_bytes
    assert after["computed_tokens"] - before["computed_tokens"] == 64


@pytest.mark.parametrize("eviction", ["kopir", "lru", "s3fifo", "arc"])
async def test_what_is_cached_is_no_leak(make_cluster: MakeCluster, eviction: str) -> None:
    """Pools full of kept blocks admit at once a request that needs every block they have; the answer is right."""
    cluster = make_cluster()
    await cluster.start("prefill", "decode", pool_blocks=12, eviction=eviction)
    for number in range(4):
        await collect(await cluster.submit(make_spec(80, 4, salt=number), f"req-{number}"))
    await cluster.at_rest()
    statuses = await cluster.statuses()
    assert all(status.cached_blocks >= 10 for status in statuses.values()), statuses
    assert all(status.counters["device_evicted_blocks"] for status in statuses.values()), statuses
    whole = make_spec(12 * BLOCK_TOKENS - 8, 8, salt=9)
    assert await collect(await cluster.submit(whole, "req-whole")) == (cluster.golden(whole), "length")
    await cluster.at_rest()


async def test_the_tier_can_be_off(make_cluster: MakeCluster) -> None:
    """``kv.device_cache: false``: nothing stays in the pools, the store serves the prompt, and all of it travels."""
    cluster = make_cluster()
    await cluster.start("prefill", "decode", device_cache=False)
    spec = make_spec(96)
    expected = await collect(await cluster.submit(spec, "req-1"))
    await cluster.at_rest()
    again = await cluster.submit(spec, "req-2")
    assert await collect(again) == expected
    assert by_tier(again) == {"host": 95}
    await cluster.at_rest()
    assert all(status.cached_blocks == 0 for status in (await cluster.statuses()).values())
    assert (await counters(cluster, "prefill-0"))["pushed_bytes"] == 12 * cluster.layout.block_bytes


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
async def test_a_damaged_block_is_dropped_and_never_used(make_cluster: MakeCluster, name: str) -> None:
    """C3: one byte of a cached block changes in the pool; its digest tells, it is counted, the tokens are right."""
    cluster = make_cluster()
    await cluster.start("prefill", "decode")
    spec = make_spec(100)
    expected = await collect(await cluster.submit(spec, "req-1"))
    await cluster.at_rest()
    third = hashes_of(cluster, name, spec)[2]

    def damage(worker: Any) -> None:
        worker._memory.block_bytes_view(worker._pool.find(third).slot)[77] ^= 0x10

    on_loop(cluster, name, damage)
    again = await cluster.submit(spec, "req-2")
    assert await collect(again) == expected
    assert by_tier(again) == ({"device": 32, "host": 64} if name == "prefill-0" else {"device": 96})
    assert (await counters(cluster, name))["device_corrupt_blocks"] == 1
    await cluster.at_rest()
    assert await collect(await cluster.submit(spec, "req-3")) == expected
    assert (await counters(cluster, name))["device_corrupt_blocks"] == 1
    await cluster.at_rest()


@pytest.mark.parametrize("is_read", [False, True])
async def test_the_slot_of_a_damaged_block_is_cleared_before_it_is_given_out(
    make_cluster: MakeCluster, is_read: bool
) -> None:
    """C3: a NaN in a slot would poison whoever gets it next, because no mask hides it; while it is read it stays."""
    cluster = make_cluster()
    await cluster.start("combined")
    spec = make_spec(100)
    await collect(await cluster.submit(spec, "req-1"))
    await cluster.at_rest()
    hashes = hashes_of(cluster, "combined-0", spec)

    def damage(worker: Any) -> int:
        block = worker._pool.find(hashes[2])
        if is_read:
            worker._device.hold("reader", 1, [block])
        worker._memory.block_bytes_view(block.slot)[:] = b"\xff" * worker._memory.block_bytes
        assert len(worker._device.match(hashes)) == 2
        return int(block.slot)

    slot = on_loop(cluster, "combined-0", damage)
    bytes_of = cluster.worker("combined-0")._memory.block_bytes_view
    if is_read:
        assert max(bytes_of(slot)) == 0xFF
        on_loop(cluster, "combined-0", lambda worker: worker._device.let_go("reader", 1))
    assert max(bytes_of(slot)) == 0
    assert on_loop(cluster, "combined-0", lambda worker: worker._pool.state_of(slot)) is SlotState.FREE


@pytest.mark.parametrize("device_cache", [True, False])
async def test_a_combined_worker_holds_what_it_copies_to_the_store(
    make_cluster: MakeCluster, device_cache: bool
) -> None:
    """The answer is out and its attempt gone while the store is slow: nobody else writes into the blocks meanwhile."""
    cluster = make_cluster()
    await cluster.start("combined", pool_blocks=8, device_cache=device_cache)
    worker = cluster.worker("combined-0")
    genuine = worker._store.put_blocks
    waits = on_loop(cluster, "combined-0", lambda _: asyncio.Event())

    async def slow(*arguments: Any, **options: Any) -> Any:
        await waits.wait()
        return await genuine(*arguments, **options)

    worker._store.put_blocks = slow
    first, second = make_spec(100, 1), make_spec(100, 1, salt=3)
    await collect(await cluster.submit(first, "req-1"))
    await until(lambda: worker._pool.counts().owned == 6)
    other = asyncio.ensure_future(collect(await cluster.submit(second, "req-2")))
    await until(lambda: worker._decode.load()[1] == 1)
    assert not other.done() and worker._pool.counts().available == 2
    on_loop(cluster, "combined-0", lambda _: waits.set())
    assert await other == (cluster.golden(second), "length")
    await cluster.at_rest()
    cluster.flush_pools()
    for number, spec in enumerate((first, second)):
        again = await cluster.submit(spec, f"req-again-{number}")
        assert await collect(again) == (cluster.golden(spec), "length")
        assert by_tier(again) == {"host": 96}
    await cluster.at_rest()
    assert worker._store.counters.corrupt_blocks == 0


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("combined",)])
async def test_a_cancelled_prefill_leaves_what_it_has_computed(
    make_cluster: MakeCluster, roles: tuple[str, ...]
) -> None:
    """The client leaves in the middle of a long prompt: complete blocks are kept, and are right."""
    cluster = make_cluster()
    await cluster.start(*roles, chunk_tokens=32)
    engine = cluster.worker(f"{roles[0]}-0")._engine._engine
    computing, go_on = threading.Event(), threading.Event()
    genuine, num_steps = engine.forward, 0

    def slow(chunks: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            computing.set()
            go_on.wait(SETTLE_S)
        return genuine(chunks)

    engine.forward = slow
    spec = make_spec(200)
    generation = await cluster.submit(spec, "req-1")
    assert await asyncio.to_thread(computing.wait, SETTLE_S)
    await generation.cancel("client_gone")
    go_on.set()
    await cluster.at_rest()
    again = await cluster.submit(spec, "req-2")
    assert await collect(again) == (cluster.golden(spec), "length")
    assert by_tier(again)["device"] >= 64
    await cluster.at_rest()


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("combined",)])
async def test_a_held_block_that_vanishes_is_a_clean_failure(make_cluster: MakeCluster, roles: tuple[str, ...]) -> None:
    """C5: decode promised a block and drops it before the hand-off: no token of this attempt, nothing left held."""
    cluster = make_cluster()
    await cluster.start(*roles)
    decode = f"{roles[-1]}-0"
    spec = make_spec(100)
    expected = await collect(await cluster.submit(spec, "req-1"))
    await cluster.at_rest()
    second = hashes_of(cluster, decode, spec)[1]
    side = cluster.worker(decode)._decode
    name = "on_hand_off" if len(roles) == 2 else "local_hand_off"
    genuine = getattr(side, name)

    def drop_first(*arguments: Any) -> Any:
        assert cluster.worker(decode)._pool.drop(second)
        delattr(side, name)
        return genuine(*arguments)

    setattr(side, name, drop_first)
    again = await cluster.submit(spec, "req-2")
    try:
        # Nothing was delivered: another attempt may serve it.
        assert await collect(again) == expected
    except UpstreamFailed as error:
        assert "gone" in str(error)
    assert (await counters(cluster, decode))["held_blocks_lost"] == 1
    await cluster.at_rest()
    assert await collect(await cluster.submit(spec, "req-3")) == expected
    await cluster.at_rest()


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("combined",)])
async def test_the_next_turn_of_a_talk_finds_the_answer(make_cluster: MakeCluster, roles: tuple[str, ...]) -> None:
    """C1, C6: complete blocks of generated tokens are hit, and hold the very bits that a prefill would have made."""
    cluster = make_cluster()
    await cluster.start(*roles)
    decode = f"{roles[-1]}-0"
    turn = make_spec(40, 60)
    answer, _ = await collect(await cluster.submit(turn, "req-1"))
    await cluster.at_rest()
    stored = (await counters(cluster, decode))["answer_blocks_stored"]
    # 99 of the 100 tokens have KV; two of the six full blocks are the prompt's own.
    assert stored == 4
    history = (*turn.prompt_token_ids, *answer)
    follow = msgspec.structs.replace(turn, prompt_token_ids=(*history, 9, 8, 7), max_tokens=12)
    expected = cluster.golden(follow)
    for index, block_hash in enumerate(hashes_of(cluster, decode, turn, tuple(answer[:-1]))):
        block = on_loop(cluster, decode, lambda worker, item=block_hash: worker._pool.find(item))
        ours = bytes(cluster.worker(decode)._memory.block_bytes_view(block.slot))
        assert ours == bytes(cluster.engine.pool.block_bytes_view(index)), f"block {index} has other bits"
    generation = await cluster.submit(follow, "req-2")
    assert await collect(generation) == (expected, "length")
    assert generation.cached_tokens == 96
    assert by_tier(generation) == ({"device": 96} if len(roles) == 1 else {"device": 32, "host": 64})
    await cluster.at_rest()


async def test_a_cancelled_answer_leaves_only_whole_blocks(make_cluster: MakeCluster) -> None:
    """C4: what a cancelled stream had complete is right for others; its last, unfinished block is nobody's."""
    cluster = make_cluster()
    await cluster.start("combined")
    spec = make_spec(40, 100)
    expected = cluster.golden(spec)
    generation = await cluster.submit(spec, "req-1")
    await until(lambda: cluster.backend._running["req-1"].machine.current.num_received >= 30)
    await generation.cancel("client_gone")
    await cluster.at_rest()
    longer = msgspec.structs.replace(spec, prompt_token_ids=(*spec.prompt_token_ids, *expected[:90]), max_tokens=10)
    again = await cluster.submit(longer, "req-2")
    assert await collect(again) == (expected[90:], "length")
    assert 64 <= again.cached_tokens <= 128 and again.cached_tokens % 16 == 0
    await cluster.at_rest()


async def test_f52_cached_tokens_stay_below_the_prompt_in_a_small_pool(make_cluster: MakeCluster) -> None:
    """0 at first, then 1..99 of 100, also while streams are preempted; what is served is always exact."""
    cluster = make_cluster()
    await cluster.start("prefill", "decode", pool_blocks=12)
    spec = make_spec(100, 60)
    expected = cluster.golden(spec), "length"
    first = await cluster.submit(spec, "req-first")
    assert await collect(first) == expected and first.cached_tokens == 0
    await cluster.at_rest()
    others = [make_spec(60, 90, salt=n) for n in range(2, 5)]
    running = [await cluster.submit(other, f"req-other-{n}") for n, other in enumerate(others)]
    again = [await cluster.submit(spec, f"req-{n}") for n in range(3)]
    results = await asyncio.gather(*(collect(generation) for generation in (*running, *again)))
    assert results[len(running) :] == [expected] * 3
    assert all(1 <= generation.cached_tokens <= 99 for generation in again)
    assert all(sum(by_tier(generation).values()) == generation.cached_tokens for generation in again)
    await cluster.at_rest()


def make_talk(*parts: tuple[int, int]) -> GenerationSpec:
    """A prompt of pieces (number, tokens), each of which is the same wherever its number stands."""
    prompt = tuple(
        (number * 7919 + index * 31 + number * index) % 140 + 5 for number, num in parts for index in range(num)
    )
    return GenerationSpec(prompt_token_ids=prompt, max_tokens=2, sampling=make_spec().sampling)


@pytest.mark.parametrize("eviction", ["kopir", "lru"])
async def test_f68_a_main_agent_and_its_sub_agent_keep_their_shared_ancestor(
    make_cluster: MakeCluster, eviction: str
) -> None:
    """A quarter of the case's size, nothing in the store. With room for both: from the second visit on nearly all of
    each prompt is found. With room for the main agent alone: each finds the common part whenever it comes."""
    shared, main, sub = (30, 64), (31, 304), (32, 48)
    roomy = make_cluster()
    roomy.host_blocks = 1
    await roomy.start("combined", pool_blocks=44, eviction=eviction)
    for visit in range(10):
        for number, own in enumerate((main, sub)):
            spec = make_talk(shared, own, (100 + 2 * visit + number, 8))
            generation = await roomy.submit(spec, f"req-{visit}-{number}")
            assert (await collect(generation))[0] == roomy.golden(spec)
            found = by_tier(generation).get("device", 0)
            assert visit == 0 or found >= 0.9 * len(spec.prompt_token_ids), (visit, number, found)
            await roomy.at_rest()
    tight = make_cluster()
    tight.host_blocks = 1
    await tight.start("combined", pool_blocks=25, eviction=eviction)
    for number, own in enumerate((sub, main, sub, main)):
        generation = await tight.submit(make_talk(shared, own, (200 + number, 4)), f"req-{number}")
        await collect(generation)
        found = by_tier(generation).get("device", 0)
        assert number == 0 or found >= 60, (number, found)
        await tight.at_rest()


async def test_f14_hits_on_the_device_pin_nothing_in_the_store(make_cluster: MakeCluster) -> None:
    """Prompts sent twice, the second time found on the device; then send, flush, resend: the store hits every time."""
    cluster = make_cluster()
    await cluster.start("combined", pool_blocks=24)
    for number in range(20):
        spec = make_spec(200, 1, salt=number)
        await collect(await cluster.submit(spec, f"req-{number}-a"))
        again = await cluster.submit(spec, f"req-{number}-b")
        await collect(again)
        assert by_tier(again) == {"device": 192}
    await cluster.at_rest()
    for number in range(40):
        spec = make_spec(200, 1, salt=50 + number)
        await collect(await cluster.submit(spec, f"req-{number}-c"))
        await cluster.at_rest()
        cluster.flush_pools()
        again = await cluster.submit(spec, f"req-{number}-d")
        await collect(again)
        assert by_tier(again) == {"host": 192}, number
    await cluster.at_rest()
    assert cluster.store is not None
    stat = await asyncio.to_thread(cluster.store.status)
    assert (stat["pinned"], stat["writing"]) == (0, 0), stat


async def test_blocks_of_a_late_reader_leave_quarantine_when_it_has_read_them(make_cluster: MakeCluster) -> None:
    """A decode worker that takes no blocks for a while and then goes on: fenced until it has read, and no longer.

    Meanwhile the fenced blocks are hit, because nobody writes them. Both sides count what they gave up.
    """
    cluster = make_cluster()
    await cluster.start("prefill", "decode", transfer_deadline_ms=200)
    side = cluster.worker("decode-0")._decode
    kept: list[Any] = []
    side.on_blocks_posted = lambda *message: kept.append(message)
    spec = make_spec(100)
    generation = await cluster.submit(spec, "req-1")
    await until(lambda: sum(len(message.blocks) for _, message in kept) == 7)
    await generation.cancel("client_gone")
    await reached(cluster, "prefill-0", "source_blocks_fenced", 7)
    assert (await cluster.statuses())["prefill-0"].quarantined_blocks == 7
    match = on_loop(cluster, "prefill-0", lambda worker: worker._device.match(hashes_of(cluster, "prefill-0", spec)))
    assert len(match) == 6

    def go_on(_: Any) -> None:
        del side.on_blocks_posted
        for message in kept:
            side.on_blocks_posted(*message)

    on_loop(cluster, "decode-0", go_on)
    await cluster.at_rest()
    found = await counters(cluster, "prefill-0")
    assert (found["source_blocks_given_up"], found["source_blocks_settled"], found["source_blocks_fenced"]) == (7, 7, 0)
    again = await cluster.submit(spec, "req-2")
    assert await collect(again) == (cluster.golden(spec), "length")
    assert by_tier(again) == {"device": 96}
    await cluster.at_rest()


async def test_a_late_sender_keeps_destinations_fenced_until_it_has_sent(make_cluster: MakeCluster) -> None:
    """The other direction: blocks are announced, their bytes come too late. The attempt fails, its slots come back."""
    cluster = make_cluster()
    await cluster.start("prefill", "decode", transfer_deadline_ms=200)
    transport = cluster.worker("prefill-0")._transport
    genuine, waiting = transport.push, []

    def push_later(peer: str, sends: Any, *, deadline_s: float) -> Any:
        waiting.append((peer, sends, Future()))
        return waiting[-1][2]

    transport.push = push_later
    spec = make_spec(100)
    generation = await cluster.submit(spec, "req-1")
    with pytest.raises(UpstreamFailed):
        await collect(generation)
    # Nothing was delivered, so that there may have been a second attempt, with the same end.
    num_late = 7 * len(generation.record()["attempts"])
    await reached(cluster, "decode-0", "destination_blocks_fenced", num_late)
    assert (await cluster.statuses())["decode-0"].quarantined_blocks == num_late
    del transport.push
    for peer, sends, promised in waiting:
        genuine(peer, sends, deadline_s=5.0).add_done_callback(
            lambda done, promised=promised: promised.set_result(done.result())
        )
    await cluster.at_rest()
    found = await counters(cluster, "decode-0")
    assert (found["destination_blocks_given_up"], found["destination_blocks_settled"]) == (num_late, num_late)
    assert await collect(await cluster.submit(spec, "req-2")) == (cluster.golden(spec), "length")
    await cluster.at_rest()


async def test_a_repeated_prompt_goes_to_the_worker_that_has_it(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ingress hears what comes into a pool and what leaves it, and routes by that: a device hit each time."""
    # A token costs what it costs by default: how busy this machine is must not decide.
    monkeypatch.setattr(ServiceRates, "saw_prefill", lambda *_, **__: None)
    cluster = make_cluster()
    await cluster.start("prefill", "prefill", "decode")
    specs = [make_spec(100, salt=number) for number in range(4)]
    homes = []
    for number, spec in enumerate(specs):
        generation = await cluster.submit(spec, f"req-{number}")
        await collect(generation)
        homes.append(generation.record()["attempts"][0]["prefill"]["worker_id"])
    assert len(set(homes)) == 2, "the work is spread"
    await cluster.at_rest()
    caches = cluster.backend._placement._caches
    lives = {name: cluster.workers[name][1].incarnation for name in set(homes)}

    def heard(number: int) -> int:
        return int(caches.prefixes(hashes_of(cluster, homes[number], specs[number])).get(lives[homes[number]], 0))

    await until(lambda: all(heard(number) == 6 for number in range(4)))
    for number, spec in enumerate(specs):
        again = await cluster.submit(spec, f"req-{number}-again")
        await collect(again)
        assert again.record()["attempts"][0]["prefill"]["worker_id"] == homes[number]
        assert by_tier(again) == {"device": 96}
    await cluster.at_rest()
    on_loop(cluster, homes[0], lambda worker: worker._pool.flush())
    await until(lambda: heard(0) == 0)


async def test_what_was_pushed_to_a_dead_decode_worker_is_pushed_again(make_cluster: MakeCluster) -> None:
    """Decode dies before it took over: prefill still has the blocks, computes the tail alone and sends them all."""
    cluster = make_cluster()
    await cluster.start("prefill", "decode")
    side = cluster.worker("decode-0")._decode
    handed: list[Any] = []
    side.on_hand_off = lambda *message: handed.append(message)
    spec = make_spec(100)
    first = asyncio.ensure_future(collect(await cluster.submit(spec, "req-1")))
    await until(lambda: handed)
    before = await counters(cluster, "prefill-0")
    await cluster.replace_worker("decode-0")
    with contextlib.suppress(ApiError):
        # Nothing was delivered: it may be served by another attempt, or end by an error.
        assert await first == (cluster.golden(spec), "length")
    again = await cluster.submit(spec, "req-2")
    assert await collect(again) == (cluster.golden(spec), "length")
    assert by_tier(again) == {"device": 96}
    await cluster.at_rest()
    after = await counters(cluster, "prefill-0")
    assert after["computed_tokens"] - before["computed_tokens"] <= 2 * 4
    assert after["pushed_bytes"] >= 7 * cluster.layout.block_bytes


async def reached(cluster: MiniCluster, name: str, counter: str, value: int) -> None:
    """Waits until a counter has this value; fails after ``SETTLE_S``."""
    deadline = asyncio.get_running_loop().time() + SETTLE_S
    while (found := (await counters(cluster, name)).get(counter)) != value:
        assert asyncio.get_running_loop().time() < deadline, f"{name} {counter}: {found}, not {value}"
        await asyncio.sleep(0.01)
