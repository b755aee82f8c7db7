"""Brings blocks that this node's slab lacks from other nodes, and gives them its own.

Owns the channels to other nodes (opened when they are needed, one fetch on each at a time) and what is known of
peers that failed. Bytes go from slab to slab in pieces over an authenticated channel: TCP, between hosts or network
namespaces. The digests come first, apart from the bytes. Every block is verified where it arrived, before its
commit: what the wire damaged is counted as ``wire_corrupt_blocks``, dropped, and taken from another node if there is
one. The giver verifies before it sends, so that its damaged slab is counted at its own slab.

A fetch ends at its deadline with what has arrived. A peer that is dead, slow or silent is a miss, and is left alone
for a while. Belongs to one event loop; the index and the slab are the node's.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from kvstore.core.counters import Counters
from kvstore.core.ids import BlockDigest, BlockHash, TenantId
from kvstore.core.slab_index import NO_MATCH, HolderId, LeasedBlock, ReserveOutcome, ReserveStatus, SlabIndex
from kvstore.digest import verify
from kvstore.errors import KopirError, PeerLost, ProtocolError
from kvstore.net.channel import Channel, connect
from kvstore.net.handshake import PeerInfo
from kvstore.store.directory_link import DirectoryLink
from kvstore.store.directory_messages import Located, PlaceInfo
from kvstore.store.messages import (
    MAX_BLOCKS_PER_FETCH,
    PIECE_BYTES_MAX,
    Attach,
    Attached,
    BlockPiece,
    BlocksOffered,
    FetchBlocks,
    ToFetcher,
)
from kvstore.store.reserving import SlotReserver
from kvstore.store.slab import Slab

logger = logging.getLogger(__name__)

CONNECT_DEADLINE_S = 0.5
PEER_PAUSE_S = 1.0
"""So long a peer that failed is not asked again."""
MAX_FETCHES = 64
MAX_PEERS = 1024
RESERVE_MARGIN_NS = 1_000_000_000
GIVE_LEASE_NS = 10_000_000_000
FETCHER = HolderId("fetch")
_NO_SLOT = (ReserveStatus.NO_ROOM, ReserveStatus.OVER_QUOTA)


@dataclass(slots=True)
class FetchCounters(Counters):
    """What happened since the node started; each only grows."""

    fetches: int = 0
    fetched_blocks: int = 0
    fetch_deadlines: int = 0
    wire_corrupt_blocks: int = 0
    """Blocks whose bytes arrived without their digest."""
    peer_failures: int = 0
    given_blocks: int = 0


OnCommitted = Callable[[BlockHash, int, BlockDigest], None]
"""Is told the hash, slot and digest of each block that a fetch made visible."""


@dataclass(frozen=True, slots=True)
class _Fetch:
    """For whom and until when."""

    tenant: TenantId
    end_ns: int
    ends_prompt: bool
    on_committed: OnCommitted


class PeerFetch:
    """Both sides of block exchange between store nodes."""

    def __init__(
        self,
        slab: Slab,
        index: SlabIndex,
        link: DirectoryLink,
        *,
        me: PeerInfo,
        secret: bytes,
        clock_ns: Callable[[], int],
        reserver: SlotReserver,
        on_leased: Callable[[], None] = lambda: None,
    ) -> None:
        """``reserver`` gives out the slots of ``index``; ``on_leased`` is called when that has a new deadline."""
        self._slab = slab
        self._reserver = reserver
        self._on_leased = on_leased
        self._index = index
        self._link = link
        self._me = me
        self._secret = secret
        self._clock_ns = clock_ns
        self._channels: dict[str, Channel] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._left_alone_until_ns: dict[str, int] = {}
        self._num_fetches = 0
        self._coming: dict[BlockHash, asyncio.Future[None]] = {}
        """Blocks that a fetch is writing now; done when it has committed them or given them up."""
        self._numbers = count(1)
        self.counters = FetchCounters()

    def close(self) -> None:
        """Ends every channel to another node."""
        for channel in self._channels.values():
            channel.abort()
        self._channels.clear()

    # --- taking -------------------------------------------------------------------------------------------

    async def fetch(
        self,
        hashes: Sequence[BlockHash],
        *,
        tenant: TenantId,
        deadline_s: float,
        ends_prompt: bool = True,
        on_committed: OnCommitted = lambda block_hash, slot, digest: None,
    ) -> tuple[int, bool]:
        """Brings the longest prefix of ``hashes`` that other nodes have, charged to ``tenant``.

        ``ends_prompt``: the last of ``hashes`` is the last of its prompt.
        Returns how many of ``hashes`` are in the slab now, from the first on, and whether the deadline ended it.
        """
        if not hashes or self._link.num_others == 0 or self._num_fetches >= MAX_FETCHES:
            return 0, False
        self._num_fetches += 1
        self.counters.fetches += 1
        is_late = False
        fetch = _Fetch(tenant, self._clock_ns() + int(deadline_s * 1e9), ends_prompt, on_committed)
        try:
            async with asyncio.timeout(deadline_s):
                located = await self._link.locate(hashes, deadline_s=deadline_s)
                if located is not None and located.prefixes:
                    await self._fetch_runs(hashes, located, fetch)
                    await self._wait_for_others(hashes)
        except TimeoutError:
            is_late = True
            self.counters.fetch_deadlines += 1
        finally:
            self._num_fetches -= 1
        return self._num_here(hashes), is_late

    async def _wait_for_others(self, hashes: Sequence[BlockHash]) -> None:
        """Returns when nobody fetches any of these blocks any more."""
        coming = [done for block_hash in hashes if (done := self._coming.get(block_hash)) is not None]
        if coming:
            await asyncio.wait(coming)

    def _num_here(self, hashes: Sequence[BlockHash]) -> int:
        for index, block_hash in enumerate(hashes):
            if block_hash not in self._index:
                return index
        return len(hashes)

    async def _fetch_runs(self, hashes: Sequence[BlockHash], located: Located, fetch: _Fetch) -> None:
        """Takes each stretch from a node that has most of it, the next best one when that fails."""
        where = [set(run.places) for run in located.prefixes[0] for _ in range(run.num_blocks)]
        failed: set[int] = {n for n, place in enumerate(located.places) if self._is_left_alone(place)}
        start = 0
        while start < min(len(where), len(hashes)):
            lengths = {number: _stretch(where, start, number) for number in where[start] - failed}
            if not lengths:
                return
            number = max(lengths, key=lambda one: (lengths[one], -one))
            wanted = hashes[start : start + min(lengths[number], MAX_BLOCKS_PER_FETCH)]
            ends_prompt = fetch.ends_prompt and start + len(wanted) == len(hashes)
            parent = hashes[start - 1] if start else None
            num_taken, goes_on = await self._take(
                located.places[number], wanted, fetch, parent=parent, ends_prompt=ends_prompt
            )
            start += num_taken
            if not goes_on:
                return
            if num_taken < len(wanted):
                failed.add(number)

    async def _take(
        self,
        place: PlaceInfo,
        hashes: Sequence[BlockHash],
        fetch: _Fetch,
        *,
        parent: BlockHash | None,
        ends_prompt: bool,
    ) -> tuple[int, bool]:
        """Takes blocks from one node. Returns how many of ``hashes`` are settled, and False when no more fit.

        A block that somebody else is writing at this moment is left to them.
        """
        outcomes = self._reserver.reserve(
            hashes,
            writer=FETCHER,
            deadline_ns=fetch.end_ns + RESERVE_MARGIN_NS,
            tenant=fetch.tenant,
            parent=parent,
            ends_prompt=ends_prompt,
        )
        usable = 0
        while usable < len(outcomes) and outcomes[usable].status not in _NO_SLOT:
            usable += 1
        wanted = [n for n, outcome in enumerate(outcomes) if outcome.status is ReserveStatus.GRANTED]
        for n in wanted:
            self._coming[hashes[n]] = asyncio.get_running_loop().create_future()
        arrived: dict[int, BlockDigest] = {}
        try:
            if wanted:
                slots = [(hashes[n], outcomes[n].slot) for n in wanted]
                await self._receive(place, slots, lambda n, digest: arrived.__setitem__(wanted[n], digest))
        except (KopirError, TimeoutError) as error:
            self._fail(place, error)
        except asyncio.CancelledError as error:
            if self._clock_ns() >= fetch.end_ns:
                self._fail(place, error)
            raise
        finally:
            # Nobody writes into these slots any more, however this ended.
            self._settle(hashes, outcomes, arrived, fetch)
        missing = next((n for n in wanted if n not in arrived), usable)
        return missing, usable == len(hashes)

    def _settle(
        self,
        hashes: Sequence[BlockHash],
        outcomes: Sequence[ReserveOutcome],
        arrived: dict[int, BlockDigest],
        fetch: _Fetch,
    ) -> None:
        """Commits what arrived, leaf first, and gives the other slots back."""
        for n in reversed(range(len(outcomes))):
            outcome = outcomes[n]
            if outcome.status is not ReserveStatus.GRANTED:
                continue
            name = {"slot": outcome.slot, "generation": outcome.generation}
            self._coming.pop(hashes[n]).set_result(None)
            if n not in arrived:
                self._index.abort(hashes[n], writer=FETCHER, **name)
            elif self._index.commit(hashes[n], digest=arrived[n], writer=FETCHER, for_reader=True, **name):
                self.counters.fetched_blocks += 1
                fetch.on_committed(hashes[n], outcome.slot, arrived[n])
        self._link.poke()

    async def _receive(
        self,
        place: PlaceInfo,
        slots: Sequence[tuple[BlockHash, int]],
        on_block: Callable[[int, BlockDigest], None],
    ) -> None:
        """Asks one node and writes what comes into the slots. Raises: KopirError, TimeoutError."""
        lock = self._locks.setdefault(place.incarnation, asyncio.Lock())
        async with lock:
            channel = await self._channel(place)
            is_whole = False
            try:
                n = next(self._numbers)
                names = tuple(block_hash for block_hash, _ in slots)
                await channel.send(FetchBlocks(n=n, block_bytes=self._slab.block_bytes, hashes=names))
                offered = await channel.recv()
                if not isinstance(offered, BlocksOffered) or offered.n != n or len(offered.digests) > len(slots):
                    raise ProtocolError(f"{type(offered).__name__} instead of BlocksOffered")
                for index, digest in enumerate(offered.digests):
                    view = self._slab.slot(slots[index][1])
                    if not await self._receive_block(channel, n, index, view):
                        break
                    if verify(view, digest):
                        on_block(index, BlockDigest(digest))
                    else:
                        self.counters.wire_corrupt_blocks += 1
                        logger.error("fetch_block_corrupt hash=%s peer=%s", names[index].hex(), place.node)
                is_whole = True
            finally:
                # Pieces that are still under way would be taken for those of the next fetch.
                if not is_whole:
                    channel.abort()

    async def _receive_block(self, channel: Channel, n: int, index: int, view: memoryview) -> bool:
        """Writes the pieces of one block into its slot. False: the other node found it damaged."""
        start = 0
        while start < len(view):
            piece = await channel.recv()
            if not isinstance(piece, BlockPiece) or (piece.n, piece.index, piece.start) != (n, index, start):
                raise ProtocolError(f"{type(piece).__name__} instead of the next piece")
            if not piece.data:
                return False
            if start + len(piece.data) > len(view):
                raise ProtocolError(f"piece of {len(piece.data)} bytes at {start} of {len(view)}")
            view[start : start + len(piece.data)] = piece.data
            start += len(piece.data)
        return True

    async def _channel(self, place: PlaceInfo) -> Channel:
        channel = self._channels.get(place.incarnation)
        if channel is not None and not channel.is_closing:
            return channel
        self._forget_closed()
        channel = await connect(
            place.host, place.port, secret=self._secret, me=self._me, decode=ToFetcher, deadline_s=CONNECT_DEADLINE_S
        )
        try:
            if channel.peer.incarnation != place.incarnation:
                raise PeerLost(f"{place.node} has another life by now")
            async with asyncio.timeout(CONNECT_DEADLINE_S):
                await channel.send(Attach(n=0, client_id=secrets.token_hex(8), block_bytes=None))
                attached = await channel.recv()
            if not isinstance(attached, Attached):
                raise ProtocolError(f"{type(attached).__name__} instead of Attached")
        except BaseException:
            channel.abort()
            raise
        self._channels[place.incarnation] = channel
        return channel

    def _forget_closed(self) -> None:
        for life in [life for life, channel in self._channels.items() if channel.is_closing]:
            del self._channels[life]
        if len(self._locks) > MAX_PEERS:
            self._locks = {life: lock for life, lock in self._locks.items() if lock.locked()}

    def _fail(self, place: PlaceInfo, error: BaseException) -> None:
        self.counters.peer_failures += 1
        if len(self._left_alone_until_ns) >= MAX_PEERS:
            self._left_alone_until_ns.clear()
        self._left_alone_until_ns[place.incarnation] = self._clock_ns() + int(PEER_PAUSE_S * 1e9)
        logger.warning("fetch_peer_failed peer=%s error=%r", place.node, error)

    def _is_left_alone(self, place: PlaceInfo) -> bool:
        return self._left_alone_until_ns.get(place.incarnation, 0) > self._clock_ns()

    # --- giving -------------------------------------------------------------------------------------------

    async def give(self, channel: Channel, ask: FetchBlocks, holder: HolderId) -> None:
        """Sends the longest prefix of what another node asks for, leased meanwhile. Raises: KopirError."""
        hashes = [BlockHash(block_hash) for block_hash in ask.hashes]
        now_ns = self._clock_ns()
        end_ns = now_ns + GIVE_LEASE_NS
        found = NO_MATCH
        if ask.block_bytes == self._slab.block_bytes:
            found = self._index.match(
                hashes, reader=holder, now_ns=now_ns, deadline_ns=end_ns, ends_prompt=False, counts_misses=False
            )
            self._on_leased()
        try:
            await channel.send(BlocksOffered(n=ask.n, digests=tuple(block.digest for block in found.blocks)))
            for index, block in enumerate(found.blocks):
                view = self._slab.slot(block.slot)
                if self._clock_ns() >= end_ns or not self._is_right(hashes[index], block, view):
                    await channel.send(BlockPiece(n=ask.n, index=index, start=0, data=b""))
                    return
                for start in range(0, len(view), PIECE_BYTES_MAX):
                    data = bytes(view[start : start + PIECE_BYTES_MAX])
                    await channel.send(BlockPiece(n=ask.n, index=index, start=start, data=data))
                self.counters.given_blocks += 1
        finally:
            if found.lease_id is not None:
                self._index.release(found.lease_id, reader=holder)

    def _is_right(self, block_hash: BlockHash, block: LeasedBlock, view: memoryview) -> bool:
        if verify(view, block.digest):
            return True
        self._index.report_corrupt(block_hash, slot=block.slot, generation=block.generation)
        logger.error("store_block_corrupt hash=%s slot=%d", block_hash.hex(), block.slot)
        return False


def _stretch(where: Sequence[set[int]], start: int, number: int) -> int:
    """Returns how many blocks from ``start`` on are in place ``number`` without a gap."""
    end = start
    while end < len(where) and number in where[end]:
        end += 1
    return end - start
