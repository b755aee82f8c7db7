"""The ingress side of the token relay: workers dial in here, one authenticated link per worker life.

Owns the listening socket, the live links and the lease granter of each. A worker's second connection, the one for its
leases, goes to the lease desk and its thread. Asks that come over a link all the same (the second connection is not up
yet) are answered here; every other message goes to the sink with the link it came from. Decides nothing about requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol

from cluster.ingress.lease_desk import LeaseDesk, SharedGranter
from kvstore.core.lease import Key, LeaseGranter
from kvstore.core.messages import LeaseAsk, ToIngress
from kvstore.errors import KopirError, NoCapacity, PeerLost
from kvstore.net.channel import Channel, ChannelServer, serve
from kvstore.net.handshake import LEASE_ROLE, PeerInfo

logger = logging.getLogger(__name__)


class RelaySink(Protocol):
    """Who hears what workers say."""

    def on_link_up(self, link: WorkerLink) -> None: ...

    def on_link_down(self, link: WorkerLink) -> None: ...

    def on_message(self, link: WorkerLink, message: Any) -> None: ...


class WorkerLink:
    """One worker life, while it is connected."""

    def __init__(self, channel: Channel, leases: SharedGranter) -> None:
        self._channel = channel
        self.leases = leases

    @property
    def worker_id(self) -> str:
        return self._channel.peer.peer_id

    @property
    def role(self) -> str:
        return self._channel.peer.role

    @property
    def incarnation(self) -> str:
        return self._channel.peer.incarnation

    @property
    def pid(self) -> int:
        return self._channel.peer.pid

    @property
    def host_identity(self) -> str:
        return self._channel.peer.host_identity

    def send(self, message: Any) -> bool:
        """Sends now or not at all. Returns False when the link is down or its worker reads too slowly.

        A link that lost a message is cut: what was lost (a credit, say) is said again only on a new one.
        """
        try:
            self._channel.send_nowait(message)
        except (PeerLost, NoCapacity) as error:
            logger.warning("relay_send_failed worker=%s error=%s", self.worker_id, error)
            self._channel.abort()
            return False
        return True

    async def recv(self) -> Any:
        return await self._channel.recv()

    @property
    def is_closing(self) -> bool:
        return self._channel.is_closing

    def abort(self) -> None:
        self._channel.abort()


class RelayServer:
    """Listens for workers. One live link per incarnation; a second connection replaces the first."""

    def __init__(
        self, *, me: PeerInfo, secret: bytes, lease_ms: int, clock_ns: Callable[[], int], sink: RelaySink
    ) -> None:
        self._me = me
        self._secret = secret
        self._lease_ms = lease_ms
        self._clock_ns = clock_ns
        self._sink = sink
        self._server: ChannelServer | None = None
        self._granters: dict[str, SharedGranter] = {}
        self._desk = LeaseDesk(self._granters.get, clock_ns=clock_ns)
        self.links: dict[str, WorkerLink] = {}

    async def start(self, host: str) -> tuple[str, int]:
        """Listens on a port of the system's choice; returns (host, port)."""
        self._desk.start()
        self._server = await serve(
            host, 0, secret=self._secret, me=self._me, decode=ToIngress, on_channel=self._on_channel
        )
        return self._server.host, self._server.port

    def granter(self, incarnation: str) -> SharedGranter:
        """Returns the granter of one worker life; it outlives a lost connection. Made where there is none."""
        granter = self._granters.get(incarnation)
        if granter is None:
            granter = self._granters[incarnation] = SharedGranter(LeaseGranter(self._lease_ms))
        return granter

    def known_granter(self, incarnation: str) -> SharedGranter | None:
        """Returns the granter of one worker life; None for a life that was never heard of or is proved over."""
        return self._granters.get(incarnation)

    def lapse(self) -> list[tuple[str, Key]]:
        """Revokes attempts whose holders have been silent for a whole lease; returns (life, attempt) of each, once."""
        now_ns = self._clock_ns()
        return [(life, key) for life, granter in self._granters.items() for key in granter.lapse(now_ns)]

    def forget(self, incarnation: str) -> None:
        """Drops what is known about a life that is proved over."""
        self._granters.pop(incarnation, None)
        link = self.links.pop(incarnation, None)
        if link is not None:
            link.abort()

    @property
    def rejected(self) -> int:
        """Connections that failed the handshake."""
        return self._server.rejected if self._server is not None else 0

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()
        self._desk.close()

    async def _on_channel(self, channel: Channel) -> None:
        incarnation = channel.peer.incarnation
        if channel.peer.role == LEASE_ROLE:
            self._desk.take(channel)
            return
        link = WorkerLink(channel, self.granter(incarnation))
        old = self.links.get(incarnation)
        if old is not None:
            old.abort()
        self.links[incarnation] = link
        self._sink.on_link_up(link)
        try:
            while True:
                message = await link.recv()
                if isinstance(message, LeaseAsk):
                    link.send(link.leases.on_ask(message, self._clock_ns))
                else:
                    self._sink.on_message(link, message)
        except KopirError as error:
            logger.info("relay_link_down worker=%s error=%s", link.worker_id, error)
        except asyncio.CancelledError:
            raise
        finally:
            if self.links.get(incarnation) is link:
                del self.links[incarnation]
                self._sink.on_link_down(link)
