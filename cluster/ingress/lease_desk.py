"""Answers lease asks on a thread of its own, so that no burst of tokens on the ingress's loop costs a lease.

Owns the thread and the connections that workers open for their leases. They arrive at the relay's port as any other and
are handed over after the handshake: this thread gets the socket, the loop keeps nothing of it. ``SharedGranter`` is the
granter of one worker life for both threads.

Life cycle: ``start`` -> ``take`` each connection -> ``close``. It decides nothing: whether an attempt may go on is the
granter's answer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable

from kvstore.core.lease import Key, LeaseGranter
from kvstore.core.messages import LeaseAsk, LeaseGrant, LeaseReady
from kvstore.errors import KopirError
from kvstore.net.channel import Channel, adopt
from kvstore.net.handshake import PeerInfo
from workers.loop_thread import LoopThread

logger = logging.getLogger(__name__)


class SharedGranter:
    """A ``LeaseGranter`` for two threads: the loop dispatches and revokes, the desk grants."""

    def __init__(self, core: LeaseGranter) -> None:
        self.core = core
        self._lock = threading.Lock()

    def dispatch(self, attempt_id: str, epoch: int, *, now_ns: int) -> None:
        with self._lock:
            self.core.dispatch(attempt_id, epoch, now_ns=now_ns)

    def on_ask(self, ask: LeaseAsk, clock_ns: Callable[[], int]) -> LeaseGrant:
        """Returns the grant to send now. The clock is read under the lock: what is revoked later is granted earlier."""
        with self._lock:
            return self.core.on_ask(ask, clock_ns())

    def revoke(self, attempt_id: str, epoch: int) -> None:
        with self._lock:
            self.core.revoke(attempt_id, epoch)

    def lapse(self, now_ns: int) -> list[Key]:
        with self._lock:
            return self.core.lapse(now_ns)

    def end(self, attempt_id: str, epoch: int) -> None:
        with self._lock:
            self.core.end(attempt_id, epoch)

    def safe_after_ns(self, attempt_id: str, epoch: int) -> int | None:
        with self._lock:
            return self.core.safe_after_ns(attempt_id, epoch)

    def __len__(self) -> int:
        return len(self.core)


class LeaseDesk:
    """See the module. ``granter_of`` answers for any thread."""

    def __init__(self, granter_of: Callable[[str], SharedGranter | None], *, clock_ns: Callable[[], int]) -> None:
        self._granter_of = granter_of
        self._clock_ns = clock_ns
        self._thread: LoopThread | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._connections: set[socket.socket] = set()
        """Every open connection: the thread, or a task on it, may end before it has begun to serve one."""

    def start(self) -> None:
        self._thread = LoopThread("kopir-leases")

    def close(self) -> None:
        """Ends the thread and every connection it has."""
        if self._thread is not None:
            self._thread.close()
        while self._connections:
            self._connections.pop().close()

    def take(self, channel: Channel) -> None:
        """Takes a connection over from the loop that accepted it; nothing may have been received on it yet."""
        if self._thread is None or self._thread.loop.is_closed():
            return
        connection = socket.socket(fileno=os.dup(channel.fileno()))
        self._connections.add(connection)
        self._thread.call(self._begin, connection, channel.peer)

    # --- on the thread ------------------------------------------------------------------------------------

    def _begin(self, connection: socket.socket, peer: PeerInfo) -> None:
        old = self._tasks.get(peer.incarnation)
        if old is not None:
            old.cancel()
        task = self._tasks[peer.incarnation] = asyncio.create_task(self._serve(connection, peer))
        task.add_done_callback(lambda done: self._ended(peer.incarnation, connection, done))

    def _ended(self, incarnation: str, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._connections.discard(connection)
        connection.close()
        if self._tasks.get(incarnation) is task:
            del self._tasks[incarnation]

    async def _serve(self, connection: socket.socket, peer: PeerInfo) -> None:
        channel = await adopt(connection, peer=peer, decode=LeaseAsk)
        try:
            channel.send_nowait(LeaseReady())
            while True:
                ask = await channel.recv()
                granter = self._granter_of(peer.incarnation)
                if granter is None:
                    return
                channel.send_nowait(granter.on_ask(ask, self._clock_ns))
        except KopirError as error:
            logger.info("lease_line_down worker=%s error=%s", peer.peer_id, error)
        finally:
            channel.abort()
