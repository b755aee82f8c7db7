"""The control channel between a prefill worker (dials) and a decode worker (listens), beside the block transport.

Owns the channels and the agreement that a pair may exchange blocks: same fingerprint, transport connected on
both sides, and a probe block that prefill pushed and decode found right (``layout_proof``). A link counts as ready
only after that, which also warms the transport's path of whole blocks. Digests, hand-offs and results travel here;
the bytes of blocks never do.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvstore.core.identity import Fingerprint, differences
from kvstore.core.messages import KvHello, KvHelloReply, KvProbeResult, ToDecode, ToPrefill
from kvstore.errors import FingerprintMismatch, KopirError, LayoutRefused, PeerLost, ProtocolError
from kvstore.net.channel import Channel, ChannelServer, connect, serve
from kvstore.net.handshake import PeerInfo
from kvstore.transport.base import BlockReceive, BlockSend, TransferResult, Transport
from workers.kv_pool import KvPool
from workers.layout_proof import LayoutProof, describe
from workers.spec import DecodeAddress

logger = logging.getLogger(__name__)

CONNECT_DEADLINE_S = 5.0
PROBE_TAG_FIRST = 1 << 62
"""Tags of probe blocks; those of a block pool count up from 1 and never come here."""


@dataclass(frozen=True, slots=True)
class KvIdentity:
    """What one side of a KV link says about itself."""

    me: PeerInfo
    secret: bytes
    fingerprint: Fingerprint
    transport: Transport
    proof: LayoutProof


async def connect_transport(transport: Transport, peer: PeerInfo, address: bytes, *, my_host: str) -> None:
    """Connects the block transport to a peer without blocking the loop. Raises: PeerLost, DeadlineExceeded."""
    await asyncio.to_thread(
        transport.connect,
        peer.incarnation,
        address,
        same_host=peer.host_identity == my_host,
        deadline_s=CONNECT_DEADLINE_S,
    )


class KvPeer:
    """One live link, seen from either side."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    @property
    def incarnation(self) -> str:
        return self._channel.peer.incarnation

    @property
    def pid(self) -> int:
        return self._channel.peer.pid

    @property
    def is_closing(self) -> bool:
        return self._channel.is_closing

    def send(self, message: Any) -> bool:
        """Sends now or not at all. Returns False when the link is down."""
        try:
            self._channel.send_nowait(message)
        except KopirError as error:
            logger.warning("kv_link_send_failed peer=%s error=%s", self._channel.peer.peer_id, error)
            return False
        return True

    def abort(self) -> None:
        self._channel.abort()


class KvListener:
    """Decode side: accepts prefill peers, agrees with each, then passes their messages on."""

    def __init__(
        self,
        identity: KvIdentity,
        *,
        on_message: Callable[[KvPeer, Any], None],
        on_lost: Callable[[KvPeer], None],
    ) -> None:
        self._identity = identity
        self._on_message = on_message
        self._on_lost = on_lost
        self._server: ChannelServer | None = None
        self._probe_tags = itertools.count(PROBE_TAG_FIRST)

    async def start(self, host: str) -> tuple[str, int]:
        """Listens; returns (host, port)."""
        self._server = await serve(
            host,
            0,
            secret=self._identity.secret,
            me=self._identity.me,
            decode=ToDecode,
            on_channel=self._on_channel,
        )
        return self._server.host, self._server.port

    @property
    def rejected(self) -> int:
        """Connections that failed the handshake."""
        return self._server.rejected if self._server is not None else 0

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()

    async def _on_channel(self, channel: Channel) -> None:
        peer = KvPeer(channel)
        try:
            await self._agree(channel)
            while True:
                self._on_message(peer, await channel.recv())
        except KopirError as error:
            logger.info("kv_link_down peer=%s error=%s", channel.peer.peer_id, error)
        finally:
            self._on_lost(peer)

    async def _agree(self, channel: Channel) -> None:
        hello = await channel.recv()
        if not isinstance(hello, KvHello):
            raise ProtocolError(f"{type(hello).__name__} before KvHello")
        me = self._identity.me
        differing = differences(self._identity.fingerprint, Fingerprint.from_dict(hello.fingerprint))
        challenge, tag = self._identity.proof.challenge(), next(self._probe_tags)
        transport = self._identity.transport
        reply = KvHelloReply(
            accepted=not differing,
            worker_id=me.peer_id,
            incarnation=me.incarnation,
            pid=me.pid,
            host_identity=me.host_identity,
            address=await asyncio.to_thread(transport.address_for, channel.peer.incarnation),
            differing_fields=tuple(differing),
            challenge=challenge,
            probe_tag=tag,
        )
        await channel.send(reply)
        if differing:
            raise FingerprintMismatch(tuple(differing))
        # Both sides connect at the same time: wiring an endpoint up needs both to make progress.
        await connect_transport(self._identity.transport, channel.peer, hello.address, my_host=me.host_identity)
        await self._demand_proof(channel, challenge, tag)

    async def _demand_proof(self, channel: Channel, challenge: bytes, tag: int) -> None:
        """Reads the peer's probe block through the transport. Raises: LayoutRefused; PeerLost when it did not come."""
        identity, peer = self._identity, channel.peer.incarnation
        landing = KvPool(identity.proof.layout, 1)
        receive = BlockReceive(tag, landing.block_bytes_view(0), None)
        pending = identity.transport.receive(peer, [receive], deadline_s=CONNECT_DEADLINE_S)
        # A receive without an end may still be written to: the transport holds the buffer until it has one.
        (result,) = await asyncio.wrap_future(pending)
        if result is not TransferResult.OK:
            raise PeerLost(f"the probe block of {channel.peer.peer_id} did not arrive: {result.name}")
        report = identity.proof.check_probe(
            landing.bytes_view[0], challenge, writer=peer, reader=identity.me.incarnation
        )
        await channel.send(KvProbeResult(accepted=report.is_clean, violations=describe(report)))
        if not report.is_clean:
            raise LayoutRefused(describe(report))


