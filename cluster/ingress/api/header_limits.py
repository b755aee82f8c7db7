"""Bounds on what stands before the body: number and bytes of headers, length of the path.

The server in front has bounds of its own; these hold whatever it is, and say what they refuse.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from cluster.ingress.api.errors import ApiError, InvalidRequest
from cluster.ingress.api.tenants import answer_error

MAX_HEADERS = 128
MAX_HEADER_BYTES = 32 << 10
MAX_PATH_BYTES = 4 << 10


class HeaderLimits:
    """ASGI middleware; see the module. ``count`` is told of each refusal."""

    def __init__(self, app: Any, *, count: Callable[[ApiError], None]) -> None:
        self._app = app
        self._count = count

    async def __call__(
        self, scope: MutableMapping[str, Any], receive: Any, send: Callable[..., Awaitable[None]]
    ) -> None:
        error = _excess(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
            return
        self._count(error)
        await answer_error(error, send)


def _excess(scope: MutableMapping[str, Any]) -> ApiError | None:
    headers = scope["headers"]
    if len(headers) > MAX_HEADERS:
        return InvalidRequest(f"headers: more than {MAX_HEADERS}.", param="headers", code="headers_too_large")
    num_bytes = sum(len(name) + len(value) for name, value in headers)
    if num_bytes > MAX_HEADER_BYTES:
        return InvalidRequest(
            f"headers: more than {MAX_HEADER_BYTES} bytes.", param="headers", code="headers_too_large"
        )
    if len(scope.get("raw_path") or b"") + len(scope.get("query_string", b"")) > MAX_PATH_BYTES:
        return InvalidRequest(f"path: more than {MAX_PATH_BYTES} bytes.", param="path", code="path_too_long")
    return None
