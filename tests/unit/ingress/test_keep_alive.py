"""Keep-alive comments during a long prefill: what readers see, and where the boundary is. Case F40, row A4."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import openai
import pytest

from cluster.ingress.api.backend import Ended, Interrupted, Restarted
from cluster.ingress.api.errors import UpstreamFailed
from cluster.ingress.api.services import ApiLimits, KeepAlive

from .conftest import MAX_BODY_BYTES, World
from .fakes import Gate, batches

PING_S = 0.02


@pytest.fixture(params=[False, True], ids=["boundary is the first byte", "boundary is the first delta"])
def limits(request: pytest.FixtureRequest) -> ApiLimits:
    keep_alive = KeepAlive(ping_s=PING_S, retry_after_first_byte=request.param)
    return ApiLimits(max_body_bytes=MAX_BODY_BYTES, keep_alive=keep_alive)


BODY = {"model": "tiny-test-model", "prompt": "hi", "max_tokens": 40, "stream": True}


async def pings(chunks: AsyncIterator[bytes], number: int) -> bytes:
    """Reads until so many comments came."""
    data = b""
    while data.count(b": ping\n") < number:
        data += await anext(chunks)
    return data


def spec_events(data: bytes) -> list[str]:
    """Reads an event stream as the standard says: comments are dropped, a blank line dispatches."""
    found, lines = [], []
    for line in data.decode().split("\n"):
        if line == "":
            if lines:
                found.append("\n".join(lines))
            lines = []
        elif not line.startswith(":"):
            name, _, value = line.partition(": ")
            assert name == "data", line
            lines.append(value)
    assert not lines, "the stream ends inside an event"
    return found


async def test_f40_comments_disturb_no_reader(world: World) -> None:
    """No event without data, no id or retry field, no blank line after a comment; the text is whole."""
    gate = Gate()
    world.play_steps([gate, *batches(world.encode("hello world")), Ended("stop")])
    async with world.http.stream("POST", "/v1/completions", json=BODY) as answer:
        assert answer.status_code == 200
        chunks = answer.aiter_bytes()
        data = await pings(chunks, 3)
        assert b"data:" not in data
        gate.open.set()
        data += b"".join([chunk async for chunk in chunks])
    assert b": ping\n\n" not in data and b"id:" not in data and b"retry:" not in data and b"event:" not in data
    events = spec_events(data)
    assert events[-1] == "[DONE]" and all(events)
    gate.open.clear()
    async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key="x", max_retries=0) as client:
        asking = asyncio.create_task(client.completions.create(**BODY))
        stream = await asking
        gate.open.set()
        text = "".join([chunk.choices[0].text async for chunk in stream])
    assert text == "hello world"


async def test_the_boundary_is_where_it_is_said_to_be(world: World, limits: ApiLimits) -> None:
    """First byte: nothing is repeated once a comment is out. First delta: an attempt may still be repeated."""
    gate = Gate()
    token_ids = batches(world.encode("hello"))
    world.play_steps([gate, Restarted("att-2"), *token_ids, Ended("stop")])
    async with world.http.stream("POST", "/v1/completions", json=BODY) as answer:
        chunks = answer.aiter_bytes()
        await pings(chunks, 1)
        assert "mark_first_delta" not in world.backend.last.calls
        gate.open.set()
        rest = b"".join([chunk async for chunk in chunks])
    if limits.keep_alive.retry_after_first_byte:
        assert rest.endswith(b"data: [DONE]\n\n")
    else:
        assert b"[DONE]" not in rest and b'"choices"' not in rest
        assert b'"code":"upstream_failed"' in rest and b'"partial_output":false' in rest
        assert world.backend.last.calls == [("cancel", "gateway_fault")]


async def test_a_failure_after_a_comment_is_an_event_and_clients_raise(world: World, limits: ApiLimits) -> None:
    """The status line is out already: the error is the one event, without [DONE]."""
    gate = Gate()
    failure = (
        UpstreamFailed("a worker was lost")
        if limits.keep_alive.retry_after_first_byte
        else Interrupted("worker_exited", "att-1", "a worker was lost")
    )
    world.play_steps([gate, failure])
    async with world.http.stream("POST", "/v1/completions", json=BODY) as answer:
        chunks = answer.aiter_bytes()
        data = await pings(chunks, 1)
        gate.open.set()
        data += b"".join([chunk async for chunk in chunks])
    (event,) = spec_events(data)
    assert "a worker was lost" in event and '"delivered_output_tokens":0' in event
    gate.open.clear()
    async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key="x", max_retries=0) as client:
        stream = await client.completions.create(**BODY)
        gate.open.set()
        with pytest.raises(openai.APIError, match="a worker was lost"):
            async for _ in stream:
                pass


async def test_who_leaves_between_comments_is_noticed(world: World) -> None:
    """The generation is cancelled."""
    gate = Gate()
    world.play_steps([gate])
    async with world.http.stream("POST", "/v1/completions", json=BODY) as answer:
        await pings(answer.aiter_bytes(), 1)
    await asyncio.wait_for(world.backend.last.over.wait(), 10)
    assert ("cancel", "client_gone") in world.backend.last.calls


async def test_an_answer_that_is_not_streamed_gets_no_comment(world: World) -> None:
    """JSON has no place for one."""
    gate = Gate()
    world.play_steps([gate, *batches(world.encode("hello")), Ended("stop")])
    asking = asyncio.create_task(world.complete())
    await gate.reached.wait()
    await asyncio.sleep(4 * PING_S)
    gate.open.set()
    answer: httpx.Response = await asking
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == "hello"
