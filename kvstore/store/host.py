"""A store node with its slab on a thread of its own, for a process that is driven by calls (a Ray actor).

Owns the slab, the event loop and the thread. ``close`` unlinks the slab; if the process is killed instead,
the next node that starts on this host removes it.

Life cycle: made -> ``start`` -> serving -> ``close``; once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvstore.core.announcer import Announcer
from kvstore.core.disk_slots import DiskIndex
from kvstore.core.event_log import Listeners
from kvstore.core.eviction import DEFAULT_POLICY, make_policy
from kvstore.core.ids import TenantId
from kvstore.core.quota import TenantBook
from kvstore.core.slab_index import SlabIndex
from kvstore.errors import BadInput
from kvstore.net.handshake import PeerInfo
from kvstore.net.host import boottime_ns
from kvstore.net.host import host_identity as resolve_host_identity
from kvstore.store.disk.file import open_disk
from kvstore.store.disk.layout import num_slots_in
from kvstore.store.disk.tier import DiskTier
from kvstore.store.event_feed import EventFeed
from kvstore.store.node import StoreNode
from kvstore.store.slab import SHM_DIR, Slab, create_slab

CLOSE_DEADLINE_S = 5.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DiskPlan:
    """Where the disk tier lies and how large its file is. ``sync``: blocks survive a power cut, not only a crash."""

    folder: Path
    disk_bytes: int
    sync: bool = True


class StoreHost:
    """One store node and everything it needs. Methods may be called from any thread."""

    def __init__(
        self,
        *,
        node: str,
        incarnation: str,
        secret: bytes,
        block_bytes: int,
        num_blocks: int,
        host_identity: str = "auto",
        shm_dir: Path = SHM_DIR,
        clock_ns: Callable[[], int] = boottime_ns,
        quotas: Mapping[TenantId, int] | None = None,
        disk: DiskPlan | None = None,
        eviction: str = DEFAULT_POLICY,
    ) -> None:
        """Allocates nothing yet. ``host_identity`` ``auto``: found out here. ``quotas``: bytes by ``tenant_of(salt)``.

        ``disk``: the tier below the slab; a disk that cannot be used is one event, and the node goes on without it.
        ``eviction``: name of the policy of each tier, one of ``kvstore.core.eviction.POLICIES``.

        Raises: BadInput naming the tenant of a bad quota.
        """
        self._book = TenantBook(quotas)
        self._eviction = eviction
        self._me = PeerInfo(
            role="store",
            peer_id=f"store-{node}",
            incarnation=incarnation,
            pid=os.getpid(),
            host_identity=resolve_host_identity(host_identity),
        )
        self._secret = secret
        self._disk = disk
        self._block_bytes = block_bytes
        self._num_blocks = num_blocks
        self._shm_dir = shm_dir
        self._clock_ns = clock_ns
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"store-{node}", daemon=True)
        self._slab: Slab | None = None
        self._node: StoreNode | None = None
        self._stopped = threading.Event()
        self._close_lock = threading.Lock()

    def start(self, bind_host: str, port: int = 0, *, advertised_host: str | None = None) -> tuple[str, int]:
        """Allocates the slab, opens the disk and listens; returns (host, port). Other nodes dial ``advertised_host``.

        Raises: EnvironmentProblem when shared memory is too small, or when another node has the disk tier's folder;
        OSError when the address is taken.
        """
        assert self._slab is None, "started twice"
        self._slab = create_slab(
            incarnation=self._me.incarnation,
            block_bytes=self._block_bytes,
            num_blocks=self._num_blocks,
            shm_dir=self._shm_dir,
        )
        self._thread.start()
        try:
            announcer = Announcer(needs_snapshot=True)
            events = EventFeed()
            disk, disk_off = self._open_disk(events)
            index = SlabIndex(
                self._num_blocks,
                policy=make_policy(self._eviction, self._num_blocks),
                table=self._slab.table,
                book=self._book,
                block_bytes=self._block_bytes,
                tier_below=disk is not None,
                listener=Listeners(announcer, events),
            )
            self._node = StoreNode(
                self._slab,
                index,
                me=self._me,
                secret=self._secret,
                loop=self._loop,
                clock_ns=self._clock_ns,
                book=self._book,
                disk=disk,
                disk_off=disk_off,
                announcer=announcer,
                events=events,
            )
            started = self._node.start(bind_host, port, advertised_host=advertised_host)
            return asyncio.run_coroutine_threadsafe(started, self._loop).result()
        except BaseException:
            self.close()
            raise

    def _open_disk(self, events: EventFeed) -> tuple[DiskTier | None, str]:
        """Returns the disk tier, or why there is none. Raises: EnvironmentProblem if that is for a person to solve."""
        plan = self._disk
        if plan is None:
            return None, ""
        num_slots = num_slots_in(plan.disk_bytes, self._block_bytes)
        if num_slots < 1:
            raise BadInput("kv.disk_bytes", plan.disk_bytes, f"one block needs {self._block_bytes} bytes and a header")
        try:
            file = open_disk(plan.folder, block_bytes=self._block_bytes, num_slots=num_slots, sync=plan.sync)
        except OSError as error:
            # A cache that cannot be had is no reason to serve nobody.
            logger.error("store_disk_off state=off doing=open folder=%s error=%s", plan.folder, error)
            return None, f"open: {error.strerror or error}"
        index = DiskIndex(
            num_slots,
            policy=make_policy(self._eviction, num_slots),
            book=self._book,
            block_bytes=self._block_bytes,
            recovered=file.recovered,
            listener=events,
        )
        logger.info(
            "store_disk_ready folder=%s slots=%d recovered=%d torn=%d",
            plan.folder, num_slots, len(file.recovered), file.num_torn,
        )  # fmt: skip
        return DiskTier(file, index, loop=self._loop), ""

    def status(self) -> dict[str, Any]:
        """Returns the fields of ``StoreStat``; empty when the node is not up."""
        if self._node is None or self._stopped.is_set():
            return {}
        stat = asyncio.run_coroutine_threadsafe(self._stat(self._node), self._loop).result(CLOSE_DEADLINE_S)
        return {name: value for name, value in stat.items() if name != "n"}

    def set_quotas(self, quotas: Mapping[TenantId, int]) -> None:
        """Replaces the quotas of all tenants, in bytes by ``tenant_of(salt)``. Raises: BadInput."""
        if self._node is not None and not self._stopped.is_set():
            done = asyncio.run_coroutine_threadsafe(self._set_quotas(self._node, quotas), self._loop)
            done.result(CLOSE_DEADLINE_S)

    def set_directory(self, host: str, port: int) -> None:
        """Names the directory that lives now."""
        if self._node is not None and not self._stopped.is_set():
            self._loop.call_soon_threadsafe(self._node.set_directory, host, port)

    def wait_until_stopped(self) -> str:
        """Blocks until ``close``; returns why the node ended."""
        self._stopped.wait()
        return "closed"

    def close(self) -> None:
        """Ends every connection, unlinks the slab, ends the thread. Safe to call twice."""
        with self._close_lock:
            if self._stopped.is_set():
                return
            if self._node is not None:
                asyncio.run_coroutine_threadsafe(self._node.close(), self._loop).result(CLOSE_DEADLINE_S)
            if self._thread.is_alive():
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join(CLOSE_DEADLINE_S)
            if not self._thread.is_alive():
                self._loop.close()
            if self._slab is not None:
                self._slab.close()
            self._stopped.set()

    @staticmethod
    async def _set_quotas(node: StoreNode, quotas: Mapping[TenantId, int]) -> None:
        node.set_quotas(quotas)

    @staticmethod
    async def _stat(node: StoreNode) -> dict[str, Any]:
        stat: dict[str, Any] = msgspec.to_builtins(node.stat())
        return stat
