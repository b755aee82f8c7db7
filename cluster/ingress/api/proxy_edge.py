"""The outermost layer of Serve's HTTP proxy: what clients may tell Serve, and how Serve's own errors look.

Runs in the proxy process, around everything else; set as ``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH =
cluster.ingress.api.proxy_edge.proxy_middlewares`` or in Serve's HTTP options. It removes request headers by which a
client could switch off Serve's disconnect watch or its timeouts, or steer its routing; it keeps one ``x-request-id`` on
answers (Serve adds its own beside ours), and moves a client's to ``x-kopir-label``, so that Serve never routes and logs
by an id that two clients may share; and it gives errors that Serve makes itself (no replica, replica died before
the first byte) the shape that every other error has. Answers of the application pass untouched.
"""

from __future__ import annotations

import secrets
from collections.abc import MutableMapping
from typing import Any

from starlette.middleware import Middleware

from cluster.ingress.api.errors import ApiError, NotFound, NotReady, UpstreamFailed

CONTROL_HEADERS = frozenset(
    {
        b"x-request-timeout-seconds",
        b"x-request-disconnect-disabled",
        b"serve-multiplexed-model-id",
        b"x-session-id",
        b"x-kopir-label",
    }
)
"""Request headers that Serve obeys. Compared in lower case, with ``_`` read as ``-``."""

_ID_HEADER = b"x-request-id"
LABEL_HEADER = b"x-kopir-label"


def proxy_middlewares() -> list[Middleware]:
    """Returns the middlewares in the form that Serve's proxy callback wants."""
    return [Middleware(ProxyEdge)]


class ProxyEdge:
    """ASGI middleware; see the module."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        kept, label = [], b""
        for name, value in scope["headers"]:
            if name.lower() == _ID_HEADER:
                label = value
            elif not _is_control(name):
                kept.append((name, value))
        # Empty says: there is none, and what Serve puts into x-request-id is not the client's.
        kept.append((LABEL_HEADER, label))
        await self._app({**scope, "headers": kept}, receive, _EdgeSend(send).send)


class _EdgeSend:
    """The way out for one request."""

    def __init__(self, send: Any) -> None:
        self._send = send
        self._foreign_error: ApiError | None = None

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            ids = [value for name, value in message["headers"] if name.lower() == _ID_HEADER]
            # The application names every answer, and Serve adds its own id: one alone is an answer of Serve's.
            if message["status"] >= 400 and len(ids) < 2:
                self._foreign_error = _translate(message["status"])
                return
            others = [(name, value) for name, value in message["headers"] if name.lower() != _ID_HEADER]
            message = {**message, "headers": [*others, *((_ID_HEADER, value) for value in ids[:1])]}
        elif self._foreign_error is not None:
            if not message.get("more_body", False):
                await self._answer(self._foreign_error)
            return
        await self._send(message)

    async def _answer(self, error: ApiError) -> None:
        body = error.body()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (_ID_HEADER, f"req-{secrets.token_hex(16)}".encode()),
            *error.headers(),
        ]
        await self._send({"type": "http.response.start", "status": error.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


def _is_control(name: bytes) -> bool:
    return name.lower().replace(b"_", b"-") in CONTROL_HEADERS


def _translate(status: int) -> ApiError:
    """Returns our error for a status of Serve's."""
    if status == 404:
        return NotFound("This path does not exist on this server.", code="unknown_path")
    if status == 408:
        return UpstreamFailed("The request took too long.", code="deadline_exceeded", status=504, should_retry=None)
    if status in (429, 503):
        return NotReady("No ingress can take the request now.", code="not_ready")
    return UpstreamFailed("The ingress failed before the answer began.", should_retry=None)
