"""Level 2: the ingress of a simulation is the product's own request driver, on a loop under virtual time.

Real: ``RelayBackend``, ``RunningRequest``, ``RelayServer``, ``Fleet``, ``Placement`` and the cores below them.
Simulated: the links that they send on, the workers at the other end, and the writer towards the client, which keeps to
the order that ``cluster.ingress.api.backend`` asks of an HTTP layer. Sockets, watches of processes and the ledger are
left out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from cluster.config import Config, load
from cluster.core import attempt_events as ev
from cluster.core.attempts import RequestMachine
from cluster.ingress.api.backend import Ended, Generation, Interrupted, Restarted, TokenBatch
from cluster.ingress.api.errors import ApiError
from cluster.ingress.backend import RelayBackend
from cluster.sim.client import SimRequest
from cluster.sim.ingress import WRITE_NS_MAX, IngressProcess
from cluster.sim.kernel import Life
from cluster.sim.loop import LifeLoop
from cluster.sim.network import Link
from cluster.sim.scenario import Ask, Shape
from cluster.sim.worker import BLOCK_TOKENS, SimWorker
from cluster.view import ClusterView, WorkerView
from kvstore.core.messages import GenerationSpec
from kvstore.errors import PeerLost
from kvstore.net.handshake import PeerInfo

if TYPE_CHECKING:
    from cluster.sim.world import World

TENANT = "t"
CANCEL_REASON = "cancelled"


class SimChannel:
    """A simulated link as the product's channel: what ``WorkerLink`` needs of one."""

    def __init__(self, ingress: DriverIngress, link: Link, peer: PeerInfo) -> None:
        self.peer = peer
        self._ingress = ingress
        self._link = link
        self._arrived: deque[Any] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._is_closed = False

    def send_nowait(self, message: Any) -> None:
        if self._is_closed or not self._link.send(self._ingress, message):
            raise PeerLost(self.peer.peer_id, "the link is down")

    async def recv(self) -> Any:
        while not self._arrived:
            if self._is_closed:
                raise PeerLost(self.peer.peer_id, "the link is down")
            self._reader = self._ingress.loop.create_future()
            await self._reader
        return self._arrived.popleft()

    @property
    def is_closing(self) -> bool:
        return self._is_closed or not self._link.is_open

    def abort(self) -> None:
        self.close()

    def take(self, message: Any) -> None:
        """A message has arrived."""
        if not self._is_closed:
            self._arrived.append(message)
            self._wake()

    def close(self) -> None:
        """The connection is over; what had arrived is still read."""
        self._is_closed = True
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class WatchedMachine(RequestMachine):
    """The product's request machine, watched by the checkers of a world."""

    __slots__ = ("ingress",)
    ingress: DriverIngress

    def step(self, event: ev.AnyEvent) -> list[ev.Instruction]:
        ingress, world = self.ingress, self.ingress.world
        request = ingress.requests[self.request_id]
        request.machine = self
        if not self.attempts and isinstance(event, ev.Routed | ev.NoRoute):
            ingress.running[self.request_id] = request
            world.tell("on_admitted", request)
        world.cover(self, event)
        before = self.phase
        orders = super().step(event)
        self.check_invariants()
        for order in orders:
            world.kernel.note(self.request_id, type(order).__name__)
            match order:
                case ev.Deliver() if isinstance(event, ev.TokensArrived):
                    key = (event.attempt_id, event.epoch)
                    world.tell("on_accepted", request, key, event.first_index + order.skip, order.num_tokens)
                case ev.RouteAgain():
                    world.tell("on_route_again", request)
                case ev.Close():
                    ingress.running.pop(self.request_id, None)
                    world.tell("on_closed", request, order)
        if self.phase is not before:
            world.on_state(request)
        return orders


