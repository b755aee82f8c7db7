"""Connections that the lease thread is handed are closed by somebody, however early it ends."""

from __future__ import annotations

import asyncio
import os
import socket

from cluster.ingress.lease_desk import LeaseDesk
from kvstore.net.handshake import PeerInfo
from kvstore.net.host import boottime_ns, host_identity, new_incarnation


class _Accepted:
    """What the desk takes from the loop that accepted a connection."""

    def __init__(self, end: socket.socket, name: str) -> None:
        self._end = end
        self.peer = PeerInfo(
            role="lease", peer_id=name, incarnation=new_incarnation(), pid=os.getpid(), host_identity=host_identity()
        )

    def fileno(self) -> int:
        return self._end.fileno()


def test_a_desk_that_closes_at_once_keeps_no_connection() -> None:
    """The thread stands still while it is handed two connections, and closes before it could serve either."""
    desk = LeaseDesk(lambda _: None, clock_ns=boottime_ns)
    pairs = [socket.socketpair() for _ in range(3)]
    desk.start()
    accepted = [_Accepted(near, f"decode-{index}") for index, (near, _) in enumerate(pairs)]
    for each in accepted[:2]:
        desk.take(each)  # type: ignore[arg-type]
    desk.close()
    desk.take(accepted[2])  # type: ignore[arg-type]
    for near, far in pairs:
        near.close()
        far.settimeout(5)
        # The end of the stream: nobody holds the other end any more. LeaseReady may come before it.
        while far.recv(4096):
            pass
        far.close()


def test_a_second_connection_of_a_worker_ends_its_first() -> None:
    """Even one that had not begun to be served."""

    async def hand_over() -> None:
        desk = LeaseDesk(lambda _: None, clock_ns=boottime_ns)
        near, far = socket.socketpair()
        other_near, other_far = socket.socketpair()
        first, second = _Accepted(near, "decode-0"), _Accepted(other_near, "decode-0")
        second.peer = first.peer
        for each in (first, second):
            desk._connections.add(connection := socket.socket(fileno=os.dup(each.fileno())))
            desk._begin(connection, each.peer)
        near.close()
        far.setblocking(False)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(5):
            while await loop.sock_recv(far, 4096):
                pass
        other_near.close()
        far.close()
        other_far.close()
        async with asyncio.timeout(5):
            while desk._connections:
                await asyncio.sleep(0.001)

    asyncio.run(hand_over())
