"""How far an answer may run ahead of its client's socket.

Between ingress and proxy Serve queues without a bound, so a write to it says nothing about the client. The proxy's
outer layer (``proxy_edge``) sees how much the client's socket has taken, and reports it on the way on which the
request came. While more than the window is on its way, the stream takes no tokens, and so grants decode no credit.
A client that takes nothing for long has its stream ended. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from typing import Final

EDGE_HEADER: Final = "x-kopir-edge"
"""Set by the proxy's outer layer, never by clients: reports will come."""
STALL_HEADER: Final = "x-kopir-client-stall-ms"
"""Of an answer, for the proxy's outer layer: a client that takes nothing for so long is cut off."""
WRITTEN: Final = "kopir.written"
"""Type of a report among the ASGI messages of a request; its ``bytes`` were written since the one before."""
REPORT_BYTES: Final = 32 << 10
"""A client that takes less than this in ``limits.client_stall_ms`` looks like one that takes nothing."""
WINDOW_BYTES: Final = 128 << 10


class WriteWindow:
    """Bytes of one answer that were sent and not yet reported as written."""

    def __init__(self) -> None:
        self._num_bytes = 0
        self._has_room = asyncio.Event()
        self._has_room.set()

    def sent(self, num_bytes: int) -> None:
        """So many bytes are on their way."""
        self._num_bytes += num_bytes
        if self._num_bytes > WINDOW_BYTES:
            self._has_room.clear()

    def written(self, num_bytes: int) -> None:
        """So many of them have left the proxy."""
        self._num_bytes = max(0, self._num_bytes - num_bytes)
        if self._num_bytes <= WINDOW_BYTES:
            self._has_room.set()

    async def room(self, *, deadline_s: float) -> bool:
        """Returns True while at most the window is on its way; False when no report came for ``deadline_s``."""
        while not self._has_room.is_set():
            before = self._num_bytes
            try:
                async with asyncio.timeout(deadline_s):
                    await self._has_room.wait()
            except TimeoutError:
                if self._num_bytes >= before:
                    return False
        return True