class SimBackend(RelayBackend):
    """The product's driver without sockets. A planted bug overrides one of its methods."""

    ingress: DriverIngress

    def begin(self, ingress: DriverIngress) -> None:
        """Starts the duties that need no socket."""
        self.ingress = ingress
        self._tasks = [asyncio.create_task(self._watch_leases())]

    def new_attempt_id(self) -> str:
        return self.ingress.world.new_attempt_id()

    def make_machine(self, request_id: str, stream: bool, **terms: Any) -> RequestMachine:
        machine = self.ingress.machine_type(request_id, stream, **terms)
        machine.ingress = self.ingress
        return machine

    def abandon(self) -> None:
        """Forgets what runs: the run is over, and coroutines that are thrown away must not act on it."""
        self._running.clear()
        self._by_attempt.clear()

    @property
    def num_leases(self) -> int:
        """How many attempts are granted or grantable."""
        return sum(len(granter) for granter in self._relay._granters.values())

    def deadline_passes(self, request_id: str) -> None:
        """The time of a request is over."""
        running = self._running.get(request_id)
        if running is not None:
            running.step(ev.DeadlineReached(now_ns=self._clock_ns()))

    async def serve_link(self, channel: SimChannel) -> None:
        """Serves one connection of a worker."""
        await self._relay._on_channel(channel)  # type: ignore[arg-type]


