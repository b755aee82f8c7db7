"""A connection that only looks at a store node: statistics, leases, lists of blocks, verification, garbage collection.

Owns one channel. It holds no blocks, maps no slab and need not be on the node's host. Life cycle: ``look_at`` (a
context manager) -> asks, one after the other -> end. For reading and writing blocks use ``kvstore.store.client``.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, NamedTuple, TypeVar

from kvstore.errors import DeadlineExceeded, FatalError, ProtocolError
from kvstore.net.channel import Channel, connect
from kvstore.net.handshake import PeerInfo
from kvstore.net.host import host_identity, new_incarnation
from kvstore.store.messages import (
    Attach,
    Attached,
    AttachRefused,
    BlockInfo,
    BlockList,
    BlocksVerified,
    CollectGarbage,
    EventList,
    EventsAsk,
    GarbageCollected,
    LeaseList,
    LeasesAsk,
    ListBlocks,
    StatAsk,
    StoreStat,
    TierName,
    ToClient,
    VerifyBlocks,
)

CALL_DEADLINE_S = 5.0
VERIFY_DEADLINE_S = 60.0
EVENTS_WAIT_MS = 1_000
"""So long the node holds an ask for changes back when there are none."""

_Reply = TypeVar("_Reply")


class BlockSnapshot(NamedTuple):
    """Everything a node had at change number ``sequence``: tier -> hashes."""

    sequence: int
    blocks: dict[TierName, frozenset[bytes]]


class BlockChange(NamedTuple):
    """Change number ``sequence`` of a node: a block came into a tier, or left it."""

    sequence: int
    tier: TierName
    block_hash: bytes
    is_added: bool


class StoreLooker:
    """Questions to one node. Every method raises PeerLost or DeadlineExceeded when the node does not answer."""

    def __init__(self, channel: Channel, incarnation: str) -> None:
        self._channel = channel
        self.incarnation = incarnation
        """Which life of the node answers."""
        self._numbers = count(1)

    async def stat(self) -> StoreStat:
        """Returns counts, tiers, tenants and counters."""
        return await self._ask(StatAsk(n=next(self._numbers)), StoreStat)

    async def leases(self) -> LeaseList:
        """Returns the standing read leases, oldest first."""
        return await self._ask(LeasesAsk(n=next(self._numbers)), LeaseList)

    async def blocks(self, tier: TierName) -> AsyncIterator[BlockInfo]:
        """Yields the blocks of one tier in the order of their slots. What moves meanwhile may be missed."""
        start: int | None = 0
        while start is not None:
            page = await self._ask(ListBlocks(n=next(self._numbers), tier=tier, start_slot=start), BlockList)
            for block in page.blocks:
                yield block
            start = page.next_slot

    async def verify(self, tier: TierName) -> AsyncIterator[BlocksVerified]:
        """Has every block of one tier read and compared with its digest; yields the results part by part."""
        start: int | None = 0
        while start is not None:
            ask = VerifyBlocks(n=next(self._numbers), tier=tier, start_slot=start)
            part = await self._ask(ask, BlocksVerified, deadline_s=VERIFY_DEADLINE_S)
            yield part
            start = part.next_slot

    async def collect_garbage(self) -> GarbageCollected:
        """Ends what is overdue and puts quarantined slots of the disk back into use."""
        return await self._ask(CollectGarbage(n=next(self._numbers)), GarbageCollected)

    async def changes(self, after: int | None = None) -> AsyncIterator[BlockSnapshot | BlockChange]:
        """Yields what comes and goes, without an end; it begins where ``after``, the number of a change, had ended.

        Without ``after``, or when what followed it is forgotten, a snapshot comes first: everything that is there. A
        change after a snapshot may be in it already, and says the same.
        """
        while True:
            ask = EventsAsk(n=next(self._numbers), after=after, wait_ms=EVENTS_WAIT_MS)
            answer = await self._ask(ask, EventList, deadline_s=CALL_DEADLINE_S + EVENTS_WAIT_MS / 1000)
            if answer.has_gap:
                # The number is older than the list: what happens while it is read is told afterwards.
                tiers: tuple[TierName, ...] = ("host", "disk")
                held = {tier: frozenset([block.block_hash async for block in self.blocks(tier)]) for tier in tiers}
                yield BlockSnapshot(answer.sequence, held)
            first = answer.sequence - len(answer.events) + 1
            for number, event in enumerate(answer.events, start=first):
                yield BlockChange(number, event.tier, event.block_hash, event.is_added)
            after = answer.sequence

    async def _ask(self, message: Any, reply: type[_Reply], *, deadline_s: float = CALL_DEADLINE_S) -> _Reply:
        try:
            async with asyncio.timeout(deadline_s):
                await self._channel.send(message)
                answer = await self._channel.recv()
        except TimeoutError as error:
            raise DeadlineExceeded(f"the store node did not answer within {deadline_s:g} s") from error
        if not isinstance(answer, reply):
            raise ProtocolError(f"{type(answer).__name__} instead of {reply.__name__}")
        return answer


@asynccontextmanager
async def look_at(host: str, port: int, *, secret: bytes) -> AsyncIterator[StoreLooker]:
    """Connects, yields the looker, disconnects. Raises: PeerLost, AuthenticationError, ProtocolError, FatalError."""
    me = PeerInfo(
        role="looker",
        peer_id="looker",
        incarnation=new_incarnation(),
        pid=os.getpid(),
        host_identity=host_identity(),
    )
    channel = await connect(host, port, secret=secret, me=me, decode=ToClient, deadline_s=CALL_DEADLINE_S)
    try:
        async with asyncio.timeout(CALL_DEADLINE_S):
            await channel.send(Attach(n=0, client_id=secrets.token_hex(8), block_bytes=None))
            attached = await channel.recv()
        if isinstance(attached, AttachRefused):
            raise FatalError(f"the store node refused: {attached.message}")
        if not isinstance(attached, Attached):
            raise ProtocolError(f"{type(attached).__name__} instead of Attached")
        yield StoreLooker(channel, attached.incarnation)
    except TimeoutError as error:
        raise DeadlineExceeded("the store node did not answer Attach") from error
    finally:
        await channel.close()
