"""Asks the directory which store nodes have a prompt's prefix in their host slabs.

Owns one connection, kept while the directory lives; asks one question per prompt with a deadline that is short beside
any prefill. No answer is an answer: nothing is known then, and routing goes by what workers announce alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from itertools import count

from cluster.view import DirectoryAddress
from kvstore.core.ids import BlockHash
from kvstore.errors import KopirError
from kvstore.net.channel import Channel, connect
from kvstore.net.handshake import PeerInfo
from kvstore.store.directory_messages import FromDirectory, Locate, Located

logger = logging.getLogger(__name__)

ASK_DEADLINE_S = 0.02
CONNECT_DEADLINE_S = 2.0
BACKOFF_S_MIN, BACKOFF_S_MAX = 0.05, 1.0
MAX_CALLS = 256
MAX_BLOCKS_ASKED = 4096
"""A longer prefix counts as this long."""


class HostTiers:
    """Questions to the directory. Belongs to the ingress's loop."""

    def __init__(self, *, me: PeerInfo, secret: bytes) -> None:
        self._me = me
        self._secret = secret
        self._address: DirectoryAddress | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._channel: Channel | None = None
        self._numbers = count(1)
        self._calls: dict[int, asyncio.Future[Located | None]] = {}
        self.num_unanswered = 0

    def set_address(self, address: DirectoryAddress | None) -> None:
        """Names the directory that lives now."""
        if address == self._address:
            return
        self._address = address
        if self._keeper is not None:
            self._keeper.cancel()
            self._keeper = None
        if address is not None:
            self._keeper = asyncio.get_running_loop().create_task(self._keep_connected(address))

    async def prefixes(self, hashes: Sequence[BlockHash]) -> dict[str, int]:
        """Returns store node -> blocks of the prefix in its host slab; empty when nobody has any or nobody answers."""
        channel = self._channel
        if channel is None or not hashes or len(self._calls) >= MAX_CALLS:
            return {}
        number = next(self._numbers)
        answer: asyncio.Future[Located | None] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        try:
            async with asyncio.timeout(ASK_DEADLINE_S):
                channel.send_nowait(Locate(n=number, prefixes=(tuple(hashes[:MAX_BLOCKS_ASKED]),)))
                located = await answer
        except (KopirError, TimeoutError):
            self.num_unanswered += 1
            return {}
        finally:
            self._calls.pop(number, None)
        return {} if located is None else _prefixes(located)

    async def close(self) -> None:
        """Ends the connection."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
            self._keeper = None

    async def _keep_connected(self, address: DirectoryAddress) -> None:
        backoff_s = BACKOFF_S_MIN
        while True:
            with suppress(KopirError, OSError):
                channel = await connect(
                    address.host,
                    address.port,
                    secret=self._secret,
                    me=self._me,
                    decode=FromDirectory,
                    deadline_s=CONNECT_DEADLINE_S,
                )
                backoff_s = BACKOFF_S_MIN
                await self._serve(channel)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, BACKOFF_S_MAX)

    async def _serve(self, channel: Channel) -> None:
        self._channel = channel
        try:
            while True:
                message = await channel.recv()
                waiting = self._calls.get(message.n) if isinstance(message, Located) else None
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
        finally:
            self._channel = None
            channel.abort()
            for waiting in self._calls.values():
                if not waiting.done():
                    waiting.set_result(None)


def _prefixes(located: Located) -> dict[str, int]:
    """Returns node -> leading blocks that its host slab has, from the runs of one prefix."""
    found: dict[str, int] = {}
    done = 0
    for run in located.prefixes[0] if located.prefixes else ():
        nodes = {place.node for index in run.places if (place := located.places[index]).tier == "host"}
        going_on = [node for node in nodes if found.get(node, 0) == done]
        if not going_on:
            break
        done += run.num_blocks
        for node in going_on:
            found[node] = done
    return found