class DriverIngress(IngressProcess):
    """One life of an ingress that runs the product's driver."""

    def __init__(self, world: World, life: Life) -> None:
        self.world = world
        self.kernel = world.kernel
        self.life = life
        self.loop = LifeLoop(world.kernel, life)  # type: ignore[abstract]
        self.requests: dict[str, SimRequest] = {}
        self.untold = self.requests
        self.running: dict[str, SimRequest] = {}
        self.machine_type = world.parts.watched or WatchedMachine
        self._config = _config(world.scenario.shape)
        self._channels: dict[Link, SimChannel] = {}
        self._views: dict[str, WorkerView] = {}
        self._gone: list[str] = []
        self._version = 0
        self._generations: dict[str, Generation] = {}
        self._writers: dict[str, asyncio.Task[None]] = {}
        me = PeerInfo(role="ingress", peer_id=life.name, incarnation=life.incarnation, pid=1, host_identity=life.name)
        self.backend: SimBackend = (world.parts.driver or SimBackend)(
            self._config,
            me=me,
            secret=b"",
            model_id="m",
            created=0,
            vocab_size=1,
            system_fingerprint="",
            model_revision="m@1",
            registry=CollectorRegistry(),
            clock_ns=lambda: self.kernel.clock_ns(self.life),
        )
        self._soon(self._begin)

    async def _begin(self) -> None:
        self.backend.begin(self)

    def _soon(self, call: Any, *args: Any) -> asyncio.Task[None]:
        return self.loop.create_task(call(*args))

    @property
    def num_leases(self) -> int:
        return self.backend.num_leases

    # --- clients ----------------------------------------------------------------------------------------------

    def submit(self, ask: Ask) -> None:
        """A client's request arrives."""
        request_id = f"req-{ask.number}"
        shape = self.world.scenario.shape
        spec = GenerationSpec(
            prompt_token_ids=tuple(range(ask.prompt_blocks * BLOCK_TOKENS)), max_tokens=ask.max_tokens
        )
        # The machine comes with the first event of the driver.
        request = SimRequest(ask, request_id, spec, None, self.life.incarnation, shape.backlog_tokens)  # type: ignore[arg-type]
        self.requests[request_id] = request
        self.world.asks[request_id] = ask
        if self.is_draining:
            self._tell(request, "rejected", 503)
            return
        self._writers[request_id] = self._soon(self._answer, request)
        if ask.deadline_ns is not None:
            self.kernel.at(ask.deadline_ns, self.life, self.deadline_passes, request)
        if ask.leaves_after_ns is not None:
            self.kernel.at(ask.leaves_after_ns, self.life, self.client_leaves, request)

    def deadline_passes(self, request: SimRequest) -> None:
        """The time of a request is over."""
        self.loop.call_soon(self.backend.deadline_passes, request.request_id)

    def client_leaves(self, request: SimRequest) -> None:
        """The client of a request goes away, or cancels it by its id."""
        if request.told:
            return
        if request.ask.cancels:
            self._soon(self._cancel, request)
        else:
            self._writers[request.request_id].cancel()

    async def _cancel(self, request: SimRequest) -> None:
        await self.backend.cancel(request.request_id, tenant=TENANT)

    async def _answer(self, request: SimRequest) -> None:
        """Serves one client as the HTTP layer does."""
        generation: Generation | None = None
        try:
            generation = await self.backend.submit(
                request.spec, request_id=request.request_id, stream=request.ask.stream, label=None, tenant=TENANT
            )
            await self._write(request, generation)
        except ApiError as error:
            admitted = request.machine is not None
            self._tell(request, "error" if admitted else "rejected", error.status)
        except asyncio.CancelledError:
            self._tell(request, "client_gone", None)
            if generation is not None:
                await generation.cancel("client_gone")

    async def _write(self, request: SimRequest, generation: Generation) -> None:
        while True:
            await asyncio.sleep(request.ask.read_ns / 1e9)
            event = await generation.next()
            match event:
                case TokenBatch():
                    request.taken.extend(event.token_ids)
                    stop_at = request.ask.stop_string_at
                    if stop_at is not None and len(request.taken) > stop_at:
                        await generation.finish_stop()
                        return await self._finish(request, generation)
                    num_visible = request.num_visible()
                    if request.ask.stream and num_visible > request.num_shown and not generation.has_restarted:
                        await self._put(request, generation, num_visible)
                case Restarted():
                    request.restart()
                case Ended():
                    return await self._finish(request, generation)
                case Interrupted():
                    cancelled = event.reason == CANCEL_REASON
                    return self._tell(request, CANCEL_REASON if cancelled else "interrupted", event.reason)

    async def _put(self, request: SimRequest, generation: Generation, num_tokens: int) -> None:
        """Records the boundary before the first write, then writes; anything may happen in between."""
        if not request.started:
            generation.mark_first_delta()
            request.started = True
        await asyncio.sleep(self.world.work.skewed(0, WRITE_NS_MAX) / 1e9)
        self.world.tell("on_wrote", request, tuple(request.taken[request.num_shown : num_tokens]))
        request.num_shown = num_tokens
        generation.delivered(num_tokens)

    async def _finish(self, request: SimRequest, generation: Generation) -> None:
        await self._put(request, generation, len(request.taken))
        generation.completed()
        self._tell(request, "finished", request.num_shown)

    def _tell(self, request: SimRequest, ending: str, detail: Any) -> None:
        if not request.told:
            request.told = True
            self.world.tell("on_told", request, ending, detail)

    def drain(self) -> None:
        """Takes nothing new from now on."""
        self.is_draining = True

    def end(self) -> None:
        """The run is over."""
        self.loop.is_over = True
        self.backend.abandon()

    def end_drain(self) -> None:
        """Ends what still runs."""
        self._soon(self.backend.close)

    # --- workers ----------------------------------------------------------------------------------------------

    def on_link_up(self, link: Link) -> None:
        """A worker dialled in; the controller has said before who it is."""
        worker = link.peer_of(self)
        assert isinstance(worker, SimWorker), worker
        life = worker.life
        if life.incarnation in self._gone:
            return
        self._views[life.incarnation] = WorkerView(
            worker_id=life.name,
            role=worker.role,
            state="ready",
            incarnation=life.incarnation,
            pid=1,
            node="node",
            host_identity=life.name,
            pool_blocks=self.world.scenario.shape.pool_blocks,
        )
        self._publish()
        peer = PeerInfo(
            role=worker.role, peer_id=life.name, incarnation=life.incarnation, pid=1, host_identity=life.name
        )
        channel = self._channels[link] = SimChannel(self, link, peer)
        self._soon(self.backend.serve_link, channel)

    def on_link_down(self, link: Link) -> None:
        """A connection ended; that proves nothing."""
        channel = self._channels.pop(link, None)
        if channel is not None:
            channel.close()

    def on_message(self, link: Link, message: Any) -> None:
        """Takes one message of a worker."""
        channel = self._channels.get(link)
        if channel is not None:
            channel.take(message)

    def on_gone(self, incarnation: str) -> None:
        """A worker life is proved over."""
        self._views.pop(incarnation, None)
        self._gone.append(incarnation)
        self._publish()

    def _publish(self) -> None:
        self._version += 1
        view = ClusterView(version=self._version, workers=tuple(self._views.values()), gone=tuple(self._gone))
        self.loop.call_soon(self.backend.set_view, view)


_BASE: list[Config] = []


def _config(shape: Shape) -> Config:
    if not _BASE:
        _BASE.append(load(None, [f"kv.block_tokens={BLOCK_TOKENS}", "attempts.cluster_retry_tokens_per_s=1000000"]))
    config, timing = _BASE[0], shape.timing
    return replace(
        config,
        attempts=replace(
            config.attempts,
            lease_ms=timing.lease_ms,
            reservation_ms=timing.reservation_ms,
            max_attempts=shape.max_attempts,
        ),
        limits=replace(
            config.limits, max_queued_requests=shape.max_requests, max_stream_backlog_tokens=shape.backlog_tokens
        ),
    )
