"""The store node: serves the index of one host slab to the local workers.

Owns the ``SlabIndex`` and, through it, the truth about the slab; owns one session per client connection. The workers
on this host copy blocks in the shared memory they map; the node itself touches bytes only between slab and disk, and
to exchange blocks with other nodes (``PeerFetch``), which it finds through the directory.

Life cycle of a session: handshake -> Attach -> Attached -> requests -> connection ends (``kvstore.store.sessions``).

Loop and clock are arguments. Limits: sessions, slow calls, and the message sizes of ``kvstore.store.messages``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from kvstore.core.announcer import Announcer
from kvstore.core.ids import BlockDigest, BlockHash, TenantId
from kvstore.core.quota import TenantBook
from kvstore.core.slab_index import HOST_TIER, LeaseId, MatchResult, SlabIndex
from kvstore.core.slot_states import SlotCounts
from kvstore.errors import KopirError, ProtocolError
from kvstore.net.channel import Channel, ChannelServer
from kvstore.net.handshake import PeerInfo
from kvstore.net.host import boottime_ns
from kvstore.store.auditor import Auditor
from kvstore.store.content import ContentChecks
from kvstore.store.directory_link import DirectoryLink
from kvstore.store.disk.tier import DiskTier
from kvstore.store.event_feed import EventFeed
from kvstore.store.inspection import disk_stat, list_blocks, skipped, verify_blocks
from kvstore.store.lower_edge import LowerEdge
from kvstore.store.messages import (
    AbortBlocks,
    Attach,
    Attached,
    BlocksCommitted,
    BlocksReserved,
    BringUp,
    BroughtUp,
    CollectGarbage,
    CommitBlocks,
    EventsAsk,
    FetchBlocks,
    FetchMissing,
    GarbageCollected,
    LeaseList,
    LeasesAsk,
    ListBlocks,
    Match,
    Matched,
    MatchedBlock,
    MissingFetched,
    OthersKnown,
    ReleaseLease,
    ReportCorrupt,
    ReserveBlocks,
    ReservedBlock,
    StatAsk,
    StoreStat,
    TierStat,
    ToClient,
    ToNode,
    Touched,
    UpdateWeights,
    VerifyBlocks,
    WeightsUpdated,
    WritesEnded,
)
from kvstore.store.peer_fetch import MAX_FETCHES, PeerFetch
from kvstore.store.reserving import SlotReserver
from kvstore.store.sessions import ClientSession, ClientSessions
from kvstore.store.slab import Slab

logger = logging.getLogger(__name__)

MAX_SLOW_CALLS = 1024
"""Calls that wait for the disk; beyond it they are answered at once, with nothing."""
ATTACH_DEADLINE_S = 5.0
LEASE_DRIFT = 0.01
LEASE_MARGIN_NS = 20_000_000
TIMER_STEP_S = 0.01


class StoreNode:
    """One store node. Belongs to one event loop."""

    def __init__(
        self,
        slab: Slab,
        index: SlabIndex,
        *,
        me: PeerInfo,
        secret: bytes,
        loop: asyncio.AbstractEventLoop,
        clock_ns: Callable[[], int] = boottime_ns,
        book: TenantBook | None = None,
        announcer: Announcer | None = None,
        events: EventFeed | None = None,
        disk: DiskTier | None = None,
        disk_off: str = "",
    ) -> None:
        """``book`` is the one that ``index`` charges, ``announcer`` and ``events`` those it tells what comes and goes.

        ``disk``: the tier below; ``disk_off``: why there is none.
        """
        self._slab = slab
        self._index = index
        self._book = TenantBook() if book is None else book
        self._auditor = Auditor(index, loop=loop, clock_ns=clock_ns)
        self._me = me
        self._loop = loop
        self._clock_ns = clock_ns
        self._content = ContentChecks(block_bytes=slab.block_bytes, num_slots=slab.num_blocks)
        self._reserver = SlotReserver(index, clock_ns=clock_ns, on_reserved=self._arm_timer)
        self._edge = None
        if disk is not None:
            self._edge = LowerEdge(
                slab, index, disk, loop=loop, clock_ns=clock_ns, reserver=self._reserver, origins=self._content.origins
            )
        self._disk_off = disk_off
        self._events = EventFeed() if events is None else events
        self._slow_calls: set[asyncio.Task[None]] = set()
        self._server = ChannelServer(secret=secret, me=me, decode=ToNode, on_channel=self._on_channel)
        self._link = DirectoryLink(
            me=me,
            secret=secret,
            announcer=Announcer(needs_snapshot=True) if announcer is None else announcer,
            blocks=lambda: {HOST_TIER: index.hashes()},
            on_others=self._on_others,
        )
        self._peers = PeerFetch(
            slab,
            index,
            self._link,
            me=me,
            secret=secret,
            clock_ns=clock_ns,
            reserver=self._reserver,
            on_leased=self._arm_timer,
        )
        self._fetches: set[asyncio.Task[None]] = set()
        self._sessions = ClientSessions(
            index, block_bytes=slab.block_bytes, me=me, loop=loop, on_fingerprint=self._content.learn
        )
        self._timer: asyncio.TimerHandle | None = None
        self._timer_deadline_ns = 0

    async def start(self, host: str, port: int = 0, *, advertised_host: str | None = None) -> tuple[str, int]:
        """Listens; returns (host, port). Other nodes dial ``advertised_host`` (default: ``host``).

        Raises: OSError if the address is taken.
        """
        await self._server.start(host, port)
        self._link.start(advertised_host or self._server.host, self._server.port)
        self._auditor.start()
        logger.info(
            "store_ready host=%s port=%d blocks=%d", self._server.host, self._server.port, self._slab.num_blocks
        )
        return self._server.host, self._server.port

    def set_directory(self, host: str, port: int) -> None:
        """Names the directory that lives now: what this node has is announced there, and what others have found."""
        self._link.set_address(host, port)

    async def close(self) -> None:
        """Ends every session. The slab belongs to the caller, who closes it afterwards."""
        await self._link.close()
        for fetch in tuple(self._fetches):
            fetch.cancel()
        await asyncio.gather(*self._fetches, return_exceptions=True)
        self._peers.close()
        await self._server.close()
        self._auditor.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._sessions.close()
        for task in tuple(self._slow_calls):
            task.cancel()
        await asyncio.gather(*self._slow_calls, return_exceptions=True)
        if self._edge is not None:
            await self._edge.close()

    def stat(self, n: int = 0) -> StoreStat:
        """Returns counts and counters; ``n`` is the call number to repeat."""
        counts = self._index.counts()
        return StoreStat(
            n=n,
            incarnation=self._me.incarnation,
            block_bytes=self._slab.block_bytes,
            free=counts.free,
            used=counts.used,
            writing=counts.writing,
            quarantined=counts.quarantined,
            total=counts.total,
            pinned=counts.pinned,
            leases=self._index.num_leases,
            clients=self._sessions.num_open,
            counters={
                **self._index.counters.to_dict(),
                **self._peers.counters.to_dict(),
                "other_nodes": self._link.num_others,
                "directory_losses": self._link.losses,
                "directory_snapshots": self._link.snapshots,
                "rejected_connections": self._server.rejected,
                "audits": self._auditor.num_looks,
                "audit_findings": self._auditor.num_findings,
                **self._content.counters,
            },
            tenants={str(tenant): tiers for tenant, tiers in self._book.usage().items()},
            quotas={str(tenant): quota_bytes for tenant, quota_bytes in self._book.quotas().items()},
            tiers=self._tiers(counts),
        )

    def _tiers(self, counts: SlotCounts) -> tuple[TierStat, ...]:
        host = TierStat(
            name="host",
            blocks=counts.total,
            used_blocks=counts.used,
            bytes=counts.total * self._slab.block_bytes,
            quarantined_blocks=counts.quarantined,
        )
        if self._edge is not None:
            return (host, disk_stat(self._edge, self._slab.block_bytes))
        if self._disk_off:
            return (host, TierStat(name="disk", blocks=0, used_blocks=0, bytes=0, state="off", why=self._disk_off))
        return (host,)

    def set_quotas(self, quotas: Mapping[TenantId, int]) -> None:
        """Replaces the quotas of all tenants, in bytes. Raises: BadInput."""
        self._book.set_quotas(quotas)

    def leases(self, n: int = 0) -> LeaseList:
        """Returns who reads what at this moment; ``n`` is the call number to repeat."""
        return self._sessions.lease_list(n, self._clock_ns())

    # --- sessions -----------------------------------------------------------------------------------------

    async def _on_channel(self, channel: Channel) -> None:
        session: ClientSession | None = None
        try:
            async with asyncio.timeout(ATTACH_DEADLINE_S):
                ask = await channel.recv()
            if not isinstance(ask, Attach):
                raise ProtocolError(f"{type(ask).__name__} before Attach")
            refusal = self._sessions.refusal(ask, channel.peer)
            if refusal is not None:
                logger.warning("store_client_refused peer=%s field=%s", channel.peer.peer_id, refusal.field)
                await channel.send(refusal)
                await channel.close()
                return
            session = self._sessions.open(channel, ask)
            await channel.send(self._attached(ask.n))
            if session.namespace is not None and self._link.num_others:
                await channel.send(OthersKnown(num_others=self._link.num_others))
            while session.is_open:
                message = await channel.recv()
                if isinstance(message, FetchBlocks):
                    await self._peers.give(channel, message, session.holder)
                    continue
                reply = self._handle(session, message)
                self._arm_timer()
                self._link.poke()
                if reply is not None:
                    await channel.send(reply)
        except (KopirError, TimeoutError) as error:
            logger.info("store_client_gone peer=%s error=%s", channel.peer.peer_id, error)
        finally:
            if session is not None:
                self._sessions.end_connection(session)

    def _attached(self, n: int) -> Attached:
        return Attached(
            n=n,
            incarnation=self._me.incarnation,
            slab_path=str(self._slab.path),
            block_bytes=self._slab.block_bytes,
            num_blocks=self._slab.num_blocks,
            has_lower_tier=self._edge is not None,
        )

    # --- requests -----------------------------------------------------------------------------------------

    def _handle(self, session: ClientSession, message: ToNode) -> ToClient | None:
        """Carries one request out; returns its answer, if it has one."""
        match message:
            case Match():
                return self._match(session, message)
            case BringUp():
                nothing = BroughtUp(n=message.n, lease_id=None, blocks=())
                self._start(session, self._bring_up(session, message, nothing), overrun=nothing)
            case ListBlocks():
                return list_blocks(message, self._index, self._edge)
            case VerifyBlocks():
                self._start(session, self._verify(message), overrun=skipped(message, self._index, self._edge))
            case EventsAsk():
                self._start(session, self._events.answer(message), overrun=self._events.now(message.n))
            case CollectGarbage():
                return self._collect_garbage(message.n)
            case ReleaseLease():
                self._index.release(LeaseId(message.lease_id), reader=session.holder)
            case Touched():
                self._touched(message)
            case ReserveBlocks():
                return self._reserve(session, message)
            case CommitBlocks():
                return self._commit(session, message)
            case AbortBlocks():
                for ref in message.blocks:
                    self._check_slot(ref.slot)
                    self._index.abort(
                        BlockHash(ref.block_hash), slot=ref.slot, generation=ref.generation, writer=session.holder
                    )
            case ReportCorrupt():
                self._report_corrupt(session, message)
            case WritesEnded():
                self._sessions.writes_ended(session)
            case UpdateWeights():
                return WeightsUpdated(n=message.n, updated=self._sessions.update_weights(session, message))
            case StatAsk():
                return self.stat(message.n)
            case LeasesAsk():
                return self.leases(message.n)
            case FetchMissing():
                fetch = self._loop.create_task(self._answer_later(session, self._fetch_missing(session, message)))
                self._fetches.add(fetch)
                fetch.add_done_callback(self._fetches.discard)
            case Attach() | FetchBlocks():
                raise ProtocolError(f"{type(message).__name__} where it cannot come")
        return None

    def _match(self, session: ClientSession, ask: Match) -> Matched:
        if not session.may_use_blocks:
            return Matched(n=ask.n, lease_id=None, blocks=())
        hashes = [BlockHash(block_hash) for block_hash in ask.hashes]
        if self._edge is not None:
            self._edge.visited(hashes)
        found = self._lease(session, hashes, ask.lease_ms)
        return Matched(n=ask.n, lease_id=found.lease_id, blocks=_matched_blocks(found))

    def _lease(self, session: ClientSession, hashes: list[BlockHash], lease_ms: int, **options: bool) -> MatchResult:
        now_ns = self._clock_ns()
        return self._index.match(
            hashes, reader=session.holder, now_ns=now_ns, deadline_ns=_deadline_ns(now_ns, lease_ms), **options
        )

    async def _bring_up(self, session: ClientSession, ask: BringUp, nothing: BroughtUp) -> BroughtUp:
        if self._edge is None or not session.may_use_blocks:
            return nothing
        hashes = [BlockHash(block_hash) for block_hash in ask.hashes]
        self._edge.visited(hashes)
        in_time = await self._edge.bring_up(hashes, timeout_s=ask.deadline_ms / 1e3, ends_prompt=ask.ends_prompt)
        if not session.is_open or not session.may_use_blocks:
            return nothing
        found = self._lease(session, hashes, ask.lease_ms, ends_prompt=ask.ends_prompt, counts_misses=False)
        from_disk = self._edge.take_from_disk(block.slot for block in found.blocks)
        return BroughtUp(
            n=ask.n,
            lease_id=found.lease_id,
            blocks=_matched_blocks(found),
            from_disk=from_disk,
            is_late=not in_time,
        )

    def _touched(self, message: Touched) -> None:
        tails = set(message.tails)
        for place, ref in enumerate(message.blocks):
            self._check_slot(ref.slot)
            self._index.touch(
                BlockHash(ref.block_hash), slot=ref.slot, generation=ref.generation, is_tail=place in tails
            )
        if self._edge is not None:
            self._edge.visited([BlockHash(ref.block_hash) for ref in message.blocks])
        self._index.missed(message.num_missed)

    def _reserve(self, session: ClientSession, ask: ReserveBlocks) -> BlocksReserved:
        if not session.may_use_blocks:
            return BlocksReserved(n=ask.n, blocks=(ReservedBlock("no_room"),) * len(ask.hashes))
        now_ns = self._clock_ns()
        outcomes = self._reserver.reserve(
            [BlockHash(block_hash) for block_hash in ask.hashes],
            writer=session.holder,
            deadline_ns=_deadline_ns(now_ns, ask.lease_ms),
            tenant=TenantId(ask.tenant),
            parent=None if ask.parent is None else BlockHash(ask.parent),
            is_put=True,
        )
        return BlocksReserved(
            n=ask.n, blocks=tuple(ReservedBlock(o.status.value, o.slot, o.generation) for o in outcomes)
        )

    def _commit(self, session: ClientSession, ask: CommitBlocks) -> BlocksCommitted:
        committed = []
        # Leaf first, so that the policy never takes a parent for older than its leaf.
        for block in reversed(ask.blocks):
            self._check_slot(block.slot)
            committed.append(
                self._index.commit(
                    BlockHash(block.block_hash),
                    slot=block.slot,
                    generation=block.generation,
                    digest=BlockDigest(block.digest),
                    writer=session.holder,
                )
            )
        committed.reverse()
        for block, is_visible in zip(ask.blocks, committed, strict=True):
            if is_visible:
                self._content.origins.note(block.slot, session.origin)
        if self._edge is not None:
            # Leaf first here too: the disk's policy takes them in the order in which they come.
            for block, is_visible in reversed(list(zip(ask.blocks, committed, strict=True))):
                if is_visible:
                    self._edge.committed(
                        BlockHash(block.block_hash),
                        slot=block.slot,
                        digest=BlockDigest(block.digest),
                        tenant=self._index.tenant_of_slot(block.slot),
                        origin=session.origin,
                    )
        return BlocksCommitted(n=ask.n, committed=tuple(committed))

    # --- what may wait for the disk -----------------------------------------------------------------------

    def _start(self, session: ClientSession, call: Coroutine[Any, Any, ToClient], *, overrun: ToClient) -> None:
        """Carries a call out beside the others of its session; beyond the bound on those the answer is ``overrun``."""
        if len(self._slow_calls) >= MAX_SLOW_CALLS:
            call.close()
            logger.warning("store_overrun peer=%s calls=%d", session.peer.peer_id, len(self._slow_calls))
            self._sessions.tell(session, overrun)
            return
        task = self._loop.create_task(self._answer_later(session, call))
        self._slow_calls.add(task)
        task.add_done_callback(self._slow_calls.discard)

    async def _answer_later(self, session: ClientSession, call: Coroutine[Any, Any, ToClient]) -> None:
        """Answers once the call has ended. One that fails ends the connection: its client must not wait in vain."""
        try:
            answer = await call
        except Exception as error:
            logger.error("store_call_failed peer=%s error=%r", session.peer.peer_id, error, exc_info=error)
            session.channel.abort()
            return
        finally:
            self._arm_timer()
        if session.is_open:
            self._sessions.tell(session, answer)

    async def _verify(self, ask: VerifyBlocks) -> ToClient:
        return await verify_blocks(ask, slab=self._slab, index=self._index, edge=self._edge, content=self._content)

    def _collect_garbage(self, n: int) -> GarbageCollected:
        before = (self._index.counters.expired_leases, self._index.counters.expired_write_blocks)
        self._index.expire(self._clock_ns())
        after = (self._index.counters.expired_leases, self._index.counters.expired_write_blocks)
        return GarbageCollected(
            n=n,
            expired_leases=after[0] - before[0],
            expired_write_blocks=after[1] - before[1],
            released_slots=0 if self._edge is None else self._edge.disk.release_quarantined(),
        )

    def _report_corrupt(self, session: ClientSession, report: ReportCorrupt) -> None:
        ref = report.block
        self._check_slot(ref.slot)
        if self._index.report_corrupt(BlockHash(ref.block_hash), slot=ref.slot, generation=ref.generation):
            logger.error(
                "store_block_corrupt hash=%s slot=%d reporter=%s", ref.block_hash.hex(), ref.slot, session.peer.peer_id
            )

    async def _fetch_missing(self, session: ClientSession, ask: FetchMissing) -> MissingFetched:
        def note(block_hash: BlockHash, slot: int, digest: BlockDigest) -> None:
            self._content.origins.note(slot, session.origin)
            if self._edge is not None:
                tenant = self._index.tenant_of_slot(slot)
                self._edge.committed(block_hash, slot=slot, digest=digest, tenant=tenant, origin=session.origin)

        num_blocks, is_late = 0, False
        if session.may_use_blocks and len(self._fetches) <= MAX_FETCHES:
            num_blocks, is_late = await self._peers.fetch(
                [BlockHash(block_hash) for block_hash in ask.hashes],
                tenant=TenantId(ask.tenant),
                deadline_s=ask.deadline_ms / 1000,
                ends_prompt=ask.ends_prompt,
                on_committed=note,
            )
        return MissingFetched(n=ask.n, num_blocks=num_blocks, is_late=is_late)

    def _on_others(self, num_others: int) -> None:
        for session in self._sessions.users():
            self._sessions.tell(session, OthersKnown(num_others=num_others))

    def _check_slot(self, slot: int) -> None:
        if slot >= self._slab.num_blocks:
            raise ProtocolError(f"slot {slot} of a slab with {self._slab.num_blocks} slots")

    # --- time ---------------------------------------------------------------------------------------------

    def _arm_timer(self) -> None:
        deadline_ns = self._index.next_deadline_ns()
        if deadline_ns is None or (self._timer is not None and self._timer_deadline_ns <= deadline_ns):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_deadline_ns = deadline_ns
        delay_s = max(TIMER_STEP_S, (deadline_ns - self._clock_ns()) / 1e9)
        self._timer = self._loop.call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._index.expire(self._clock_ns())
        self._arm_timer()


def _matched_blocks(found: MatchResult) -> tuple[MatchedBlock, ...]:
    return tuple(MatchedBlock(block.slot, block.generation, block.digest) for block in found.blocks)


def _deadline_ns(now_ns: int, lease_ms: int) -> int:
    """Returns when the node's side of a lease ends: later than the holder's, whose clock may run slower."""
    return now_ns + int(lease_ms * 1_000_000 * (1 + LEASE_DRIFT)) + LEASE_MARGIN_NS
