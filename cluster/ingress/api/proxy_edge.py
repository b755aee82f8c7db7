"""The outermost layer of Serve's HTTP proxy: what clients may tell Serve, and how Serve's own errors look.

Runs in the proxy process, around everything else; set as ``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH =
cluster.ingress.api.proxy_edge.proxy_middlewares`` or in Serve's HTTP options. It removes request headers by which a
client could switch off Serve's disconnect watch or its timeouts, or steer its routing; it keeps one ``x-request-id`` on
answers (Serve adds its own beside ours), and moves a client's to ``x-kopir-label``, so that Serve never routes and logs
by an id that two clients may share; and it gives errors that Serve makes itself (no replica, replica died before
the first byte) the shape that every other error has. Answers of the application pass untouched. It tells the
application how much of a long answer the client's socket has taken (see ``window``), because nothing else does, and
cuts off a client that takes nothing any more: the application cannot reach its socket. It also says, by itself, for how
long the oldest answer under way has been open: when that is out, nothing is lost if the proxy ends.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import secrets
import time
from collections.abc import Callable, MutableMapping
from typing import Any

from starlette.middleware import Middleware

from cluster.ingress.api.errors import ApiError, NotFound, NotReady, UpstreamFailed
from cluster.ingress.api.window import EDGE_HEADER, REPORT_BYTES, STALL_HEADER, WRITTEN

logger = logging.getLogger(__name__)

CONTROL_HEADERS = frozenset(
    {
        b"x-request-timeout-seconds",
        b"x-request-disconnect-disabled",
        b"serve-multiplexed-model-id",
        b"x-session-id",
        b"x-kopir-label",
        EDGE_HEADER.encode(),
    }
)
"""Request headers that Serve obeys. Compared in lower case, with ``_`` read as ``-``."""

_ID_HEADER = b"x-request-id"
_STALL_HEADER = STALL_HEADER.encode()
LABEL_HEADER = b"x-kopir-label"
OPEN_PATH = "/internal/proxy"
"""Answered here: how many requests are open, and since when, in seconds, the oldest of them is."""


def proxy_middlewares() -> list[Middleware]:
    """Returns the middlewares in the form that Serve's proxy callback wants."""
    return [Middleware(ProxyEdge)]


class ProxyEdge:
    """ASGI middleware; see the module."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._since_s: dict[int, float] = {}
        """Open requests, oldest first."""
        self._numbers = itertools.count()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"] == OPEN_PATH:
            await self._tell_open(send)
            return
        number = next(self._numbers)
        self._since_s[number] = time.monotonic()
        try:
            await self._answer(scope, receive, send)
        finally:
            del self._since_s[number]

    async def _tell_open(self, send: Any) -> None:
        oldest_s = time.monotonic() - next(iter(self._since_s.values())) if self._since_s else None
        body = json.dumps({"open": len(self._since_s), "oldest_s": oldest_s}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _answer(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        kept, label = [], b""
        for name, value in scope["headers"]:
            if name.lower() == _ID_HEADER:
                label = value
            elif not _is_control(name):
                kept.append((name, value))
        # Empty says: there is none, and what Serve puts into x-request-id is not the client's.
        kept.append((LABEL_HEADER, label))
        kept.append((EDGE_HEADER.encode(), b"1"))
        reports = _Reports(receive)
        await self._app({**scope, "headers": kept}, reports.receive, _EdgeSend(send, reports.written).send)


class _Reports:
    """The way in for one request: what the client sends, and after that reports of what it was sent."""

    def __init__(self, receive: Any) -> None:
        self._receive = receive
        self._client: asyncio.Future[Any] | None = None
        """The client's next message, once its body is complete: it says only that the client is gone."""
        self._is_whole = False
        self._num_bytes = 0
        self._is_due = asyncio.Event()

    def written(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes >= REPORT_BYTES:
            self._is_due.set()

    async def receive(self) -> Any:
        if not self._is_whole:
            message = await self._receive()
            self._is_whole = not message.get("more_body", False)
            return message
        if self._client is None:
            self._client = asyncio.ensure_future(self._receive())
        due = asyncio.ensure_future(self._is_due.wait())
        try:
            await asyncio.wait((self._client, due), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._client.cancel()
            raise
        finally:
            due.cancel()
        if self._client.done():
            return self._client.result()
        num_bytes, self._num_bytes = self._num_bytes, 0
        self._is_due.clear()
        return {"type": WRITTEN, "bytes": num_bytes}


class _EdgeSend:
    """The way out for one request. ``written`` is told how much of the body is out."""

    def __init__(self, send: Any, written: Callable[[int], None]) -> None:
        self._send = send
        self._written = written
        self._foreign_error: ApiError | None = None
        self._watch: _SocketWatch | None = None

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            ids = [value for name, value in message["headers"] if name.lower() == _ID_HEADER]
            # The application names every answer, and Serve adds its own id: one alone is an answer of Serve's.
            if message["status"] >= 400 and len(ids) < 2:
                self._foreign_error = _translate(message["status"])
                return
            self._watch = _SocketWatch.of(self._send, message["headers"])
            others = [item for item in message["headers"] if item[0].lower() not in (_ID_HEADER, _STALL_HEADER)]
            message = {**message, "headers": [*others, *((_ID_HEADER, value) for value in ids[:1])]}
        elif self._foreign_error is not None:
            if not message.get("more_body", False):
                await self._answer(self._foreign_error)
            return
        if self._watch is None:
            await self._send(message)
        else:
            self._watch.start()
            try:
                await self._send(message)
            finally:
                self._watch.stop()
        self._written(len(message.get("body", b"")))

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


class _SocketWatch:
    """Cuts off a client whose socket took nothing from one look to the next, while a write waits for it.

    The application has ended the answer by then; what it could not end is the wait of the server for the socket.
    """

    def __init__(self, transport: asyncio.WriteTransport, stall_s: float) -> None:
        self._transport = transport
        self._stall_s = stall_s
        self._num_waiting: int | None = None
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    def of(cls, send: Any, headers: list[tuple[bytes, bytes]]) -> _SocketWatch | None:
        """Returns the watch that the answer asks for; None where it asks for none, or the server shows no transport.

        ASGI has no word for this; uvicorn's ``send`` belongs to an object that has the transport.
        """
        stall_ms = next((value for name, value in headers if name.lower() == _STALL_HEADER), None)
        transport: Any = getattr(getattr(send, "__self__", None), "transport", None)
        # By what it can do: uvloop's transports do not derive from asyncio's.
        if stall_ms is None or not hasattr(transport, "abort") or not hasattr(transport, "get_write_buffer_size"):
            return None
        return cls(transport, int(stall_ms) / 1000)

    def start(self) -> None:
        self._num_waiting = None
        self._timer = asyncio.get_running_loop().call_later(self._stall_s, self._look)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        before, self._num_waiting = self._num_waiting, self._transport.get_write_buffer_size()
        if before is not None and self._num_waiting >= before:
            logger.warning("client_cut_off waiting_bytes=%d", self._num_waiting)
            self._transport.abort()
            return
        self._timer = asyncio.get_running_loop().call_later(self._stall_s, self._look)


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
