"""The proxy's outer layer: control headers stay out, ids are single, Serve's own errors get our shape."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.ingress.api.proxy_edge import ProxyEdge, proxy_middlewares


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

    await ProxyEdge(inner)({"type": "http", "headers": headers or []}, None, send)
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
    await run(inner, [*((name, b"?1") for name in [*names, b"x-kopir-label"]), (b"authorization", b"x")])
    assert inner.scope["headers"] == [(b"authorization", b"x"), (b"x-kopir-label", b"")]


async def test_id_of_a_client_becomes_a_label() -> None:
    """F39: Serve never sees an id that two clients may share."""
    inner = InnerApp([])
    await run(inner, [(b"X-Request-Id", b"job-1")])
    assert inner.scope["headers"] == [(b"x-kopir-label", b"job-1")]


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


def test_callback_returns_starlette_middlewares() -> None:
    """The form that Serve's callback is checked for."""
    assert [middleware.cls for middleware in proxy_middlewares()] == [ProxyEdge]
