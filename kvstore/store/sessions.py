"""The clients of a store node: who is connected, whose process lives, whose blocks may be used.

Owns one session per connection and what is left of it while its unfinished writes are quarantined; a watch on each
client's process; and the fingerprint of each namespace. At the end of a connection its read leases are released, and
slots that it was writing are quarantined until its process is dead (pidfd), or the same client said on a new connection
that it writes nothing of the old one any more: a connection that closes proves neither. Belongs to the node's loop;
at most ``MAX_CLIENTS`` sessions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvstore.core.disk_slots import NO_ORIGIN
from kvstore.core.namespaces import EPOCH_FIELD, Namespaces, differing_texts
from kvstore.core.slab_index import HolderId, SlabIndex
from kvstore.errors import FingerprintMismatch, KopirError
from kvstore.net.channel import Channel
from kvstore.net.handshake import PeerInfo
from kvstore.net.host import ProcessWatch
from kvstore.store.inspection import origin_of
from kvstore.store.messages import (
    MAX_LEASES_LISTED,
    STORE_VERSION,
    Attach,
    AttachRefused,
    LeaseInfo,
    LeaseList,
    Superseded,
    ToClient,
    UpdateWeights,
)

logger = logging.getLogger(__name__)

MAX_CLIENTS = 1024


@dataclass(slots=True)
class ClientSession:
    """One client connection, or what is left of it while its unfinished writes are quarantined."""

    holder: HolderId
    client_id: str
    peer: PeerInfo
    channel: Channel
    namespace: str | None
    """None: the client only looks."""
    fingerprint: dict[str, str]
    origin: bytes = NO_ORIGIN
    """Digest of namespace and fingerprint, which goes with the blocks to the disk."""
    watch: ProcessWatch | None = None
    is_open: bool = True
    is_superseded: bool = False
    """The namespace has another fingerprint by now."""

    @property
    def may_use_blocks(self) -> bool:
        """True for a client that reads and writes, with the weights that its namespace has now."""
        return self.namespace is not None and not self.is_superseded


class ClientSessions:
    """Every session of one node."""

    def __init__(
        self,
        index: SlabIndex,
        *,
        block_bytes: int,
        me: PeerInfo,
        loop: asyncio.AbstractEventLoop,
        on_fingerprint: Callable[[bytes, dict[str, str]], None],
    ) -> None:
        """``on_fingerprint`` is told the origin and the fingerprint of whoever comes to use blocks."""
        self._index = index
        self._block_bytes = block_bytes
        self._me = me
        self._loop = loop
        self._on_fingerprint = on_fingerprint
        self._namespaces = Namespaces()
        self._sessions: dict[HolderId, ClientSession] = {}
        self._num_sessions = 0

    @property
    def num_open(self) -> int:
        """Connections that stand."""
        return sum(session.is_open for session in self._sessions.values())

    def users(self) -> Iterator[ClientSession]:
        """Yields the sessions that are open and use blocks."""
        for session in tuple(self._sessions.values()):
            if session.is_open and session.namespace is not None:
                yield session

    def close(self) -> None:
        """Forgets every session."""
        for session in tuple(self._sessions.values()):
            self._forget(session)

    def lease_list(self, n: int, now_ns: int) -> LeaseList:
        """Returns who reads what; ``n`` is the call number to repeat."""
        standing = self._index.leases()
        infos = []
        for lease in standing[:MAX_LEASES_LISTED]:
            peer = self._sessions[lease.reader].peer
            infos.append(
                LeaseInfo(
                    lease_id=lease.lease_id,
                    holder=peer.peer_id,
                    incarnation=peer.incarnation,
                    pid=peer.pid,
                    age_ms=(now_ns - lease.granted_ns) // 1_000_000,
                    left_ms=(lease.deadline_ns - now_ns) // 1_000_000,
                    num_blocks=len(lease.slots),
                )
            )
        return LeaseList(n=n, num_leases=len(standing), leases=tuple(infos))

    def open(self, channel: Channel, ask: Attach) -> ClientSession:
        """Returns the session of a connection that was not refused."""
        self._num_sessions += 1
        holder = HolderId(f"{channel.peer.incarnation}#{self._num_sessions}")
        namespace = None if ask.block_bytes is None else ask.namespace
        session = ClientSession(holder, ask.client_id, channel.peer, channel, namespace, ask.fingerprint)
        if namespace is not None:
            session.origin = origin_of(namespace, ask.fingerprint)
            self._on_fingerprint(session.origin, ask.fingerprint)
            session.watch = self._watch(channel.peer, holder)
        self._sessions[holder] = session
        return session

    def refusal(self, ask: Attach, peer: PeerInfo) -> AttachRefused | None:
        """Returns why this client may not attach, or None."""
        mine_and_theirs: dict[str, tuple[object, object]] = {"version": (STORE_VERSION, ask.version)}
        if ask.block_bytes is not None:
            mine_and_theirs["block_bytes"] = (self._block_bytes, ask.block_bytes)
            # The slab is shared memory: a client elsewhere could not map it, and its death could not be proved.
            mine_and_theirs["host_identity"] = (self._me.host_identity, peer.host_identity)
        for field, (mine, theirs) in mine_and_theirs.items():
            if mine != theirs:
                return AttachRefused(
                    n=ask.n, field=field, message=f"{field} is {mine} here, {theirs} at the client"[:512]
                )
        if len(self._sessions) >= MAX_CLIENTS:
            return AttachRefused(n=ask.n, field="clients", message=f"{MAX_CLIENTS} clients are connected already")
        return None if ask.block_bytes is None else self._fingerprint_refusal(ask)

    def _fingerprint_refusal(self, ask: Attach) -> AttachRefused | None:
        differing = self._namespaces.attach(ask.namespace, ask.fingerprint)
        if not differing:
            return None
        mine = self._namespaces.fingerprint(ask.namespace)
        facts = "; ".join(
            f"{name} is {mine.get(name)!r} here, {ask.fingerprint.get(name)!r} there" for name in differing
        )
        message = f"namespace {ask.namespace!r}: {FingerprintMismatch(differing)} ({facts})"
        return AttachRefused(n=ask.n, field="fingerprint", message=message[:4096], differing_fields=differing)

    def writes_ended(self, session: ClientSession) -> None:
        """The client writes nothing of its earlier connections any more, which it therefore has left."""
        for earlier in tuple(self._sessions.values()):
            if earlier is session or _client_of(earlier) != _client_of(session):
                continue
            # Its end may not have been noticed here yet.
            earlier.channel.abort()
            self._index.reader_lost(earlier.holder)
            freed = self._index.writer_dead(earlier.holder)
            logger.info("store_writes_ended peer=%s freed_blocks=%d", session.peer.peer_id, freed)
            self._forget(earlier)

    def update_weights(self, session: ClientSession, ask: UpdateWeights) -> bool:
        """The client's weights changed: others of its namespace that still have the old ones are told so.

        False: the namespace's epoch was not lower.
        """
        name = session.namespace
        if name is None or not self._namespaces.update(name, ask.fingerprint):
            return False
        session.fingerprint, session.is_superseded = ask.fingerprint, False
        session.origin = origin_of(name, ask.fingerprint)
        self._on_fingerprint(session.origin, ask.fingerprint)
        logger.info("store_weights_updated namespace=%s epoch=%s", name, ask.fingerprint.get(EPOCH_FIELD))
        for other in self.users():
            if other.namespace != name or other is session:
                continue
            differing = differing_texts(ask.fingerprint, other.fingerprint)
            if differing and not other.is_superseded:
                other.is_superseded = True
                self.tell(other, Superseded(differing_fields=differing))
        return True

    def tell(self, session: ClientSession, message: ToClient) -> None:
        """Sends what nobody asked for; a client that does not read loses its connection."""
        try:
            session.channel.send_nowait(message)
        except KopirError as error:
            logger.info("store_client_gone peer=%s error=%s", session.peer.peer_id, error)
            session.channel.abort()

    def _watch(self, peer: PeerInfo, holder: HolderId) -> ProcessWatch | None:
        """Returns a watch on the client's process; None when it cannot be had (then only its word ends quarantine)."""
        try:
            watch = ProcessWatch(peer.pid)
        except (OSError, ValueError) as error:
            logger.warning("store_client_unwatched peer=%s pid=%d error=%s", peer.peer_id, peer.pid, error)
            return None
        self._loop.add_reader(watch.fileno(), self._on_process_gone, holder)
        return watch

    def _on_process_gone(self, holder: HolderId) -> None:
        session = self._sessions[holder]
        self._index.reader_lost(holder)
        freed = self._index.writer_dead(holder)
        logger.info("store_client_dead peer=%s pid=%d freed_blocks=%d", session.peer.peer_id, session.peer.pid, freed)
        session.channel.abort()
        self._forget(session)

    def end_connection(self, session: ClientSession) -> None:
        """The connection is over; the process may live on and may still be writing."""
        if session.holder not in self._sessions:
            return
        session.is_open = False
        self._index.reader_lost(session.holder)
        quarantined = self._index.writer_lost(session.holder)
        if self._index.has_unfinished_writes(session.holder):
            logger.warning("store_writer_lost peer=%s quarantined_blocks=%d", session.peer.peer_id, quarantined)
        else:
            self._forget(session)

    def _forget(self, session: ClientSession) -> None:
        self._sessions.pop(session.holder, None)
        session.is_open = False
        if session.watch is not None:
            self._loop.remove_reader(session.watch.fileno())
            session.watch.close()
            session.watch = None


def _client_of(session: ClientSession) -> tuple[str, str]:
    return session.peer.incarnation, session.client_id
