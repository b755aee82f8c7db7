"""The directory as a process: nodes announce to it and ask it over authenticated channels.

Owns the ``Directory``, the addresses of its nodes and a timer. It dies without harm: nodes dial again, and announce
everything to whoever answers. Works the same in a Ray actor, beside a store node without Ray, and in a test.

Life cycle: made -> ``start`` -> serving -> ``close``; once. Loop and clock are arguments.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from kvstore.core.directory import Directory, Heard, Place, TierChange
from kvstore.core.ids import BlockHash
from kvstore.errors import KopirError
from kvstore.net.channel import Channel, ChannelServer
from kvstore.net.handshake import PeerInfo
from kvstore.net.host import boottime_ns, host_identity
from kvstore.store.directory_messages import (
    Announce,
    AnnounceAll,
    JoinDirectory,
    Leave,
    Locate,
    Located,
    PlaceInfo,
    Renew,
    Run,
    Runs,
    Tiers,
    ToDirectory,
    Told,
)

logger = logging.getLogger(__name__)

DEFAULT_LEASE_MS = 3_000
MAX_CONNECTIONS = 4096
SWEEP_BLOCKS_PER_STEP = 4_096
CLOSE_DEADLINE_S = 5.0


class DirectoryServer:
    """One directory. Belongs to one event loop."""

    def __init__(
        self,
        *,
        me: PeerInfo,
        secret: bytes,
        loop: asyncio.AbstractEventLoop,
        clock_ns: Callable[[], int] = boottime_ns,
        lease_ms: int = DEFAULT_LEASE_MS,
    ) -> None:
        self._me = me
        self._loop = loop
        self._clock_ns = clock_ns
        self._directory = Directory(lease_ns=lease_ms * 1_000_000)
        self._lease_ms = lease_ms
        self._tick_s = lease_ms / 1000 / 20
        self._server = ChannelServer(secret=secret, me=me, decode=ToDirectory, on_channel=self._on_channel)
        self._addresses: dict[str, tuple[str, int]] = {}
        self._num_connections = 0
        self._timer: asyncio.TimerHandle | None = None

    async def start(self, host: str, port: int = 0) -> tuple[str, int]:
        """Listens; returns (host, port). Raises: OSError if the address is taken."""
        await self._server.start(host, port)
        self._timer = self._loop.call_later(self._tick_s, self._on_timer)
        logger.info("directory_ready host=%s port=%d", self._server.host, self._server.port)
        return self._server.host, self._server.port

    async def close(self) -> None:
        """Ends every connection."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await self._server.close()

    def stat(self) -> dict[str, Any]:
        """Returns what the directory knows; ``nodes``: name -> tier -> blocks."""
        return {
            "incarnation": self._me.incarnation,
            "blocks": len(self._directory),
            "nodes": {name: self._directory.num_blocks_of(name) for name in self._directory.nodes()},
            "counters": {
                **self._directory.counters.to_dict(),
                "rejected_connections": self._server.rejected,
                "connections": self._num_connections,
            },
        }

    # --- inside -------------------------------------------------------------------------------------------

    async def _on_channel(self, channel: Channel) -> None:
        if self._num_connections >= MAX_CONNECTIONS:
            return
        self._num_connections += 1
        try:
            while True:
                reply = self._handle(channel.peer, await channel.recv())
                if reply is not None:
                    await channel.send(reply)
        except KopirError as error:
            logger.info("directory_peer_gone peer=%s error=%s", channel.peer.peer_id, error)
        finally:
            self._num_connections -= 1

    def _handle(self, peer: PeerInfo, message: ToDirectory) -> Told | Located | None:
        """Carries one message out; returns its answer, if it has one."""
        node, life, now_ns = peer.peer_id, peer.incarnation, self._clock_ns()
        directory = self._directory
        match message:
            case JoinDirectory():
                heard = directory.join(node, life, sequence=message.sequence, now_ns=now_ns)
                if heard is not Heard.REFUSED:
                    self._addresses[life] = (message.host, message.port)
                self._forget_addresses()
                logger.info("directory_join node=%s incarnation=%s heard=%s", node, life, heard.value)
                return self._told(node, heard)
            case Renew():
                return self._told(node, directory.renew(node, life, now_ns=now_ns))
            case Announce():
                changes = _changes(message.changes)
                heard = directory.announce(node, life, sequence=message.sequence, changes=changes, now_ns=now_ns)
                return None if heard in (Heard.OK, Heard.WAITING) else self._told(node, heard)
            case AnnounceAll():
                heard = directory.snapshot(
                    node, life, sequence=message.sequence, part=message.part, is_last=message.is_last,
                    changes=_changes(message.changes), now_ns=now_ns,
                )  # fmt: skip
                return None if heard is Heard.OK else self._told(node, heard)
            case Leave():
                directory.leave(node, life)
                self._forget_addresses()
            case Locate():
                return self._locate(node, message)
        return None

    def _told(self, node: str, heard: Heard) -> Told:
        # A node that owes a snapshot has been told so, and is told again when it renews.
        assert heard is not Heard.WAITING, node
        nodes = self._directory.nodes()
        return Told(heard=heard.value, num_others=len(nodes) - (node in nodes), lease_ms=self._lease_ms)

    def _locate(self, node: str, ask: Locate) -> Located:
        numbers: dict[Place, int] = {}
        prefixes = []
        for prefix in ask.prefixes:
            found = self._directory.match([BlockHash(block_hash) for block_hash in prefix], without=node)
            prefixes.append(_runs(found, numbers))
        places = tuple(PlaceInfo(*place, *self._addresses[place.incarnation]) for place in numbers)
        return Located(n=ask.n, places=places, prefixes=tuple(prefixes))

    def _on_timer(self) -> None:
        """Forgets who is silent, and takes some of the entries of the dead out."""
        late = self._directory.expire(self._clock_ns())
        for name in late:
            logger.warning("directory_node_expired node=%s", name)
        if late:
            self._forget_addresses()
        delay_s = 0.0 if self._directory.sweep(SWEEP_BLOCKS_PER_STEP) else self._tick_s
        self._timer = self._loop.call_later(delay_s, self._on_timer)

    def _forget_addresses(self) -> None:
        lives = set(self._directory.nodes().values())
        for life in [life for life in self._addresses if life not in lives]:
            del self._addresses[life]


