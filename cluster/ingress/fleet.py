"""The workers as an ingress knows them: membership, links, last answers, and who is proved dead.

Owns the newest view, the link and last status of each life, and the watches of processes on this host. A worker is
usable while the view calls it ready and its link is up. ``/readyz`` rests on answers that workers gave from their
engine loops a moment ago, not on open sockets.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from cluster.core.attempt_events import WorkerRef
from cluster.ingress.api.backend import ReadyState
from cluster.ingress.relay import WorkerLink
from cluster.view import ClusterView, WorkerView
from kvstore.core.messages import Status, StatusAsk
from kvstore.net.host import ProcessWatch

logger = logging.getLogger(__name__)

PROBE_EVERY_S = 1.0
PROOF_VALID_S = 30.0
"""A worker in a long prefill chunk answers late without being dead."""
STATUS_DEADLINE_S = 5.0


@dataclass(slots=True)
class _Member:
    link: WorkerLink
    watch: ProcessWatch | None
    answered_s: float | None = None
    waiters: dict[int, asyncio.Future[Status]] = field(default_factory=dict)


class Fleet:
    """Everything an ingress knows about workers. Lives on the ingress's event loop."""

    def __init__(self, host_identity: str, *, on_gone: Callable[[str], None]) -> None:
        self._host_identity = host_identity
        self._on_gone = on_gone
        self._members: dict[str, _Member] = {}
        self._nonces = itertools.count(1)
        self._gone: set[str] = set()
        self.view = ClusterView(version=-1, workers=(), gone=())

    # --- who is there -----------------------------------------------------------------------------------------

    def set_view(self, view: ClusterView) -> None:
        """Takes a newer membership; an older one is ignored."""
        if view.version <= self.view.version:
            return
        self.view = view
        for incarnation in view.gone:
            self._mark_gone(incarnation)

    def link_up(self, link: WorkerLink) -> None:
        """A worker dialled in."""
        old = self._members.pop(link.incarnation, None)
        if old is not None:
            self._unwatch(old)
        member = _Member(link, self._watch(link))
        self._members[link.incarnation] = member
        link.send(StatusAsk(nonce=next(self._nonces)))

    def link_down(self, link: WorkerLink) -> None:
        """A connection ended. The process watch stays: it may yet prove a death."""
        member = self._members.get(link.incarnation)
        if member is not None and member.link is link:
            member.answered_s = None

    def on_status(self, status: Status) -> None:
        """A worker's engine loop answered."""
        member = self._members.get(status.incarnation)
        if member is None:
            return
        member.answered_s = time.monotonic()
        waiter = member.waiters.pop(status.nonce, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(status)

    def usable(self) -> list[tuple[WorkerRef, str, int]]:
        """Returns (life, role, pool blocks) of every worker that may get work now."""
        return [
            (
                WorkerRef(worker_id=w.worker_id, incarnation=w.incarnation, pid=w.pid or 0, node=w.node),
                w.role,
                w.pool_blocks,
            )
            for w in self.view.workers
            if w.state == "ready" and self._is_up(w.incarnation)
        ]

    def ready(self) -> ReadyState:
        """Says whether a pair has proved in the last ``PROOF_VALID_S`` that it turns."""
        now_s = time.monotonic()
        roles = set()
        detail: dict[str, Any] = {}
        for ref, role, _ in self.usable():
            answered_s = self._members[ref.incarnation].answered_s
            detail[ref.worker_id] = None if answered_s is None else round(now_s - answered_s, 3)
            if answered_s is not None and now_s - answered_s <= PROOF_VALID_S:
                roles.add(role)
        if "combined" in roles or {"prefill", "decode"} <= roles:
            return ReadyState(True, "", {"answered_s_ago": detail})
        return ReadyState(False, "no pair of workers has proved to be alive yet", {"answered_s_ago": detail})

    # --- asking -------------------------------------------------------------------------------------------------

    async def probe_for_ever(self) -> None:
        """Keeps the answers behind ``ready`` fresh."""
        while True:
            await asyncio.sleep(PROBE_EVERY_S)
            for member in tuple(self._members.values()):
                if member.link is not None and self._is_up(member.link.incarnation):
                    member.link.send(StatusAsk(nonce=next(self._nonces)))

    async def statuses(self) -> list[dict[str, Any]]:
        """Asks every worker now; one that does not answer in time is listed with what the view says."""
        # The membership may change while they are asked.
        workers = self.view.workers
        answers = await asyncio.gather(*(self._ask(worker.incarnation) for worker in workers))
        return [_entry(worker, answer) for worker, answer in zip(workers, answers, strict=True)]

    async def _ask(self, incarnation: str) -> Status | None:
        member = self._members.get(incarnation)
        if member is None or not self._is_up(incarnation):
            return None
        nonce = next(self._nonces)
        waiter: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        member.waiters[nonce] = waiter
        member.link.send(StatusAsk(nonce=nonce))
        try:
            async with asyncio.timeout(STATUS_DEADLINE_S):
                return await waiter
        except TimeoutError:
            return None
        finally:
            member.waiters.pop(nonce, None)

    # --- proofs of death ----------------------------------------------------------------------------------------

    def _watch(self, link: WorkerLink) -> ProcessWatch | None:
        """Watches the process itself where it runs on this host: a pidfd tells at once and cannot be wrong."""
        if link.host_identity != self._host_identity:
            return None
        try:
            watch = ProcessWatch(link.pid)
        except ProcessLookupError:
            asyncio.get_running_loop().call_soon(self._mark_gone, link.incarnation)
            return None
        asyncio.get_running_loop().add_reader(watch.fileno(), self._mark_gone, link.incarnation)
        return watch

    def _mark_gone(self, incarnation: str) -> None:
        member = self._members.pop(incarnation, None)
        if member is not None:
            self._unwatch(member)
        if incarnation in self._gone:
            return
        self._gone.add(incarnation)
        logger.info("worker_gone incarnation=%s", incarnation)
        self._on_gone(incarnation)

    def _unwatch(self, member: _Member) -> None:
        if member.watch is not None:
            asyncio.get_running_loop().remove_reader(member.watch.fileno())
            member.watch.close()
            member.watch = None

    def _is_up(self, incarnation: str) -> bool:
        member = self._members.get(incarnation)
        return member is not None and not member.link.is_closing

    def close(self) -> None:
        """Ends every watch."""
        for member in self._members.values():
            self._unwatch(member)


def _entry(worker: WorkerView, answer: Status | None) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "id": worker.worker_id,
        "role": worker.role,
        "pid": worker.pid,
        "node": worker.node,
        "incarnation": worker.incarnation,
        "state": worker.state,
        "pool_blocks": worker.pool_blocks,
        "used_blocks": None,
        "quarantined_blocks": None,
        "cached_blocks": None,
        "running": None,
        "waiting": None,
    }
    if worker.refused_fields:
        entry["refused_fields"] = list(worker.refused_fields)
    if answer is not None:
        fields = msgspec.to_builtins(answer)
        entry |= {
            name: fields[name]
            for name in (
                "used_blocks",
                "quarantined_blocks",
                "cached_blocks",
                "running",
                "waiting",
                "leases",
                "counters",
            )
        }
    return entry
