"""The proxy's outer layer: control headers stay out, ids are single, Serve's own errors get our shape."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from cluster.ingress.api.proxy_edge import OPEN_PATH, ProxyEdge, proxy_middlewares
from cluster.ingress.api.window import EDGE_HEADER, REPORT_BYTES, STALL_HEADER, WRITTEN

EDGE = (EDGE_HEADER.encode(), b"1")


class InnerApp:
    """Plays messages as Serve's proxy would and keeps the scope that it saw."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self.messages = messages
        self.scope: dict[str, Any] = {}

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        self.scope = scope
        for message in self.messages:
            await send(message)


async def run(inner: InnerApp, headers: list[tuple[bytes, bytes]] | None = None) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await ProxyEdge(inner)({"type": "http", "path": "/v1/completions", "headers": headers or []}, None, send)
    return sent


def start(status: int, *ids: bytes) -> dict[str, Any]:
    headers = [(b"content-type", b"text/plain"), *((b"x-request-id", value) for value in ids)]
    return {"type": "http.response.start", "status": status, "headers": headers}


def body(data: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def test_control_headers_of_clients_are_removed() -> None:
    """Contract 1: a client cannot switch off disconnect or timeout handling, whatever the spelling."""
    inner = InnerApp([])
    names = [b"X-Request-Timeout-Seconds", b"x-request-disconnect-disabled", b"serve_multiplexed_model_id"]
    names += [b"x-kopir-label", b"X-Kopir-Edge"]
    await run(inner, [*((name, b"?1") for name in names), (b"authorization", b"x")])
    assert inner.scope["headers"] == [(b"authorization", b"x"), (b"x-kopir-label", b""), EDGE]


async def test_id_of_a_client_becomes_a_label() -> None:
    """F39: Serve never sees an id that two clients may share."""
    inner = InnerApp([])
    await run(inner, [(b"X-Request-Id", b"job-1")])
    assert inner.scope["headers"] == [(b"x-kopir-label", b"job-1"), EDGE]


async def test_answers_of_the_application_pass_with_one_id() -> None:
    """Our id is kept, Serve's is dropped; bodies pass as they are, errors of ours too."""
    for status in (200, 404):
        inner = InnerApp([start(status, b"req-1", b"serve-2"), body(b"a", more=True), body(b"b")])
        head, *bodies = await run(inner)
        assert [value for name, value in head["headers"] if name == b"x-request-id"] == [b"req-1"]
        assert (head["status"], bodies) == (status, inner.messages[1:])


@pytest.mark.parametrize(
    ("status", "expected", "code"),
    [
        (500, 502, "upstream_failed"),
        (503, 503, "not_ready"),
        (408, 504, "deadline_exceeded"),
        (404, 404, "unknown_path"),
    ],
)
async def test_errors_of_serve_get_our_shape(status: int, expected: int, code: str) -> None:
    """A replica that died before the first byte is an OpenAI-shaped error with an id of ours."""
    inner = InnerApp([start(status, b"serve-2"), body(b"Internal ", more=True), body(b"Server Error")])
    head, answer = await run(inner)
    headers = dict(head["headers"])
    assert head["status"] == expected
    assert headers[b"content-type"] == b"application/json"
    assert headers[b"x-request-id"].startswith(b"req-")
    error = json.loads(answer["body"])["error"]
    assert (set(error), error["code"]) == ({"message", "type", "param", "code"}, code)


async def test_application_hears_how_much_the_client_has_taken() -> None:
    """Only what left the proxy is reported, on the way that the request came; the client's own messages pass."""
    socket = asyncio.Semaphore(1)
    left = asyncio.Event()
    come = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.request", "body": b"}"}]
    heard: list[dict[str, Any]] = []
    reported = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if come:
            return come.pop(0)
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            await socket.acquire()

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        async def listen() -> None:
            while not heard or heard[-1]["type"] != "http.disconnect":
                heard.append(await receive())
                if heard[-1]["type"] == WRITTEN:
                    reported.set()

        listener = asyncio.create_task(listen())
        await send(start(200, b"req-1", b"serve-2"))
        for _ in range(3):
            await send(body(b"x" * REPORT_BYTES, more=True))
        await listener

    running = asyncio.create_task(
        ProxyEdge(app)({"type": "http", "path": "/v1/completions", "headers": []}, receive, send)
    )
    await asyncio.wait_for(reported.wait(), 5)
    assert [message.get("bytes") for message in heard] == [None, None, REPORT_BYTES], "the second write has not ended"
    socket.release()
    socket.release()
    while sum(message.get("bytes", 0) for message in heard) < 3 * REPORT_BYTES:
        reported.clear()
        await asyncio.wait_for(reported.wait(), 5)
    left.set()
    await asyncio.wait_for(running, 5)
    assert heard[-1] == {"type": "http.disconnect"}


