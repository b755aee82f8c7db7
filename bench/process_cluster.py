"""A cluster whose workers are real processes and whose rest is this process: for measurements and tests that kill.

Owns a store, the request driver of an ingress and the workers, which are forked from a server that has imported
everything, so that a replacement is up in a fraction of a second. No Ray, no HTTP: what a failure costs is measured
and tested without what they add. Does a controller's duties: tells everybody who is gone and who is new.

Life cycle: made -> ``start`` -> ``submit``, ``kill``, ``replace`` ... -> ``close``. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from bench.network import Place, enter
from cluster.config import Config
from cluster.ingress.api.backend import Generation
from cluster.ingress.backend import RelayBackend
from cluster.plan import make_plan
from cluster.view import ClusterView, WorkerView
from kvstore.core.messages import GenerationSpec
from kvstore.net.handshake import PeerInfo
from kvstore.net.host import boottime_ns, host_identity, new_incarnation
from kvstore.store.host import StoreHost
from workers.model.config import read_config
from workers.spec import DecodeAddress, IngressAddress, WorkerJoin, WorkerSpec

START_DEADLINE_S = 60.0
SETTLE_DEADLINE_S = 20.0
_SECRET = b"a secret of one process tree...."
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["workers.worker", "kvstore.transport.ucx"])


@dataclass(slots=True)
class WorkerLife:
    """One worker process."""

    spec: WorkerSpec
    process: Any
    pipe: Connection
    join: WorkerJoin
    turn: asyncio.Lock
    is_gone: bool = False

    async def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the worker; returns its answer, an error's text, or None when the process died."""
        async with self.turn:
            try:
                return await asyncio.to_thread(_ask, self.pipe, (method, arguments))
            except (EOFError, OSError):
                return None


