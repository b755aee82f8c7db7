"""The controller: starts directory, store node and workers, replaces the dead, tells ingresses who is there.

Owns the membership (soft state). Watches each process by one call that never returns while it lives, so that a
death is seen when it happens and not at the next poll. Never sees requests, tokens or KV.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec
import ray
from ray.exceptions import RayActorError

from cluster.actors import directory, store, worker
from cluster.actors.calls import quiet, until_dead, until_died
from cluster.actors.worker_changes import START_DEADLINE_S, STOP_DEADLINE_S, WorkerChanges
from cluster.core.drain import DrainWatch
from cluster.core.membership import Membership
from cluster.view import ClusterPlan, ClusterView, DirectoryAddress, DrainReport, StoreAddress, WorkerView
from kvstore.core.identity import Fingerprint, differences
from kvstore.net.host import new_incarnation
from workers.spec import DecodeAddress, IngressAddress, WorkerJoin, WorkerSpec

logger = logging.getLogger(__name__)

CONTROLLER_NAME = "kopir-controller"
NAMESPACE = "kopir"
WATCH_DEADLINE_S = 10.0
RESTART_PAUSE_S, RESTART_PAUSE_S_MAX = 0.2, 5.0
ACTOR_OPTIONS: dict[str, Any] = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": 256, "num_cpus": 0}


class _Life:
    """One running worker process."""

    def __init__(self, spec: WorkerSpec, actor: Any) -> None:
        self.spec = spec
        self.actor = actor
        self.join: WorkerJoin | None = None


class ControllerProcess(WorkerChanges):
    """One per cluster."""

    def __init__(self, plan: ClusterPlan, secret: bytes) -> None:
        self._plan = plan
        self._secret = secret
        self._membership = Membership()
        self._lives: dict[str, _Life] = {}
        self._ingresses: dict[str, IngressAddress] = {}
        self._directory: Any | None = None
        self._directory_address: DirectoryAddress | None = None
        self._store: Any | None = None
        self._store_address: StoreAddress | None = None
        self._fingerprint: Fingerprint | None = None
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._drains = DrainWatch()
        self._stops_at_s: float | None = None
        self._num_seats: int | None = None
        self._change_lock = asyncio.Lock()

    # --- start and stop -----------------------------------------------------------------------------------

    async def start(self) -> ClusterView:
        """Starts everything of the plan; returns once each worker is ready or refused.

        Raises: what a worker or the store node raised while starting (for example EnvironmentProblem).
        """
        if self._plan.store is not None:
            await self._start_directory()
            await self._start_store()
        await asyncio.gather(*(self._bring_up(self._new_life(spec)) for spec in self._plan.workers))
        return self._view()

    async def drain(self, drain_s: float) -> bool:
        """Lets nobody in any more. Returns once no request is open (True) or after ``drain_s`` seconds (False)."""
        self._stops_at_s = time.monotonic() + drain_s
        self._membership.version += 1
        version = self._membership.version
        await self._notify()
        return await self._wait_until(lambda: self._drains.is_quiet(version), drain_s)

    async def drain_report(self, report: DrainReport) -> None:
        """Takes what an ingress still has."""
        self._drains.told(report.ingress, version=report.version, num_open=report.num_open, busy=report.busy)
        await self._notify()

    async def _wait_until(self, is_so: Callable[[], bool], deadline_s: float) -> bool:
        """Returns True once something is so, False when it is not within the deadline. Asked at each change."""
        async with self._changed:
            with suppress(TimeoutError):
                async with asyncio.timeout(deadline_s):
                    await self._changed.wait_for(is_so)
        return is_so()

    async def stop(self) -> None:
        """Stops workers, store node and directory; bounded by ``STOP_DEADLINE_S``."""
        self._stopping = True
        actors = [life.actor for life in self._lives.values()]
        actors += [actor for actor in (self._store, self._directory) if actor is not None]
        # A worker that still starts has nothing to put in order, and would answer only once it is up.
        starting = [life.actor for life in self._lives.values() if life.join is None]
        stops = [asyncio.ensure_future(quiet(actor.stop.remote())) for actor in actors if actor not in starting]
        if stops:
            await asyncio.wait(stops, timeout=STOP_DEADLINE_S)
        for actor in actors:
            ray.kill(actor, no_restart=True)

    # --- directory ----------------------------------------------------------------------------------------

    async def _start_directory(self) -> None:
        """Starts a directory, and lets the store node announce to it."""
        assert self._plan.store is not None
        actor = directory.DirectoryActor.options(**directory.ACTOR_OPTIONS).remote(new_incarnation(), self._secret)
        address: DirectoryAddress = await actor.start.remote(self._plan.store.bind_host)
        self._directory, self._directory_address = actor, address
        self._spawn(self._keep_up("directory", actor, self._start_directory))
        self._membership.version += 1
        await self._notify()
        await self._introduce_store()

    async def _introduce_store(self) -> None:
        if self._store is not None and self._directory_address is not None:
            address = self._directory_address
            await quiet(self._store.set_directory.remote(address.host, address.port))

    async def _keep_up(self, what: str, actor: Any, start: Callable[[], Awaitable[None]]) -> None:
        """Waits for the end of the directory or of the store node, then starts another, until one is up."""
        await until_dead(actor)
        pause_s = RESTART_PAUSE_S
        while not self._stopping:
            logger.warning("%s_lost restarting=true", what)
            await asyncio.sleep(pause_s)
            try:
                async with asyncio.timeout(START_DEADLINE_S):
                    await start()
                return
            except Exception as error:
                # Whatever keeps it from coming up (no memory, no disk, no Ray for a moment) may be over next time.
                pause_s = min(2 * pause_s, RESTART_PAUSE_S_MAX)
                logger.error("%s_start_failed error=%s", what, error or type(error).__name__)

    # --- store node ---------------------------------------------------------------------------------------

    async def _start_store(self) -> None:
        """Starts a store node, and names it to every worker."""
        assert self._plan.store is not None
        spec = msgspec.structs.replace(self._plan.store, incarnation=new_incarnation())
        actor = store.StoreActor.options(**store.ACTOR_OPTIONS).remote(spec, self._secret)
        self._store_address = address = await actor.start.remote()
        self._store = actor
        self._spawn(self._keep_up("store", actor, self._start_store))
        await self._introduce_store()
        lives = [life for life in self._lives.values() if life.join is not None]
        await asyncio.gather(*(quiet(life.actor.set_store.remote(address.host, address.port)) for life in lives))

    # --- workers ------------------------------------------------------------------------------------------

    def _new_life(self, template: WorkerSpec) -> _Life:
        """Begins a new process in the slot of ``template``."""
        spec = msgspec.structs.replace(
            template,
            incarnation=new_incarnation(),
            store_host=self._store_address.host if self._store_address else None,
            store_port=self._store_address.port if self._store_address else None,
        )
        env = self._plan.thread_environment.get(spec.role, {})
        actor = worker.WorkerActor.options(runtime_env={"env_vars": env}, **worker.ACTOR_OPTIONS).remote(
            spec, self._secret
        )
        life = self._lives[spec.worker_id] = _Life(spec, actor)
        self._membership.starting(spec.worker_id, spec.role, spec.incarnation)
        return life

    async def _bring_up(self, life: _Life) -> None:
        """Takes a life from its start to ready or refused; one that dies on the way is replaced.

        Raises: what it raised while starting; TimeoutError.
        """
        await self._notify()
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                await self._join(life)
                await self._admit(life)
        except RayActorError:
            await self._discard(life)

    async def _join(self, life: _Life) -> None:
        """Waits until a new process is up, and watches it from then on."""
        life.join = await life.actor.start.remote()
        assert life.join is not None
        self._membership.joined(life.spec.worker_id, life.spec.incarnation, pid=life.join.pid)
        self._spawn(self._watch_worker(life))
        await self._notify()

    async def _replace(self, template: WorkerSpec) -> None:
        """Starts another life. One that does not come up, for whatever reason, is one more loss of its slot."""
        life = self._new_life(template)
        try:
            await self._bring_up(life)
        except Exception as error:
            logger.error("worker_start_failed worker=%s error=%s", life.spec.worker_id, error or type(error).__name__)
            await self._discard(life)

    async def _discard(self, life: _Life) -> None:
        """Ends a life that did not come up. It was never given anything, so its death is not waited for any longer."""
        ray.kill(life.actor, no_restart=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_DEADLINE_S):
                await until_died(life.actor)
        await self._worker_lost(life)

    async def _admit(self, life: _Life) -> None:
        """Compares fingerprints, connects the worker to ingresses and peers, then lets it serve."""
        assert life.join is not None
        fingerprint = Fingerprint.from_dict(life.join.fingerprint)
        if self._fingerprint is None:
            self._fingerprint = fingerprint
        differing = tuple(differences(self._fingerprint, fingerprint))
        if differing:
            self._membership.refused(life.spec.worker_id, life.spec.incarnation, differing)
            logger.warning("worker_refused worker=%s fields=%s", life.spec.worker_id, ",".join(differing))
            await self._notify()
            return
        for address in self._ingresses.values():
            await life.actor.add_ingress.remote(address)
        await self._warm_pairs(life)
        self._membership.ready(life.spec.worker_id, life.spec.incarnation)
        await self._notify()

    async def _warm_pairs(self, life: _Life) -> None:
        """Opens the KV link of every pair this life is part of, so that no request pays for it."""
        joined = [other for other in self._lives.values() if other.join is not None and other is not life]
        pairs = []
        if life.spec.role == "prefill":
            pairs = [(life, other) for other in joined if other.spec.role == "decode"]
        elif life.spec.role == "decode":
            pairs = [(other, life) for other in joined if other.spec.role == "prefill"]
        for prefill, decode in pairs:
            await quiet(prefill.actor.warm_decode_peer.remote(_decode_address(decode)))

    async def _watch_worker(self, life: _Life) -> None:
        await until_dead(life.actor)
        await self._worker_lost(life)

    async def _worker_lost(self, life: _Life) -> None:
        if self._stopping:
            return
        spec = life.spec
        if self._is_leaving(life):
            await self._removed(life)
            return
        slot = self._membership.lost(spec.worker_id, spec.incarnation, time.monotonic_ns())
        if slot is None:
            return
        logger.warning("worker_lost worker=%s incarnation=%s", spec.worker_id, spec.incarnation)
        await self._notify()
        others = [other for other in self._lives.values() if other is not life and other.join is not None]
        await asyncio.gather(*(quiet(other.actor.peer_gone.remote(spec.incarnation)) for other in others))
        if slot.restart_at_ns is None:
            logger.error("worker_given_up worker=%s", spec.worker_id)
            return
        await asyncio.sleep(max(0, slot.restart_at_ns - time.monotonic_ns()) / 1e9)
        if not self._stopping and self._membership.slots.get(spec.worker_id) == slot:
            self._spawn(self._replace(spec))

    # --- ingresses and people -----------------------------------------------------------------------------

    async def register_ingress(self, address: IngressAddress, actor: Any) -> ClusterView:
        """Lets every worker dial a new ingress, until ``actor``, which it runs in, is dead. Returns the membership."""
        self._ingresses[address.incarnation] = address
        self._drains.joined(address.incarnation)
        self._spawn(self._watch_ingress(address.incarnation, actor))
        lives = [life for life in self._lives.values() if life.join is not None]
        await asyncio.gather(*(quiet(life.actor.add_ingress.remote(address)) for life in lives))
        return self._view()

    async def _watch_ingress(self, incarnation: str, actor: Any) -> None:
        await until_died(actor)
        if not self._stopping:
            await self.forget_ingress(incarnation)

    async def forget_ingress(self, incarnation: str) -> None:
        """An ingress is gone: workers stop dialling it, and end what they still do for it."""
        if self._ingresses.pop(incarnation, None) is None:
            return
        logger.warning("ingress_lost incarnation=%s", incarnation)
        self._drains.left(incarnation)
        await self._notify()
        lives = [life for life in self._lives.values() if life.join is not None]
        await asyncio.gather(*(quiet(life.actor.remove_ingress.remote(incarnation)) for life in lives))

    async def watch(self, after_version: int) -> ClusterView:
        """Returns the membership once it is newer than ``after_version``, or after ``WATCH_DEADLINE_S``."""
        await self._wait_until(lambda: self._membership.version > after_version, WATCH_DEADLINE_S)
        return self._view()

    async def ping(self) -> None:
        """Answers: the proof that the controller lives."""

    async def status(self) -> dict[str, Any]:
        """Returns the controller's, the directory's and the store node's part of ``kopir status --json``."""
        nodes: list[dict[str, Any]] = []
        if self._store is not None:
            answer = await quiet(self._store.status.remote())
            if answer:
                nodes.append(answer)
        directory_pid = None if self._directory_address is None else self._directory_address.pid
        known = await quiet(self._directory.status.remote()) if self._directory is not None else None
        return {
            "controller": {"pid": os.getpid()},
            "directory": known or {"pid": directory_pid},
            "store": nodes,
            "ingress": [{"id": a.ingress_id, "pid": a.pid} for a in self._ingresses.values()],
        }

    def _view(self) -> ClusterView:
        views = []
        for name in sorted(self._membership.slots):
            slot = self._membership.slots[name]
            life = self._lives[name]
            views.append(
                WorkerView(
                    worker_id=name,
                    role=slot.role,
                    state=slot.state.value,
                    incarnation=slot.incarnation,
                    pid=slot.pid,
                    node=life.spec.node,
                    host_identity=life.join.host_identity if life.join else "",
                    pool_blocks=life.spec.pool_blocks,
                    refused_fields=slot.refused_fields,
                )
            )
        return ClusterView(
            version=self._membership.version,
            workers=tuple(views),
            gone=tuple(self._membership.gone),
            directory=self._directory_address,
            stops_in_s=None if self._stops_at_s is None else max(0.0, self._stops_at_s - time.monotonic()),
            num_seats=self._num_seats,
        )

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("duty_failed task=%s", task.get_coro(), exc_info=error)


def _decode_address(life: _Life) -> DecodeAddress:
    assert life.join is not None
    return DecodeAddress(
        worker_id=life.join.worker_id,
        incarnation=life.join.incarnation,
        kv_host=life.join.kv_host,
        kv_port=life.join.kv_port,
    )


# The library's decorator is untyped, so it is applied here and not above the class.
ControllerActor: Any = ray.remote(ControllerProcess)
