"""A relay of TCP bytes that delays and loses some of what passes, both ways."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

CHUNK_BYTES = 1400
"""As a network would cut them."""
DELAY_S = 0.2


class LossyRelay:
    """Listens and forwards to one address. Life cycle: made -> ``start`` -> ``close``."""

    def __init__(self, seed: int, *, share: float) -> None:
        """``share``: of all chunks, how many meet with a fault; half of those are late, half never come."""
        self.faults: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._share = share
        self._target = ("", 0)
        self._pumps: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Returns where it listens."""
        self._target = (host, port)
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        listening: tuple[str, int] = self._server.sockets[0].getsockname()[:2]
        return listening

    async def close(self) -> None:
        self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            pump = asyncio.create_task(self._pump(source, sink))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while chunk := await source.read(CHUNK_BYTES):
                if self._random.random() < self._share:
                    fault = self._random.choice(("late", "lost"))
                    self.faults[fault] += 1
                    if fault == "lost":
                        continue
                    await asyncio.sleep(DELAY_S)
                sink.write(chunk)
                await sink.drain()
        except OSError:
            pass
        finally:
            sink.close()
