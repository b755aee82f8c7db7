"""The server's id of each HTTP request: made here, in the scope for handlers, on every answer as ``x-request-id``.

A client's own ``x-request-id`` is only a label: two clients may send the same one.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

_SCOPE_KEY = "kopir.request_id"


class RequestIdentity:
    """ASGI middleware that names each request."""

    def __init__(self, app: Any, *, make_request_id: Callable[[], str]) -> None:
        self._app = app
        self._make_request_id = make_request_id

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = self._make_request_id()
        scope[_SCOPE_KEY] = request_id
        header = (b"x-request-id", request_id.encode())

        def send_named(message: MutableMapping[str, Any]) -> Any:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), header]}
            return send(message)

        await self._app(scope, receive, send_named)


def request_id_of(scope: MutableMapping[str, Any]) -> str:
    """Returns the server's id of this request; empty outside of ``RequestIdentity``."""
    return str(scope.get(_SCOPE_KEY, ""))
