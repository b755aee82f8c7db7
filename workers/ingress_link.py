"""A worker's link to one ingress: dialled by the worker, kept up, and the way to the leases of its attempts.

Owns one channel at a time, the lease line of this ingress's attempts and the frame sequence number. Messages
from the ingress go to ``on_message``; everything runs on the worker's link loop, but for the renewal of leases
(``workers/lease_line.py``).

Life cycle: ``IngressLink`` -> ``run`` (dial, serve, redial with back-off) -> ``close``. A lost connection is not a
death: attempts go on until their lease runs out, and ``publish`` refuses once it has.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from kvstore.core.messages import WIRE_VERSION, Frame, LeaseGrant, StreamDelta, ToWorker
from kvstore.errors import KopirError, NoCapacity, PeerLost, ProtocolError
from kvstore.net.channel import Channel, connect
from kvstore.net.handshake import PeerInfo
from workers.engine_loop import AttemptKey
from workers.lease_line import LeaseLine
from workers.loop_thread import LoopThread
from workers.spec import IngressAddress

logger = logging.getLogger(__name__)

REDIAL_DELAY_S_MIN = 0.05
REDIAL_DELAY_S_MAX = 1.0


class IngressLink:
    """One ingress as a worker sees it."""

    def __init__(
        self,
        address: IngressAddress,
        *,
        me: PeerInfo,
        secret: bytes,
        lease_ms: int,
        clock_ns: Callable[[], int],
        lease_thread: LoopThread,
        post: Callable[..., object],
        on_message: Callable[[IngressLink, Any], None],
        on_granted: Callable[[IngressLink], None],
        on_reconnected: Callable[[IngressLink], None],
        on_lease_expired: Callable[[IngressLink, list[AttemptKey]], None],
    ) -> None:
        self.address = address
        self._me = me
        self._secret = secret
        self._on_message = on_message
        self._on_granted = on_granted
        self.leases = LeaseLine(
            address,
            me=me,
            secret=secret,
            lease_ms=lease_ms,
            clock_ns=clock_ns,
            thread=lease_thread,
            post=post,
            ask_over_link=self.send,
            on_granted=lambda: on_granted(self),
            on_expired=lambda keys: on_lease_expired(self, keys),
        )
        self._on_reconnected = on_reconnected
        self._attempts: Counter[AttemptKey] = Counter()
        self._channel: Channel | None = None
        self._frame_seq = 0
        self._num_connections = 0
        self.connected = asyncio.Event()

    # --- attempts and leases ------------------------------------------------------------------------------

    def begin(self, key: AttemptKey) -> None:
        """Starts to hold a lease for an attempt; the first ask leaves at once.

        Both sides of a combined worker hold the same attempt: it is held until each has ended it.
        """
        self._attempts[key] += 1
        self.leases.begin(key)

    def end(self, key: AttemptKey) -> None:
        """One side lets an attempt go."""
        self._attempts[key] -= 1
        if self._attempts[key] <= 0:
            del self._attempts[key]
            self.leases.end(key)

    @property
    def num_leases(self) -> int:
        """How many attempts this link holds a lease for."""
        return len(self._attempts)

    def may_publish(self, key: AttemptKey) -> bool:
        """True while this attempt's lease is valid."""
        return self.leases.may_publish(key)

    def was_granted(self, key: AttemptKey) -> bool:
        """True if this attempt ever had a lease."""
        return self.leases.was_granted(key)

    # --- sending ------------------------------------------------------------------------------------------

    def send(self, message: Any) -> bool:
        """Sends now or not at all. Returns False when there is no usable connection."""
        if self._channel is None:
            return False
        try:
            self._channel.send_nowait(message)
        except (PeerLost, NoCapacity) as error:
            logger.warning("link_send_failed ingress=%s error=%s", self.address.ingress_id, error)
            self._channel.abort()
            return False
        return True

    def publish(self, deltas: Sequence[StreamDelta]) -> bool:
        """Sends one frame. The caller has checked each stream's lease just before."""
        self._frame_seq += 1
        return self.send(
            Frame(
                v=WIRE_VERSION,
                worker_id=self._me.peer_id,
                incarnation=self._me.incarnation,
                seq=self._frame_seq,
                streams=tuple(deltas),
            )
        )

    # --- life cycle ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Dials until cancelled; each connection is served until it ends."""
        self.leases.start()
        delay_s = REDIAL_DELAY_S_MIN
        try:
            while True:
                try:
                    self._channel = await connect(
                        self.address.host, self.address.port, secret=self._secret, me=self._me, decode=ToWorker
                    )
                    delay_s = REDIAL_DELAY_S_MIN
                    await self._serve(self._channel)
                except KopirError as error:
                    logger.info("link_down ingress=%s error=%s", self.address.ingress_id, error)
                finally:
                    self._drop_channel()
                await asyncio.sleep(delay_s)
                delay_s = min(delay_s * 2, REDIAL_DELAY_S_MAX)
        finally:
            self.leases.close()

    async def _serve(self, channel: Channel) -> None:
        if channel.peer.incarnation != self.address.incarnation:
            raise ProtocolError(f"another incarnation answers at {self.address.host}:{self.address.port}")
        self._num_connections += 1
        if self._num_connections > 1:
            self._on_reconnected(self)
        self.connected.set()
        self.leases.link_up()
        while True:
            message = await channel.recv()
            if isinstance(message, LeaseGrant):
                self.leases.on_grant(message)
                self._on_granted(self)
            else:
                self._on_message(self, message)

    def _drop_channel(self) -> None:
        self.connected.clear()
        self.leases.link_down()
        if self._channel is not None:
            self._channel.abort()
            self._channel = None
