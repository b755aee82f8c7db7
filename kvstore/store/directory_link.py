"""A node's connection to the directory: keeps it up, announces through it, asks through it.

Owns one channel at a time and the node's ``Announcer``. A directory that is gone, slow or new costs nothing but hits:
the link dials again, joins with the number of its latest announcement, and sends a snapshot when it is told to.

Life cycle: ``start`` -> (connected <-> lost)* -> ``close``. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count

from kvstore.core.announcer import Announcer
from kvstore.core.directory import TierChange
from kvstore.core.ids import BlockHash
from kvstore.errors import KopirError
from kvstore.net.channel import Channel, connect
from kvstore.net.handshake import PeerInfo
from kvstore.store.directory_messages import (
    MAX_LOCATED_BLOCKS,
    Announce,
    AnnounceAll,
    FromDirectory,
    JoinDirectory,
    Leave,
    Locate,
    Located,
    Renew,
    TierPart,
    Told,
)

logger = logging.getLogger(__name__)

CONNECT_DEADLINE_S = 2.0
BACKOFF_S_MIN, BACKOFF_S_MAX = 0.05, 1.0
RENEWALS_PER_LEASE = 4
DEFAULT_RENEW_S = 0.5
"""Until the directory has said how long its lease is."""
ANNOUNCE_DELAY_S = 0.01
"""So long changes are gathered before they are announced."""
MAX_CALLS = 256


class DirectoryLink:
    """Announces the blocks of one node and finds those of others."""

    def __init__(
        self,
        *,
        me: PeerInfo,
        secret: bytes,
        announcer: Announcer,
        blocks: Callable[[], Mapping[str, Sequence[BlockHash]]],
        on_others: Callable[[int], None],
    ) -> None:
        """``blocks`` returns what each tier has now; ``on_others`` is told how many other nodes there are."""
        self._me = me
        self._secret = secret
        self._announcer = announcer
        self._blocks = blocks
        self._on_others = on_others
        self._renew_s = DEFAULT_RENEW_S
        self._backoff_s = BACKOFF_S_MIN
        self._address: tuple[str, int] | None = None
        self._address_changed = asyncio.Event()
        self._mine = ("", 0)
        self._channel: Channel | None = None
        self._has_joined = False
        self._keeper: asyncio.Task[None] | None = None
        self._has_news = asyncio.Event()
        self._numbers = count(1)
        self._calls: dict[int, asyncio.Future[Located | None]] = {}
        self.num_others = 0
        self.snapshots = 0
        self.losses = 0

    def start(self, host: str, port: int) -> None:
        """Begins to keep a connection up; others fetch this node's blocks at ``host:port``."""
        assert self._keeper is None, "started twice"
        self._mine = (host, port)
        self._keeper = asyncio.get_running_loop().create_task(self._keep_connected())

    def set_address(self, host: str, port: int) -> None:
        """Points the link to a (new) directory; a connection to another one ends."""
        if self._address == (host, port):
            return
        self._address = (host, port)
        self._address_changed.set()
        if self._channel is not None:
            self._channel.abort()

    def poke(self) -> None:
        """The node's blocks may have changed: whatever the announcer has is announced soon."""
        if len(self._announcer) or self._announcer.needs_snapshot:
            self._has_news.set()

    async def close(self) -> None:
        """Says goodbye if somebody listens, and ends."""
        if self._channel is not None and not self._channel.is_closing:
            with suppress(KopirError):
                self._channel.send_nowait(Leave())
            await self._channel.close()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
            self._keeper = None

    async def locate(self, hashes: Sequence[BlockHash], *, deadline_s: float) -> Located | None:
        """Asks where the longest prefix can be had. None: the directory is gone, too slow or overrun."""
        if self._channel is None or not self._has_joined or len(self._calls) >= MAX_CALLS:
            return None
        n = next(self._numbers)
        self._calls[n] = answer = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(deadline_s):
                await self._channel.send(Locate(n=n, prefixes=(tuple(hashes[:MAX_LOCATED_BLOCKS]),)))
                located: Located | None = await answer
                return located
        except (KopirError, TimeoutError):
            return None
        finally:
            self._calls.pop(n, None)

    # --- inside -------------------------------------------------------------------------------------------

    async def _keep_connected(self) -> None:
        while True:
            if self._address is None:
                await self._address_changed.wait()
            self._address_changed.clear()
            assert self._address is not None
            try:
                self._channel = await connect(
                    *self._address,
                    secret=self._secret,
                    me=self._me,
                    decode=FromDirectory,
                    deadline_s=CONNECT_DEADLINE_S,
                )
                await self._serve(self._channel)
            except (KopirError, OSError) as error:
                logger.info("directory_lost host=%s port=%d error=%s", *self._address, error)
            finally:
                self._connection_ended()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._backoff_s):
                    await self._address_changed.wait()
            self._backoff_s = min(2 * self._backoff_s, BACKOFF_S_MAX)

    async def _serve(self, channel: Channel) -> None:
        """Announces and reads until the connection ends. Raises: KopirError at its end."""
        host, port = self._mine
        await channel.send(JoinDirectory(host=host, port=port, sequence=self._announcer.sequence))
        teller = asyncio.get_running_loop().create_task(self._tell(channel))
        try:
            while True:
                message = await channel.recv()
                if isinstance(message, Told):
                    await self._on_told(channel, message)
                elif isinstance(message, Located):
                    answer = self._calls.pop(message.n, None)
                    if answer is not None and not answer.done():
                        answer.set_result(message)
        finally:
            teller.cancel()
            await asyncio.gather(teller, return_exceptions=True)

    async def _on_told(self, channel: Channel, told: Told) -> None:
        self._renew_s = told.lease_ms / 1000 / RENEWALS_PER_LEASE
        if told.num_others != self.num_others:
            self.num_others = told.num_others
            self._on_others(told.num_others)
        if told.heard == "unknown":
            host, port = self._mine
            await channel.send(JoinDirectory(host=host, port=port, sequence=self._announcer.sequence))
        elif told.heard == "refused":
            logger.error("directory_refused node=%s incarnation=%s", self._me.peer_id, self._me.incarnation)
            channel.abort()
        else:
            self._announcer.needs_snapshot |= told.heard == "resync"
            self._has_joined = True
            # Only now: a node that is refused must not dial without pause.
            self._backoff_s = BACKOFF_S_MIN
        self.poke()

    async def _tell(self, channel: Channel) -> None:
        """Announces what waits, a little later than it came, and shows a sign of life several times per lease."""
        loop = asyncio.get_running_loop()
        renewed_s = loop.time()
        try:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(renewed_s + self._renew_s):
                        await self._has_news.wait()
                        await asyncio.sleep(ANNOUNCE_DELAY_S)
                self._has_news.clear()
                if self._has_joined:
                    await self._announce(channel)
                if loop.time() >= renewed_s + self._renew_s:
                    renewed_s = loop.time()
                    await channel.send(Renew())
        except KopirError:
            channel.abort()

    async def _announce(self, channel: Channel) -> None:
        if self._announcer.needs_snapshot:
            self.snapshots += 1
            for part in self._announcer.snapshot(self._blocks()):
                whole = AnnounceAll(
                    sequence=part.sequence, part=part.part, is_last=part.is_last, changes=_tier_parts(part.changes)
                )
                await channel.send(whole)
        while (news := self._announcer.take()) is not None:
            await channel.send(Announce(sequence=news.sequence, changes=_tier_parts(news.changes)))

    def _connection_ended(self) -> None:
        if self._channel is not None:
            self._channel.abort()
            self._channel = None
            self.losses += 1
        self._has_joined = False
        for answer in self._calls.values():
            if not answer.done():
                answer.set_result(None)
        self._calls.clear()
        if self.num_others:
            self.num_others = 0
            self._on_others(0)


def _tier_parts(changes: Sequence[TierChange]) -> tuple[TierPart, ...]:
    return tuple(TierPart(change.tier, tuple(change.added), tuple(change.removed)) for change in changes)