class KvDialer:
    """Prefill side: one link per decode incarnation, dialled once however many jobs ask for it at a time."""

    def __init__(
        self, identity: KvIdentity, *, on_message: Callable[[KvPeer, Any], None], on_lost: Callable[[KvPeer], None]
    ) -> None:
        self._identity = identity
        self._on_message = on_message
        self._on_lost = on_lost
        self._links: dict[str, asyncio.Task[KvPeer]] = {}
        self._readers: set[asyncio.Task[None]] = set()

    async def link(self, address: DecodeAddress) -> KvPeer:
        """Returns the live link to a decode worker, dialling it when needed.

        Raises: PeerLost, DeadlineExceeded; FingerprintMismatch naming the fields; LayoutRefused naming what is wrong.
        """
        task = self._links.get(address.incarnation)
        if task is None or (task.done() and (task.exception() is not None or task.result().is_closing)):
            task = asyncio.create_task(self._dial(address))
            self._links[address.incarnation] = task
        return await asyncio.shield(task)

    def forget(self, incarnation: str) -> None:
        """Drops the link to an incarnation that is gone."""
        task = self._links.pop(incarnation, None)
        if task is not None and task.done() and task.exception() is None:
            task.result().abort()

    async def close(self) -> None:
        for incarnation in tuple(self._links):
            self.forget(incarnation)
        for task in tuple(self._readers):
            task.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    async def _dial(self, address: DecodeAddress) -> KvPeer:
        identity = self._identity
        channel = await connect(
            address.kv_host,
            address.kv_port,
            secret=identity.secret,
            me=identity.me,
            decode=ToPrefill,
            deadline_s=CONNECT_DEADLINE_S,
        )
        try:
            if channel.peer.incarnation != address.incarnation:
                raise PeerLost(f"{address.worker_id} now lives another incarnation")
            await self._agree(channel)
        except BaseException:
            channel.abort()
            raise
        peer = KvPeer(channel)
        reader = asyncio.create_task(self._read(channel, peer))
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)
        return peer

    async def _agree(self, channel: Channel) -> None:
        me = self._identity.me
        transport = self._identity.transport
        await channel.send(
            KvHello(
                worker_id=me.peer_id,
                incarnation=me.incarnation,
                pid=me.pid,
                host_identity=me.host_identity,
                transport=transport.name,
                address=await asyncio.to_thread(transport.address_for, channel.peer.incarnation),
                fingerprint=self._identity.fingerprint.to_dict(),
            )
        )
        async with asyncio.timeout(CONNECT_DEADLINE_S):
            reply = await channel.recv()
        if not isinstance(reply, KvHelloReply):
            raise ProtocolError(f"{type(reply).__name__} instead of KvHelloReply")
        if not reply.accepted:
            raise FingerprintMismatch(reply.differing_fields)
        await connect_transport(transport, channel.peer, reply.address, my_host=me.host_identity)
        await self._prove(channel, reply)

    async def _prove(self, channel: Channel, reply: KvHelloReply) -> None:
        """Pushes the probe block that the peer asked for and waits for its verdict."""
        identity, peer = self._identity, channel.peer.incarnation
        probe = identity.proof.probe_block(reply.challenge, writer=identity.me.incarnation, reader=peer)
        send = BlockSend(reply.probe_tag, probe.block_bytes_view(0))
        pushed = identity.transport.push(peer, [send], deadline_s=CONNECT_DEADLINE_S)
        async with asyncio.timeout(CONNECT_DEADLINE_S):
            verdict = await channel.recv()
        await asyncio.wrap_future(pushed)
        if not isinstance(verdict, KvProbeResult):
            raise ProtocolError(f"{type(verdict).__name__} instead of KvProbeResult")
        if not verdict.accepted:
            raise LayoutRefused(verdict.violations)

    async def _read(self, channel: Channel, peer: KvPeer) -> None:
        try:
            while True:
                self._on_message(peer, await channel.recv())
        except KopirError as error:
            logger.info("kv_link_down peer=%s error=%s", channel.peer.peer_id, error)
        finally:
            channel.abort()
            self._on_lost(peer)
