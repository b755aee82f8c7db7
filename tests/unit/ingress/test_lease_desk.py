"""The lease desk: takes connections off the ingress's loop, whichever kind of loop that is, and answers beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvloop

from cluster.ingress.relay import RelayServer, WorkerLink
from kvstore.core.messages import LeaseAsk, LeaseGrant, LeaseReady, ToWorker
from kvstore.errors import PeerLost
from kvstore.net.channel import Channel, connect
from kvstore.net.handshake import LEASE_ROLE, PeerInfo
from kvstore.net.host import boottime_ns, host_identity
from workers.loop_thread import LoopThread

SECRET = b"0123456789abcdef0123456789abcdef"
DEADLINE_S = 10.0
LEASE_MS = 1000


class Sink:
    """Hears nothing that matters here."""

    def on_link_up(self, link: WorkerLink) -> None: ...

    def on_link_down(self, link: WorkerLink) -> None: ...

    def on_message(self, link: WorkerLink, message: Any) -> None: ...


def make_peer(role: str) -> PeerInfo:
    return PeerInfo(role=role, peer_id="decode-0", incarnation="life-1", pid=1, host_identity=host_identity())


@pytest.fixture
def worker() -> Iterator[LoopThread]:
    thread = LoopThread("test-worker")
    yield thread
    thread.close()


async def dial(relay: RelayServer, role: str, decode: Any) -> Channel:
    assert relay._server is not None
    return await connect("127.0.0.1", relay._server.port, secret=SECRET, me=make_peer(role), decode=decode)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_asks_are_answered_while_the_loop_stands_still(
    new_loop: Callable[[], asyncio.AbstractEventLoop], worker: LoopThread
) -> None:
    """The loop that accepted the connection runs nothing, and a grant comes; what it revoked is not granted."""

    async def run() -> None:
        relay = RelayServer(
            me=make_peer("ingress"), secret=SECRET, lease_ms=LEASE_MS, clock_ns=boottime_ns, sink=Sink()
        )
        await relay.start("127.0.0.1")
        on_worker = asyncio.to_thread(worker.run, _open(relay), deadline_s=DEADLINE_S)
        link, lines = await on_worker
        granter = relay.granter("life-1")
        for attempt in ("a", "b"):
            granter.dispatch(attempt, 1, now_ns=boottime_ns())
        granter.revoke("b", 1)
        # Blocks this loop until the worker has its answer.
        grant = worker.run(_ask(lines, 7), deadline_s=DEADLINE_S)
        assert grant == LeaseGrant(nonce=7, duration_ms=LEASE_MS, granted=(("a", 1),))
        assert granter.lapse(boottime_ns()) == [], "it has just asked"
        # A life that is proved over gets no answer, and its connection ends.
        relay.forget("life-1")
        with pytest.raises(PeerLost):
            worker.run(_ask(lines, 8), deadline_s=DEADLINE_S)
        await asyncio.to_thread(worker.run, _close(link, lines), deadline_s=DEADLINE_S)
        await relay.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())


async def _open(relay: RelayServer) -> tuple[Channel, Channel]:
    link = await dial(relay, "decode", ToWorker)
    line = await dial(relay, LEASE_ROLE, LeaseGrant | LeaseReady)
    assert await line.recv() == LeaseReady()
    return link, line


async def _ask(line: Channel, nonce: int) -> Any:
    line.send_nowait(LeaseAsk(nonce=nonce, attempts=(("a", 1), ("b", 1))))
    return await line.recv()


async def _close(*channels: Channel) -> None:
    for channel in channels:
        channel.abort()