class ProcessCluster:
    """See the module. Workers are named ``prefill-0``, ``decode-0``, ``combined-0`` ... by role and number."""

    def __init__(
        self, config: Config, model: Path, *, address: str = "127.0.0.1", places: Mapping[str, Place] | None = None
    ) -> None:
        """``places``: the host (network namespace) of each worker by name; the others live here, at ``address``.

        Only the workers that live here use the store: a store serves the workers of its own host.
        """
        self.config = config
        self._host = address
        self.places = dict(places or {})
        self.registry = CollectorRegistry()
        self.lives: dict[str, WorkerLife] = {}
        self.gone: list[str] = []
        model_config = read_config(model)
        self.vocab_size = model_config.vocab_size
        self._plan = make_plan(config, model_path=model, model=model_config, cores=os.cpu_count() or 1)
        self._templates = {spec.worker_id: spec for spec in self._plan.workers}
        self._me = PeerInfo(
            role="ingress",
            peer_id="ingress-0",
            incarnation=new_incarnation(),
            pid=os.getpid(),
            host_identity=host_identity(),
        )
        self.backend = RelayBackend(
            config,
            me=self._me,
            secret=_SECRET,
            model_id="model",
            created=0,
            vocab_size=self.vocab_size,
            system_fingerprint="",
            model_revision="model",
            registry=self.registry,
            clock_ns=boottime_ns,
        )
        self._version = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_started: Counter[str] = Counter()

    async def start(self) -> None:
        """Starts everything of the configuration; returns when every worker can serve."""
        assert self._plan.store is not None
        self.store = StoreHost(
            node="node-0",
            incarnation=new_incarnation(),
            secret=_SECRET,
            block_bytes=self._plan.store.block_bytes,
            num_blocks=self._plan.store.num_blocks,
        )
        self._store_address = await asyncio.to_thread(self.store.start, self._host)
        host, port = await self.backend.start(self._host)
        self._address = IngressAddress(
            ingress_id="ingress-0", incarnation=self._me.incarnation, host=host, port=port, pid=os.getpid()
        )
        for name in self._templates:
            await self.replace(name)
        await self.wait_connected()

    async def submit(self, spec: GenerationSpec, request_id: str, *, stream: bool = True) -> Generation:
        """Admits a request."""
        return await self.backend.submit(spec, request_id=request_id, stream=stream, label=None, tenant="t")

    # --- lives and deaths ---------------------------------------------------------------------------------------

    async def replace(self, name: str) -> WorkerLife:
        """Starts a new life of a worker and lets everybody know it. The old one, if any, must be dead."""
        spec = msgspec.structs.replace(self._templates[name], incarnation=new_incarnation(), bind_host=self._host)
        place = self.places.get(name)
        if place is None:
            host, port = self._store_address
            spec = msgspec.structs.replace(spec, store_host=host, store_port=port)
        else:
            spec = msgspec.structs.replace(spec, bind_host=place.host, node=place.namespace)
        ours, theirs = _context.Pipe()
        process = _context.Process(target=_run_worker, args=(spec, _SECRET, theirs, place), daemon=True)
        await asyncio.to_thread(process.start)
        theirs.close()
        join = await asyncio.wait_for(asyncio.to_thread(ours.recv), START_DEADLINE_S)
        life = WorkerLife(spec, process, ours, join, asyncio.Lock())
        self.lives[name] = life
        self.num_started[name] += 1
        asyncio.get_running_loop().add_reader(process.sentinel, self._on_death, life)
        await life.call("add_ingress", self._address)
        for other in tuple(self.lives.values()):
            if {spec.role, other.spec.role} == {"prefill", "decode"} and not other.is_gone:
                prefill, decode = (life, other) if spec.role == "prefill" else (other, life)
                await prefill.call("warm_decode_peer", decode_address(decode.join))
        self._publish_view()
        return life

    def kill(self, name: str, number: int = signal.SIGKILL) -> WorkerLife:
        """Sends a signal to a worker's process."""
        life = self.lives[name]
        os.kill(life.join.pid, number)
        return life

    def _on_death(self, life: WorkerLife) -> None:
        asyncio.get_running_loop().remove_reader(life.process.sentinel)
        life.is_gone = True
        self.gone.append(life.join.incarnation)
        self._publish_view()
        for other in self.lives.values():
            if not other.is_gone:
                task = asyncio.ensure_future(other.call("peer_gone", life.join.incarnation))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _publish_view(self) -> None:
        self._version += 1
        workers = tuple(_view(life) for life in self.lives.values() if not life.is_gone)
        self.backend.set_view(ClusterView(version=self._version, workers=workers, gone=tuple(self.gone[-256:])))

    async def wait_connected(self) -> None:
        """Waits until every living worker can be given work. Raises: TimeoutError."""
        await self._until(
            lambda: all(life.is_gone or life.join.incarnation in self.backend._relay.links for life in self.all_lives())
        )

    def all_lives(self) -> list[WorkerLife]:
        """Returns the newest life of each worker."""
        return list(self.lives.values())

    async def held(self) -> list[str]:
        """Returns what is not at rest: requests, blocks, leases and places in engines; empty when all is free."""
        notes = [f"request {stream['request_id']} is {stream['phase']}" for stream in self.backend.streams()]
        for status in await self.backend.worker_statuses():
            if status["state"] == "ready":
                for field in ("used_blocks", "quarantined_blocks", "running", "waiting", "leases"):
                    if status[field] != 0:
                        notes.append(f"{status['id']} {field}={status[field]}")
        return notes

    async def at_rest(self) -> None:
        """Waits until nothing is held or runs anywhere. Raises: AssertionError naming what is left."""
        end_s = time.monotonic() + SETTLE_DEADLINE_S
        while notes := await self.held():
            assert time.monotonic() < end_s, f"still held after {SETTLE_DEADLINE_S} s: {notes}"
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        """Ends every process."""
        await self.backend.close()
        for life in self.lives.values():
            if not life.is_gone:
                asyncio.get_running_loop().remove_reader(life.process.sentinel)
                with suppress(ProcessLookupError):
                    os.kill(life.join.pid, signal.SIGKILL)
            await asyncio.to_thread(life.process.join, START_DEADLINE_S)
            life.pipe.close()
        await asyncio.to_thread(self.store.close)

    async def _until(self, condition: Callable[[], object]) -> None:
        end_s = time.monotonic() + SETTLE_DEADLINE_S
        while not condition():
            if time.monotonic() > end_s:
                raise TimeoutError("workers did not connect in time")
            await asyncio.sleep(0.002)


def decode_address(join: WorkerJoin) -> DecodeAddress:
    """Returns where a decode worker listens for its peers."""
    return DecodeAddress(
        worker_id=join.worker_id, incarnation=join.incarnation, kv_host=join.kv_host, kv_port=join.kv_port
    )


def _view(life: WorkerLife) -> WorkerView:
    join = life.join
    return WorkerView(
        worker_id=join.worker_id,
        role=join.role,
        state="ready",
        incarnation=join.incarnation,
        pid=join.pid,
        node=join.node,
        host_identity=join.host_identity,
        pool_blocks=join.pool_blocks,
    )


def _ask(pipe: Connection, question: tuple[str, tuple[Any, ...]]) -> Any:
    pipe.send(question)
    return pipe.recv()


def _run_worker(spec: WorkerSpec, secret: bytes, pipe: Connection, place: Place | None) -> None:
    """Runs in the worker's process: starts the worker at its place, then carries out calls until the pipe ends."""
    if place is not None:
        enter(place.namespace)
    from workers.worker import Worker

    worker = Worker(spec, secret)
    pipe.send(worker.start())
    with suppress(EOFError, OSError):
        while True:
            method, arguments = pipe.recv()
            try:
                answer = getattr(worker, method)(*arguments)
            except Exception as error:
                pipe.send(repr(error))
            else:
                pipe.send(answer)
    os._exit(0)
