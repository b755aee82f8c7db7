"""Clients that leave: at every stage the work behind them stops."""

from __future__ import annotations

import asyncio
import json

import pytest

from cluster.ingress.api.app import create_app
from cluster.ingress.api.backend import Ended

from .conftest import World
from .fakes import MODEL_ID, FakeBackend, Gate, batches, make_bundle


async def open_request(world: World, *, stream: bool) -> asyncio.StreamWriter:
    """Sends a chat request over a bare socket, so that closing it is in our hands."""
    body = json.dumps({"model": MODEL_ID, "stream": stream, "messages": [{"role": "user", "content": "x"}]}).encode()
    host, port = world.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    world.reader = reader  # type: ignore[attr-defined]
    return writer


@pytest.mark.parametrize("stream", [True, False])
async def test_client_leaves_while_the_first_token_is_awaited(world: World, stream: bool) -> None:
    """The generation is cancelled as client_gone; nothing was written."""
    gate = Gate()
    world.play_steps([gate])
    writer = await open_request(world, stream=stream)
    await gate.reached.wait()
    writer.close()
    await asyncio.wait_for(world.backend.last.over.wait(), 10)
    assert world.backend.last.calls == [("cancel", "client_gone")]


async def test_client_leaves_in_mid_stream(world: World) -> None:
    """After deltas went out: cancelled once, nothing more asked for."""
    gate = Gate()
    world.play_steps([*batches(world.encode("fox")), gate])
    writer = await open_request(world, stream=True)
    await gate.reached.wait()
    writer.close()
    await asyncio.wait_for(world.backend.last.over.wait(), 10)
    assert world.backend.last.calls[-1] == ("cancel", "client_gone")
    assert [call for call in world.backend.last.calls if call[0] == "cancel"] == [("cancel", "client_gone")]


async def test_client_leaves_during_submit(world: World) -> None:
    """F32: queued work of a client that left is given up."""
    gate = Gate()
    world.backend.submit_steps = [gate]
    writer = await open_request(world, stream=True)
    await gate.reached.wait()
    writer.close()
    await asyncio.wait_for(world.backend.submit_cancelled.wait(), 10)
    assert world.backend.generations == []


async def test_server_goes_on_after_a_client_left(world: World) -> None:
    """F37: the next request is served, and the one that left is counted."""
    gate = Gate()
    world.play_steps([gate])
    writer = await open_request(world, stream=True)
    await gate.reached.wait()
    writer.close()
    await asyncio.wait_for(world.backend.last.over.wait(), 10)
    world.play("hello")
    assert (await world.chat()).status_code == 200
    counted = world.metrics.registry.get_sample_value(
        "kopir_requests_total", {"endpoint": "chat", "outcome": "client_gone"}
    )
    assert counted == 1


async def call_app(backend: FakeBackend, *, more_receive: asyncio.Event) -> asyncio.Task[None]:
    """Calls the application as Serve does: as a task that may be cancelled, with a receive that never ends."""
    app = create_app(backend, make_bundle())
    body = json.dumps({"model": MODEL_ID, "stream": True, "prompt": "x"}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, object]:
        if messages:
            return messages.pop(0)
        await more_receive.wait()
        return {"type": "http.disconnect"}

    async def send(message: object) -> None: ...

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "headers": [],
        "root_path": "",
        "scheme": "http",
        "server": ("x", 80),
    }
    return asyncio.create_task(app(scope, receive, send))


@pytest.mark.parametrize("written", [True, False])
async def test_cancelled_handler_cancels_the_generation(written: bool) -> None:
    """Serve tells of a client that left by cancelling the handler: the generation is cancelled, and so is the task."""
    bundle = make_bundle()
    backend = FakeBackend(vocab_size=len(bundle.table))
    gate = Gate()
    word = (await bundle.encode("fox", add_special_tokens=False)) if written else []
    backend.script = [*batches(word), gate, Ended("stop")]
    task = await call_app(backend, more_receive=asyncio.Event())
    await gate.reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert backend.last.calls[-1] == ("cancel", "client_gone")


async def test_write_to_a_lost_connection_cancels_the_generation() -> None:
    """A server that raises on write: same ending as any client that left."""
    bundle = make_bundle()
    backend = FakeBackend(vocab_size=len(bundle.table))
    backend.script = [*batches(await bundle.encode("fox", add_special_tokens=False)), Ended("stop")]
    app = create_app(backend, bundle)
    body = json.dumps({"model": MODEL_ID, "stream": True, "prompt": "x"}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, object]:
        if messages:
            return messages.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: object) -> None:
        raise OSError("gone")

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
    await app(scope, receive, send)
    assert backend.last.calls == ["mark_first_delta", ("cancel", "client_gone")]


async def test_client_that_leaves_before_the_last_byte_is_not_a_finished_request() -> None:
    """The generation has ended, its end was not written: cancelled, never completed."""
    bundle = make_bundle()
    backend = FakeBackend(vocab_size=len(bundle.table))
    backend.script = [*batches(await bundle.encode("fox", add_special_tokens=False)), Ended("stop")]
    app = create_app(backend, bundle)
    body = json.dumps({"model": MODEL_ID, "stream": True, "prompt": "x"}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    at_the_end = asyncio.Event()

    async def receive() -> dict[str, object]:
        if messages:
            return messages.pop(0)
        await at_the_end.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, object]) -> None:
        if message["type"] == "http.response.body" and not message["more_body"]:
            at_the_end.set()
            await asyncio.Event().wait()

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
    await app(scope, receive, send)
    assert backend.last.calls[-1] == ("cancel", "client_gone")
    assert "completed" not in backend.last.calls