async def test_waiting_for_the_client_ends_with_the_request() -> None:
    """Serve cancels its wait when the answer is complete; the question to the client is taken back with it."""
    asked, taken_back = asyncio.Event(), asyncio.Event()

    async def receive() -> dict[str, Any]:
        if not asked.is_set():
            asked.set()
            return {"type": "http.request", "body": b""}
        try:
            await asyncio.Event().wait()
        finally:
            taken_back.set()
        raise AssertionError("nobody wakes it")

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await receive()
        waiting = asyncio.create_task(receive())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting.cancel()

    async def send(message: dict[str, Any]) -> None:
        raise AssertionError(message)

    await ProxyEdge(app)({"type": "http", "path": "/v1/completions", "headers": []}, receive, send)
    await asyncio.wait_for(taken_back.wait(), 5)


class Socket:
    """A server's side of a connection: ``send`` waits while ``num_waiting`` bytes wait for the client."""

    def __init__(self) -> None:
        self.transport = self
        self.num_waiting = 0
        self.went_on = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        self.is_aborted = False
        self.num_looks = 0
        self.looked = asyncio.Event()

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        if message["type"] == "http.response.body":
            await self.went_on.wait()

    def get_write_buffer_size(self) -> int:
        self.num_looks += 1
        self.looked.set()
        return self.num_waiting

    def abort(self) -> None:
        self.is_aborted = True
        self.went_on.set()


async def test_client_whose_socket_takes_nothing_is_cut_off() -> None:
    """As long as it takes something from one look to the next it stays, however little; then the connection goes."""
    socket, inner = Socket(), InnerApp([start(200, b"req-1", b"serve-2"), body(b"x", more=True)])
    inner.messages[0]["headers"].append((STALL_HEADER.encode(), b"100"))
    socket.num_waiting = 100
    running = asyncio.create_task(
        ProxyEdge(inner)({"type": "http", "path": "/v1/completions", "headers": []}, None, socket.send)
    )
    for left in range(99, 94, -1):
        await asyncio.wait_for(socket.looked.wait(), 5)
        socket.looked.clear()
        assert not socket.is_aborted
        socket.num_waiting = left
    await asyncio.wait_for(running, 5)
    assert socket.is_aborted and socket.num_looks == 7
    assert STALL_HEADER.encode() not in dict(socket.sent[0]["headers"]), "nobody else's business"
    await asyncio.sleep(0.15)
    assert socket.num_looks == 7, "the watch ends with the write"


def test_callback_returns_starlette_middlewares() -> None:
    """The form that Serve's callback is checked for."""
    assert [middleware.cls for middleware in proxy_middlewares()] == [ProxyEdge]


async def test_it_says_which_answers_are_under_way() -> None:
    """By itself, also while the application takes long; one that broke is not open any more."""
    may_end, inside = asyncio.Event(), asyncio.Event()

    async def slow(scope: dict[str, Any], receive: Any, send: Any) -> None:
        inside.set()
        await may_end.wait()
        raise RuntimeError("broke")

    edge = ProxyEdge(slow)

    async def told() -> dict[str, Any]:
        sent: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await edge({"type": "http", "path": OPEN_PATH, "headers": []}, None, send)
        assert sent[0]["status"] == 200
        answer: dict[str, Any] = json.loads(sent[1]["body"])
        return answer

    assert await told() == {"open": 0, "oldest_s": None}
    running = asyncio.create_task(edge({"type": "http", "path": "/v1/completions", "headers": []}, None, None))
    await inside.wait()
    first, second = await told(), await told()
    assert first["open"] == 1 and 0 <= first["oldest_s"] < second["oldest_s"]
    may_end.set()
    with pytest.raises(RuntimeError, match="broke"):
        await running
    assert await told() == {"open": 0, "oldest_s": None}
