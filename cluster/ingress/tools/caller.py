"""One HTTP request to a tool, and what its end says about the action.

Owns the client and the reading of answers. A call is a POST of the arguments as JSON, with the action's key in
``Idempotency-Key``; a look-up is a GET of the tool's ``lookup_url``. Every request has a connection of its own: on one
that was kept open, a tool that has just closed it could not be told from one that took the call and died.

    2xx                          the tool's answer, as it is
    429                          nothing was done; it may be tried again
    408, 425, 5xx                nobody knows
    any other status             the tool refused: its words are the answer
    no connection                nothing was done
    anything after it was sent   nobody knows

Never logs or raises with a URL, a header, arguments or a result.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from dataclasses import dataclass
from types import TracebackType
from typing import Literal
from urllib.parse import quote

import httpx

from cluster.core.tool_events import LookupAnswer, ToolResult
from cluster.ingress.tracing import trace_headers
from cluster.tools_source import KEY_PLACE, ServerTool

MAX_REFUSAL_BYTES = 2048
"""Most of a refusal's words that the model gets."""
CONNECT_SHARE = 0.5
"""Of a call's time that may pass before it has a connection."""
MAX_CONNECTIONS = 256


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one try came to. ``result`` goes with ``answered``."""

    kind: Literal["answered", "not_made", "unknown"]
    result: ToolResult | None = None
    why: str = ""


class ToolCaller:
    """Calls tools. Life cycle: made on the event loop of the ingress -> calls -> ``close``."""

    def __init__(self, *, max_result_bytes: int, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._max_result_bytes = max_result_bytes
        # The library writes whole URLs into the log, and headers when it is asked to be chatty.
        for name in ("httpx", "httpcore"):
            logging.getLogger(name).setLevel(logging.WARNING)
        self._client = httpx.AsyncClient(
            transport=transport,
            follow_redirects=False,
            trust_env=False,  # A proxy from the environment would get the headers.
            limits=httpx.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=0),
            timeout=None,
            verify=ssl.create_default_context(),
            headers={"accept-encoding": "identity"},
        )

    async def call(self, tool: ServerTool, arguments: bytes, *, key: str, timeout_s: float) -> Outcome:
        """Makes one try, within ``timeout_s``."""
        headers = {**trace_headers(), **dict(tool.headers), "content-type": "application/json", "idempotency-key": key}
        request = self._client.build_request("POST", tool.url, content=arguments, headers=headers)
        # A connection that takes longer is given up while it is certain that nothing was sent.
        request.extensions["timeout"] = {"pool": timeout_s * CONNECT_SHARE, "connect": timeout_s * CONNECT_SHARE}
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._client.send(request, stream=True)
                try:
                    return await self._read(response)
                finally:
                    await response.aclose()
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol) as error:
            return Outcome("not_made", why=f"no connection ({type(error).__name__})")
        except TimeoutError:
            return Outcome("unknown", why=f"no answer within {timeout_s:.3g} s")
        except httpx.HTTPError as error:
            return Outcome("unknown", why=f"the connection broke ({type(error).__name__})")

    async def look_up(self, tool: ServerTool, *, key: str, timeout_s: float) -> tuple[LookupAnswer, ToolResult | None]:
        """Asks a tool what became of an action: 200 done, 404 absent, 202, 409 and 425 running; else unknown."""
        assert tool.lookup_url is not None, tool.name
        url = tool.lookup_url.replace(KEY_PLACE, quote(key, safe=""))
        headers = {**trace_headers(), **dict(tool.headers), "idempotency-key": key}
        request = self._client.build_request("GET", url, headers=headers)
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._client.send(request, stream=True)
                try:
                    match response.status_code:
                        case 200:
                            outcome = await self._read(response)
                            return "done", outcome.result
                        case 404:
                            return "absent", None
                        case 202 | 409 | 425:
                            return "running", None
                        case _:
                            return "unknown", None
                finally:
                    await response.aclose()
        except (TimeoutError, httpx.HTTPError):
            return "unknown", None

    async def close(self) -> None:
        """Closes every connection."""
        await self._client.aclose()

    async def __aenter__(self) -> ToolCaller:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _read(self, response: httpx.Response) -> Outcome:
        status = response.status_code
        if status == 429:
            return Outcome("not_made", why="the tool has no room now (429)")
        if status in (408, 425) or status >= 500:
            return Outcome("unknown", why=f"the tool answered {status}")
        is_refusal = not 200 <= status < 300
        limit = min(MAX_REFUSAL_BYTES, self._max_result_bytes) if is_refusal else self._max_result_bytes
        data = bytearray()
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            # It was not asked for, and a small one may unpack to anything.
            text = "The tool did its work; its result is not shown, because it came compressed."
            return Outcome("answered", ToolResult(text if not is_refusal else "The tool refused.", is_error=True))
        async for chunk in response.aiter_raw():
            data += chunk
            if len(data) > limit:
                break
        if is_refusal:
            words = _text(bytes(data[:limit]))
            return Outcome("answered", ToolResult(f"The tool refused ({status}): {words}".rstrip(": "), is_error=True))
        if len(data) > limit:
            text = f"The tool did its work; its result is not shown, because it is larger than {limit} bytes."
            return Outcome("answered", ToolResult(text, is_error=True))
        return Outcome("answered", ToolResult(_text(bytes(data))))


def _text(data: bytes) -> str:
    """Returns what a tool said as text that any database keeps: PostgreSQL takes no NUL."""
    return data.decode("utf-8", "replace").replace("\x00", "\N{REPLACEMENT CHARACTER}")
