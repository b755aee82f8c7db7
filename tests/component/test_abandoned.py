"""Cases F16, F29 and F32 through the endpoint: clients that leave mid-way, workers that end without an end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import openai
import pytest
from mini_cluster import SETTLE_S, MiniCluster, collect, make_spec, until
from mini_http import MODEL_ID, make_client, make_prompt, serve

from cluster.ingress.api.backend import TokenBatch
from kvstore.core.messages import AttemptFault

MakeCluster = Callable[..., MiniCluster]


async def test_f16_what_was_computed_for_a_client_that_left_is_let_go(make_cluster: MakeCluster) -> None:
    """30 clients leave between the end of prefill and its acceptance by decode: nothing of them stays on prefill."""
    num_clients = 30
    cluster = make_cluster()
    await cluster.start("prefill", "decode", pool_blocks=num_clients * 17, max_num_seqs=num_clients)
    decode = cluster.worker("decode-0")._decode
    assert decode is not None
    accept, offered, go_on = decode.on_hand_off, [], threading.Event()

    def later(peer: Any, message: Any) -> None:
        # Decode is slow to take the hand-over: here, until the clients are gone.
        offered.append(message)
        asyncio.get_running_loop().run_in_executor(None, go_on.wait, SETTLE_S).add_done_callback(
            lambda _: accept(peer, message)
        )

    decode.on_hand_off = later  # type: ignore[method-assign]
    async with serve(cluster) as url, make_client(url) as client:
        asks = [
            asyncio.ensure_future(
                client.completions.create(model=MODEL_ID, prompt=make_prompt(n, 256), max_tokens=16, stream=True)
            )
            for n in range(num_clients)
        ]
        await until(lambda: len(offered) == num_clients)
        for ask in asks:
            ask.cancel()
        await asyncio.gather(*asks, return_exceptions=True)
        await until(lambda: not cluster.backend.streams())
        go_on.set()
        decode.on_hand_off = accept  # type: ignore[method-assign]
        await cluster.at_rest()
        probe = make_spec(400, 4)
        assert await collect(await cluster.submit(probe)) == (cluster.golden(probe), "length")
        await cluster.at_rest()


@pytest.mark.parametrize("fault", ["silent end", "stopped with no grace"])
async def test_f29_an_end_without_an_ending_is_an_error(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """After 10 deltas the worker's side ends cleanly without its last item: no finish_reason, no usage, an error."""
    cluster = make_cluster(**{"limits.max_stream_backlog_tokens": 12})
    await cluster.start("combined")
    worker = cluster.worker("combined-0")
    if fault == "silent end":
        deliver = cluster.backend.on_message

        def swallow(link: Any, message: Any) -> None:
            if not isinstance(message, AttemptFault):
                deliver(link, message)

        monkeypatch.setattr(cluster.backend, "on_message", swallow)
    chunks = []
    async with serve(cluster) as url, make_client(url) as client:
        with pytest.raises(openai.APIError) as broken:
            stream = await client.completions.create(
                model=MODEL_ID,
                prompt=make_prompt(1, 40),
                max_tokens=400,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            closing: asyncio.Future[None] | None = None
            async for chunk in stream:
                chunks.append(chunk)
                if len(chunks) == 10:
                    closing = asyncio.ensure_future(asyncio.to_thread(worker.close))
        assert closing is not None
        await closing
    assert all(choice.finish_reason is None for chunk in chunks for choice in chunk.choices)
    assert all(chunk.usage is None for chunk in chunks)
    error = broken.value.body
    assert isinstance(error, dict) and error["code"] == "upstream_decode_interrupted"
    assert error["reason"] == ("shutdown" if fault != "silent end" else "network_cut")
    assert error["delivered_output_tokens"] < 400


async def test_f32_abandoned_requests_cost_the_next_one_nothing(make_cluster: MakeCluster) -> None:
    """20 clients give up and ask again, three times each; when they are gone, so is all that they asked for."""
    step_s, num_tokens, patience_s = 0.02, 50, 0.4
    cluster = make_cluster()
    await cluster.start("combined", max_num_seqs=1)
    engine = cluster.worker("combined-0")._engine._engine
    right, num_steps = engine.forward, 0

    def slow(chunks: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        time.sleep(step_s)
        return right(chunks)

    engine.forward = slow  # type: ignore[method-assign]
    async with serve(cluster) as url:
        impatient = make_client(url, timeout_s=patience_s, max_retries=2)

        async def ask(number: int) -> None:
            with suppress(openai.APIError):
                await impatient.completions.create(
                    model=MODEL_ID,
                    prompt=make_prompt(number, 40),
                    max_tokens=num_tokens,
                    extra_body={"ignore_eos": True},
                )

        async with impatient:
            await asyncio.gather(*(ask(number) for number in range(20)))
        generation = await cluster.submit(make_spec(40, 10))
        num_before = num_steps
        assert isinstance(await generation.next(), TokenBatch)
        # Behind the sixty that nobody wants any more, it would wait for three thousand steps.
        assert num_steps - num_before <= 2 * num_tokens
        await generation.cancel("client_gone")
        await cluster.at_rest()
