"""What stands in the HTTP proxy, in front of every ingress: which headers may pass.

* Headers by which a client could switch off the proxy's own disconnect and timeout handling are taken away.
* A client's ``x-request-id`` is only a label. It must not become the id by which the proxy routes and logs, so it
  travels on as ``x-kopir-label``.
* Each answer carries exactly one ``x-request-id``: the one the ingress made, where the ingress made the answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.middleware import Middleware

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

REQUEST_ID = b"x-request-id"
LABEL = b"x-kopir-label"
TAKEN_AWAY = frozenset({b"x-request-timeout-seconds", b"x-request-disconnect-disabled", LABEL})


def proxy_middlewares() -> list[Middleware]:
    """Returns the middlewares of the proxy; Serve calls this by its import path."""
    return [Middleware(EdgeHeaders)]


class EdgeHeaders:
    """ASGI middleware of the proxy process."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["headers"] = clean_request_headers(scope["headers"])

        async def send_clean(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = clean_response_headers(message["headers"])
            await send(message)

        await self._app(scope, receive, send_clean)


def clean_request_headers(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Returns the headers that may pass, with the client's request id as a label."""
    passed = []
    for name, value in headers:
        lower = name.lower()
        if lower == REQUEST_ID:
            passed.append((LABEL, value))
        elif lower not in TAKEN_AWAY:
            passed.append((name, value))
    return passed


def clean_response_headers(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Returns the headers with the first request id only: the proxy appends its own behind the ingress's."""
    passed = []
    seen = False
    for name, value in headers:
        if name.lower() == REQUEST_ID:
            if seen:
                continue
            seen = True
        passed.append((name, value))
    return passed
