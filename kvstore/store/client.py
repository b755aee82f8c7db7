"""The store client of a worker: finds, loads and stores KV blocks in the slab of the node on this host.

Owns the connection to one store node and keeps it up: it dials, attaches, maps the slab, and does so again after
every loss. A lost, slow or refusing store is a miss and never an error: every call has a deadline and a typed
result. Bytes are copied by this process, between its own memory and the mapped slab; none go through the socket.

Life cycle: ``start`` -> (connected <-> lost)* -> ``close``. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvstore.core.identity import Fingerprint
from kvstore.core.ids import BlockDigest, BlockHash, TenantId
from kvstore.core.quota import NOBODY
from kvstore.digest import block_digest
from kvstore.errors import FatalError, FingerprintMismatch, KopirError, PeerLost, ProtocolError
from kvstore.net.channel import Channel, connect
from kvstore.net.handshake import PeerInfo
from kvstore.net.host import boottime_ns
from kvstore.store.loading import ClientCounters, Loader, LoadResult
from kvstore.store.messages import (
    DEFAULT_NAMESPACE,
    Attach,
    Attached,
    AttachRefused,
    StatAsk,
    StoreStat,
    Superseded,
    ToClient,
    UpdateWeights,
    WeightsUpdated,
    WritesEnded,
)
from kvstore.store.session import LeasedPrefix, StoreSession, WriteReservation
from kvstore.store.slab import Slab, open_slab

logger = logging.getLogger(__name__)

CONNECT_DEADLINE_S = 2.0
BACKOFF_S_MIN = 0.05
BACKOFF_S_MAX = 1.0
DEFAULT_CALL_DEADLINE_S = 0.5
DEFAULT_LEASE_MS = 5_000


class PutBlock(NamedTuple):
    """One block to store. ``digest`` is computed from ``view`` when it is not known already."""

    block_hash: BlockHash
    view: Any
    digest: BlockDigest | None = None


@dataclass(frozen=True, slots=True)
class PutResult:
    """What became of the blocks of one ``put_blocks``; the six numbers add up to the blocks given."""

    stored: int = 0
    present: int = 0
    in_progress: int = 0
    no_room: int = 0
    over_quota: int = 0
    lost: int = 0
    """Not stored because the store was gone, too slow, or the reservation ran out."""


class StoreClient:
    """Everything a worker does with its store node."""

    def __init__(
        self,
        *,
        me: PeerInfo,
        secret: bytes,
        block_bytes: int,
        namespace: str = DEFAULT_NAMESPACE,
        fingerprint: Fingerprint | None = None,
        call_deadline_s: float = DEFAULT_CALL_DEADLINE_S,
        lease_ms: int = DEFAULT_LEASE_MS,
        clock_ns: Callable[[], int] = boottime_ns,
        is_sound: Callable[[Any], bool] | None = None,
    ) -> None:
        """``fingerprint``: of the KV this client computes and reads; a namespace has one, which may be None.

        ``is_sound``: looks at the bytes of every loaded block whose digest is right; one it refuses counts as damaged.
        """
        self._me = me
        self._namespace = namespace
        self._fingerprint = {} if fingerprint is None else fingerprint.to_dict()
        self._client_id = secrets.token_hex(8)
        self._secret = secret
        self._block_bytes = block_bytes
        self._call_deadline_s = call_deadline_s
        self._lease_ms = lease_ms
        self._clock_ns = clock_ns
        self._address: tuple[str, int] | None = None
        self._address_changed = asyncio.Event()
        self._session: StoreSession | None = None
        self._connected = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._slab: Slab | None = None
        self._toucher: asyncio.Task[None] | None = None
        self._reservations: set[WriteReservation] = set()
        self._owes_writes_ended = False
        self._has_lower_tier = False
        self.refusal: str = ""
        """Why the node refused this client; empty when it did not."""
        self.differing_fields: tuple[str, ...] = ()
        """The fields of the fingerprint that made the node refuse it."""
        self.counters = ClientCounters()
        self._loader = Loader(
            block_bytes=block_bytes, lease_ms=lease_ms, clock_ns=clock_ns, is_sound=is_sound, counters=self.counters
        )
        self.cost = self._loader.cost
        """What loads from below the slab are worth; whoever computes what was not loaded tells it (``computed``)."""

    # --- connection ---------------------------------------------------------------------------------------

    def start(self, host: str | None = None, port: int | None = None) -> None:
        """Begins to keep a connection up, to ``host:port`` or to what ``set_address`` says later."""
        assert self._keeper is None, "started twice"
        if host is not None and port is not None:
            self.set_address(host, port)
        self._keeper = asyncio.get_running_loop().create_task(self._keep_connected())

    def set_address(self, host: str, port: int) -> None:
        """Points the client to a (new) store node; a connection to another one ends."""
        if self._address == (host, port) and not self.refusal:
            return
        self._address = (host, port)
        self._accept_again()
        self._address_changed.set()
        if self._session is not None:
            self._session.abort()

    @property
    def is_connected(self) -> bool:
        """True while calls have a chance to be answered."""
        return self._usable_session() is not None

    async def wait_connected(self, deadline_s: float) -> bool:
        """Returns True as soon as the store is attached, False when that took longer than ``deadline_s``."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._connected.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Ends the connection; leases end with it. The mapping of the slab goes with its last view."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
            self._keeper = None
        if self._toucher is not None:
            await asyncio.gather(self._toucher, return_exceptions=True)
        if self._slab is not None:
            self._slab.close()
            self._slab = None

    # --- blocks -------------------------------------------------------------------------------------------

    async def load_blocks(
        self,
        hashes: Sequence[BlockHash],
        into: Callable[[int], Any],
        *,
        deadline_s: float = 2.0,
        tenant: TenantId = NOBODY,
        block_tokens: int | None = None,
    ) -> LoadResult:
        """Copies the longest cached prefix of ``hashes`` to where ``into`` says, each block verified after its copy.

        Reads the slab without asking its node; for what is not there the node is asked to bring it up from the disk, if
        it has one, and then to fetch it from other nodes that have it, for at most half of the time that is left and
        charged to ``tenant``. ``into(i)`` returns a writable buffer of ``block_bytes`` bytes for ``hashes[i]``. A block
        without its digest is reported and ends the load there. No wrong byte stays: a buffer whose copy does not count
        is zeroed. Modifies: the buffers that ``into`` returned.

        ``block_tokens``: a block holds so many tokens; then what is below the slab is asked for only if, and for as
        long as, computing them would take longer (``cost``).
        """
        session = self._usable_session()
        if session is None:
            return LoadResult(0, 0, "end")
        return await self._loader.load(
            session,
            hashes,
            into,
            has_lower_tier=self._has_lower_tier,
            deadline_s=deadline_s,
            tenant=tenant,
            block_tokens=block_tokens,
        )

    async def load_leased(
        self, prefix: LeasedPrefix, into: Callable[[int], Any], *, deadline_s: float = 2.0
    ) -> LoadResult:
        """Like ``load_blocks``, of blocks that are pinned: none can be evicted before it is copied.

        The lease stays the caller's. Modifies: the buffers that ``into`` returned.
        """
        return await self._loader.load_leased(prefix, into, deadline_s=deadline_s)

    def exist(self, hashes: Sequence[BlockHash]) -> list[bool]:
        """Returns for each hash whether the slab of this host has its block now: a hint. No store, no block."""
        session = self._usable_session()
        if session is None:
            return [False] * len(hashes)
        return session.reader.exist(hashes)

    async def put_blocks(
        self,
        blocks: Sequence[PutBlock | tuple[BlockHash, Any]],
        *,
        tenant: TenantId = NOBODY,
        parent: BlockHash | None = None,
    ) -> PutResult:
        """Reserves slots, copies and commits, parents before leaves. The views must not change meanwhile.

        ``tenant``: whom the blocks are charged to, see ``kvstore.core.quota.tenant_of``. ``parent``: the block before
        the first of ``blocks`` in their prompt, of which they are the end.
        """
        items = [PutBlock(*block) for block in blocks]
        result = await self._put_once(items, tenant, parent)
        # With a tier below, a prompt larger than the slab passes through it: what is stored leaves for the next part.
        while self._has_lower_tier and result.no_room and result.stored:
            start = len(items) - result.no_room
            part = await self._put_once(items[start:], tenant, items[start - 1].block_hash if start else parent)
            if not part.stored:
                break
            result = _added(result, part)
        return result

    async def _put_once(self, items: Sequence[PutBlock], tenant: TenantId, parent: BlockHash | None) -> PutResult:
        asked = asyncio.ensure_future(self.reserve([item.block_hash for item in items], tenant=tenant, parent=parent))
        try:
            # The node looks for slots meanwhile.
            digests = await self._digests(items)
            reservation = await asked
        except BaseException:
            _abort_when_granted(asked)
            raise
        if reservation is None:
            return PutResult(lost=len(items))
        with reservation:
            granted = [index for index, status in enumerate(reservation.statuses) if status == "granted"]
            # Leaf first: what is committed early must not look older than its parents.
            for num_written, index in enumerate(reversed(granted), 1):
                if not reservation.write(index, items[index].view, items[index].digest or digests.get(index)):
                    break
                if self._loader.is_turn_of_others(num_written):
                    # The node works through these while the next ones are copied.
                    reservation.begin_commit(deadline_s=self._call_deadline_s)
                    await asyncio.sleep(0)
            stored = await reservation.commit(deadline_s=self._call_deadline_s)
        self.counters.stored_blocks += stored
        statuses = reservation.statuses
        return PutResult(
            stored=stored,
            present=statuses.count("present"),
            in_progress=statuses.count("in_progress"),
            no_room=statuses.count("no_room"),
            over_quota=statuses.count("over_quota"),
            lost=statuses.count("granted") - stored,
        )

    async def _digests(self, items: Sequence[PutBlock]) -> dict[int, BlockDigest]:
        """Returns the digests of those blocks that have none and are not in the slab already."""
        lacking = [index for index, item in enumerate(items) if item.digest is None]
        await asyncio.sleep(0)
        are_here = self.exist([items[index].block_hash for index in lacking])
        digests: dict[int, BlockDigest] = {}
        for index, is_here in zip(lacking, are_here, strict=True):
            if not is_here:
                digests[index] = block_digest(items[index].view)
                await self._loader.let_others_run(len(digests))
        return digests

    async def match(self, hashes: Sequence[BlockHash], *, lease_ms: int | None = None) -> LeasedPrefix | None:
        """Pins the longest cached prefix; None for a miss or a lost store. The caller releases what it gets."""
        session = self._usable_session()
        if session is None or not hashes:
            return None
        return await session.match(hashes, lease_ms=lease_ms or self._lease_ms, deadline_s=self._call_deadline_s)

    async def reserve(
        self,
        hashes: Sequence[BlockHash],
        *,
        lease_ms: int | None = None,
        tenant: TenantId = NOBODY,
        parent: BlockHash | None = None,
    ) -> WriteReservation | None:
        """Takes writable slots; None when the store is lost. The caller commits or aborts what it gets, always."""
        session = self._usable_session()
        if session is None or not hashes:
            return None
        reservation = await session.reserve(
            hashes,
            lease_ms=lease_ms or self._lease_ms,
            deadline_s=self._call_deadline_s,
            tenant=tenant,
            parent=parent,
        )
        if reservation is not None:
            self._reservations.add(reservation)
            reservation.when_finished(lambda: self._reservation_finished(reservation))
        return reservation

    async def stat(self) -> StoreStat | None:
        """Returns the node's counts; None when the store is lost."""
        if self._session is None:
            return None
        return await self._session.call(lambda n: StatAsk(n=n), StoreStat, deadline_s=self._call_deadline_s)

    async def usage(self) -> dict[str, dict[str, int]] | None:
        """Returns tenant -> tier -> bytes used; None when the store is lost."""
        stat = await self.stat()
        return None if stat is None else stat.tenants

    async def update_weights(self, fingerprint: Fingerprint) -> bool:
        """The weights of this client's namespace are changed in place; ``fingerprint`` has a higher ``weights_epoch``.

        From now on clients with the old fingerprint are given nothing new. False: the store is lost or knew better.
        """
        if self._session is None:
            return False
        texts = fingerprint.to_dict()
        answer = await self._session.call(
            lambda n: UpdateWeights(n=n, fingerprint=texts), WeightsUpdated, deadline_s=self._call_deadline_s
        )
        if answer is None or not answer.updated:
            return False
        self._fingerprint = texts
        self._accept_again()
        return True

    # --- inside -------------------------------------------------------------------------------------------

    def _usable_session(self) -> StoreSession | None:
        session = self._session
        return session if session is not None and session.is_open and not self.refusal else None

    def _accept_again(self) -> None:
        self.refusal = ""
        self.differing_fields = ()

    def _on_superseded(self, notice: Superseded) -> None:
        """The connection stays, for what this client still holds; it is given nothing new."""
        self.differing_fields = notice.differing_fields
        self.refusal = f"weights were updated: {FingerprintMismatch(notice.differing_fields)}"
        logger.warning("store_superseded fields=%s", ",".join(notice.differing_fields))

    async def _keep_connected(self) -> None:
        backoff_s = BACKOFF_S_MIN
        while True:
            if self._address is None or self.refusal:
                await self._address_changed.wait()
            self._address_changed.clear()
            assert self._address is not None
            try:
                self._session = await self._dial(*self._address)
                backoff_s = BACKOFF_S_MIN
                self.counters.connections += 1
                self._connected.set()
                self._settle_earlier_writes()
                await self._session.read()
            except FatalError as error:
                logger.warning("store_unusable host=%s port=%d error=%s", *self._address, error)
            except (KopirError, OSError) as error:
                logger.info("store_lost host=%s port=%d error=%s", *self._address, error)
            finally:
                self._connection_ended()
            if not self.refusal:
                await self._pause(backoff_s)
                backoff_s = min(2 * backoff_s, BACKOFF_S_MAX)

    async def _pause(self, backoff_s: float) -> None:
        """Waits before the next dial, unless the address changes."""
        try:
            async with asyncio.timeout(backoff_s):
                await self._address_changed.wait()
        except TimeoutError:
            pass

    async def _dial(self, host: str, port: int) -> StoreSession:
        channel = await connect(
            host, port, secret=self._secret, me=self._me, decode=ToClient, deadline_s=CONNECT_DEADLINE_S
        )
        try:
            async with asyncio.timeout(CONNECT_DEADLINE_S):
                attached = await self._attach(channel)
            slab = self._map_slab(attached)
        except TimeoutError as error:
            channel.abort()
            raise PeerLost("the store node did not answer Attach") from error
        except BaseException:
            channel.abort()
            raise
        return StoreSession(channel, slab, clock_ns=self._clock_ns, on_superseded=self._on_superseded)

    async def _attach(self, channel: Channel) -> Attached:
        ask = Attach(
            n=0,
            client_id=self._client_id,
            block_bytes=self._block_bytes,
            namespace=self._namespace,
            fingerprint=self._fingerprint,
        )
        await channel.send(ask)
        answer = await channel.recv()
        if isinstance(answer, AttachRefused):
            self.refusal = answer.message
            self.differing_fields = answer.differing_fields
            if answer.differing_fields:
                raise FingerprintMismatch(answer.differing_fields)
            raise ProtocolError(f"the store node refused: {answer.message}")
        if not isinstance(answer, Attached):
            raise ProtocolError(f"{type(answer).__name__} instead of Attached")
        self._has_lower_tier = answer.has_lower_tier
        return answer

    def _map_slab(self, attached: Attached) -> Slab:
        """Returns the mapping of the node's slab: the one at hand if it is the same slab, or a new one."""
        if self._slab is not None and self._slab.incarnation == attached.incarnation:
            return self._slab
        slab = open_slab(Path(attached.slab_path))
        facts = (slab.incarnation, slab.block_bytes, slab.num_blocks)
        if facts != (attached.incarnation, self._block_bytes, attached.num_blocks):
            slab.close()
            raise ProtocolError(f"slab {attached.slab_path} is not the one the node described")
        if self._slab is not None:
            self._slab.close()
        self._slab = slab
        # In the background: a slab of many gigabytes takes seconds, and can be used meanwhile.
        self._toucher = asyncio.get_running_loop().create_task(asyncio.to_thread(slab.touch_pages))
        return slab

    def _connection_ended(self) -> None:
        if self._session is not None:
            self._session.abort()
            self._session = None
            self._owes_writes_ended = True
            self.counters.losses += 1
        self._connected.clear()

    def _reservation_finished(self, reservation: WriteReservation) -> None:
        self._reservations.discard(reservation)
        self._settle_earlier_writes()

    def _settle_earlier_writes(self) -> None:
        """Tells the node, once it is true, that nothing of an earlier connection is being written any more."""
        if not self._owes_writes_ended or self._session is None:
            return
        if any(reservation.session is not self._session for reservation in self._reservations):
            return
        if self._session.send(WritesEnded()):
            self._owes_writes_ended = False


def _abort_when_granted(asked: asyncio.Future[WriteReservation | None]) -> None:
    """Nobody waits for this reservation any more: it is given back, now or when it comes."""
    if not asked.cancel() and not asked.cancelled() and asked.exception() is None:
        reservation = asked.result()
        if reservation is not None:
            reservation.abort()


def _added(result: PutResult, part: PutResult) -> PutResult:
    """Returns the outcome of all blocks, when ``part`` is that of those that had no room at first."""
    return PutResult(
        stored=result.stored + part.stored,
        present=result.present + part.present,
        in_progress=result.in_progress + part.in_progress,
        no_room=part.no_room,
        over_quota=result.over_quota + part.over_quota,
        lost=result.lost + part.lost,
    )