class DirectoryHost:
    """A directory on a thread of its own, for a process that is driven by calls. Methods: from any thread."""

    def __init__(
        self,
        *,
        incarnation: str,
        secret: bytes,
        lease_ms: int = DEFAULT_LEASE_MS,
        clock_ns: Callable[[], int] = boottime_ns,
    ) -> None:
        me = PeerInfo(
            role="directory",
            peer_id="directory",
            incarnation=incarnation,
            pid=os.getpid(),
            host_identity=host_identity(),
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="directory", daemon=True)
        self._server = DirectoryServer(me=me, secret=secret, loop=self._loop, clock_ns=clock_ns, lease_ms=lease_ms)
        self._stopped = threading.Event()

    def start(self, bind_host: str, port: int = 0) -> tuple[str, int]:
        """Listens; returns (host, port). Raises: OSError when the address is taken."""
        self._thread.start()
        try:
            return asyncio.run_coroutine_threadsafe(self._server.start(bind_host, port), self._loop).result()
        except BaseException:
            self.close()
            raise

    def status(self) -> dict[str, Any]:
        """Returns what ``DirectoryServer.stat`` does; empty once closed."""
        if self._stopped.is_set():
            return {}
        return asyncio.run_coroutine_threadsafe(self._stat(), self._loop).result(CLOSE_DEADLINE_S)

    def wait_until_stopped(self) -> str:
        """Blocks until ``close``; returns why the directory ended."""
        self._stopped.wait()
        return "closed"

    def close(self) -> None:
        """Ends every connection and the thread. Safe to call twice."""
        if self._stopped.is_set():
            return
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._server.close(), self._loop).result(CLOSE_DEADLINE_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_DEADLINE_S)
        if not self._thread.is_alive():
            self._loop.close()
        self._stopped.set()

    async def _stat(self) -> dict[str, Any]:
        return self._server.stat()


def _changes(parts: Tiers) -> list[TierChange]:
    return [TierChange(part.tier, part.added, part.removed) for part in parts]  # type: ignore[arg-type]


def _runs(found: Sequence[tuple[Place, ...]], numbers: dict[Place, int]) -> Runs:
    """Returns neighbours with the same places as one run; gives places that have no number yet the next one."""
    runs = []
    for where, blocks in groupby(found):
        indexes = tuple(numbers.setdefault(place, len(numbers)) for place in where)
        runs.append(Run(sum(1 for _ in blocks), indexes))
    return tuple(runs)
