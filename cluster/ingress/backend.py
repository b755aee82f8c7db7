"""The request driver of an ingress: from an admitted request to frames on links and back.

Owns the running requests, their timers, the records of ended ones, and the relay server. Turns messages of workers
into events of request machines and orders of machines into messages. Decisions are the machines' (``cluster.core``).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from prometheus_client import CollectorRegistry

from cluster.config import Config
from cluster.core import attempt_events as ev
from cluster.core.attempts import Phase, RequestMachine, RetryTerms
from cluster.core.policy import Policy
from cluster.core.prefix_router import Decision
from cluster.core.retry_budget import RetryBudget
from cluster.core.routing import NoPair
from cluster.ingress.api.backend import Backend, Generation, ReadyState
from cluster.ingress.api.errors import InvalidRequest, Overloaded
from cluster.ingress.fleet import Fleet
from cluster.ingress.generation import RunningRequest
from cluster.ingress.link_orders import LinkOrders
from cluster.ingress.placement import Placement, for_journal
from cluster.ingress.record_book import RecordBook
from cluster.ingress.relay import RelayServer, WorkerLink
from cluster.ingress.relay_metrics import RelayMetrics
from cluster.ingress.siblings import Share
from cluster.ingress.tracing import current_trace
from cluster.ledger.key_store import KeyStore
from cluster.ledger.tool_store import ToolStore
from cluster.policy_source import PolicySource
from cluster.view import ClusterView
from kvstore.core.messages import (
    AttemptFault,
    CacheChanged,
    CacheSnapshot,
    CancelAck,
    Frame,
    GenerationSpec,
    PrefillDone,
    PrefillStarted,
    Refused,
    Reserved,
    Status,
)
from kvstore.net.handshake import PeerInfo

logger = logging.getLogger(__name__)

CLOSE_DEADLINE_S = 2.0
LAPSE_LOOKS_PER_LEASE = 20
INTERRUPTIONS_MAX = 64
"""Interruptions that the status shows."""
PROGRESS_S = 0.25
"""How often the ledger is told how far running requests are."""


class RelayBackend(LinkOrders, Backend):
    """``Backend`` over workers that dial in."""

    def __init__(
        self,
        config: Config,
        *,
        me: PeerInfo,
        secret: bytes,
        model_id: str,
        created: int,
        vocab_size: int,
        system_fingerprint: str,
        model_revision: str,
        registry: CollectorRegistry,
        clock_ns: Callable[[], int],
    ) -> None:
        self.model_id = model_id
        self.created = created
        self.max_model_len = config.max_model_len
        self.vocab_size = vocab_size
        self.system_fingerprint = system_fingerprint
        self._model_revision = model_revision
        self._config = config
        self._metrics = RelayMetrics(registry)
        relay = RelayServer(me=me, secret=secret, lease_ms=config.attempts.lease_ms, clock_ns=clock_ns, sink=self)
        super().__init__(relay, clock_ns=clock_ns, reservation_ms=config.attempts.reservation_ms)
        self._fleet = Fleet(me.host_identity, on_gone=self._on_worker_gone)
        self._running: dict[str, RunningRequest] = {}
        self._by_attempt: dict[str, RunningRequest] = {}
        self._policy = PolicySource(config)
        # Each ingress has its share, so that no retry has to ask another process first.
        self._budget = RetryBudget(config.attempts.cluster_retry_tokens_per_s / config.ingress.replicas)
        self._metrics.watch_budget(self._budget)
        self._placement = Placement(
            me=me, secret=secret, fleet=self._fleet, block_tokens=config.kv.block_tokens, clock_ns=clock_ns
        )
        self._cool = self._placement.router.cool
        self._interruptions: deque[tuple[str, int, dict[str, Any]]] = deque(maxlen=INTERRUPTIONS_MAX)
        """(tenant, when its books were closed, what the client was told), oldest first."""
        self._book = RecordBook(me.incarnation, lease_ms=config.attempts.lease_ms)
        rejected = self._metrics.rejected_connections
        rejected.labels("relay").set_function(lambda: self._relay.rejected)
        rejected.labels("siblings").set_function(lambda: self._book.rejected)
        self._me = me
        self._secret = secret
        self._tasks: list[asyncio.Task[None]] = []

    # --- life cycle -------------------------------------------------------------------------------------------

    async def start(self, host: str) -> tuple[str, int]:
        """Listens for workers; returns (host, port)."""
        duties = (self._fleet.probe_for_ever(), self._tell_progress(), self._policy.watch(), self._watch_leases())
        self._tasks = [asyncio.create_task(duty) for duty in duties]
        return await self._relay.start(host)

    async def join_ledger(self, host: str, *, share: Share | None = None) -> None:
        """Joins the ledger of ``config.ledger``; siblings ask at ``host``, and are told ``share``.

        Raises: BadInput, EnvironmentProblem, LedgerUnavailable.
        """
        await self._book.open(
            self._config.ledger.url,
            me=self._me,
            secret=self._secret,
            host=host,
            answer=self._answer_sibling,
            share=share,
            retention_s=self._config.ledger.retention_s,
            clock_ns=self._clock_ns,
        )

    async def shares(self, tenant: str | None) -> list[dict[str, Any]]:
        """Returns what the other ingresses contribute to the status."""
        return await self._book.shares(tenant)

    @property
    def keys(self) -> KeyStore | None:
        """Idempotency keys in the ledger; None before ``join_ledger``."""
        return self._book.keys

    @property
    def tools(self) -> ToolStore | None:
        """Tool calls in the ledger; None before ``join_ledger``."""
        return self._book.tools

    async def close(self) -> None:
        """Interrupts what runs, waits a moment for its end to be told, then closes the links."""
        for request in tuple(self._running.values()):
            request.step(ev.DrainEnded(now_ns=self._clock_ns()))
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_DEADLINE_S):
                while self._running:
                    await asyncio.sleep(0.01)
        for task in self._tasks:
            task.cancel()
        await self._placement.close()
        await self._relay.close()
        self._fleet.close()
        await self._book.close()

    def set_view(self, view: ClusterView) -> None:
        """Takes a newer membership; lives that it calls gone are gone."""
        self._fleet.set_view(view)
        self._placement.set_directory(self._fleet.view.directory)

    @property
    def view_version(self) -> int:
        """Version of the membership in use."""
        return self._fleet.view.version

    @property
    def view(self) -> ClusterView:
        """The membership in use."""
        return self._fleet.view

    def busy_lives(self) -> set[str]:
        """Returns the worker lives that an attempt of this ingress may still run on."""
        lives: set[str] = set()
        for request in self._running.values():
            for attempt in request.machine.attempts:
                lives.update(attempt.workers[role].incarnation for role in ev.ROLES if role not in attempt.fenced)
        return lives

    # --- Backend ----------------------------------------------------------------------------------------------

    def ready(self) -> ReadyState:
        return self._fleet.ready()

    async def submit(
        self,
        spec: GenerationSpec,
        *,
        request_id: str,
        stream: bool,
        label: str | None,
        tenant: str,
        client_retries: int = 0,
        cache_key: str | None = None,
        waited_s: float = 0.0,
    ) -> Generation:
        placed = await self._placement.look_up(spec, tenant=tenant, cache_key=cache_key)
        if len(self._running) >= self._config.limits.max_queued_requests:
            raise Overloaded(f"{len(self._running)} requests are waiting or running here already.", retry_after_s=1)
        policy = self._policy.current
        deadline_ms = self._config.attempts.deadline_ms
        left_s = None if deadline_ms is None else max(0.0, deadline_ms / 1000 - waited_s)
        machine = self._machine(request_id, spec, policy, stream, client_retries, left_s)
        request = RunningRequest(
            spec,
            machine=machine,
            tenant=tenant,
            label=label,
            orders=self,
            clock_ns=self._clock_ns,
            backlog_tokens=self._config.limits.max_stream_backlog_tokens,
            placed=placed,
            facts={
                "model_revision": self._model_revision,
                "lease_ms": self._config.attempts.lease_ms,
                "boundary": self._config.boundary(stream=stream),
                "policy": {"version": policy.version, "digest": policy.digest},
                "client_retries": client_retries,
                "waited_ms": waited_s * 1000,
            },
            trace=current_trace(),
        )
        decision = self._choose(request, ())
        if isinstance(decision, NoPair) and decision.never:
            raise InvalidRequest(f"The request {decision.why}.", param="max_tokens", code="context_length_exceeded")
        self._running[request_id] = request
        if left_s is not None:
            request.deadline = asyncio.get_running_loop().call_later(
                left_s,
                lambda: request.step(ev.DeadlineReached(now_ns=self._clock_ns())),
            )
        self.route(request, ())
        # Long before anything can be sent: the successor of an ingress that dies knows whom it owed an answer.
        self._tell(request)
        return request

    def _machine(
        self,
        request_id: str,
        spec: GenerationSpec,
        policy: Policy,
        stream: bool,
        client_retries: int,
        left_s: float | None,
    ) -> RequestMachine:
        now_ns = self._clock_ns()
        if client_retries:
            self._budget.charge(now_ns)
        return self.make_machine(
            request_id,
            stream,
            # Whoever repeats it, the gateway or the client's library: it is the same prefill.
            max_attempts=max(1, policy.max_attempts - client_retries),
            admitted_ns=now_ns,
            lease_ms=self._config.attempts.lease_ms,
            model=self._model_revision,
            told_by_event=True,
            terms=RetryTerms(
                num_prompt_tokens=len(spec.prompt_token_ids),
                max_reprefill_tokens=policy.max_reprefill_tokens,
                deadline_ns=None if left_s is None else now_ns + int(left_s * 1e9),
                budget=self._budget,
            ),
        )

    def make_machine(self, request_id: str, stream: bool, **terms: Any) -> RequestMachine:
        """Returns the machine of a new request; its fields by name. The simulator watches it by overriding this."""
        return RequestMachine(request_id, stream, **terms)

    def new_attempt_id(self) -> str:
        """Returns an id that no attempt of any ingress has had or will have."""
        return f"att-{secrets.token_hex(16)}"

    async def request_record(self, request_id: str, *, tenant: str) -> dict[str, Any] | None:
        running = self._running.get(request_id)
        if running is not None:
            return running.record() if running.tenant == tenant else None
        return await self._book.find(request_id, tenant)

    async def cancel(self, request_id: str, *, tenant: str) -> dict[str, Any] | None:
        if request_id not in self._running:
            return await self._book.find(request_id, tenant, cancel=True)
        return await self._cancel_here(request_id, tenant)

    async def _cancel_here(self, request_id: str, tenant: str) -> dict[str, Any] | None:
        running = self._running.get(request_id)
        if running is None or running.tenant != tenant:
            return self._book.ended_here(request_id, tenant)
        if not running.machine.is_ended:
            running.cancel_by_id()
        # Bounded by the lease: each side is fenced by its acknowledgement or by the end of its lease. The client may
        # take its time to read the end, so the books need not be closed.
        while not running.machine.is_fenced:
            await asyncio.sleep(0.005)
        return self._book.ended_here(request_id, tenant) or running.record()

    async def _answer_sibling(self, request_id: str, tenant: str, cancel: bool) -> dict[str, Any] | None:
        """Answers another ingress about a request of this one; never asks further."""
        if cancel:
            return await self._cancel_here(request_id, tenant)
        running = self._running.get(request_id)
        if running is not None:
            return running.record() if running.tenant == tenant else None
        return self._book.ended_here(request_id, tenant)

    async def _tell_progress(self) -> None:
        """Writes behind how far running requests are, so that an ingress that dies leaves a lower bound."""
        while True:
            await asyncio.sleep(PROGRESS_S)
            for request in tuple(self._running.values()):
                self._tell(request)

    def _tell(self, request: RunningRequest) -> None:
        machine = request.machine
        told = (request.request_id, machine.phase.value, machine.first_delta_sent, machine.num_delivered)
        self._book.running(request.tenant, request.record, told)

    async def _watch_leases(self) -> None:
        """Ends what no broken link tells of: the sides whose holder has not asked for a whole lease."""
        lease_ns = self._config.attempts.lease_ms * 1_000_000
        looked_ns = self._clock_ns()
        while True:
            await asyncio.sleep(lease_ns / 1e9 / LAPSE_LOOKS_PER_LEASE)
            self._placement.sweep()
            late_ns, looked_ns = self._clock_ns() - looked_ns, self._clock_ns()
            if late_ns > lease_ns // 2:
                # This process stood still, and asks that came meanwhile may not have been read: judge at the next look.
                continue
            lapsed = self._relay.lapse()
            for incarnation in {life for life, _ in lapsed}:
                # Once, however many attempts it had: it is one silence.
                self._cool.failed(incarnation, self._clock_ns())
            for incarnation, (attempt_id, epoch) in lapsed:
                request = self._by_attempt.get(attempt_id)
                if request is not None:
                    self._lapsed(request, incarnation, attempt_id, epoch)

    def _lapsed(self, request: RunningRequest, incarnation: str, attempt_id: str, epoch: int) -> None:
        # A combined worker holds both sides under one lease.
        for role in ev.ROLES:
            if self.ref(request, attempt_id, role).incarnation == incarnation:
                now_ns = self._clock_ns()
                request.step(ev.LeaseLapsed(now_ns=now_ns, attempt_id=attempt_id, epoch=epoch, role=role))

    # --- for the status endpoint --------------------------------------------------------------------------------

    async def worker_statuses(self) -> list[dict[str, Any]]:
        """Returns one entry per worker slot, asked now; lost and refused ones included."""
        return await self._fleet.statuses()

    def policy_status(self) -> dict[str, Any]:
        """Returns which policy is in force and why the file that is there now is not, if so."""
        policy = self._policy.current
        return {"version": policy.version, "digest": policy.digest, "error": self._policy.error}

    def streams(self, tenant: str | None = None) -> list[dict[str, Any]]:
        """Returns the requests that run here, of one tenant or of all."""
        return [
            {
                "request_id": request.request_id,
                "phase": request.machine.phase.value,
                "attempt": len(request.machine.attempts),
                "epoch": request.machine.current.epoch if request.machine.current else 0,
                "delivered_output_tokens": request.machine.num_delivered,
            }
            for request in self._running.values()
            if tenant in (None, request.tenant)
        ]

    def interruptions(self, tenant: str | None = None) -> list[dict[str, Any]]:
        """Returns the answers that broke here not long ago, newest first, of one tenant or of all."""
        now_ns = self._clock_ns()
        return [
            {
                "request_id": told["request_id"],
                "reason": told["reason"],
                "message": told["message"],
                "delivered_output_tokens": told["delivered_output_tokens"],
                "age_s": round((now_ns - at_ns) / 1e9, 1),
            }
            for owner, at_ns, told in reversed(self._interruptions)
            if tenant in (None, owner)
        ]

    # --- RelaySink ------------------------------------------------------------------------------------------------

    def on_link_up(self, link: WorkerLink) -> None:
        self._fleet.link_up(link)
        for request in tuple(self._running.values()):
            request.step(ev.LinkBack(now_ns=self._clock_ns(), incarnation=link.incarnation))
            attempt = request.machine.current
            if attempt is not None and attempt.workers["decode"].incarnation == link.incarnation:
                request.repeat_credit()

    def on_link_down(self, link: WorkerLink) -> None:
        self._fleet.link_down(link)
        for request in tuple(self._running.values()):
            request.step(ev.LinkLost(now_ns=self._clock_ns(), incarnation=link.incarnation))

    def on_store_status(self, incarnation: str, counters: Mapping[str, int]) -> None:
        """Takes what a life of a store node has counted so far."""
        self._metrics.workers.on_store(incarnation, counters)

    def on_message(self, link: WorkerLink, message: Any) -> None:
        if isinstance(message, Frame):
            self._on_frame(message)
        elif isinstance(message, Status):
            self._fleet.on_status(message)
            self._metrics.workers.on_status(message)
        elif isinstance(message, CacheSnapshot | CacheChanged):
            self._placement.on_news(link, message)
        else:
            request = self._by_attempt.get(message.attempt_id)
            if request is None:
                self._metrics.stale_messages.inc()
            else:
                self._on_attempt_message(request, link, message)

    def _on_frame(self, frame: Frame) -> None:
        now_ns = self._clock_ns()
        for delta in frame.streams:
            request = self._by_attempt.get(delta.attempt_id)
            if request is None:
                self._metrics.dropped("unknown_attempt", len(delta.token_ids))
                continue
            event = ev.TokensArrived(
                now_ns=now_ns,
                attempt_id=delta.attempt_id,
                epoch=delta.epoch,
                first_index=delta.first_index,
                num_tokens=len(delta.token_ids),
                end=delta.end,
            )
            request.step(event, delta)
            if delta.end is not None:
                self._cool.succeeded(frame.incarnation)

    def _on_attempt_message(self, request: RunningRequest, link: WorkerLink, message: Any) -> None:
        about: dict[str, Any] = {"now_ns": self._clock_ns(), "attempt_id": message.attempt_id, "epoch": message.epoch}
        match message:
            case Reserved():
                current = request.machine.current
                if current is not None and current.attempt_id == message.attempt_id:
                    request.ticket = message.ticket
                request.step(ev.BlocksReserved(**about))
            case Refused():
                role = self._role_of(request, link)
                request.step(ev.WorkerRefused(**about, role=role, code=message.code, message=message.message))
            case PrefillStarted():
                self._metrics.prefill_queue.observe(message.queued_ns / 1e9)
                for tier, num_tokens in message.cached_by_tier.items():
                    self._metrics.cached_by_tier.labels(tier).inc(num_tokens)
                request.on_prefill_began(
                    ev.PrefillBegan(**about, cached_tokens=message.cached_tokens, cached_by_tier=message.cached_by_tier)
                )
            case PrefillDone():
                spans = {
                    "lookup": message.lookup_ns,
                    "engine_queue": message.engine_queue_ns,
                    "compute": message.compute_ns,
                    "hand_off": message.hand_off_ns,
                }
                self._metrics.prefill_ended(spans)
                self._cool.succeeded(link.incarnation)
                self._placement.on_prefill_done(link.incarnation, message, len(request.spec.prompt_token_ids))
                request.step(ev.PrefillEnded(**about, spans_ns=spans))
            case AttemptFault():
                role = self._role_of(request, link)
                self._cool.failed(link.incarnation, about["now_ns"])
                self._placement.prefill_ended(message.attempt_id, link.incarnation)
                request.step(ev.AttemptFaulted(**about, role=role, reason=message.reason, message=message.message))
            case CancelAck():
                self._on_cancel_ack(request, link, message, about)
            case _:
                logger.warning("message_ignored type=%s", type(message).__name__)

    def _on_cancel_ack(
        self, request: RunningRequest, link: WorkerLink, message: CancelAck, about: dict[str, Any]
    ) -> None:
        attempt = request.machine.current
        if attempt is not None and attempt.workers["prefill"] == attempt.workers["decode"]:
            # A combined worker answers once for both sides.
            request.step(ev.CancelAcked(**about, role="prefill", num_generated=0))
            request.step(ev.CancelAcked(**about, role="decode", num_generated=message.num_generated))
            return
        role = self._role_of(request, link)
        request.step(ev.CancelAcked(**about, role=role, num_generated=message.num_generated))

    def _role_of(self, request: RunningRequest, link: WorkerLink) -> ev.Role:
        for attempt in request.machine.attempts:
            if attempt.workers["prefill"].incarnation == link.incarnation:
                is_decode = attempt.workers["decode"].incarnation == link.incarnation
                # A combined worker speaks for the side that has the attempt now.
                is_prefilling = "prefill" in attempt.dispatched and not attempt.handed_off
                return "decode" if is_decode and not is_prefilling else "prefill"
        return "decode"

    # --- Orders -----------------------------------------------------------------------------------------------

    def route(self, generation: RunningRequest, avoid: tuple[str, ...], silent_nodes: tuple[str, ...] = ()) -> None:
        """Chooses a pair and starts an attempt on it."""
        now_ns = self._clock_ns()
        lost = generation.machine.current
        if lost is not None:
            self._placement.prefill_ended(lost.attempt_id, lost.workers["prefill"].incarnation)
        decision = self._choose(generation, avoid, silent_nodes)
        if isinstance(decision, NoPair):
            generation.step(ev.NoRoute(now_ns=now_ns, message=decision.why))
            return
        attempt_id = self.new_attempt_id()
        self._by_attempt[attempt_id] = generation
        machine, pair = generation.machine, decision.pair
        self._placement.started(attempt_id, decision, generation.placed)
        generation.step(ev.Routed(now_ns=now_ns, attempt_id=attempt_id, prefill=pair.prefill, decode=pair.decode))
        machine.journal.note(now_ns, "routing", len(machine.attempts), **for_journal(decision))

    def _choose(
        self, request: RunningRequest, avoid: tuple[str, ...], silent_nodes: tuple[str, ...] = ()
    ) -> Decision | NoPair:
        return self._placement.choose(
            request.spec, request.placed, loads=self._load(), avoid=avoid, silent_nodes=silent_nodes
        )

    def _load(self) -> dict[str, int]:
        load: dict[str, int] = {}
        for request in self._running.values():
            attempt = request.machine.current
            if attempt is None:
                continue
            for role in ev.ROLES:
                if role not in attempt.fenced:
                    incarnation = attempt.workers[role].incarnation
                    load[incarnation] = load.get(incarnation, 0) + 1
        return load

    def count_dropped(self, order: ev.DropTokens) -> None:
        """Counts tokens that were not handed on."""
        self._metrics.dropped(order.reason, order.num_tokens)

    def closed(self, generation: RunningRequest, order: ev.Close) -> None:
        """The books of a request are closed: nothing of it runs anywhere."""
        self._metrics.account(order)
        for attempt in generation.machine.attempts:
            self._metrics.attempt_lost(attempt.end_reason or "")
            self._by_attempt.pop(attempt.attempt_id, None)
            self._placement.prefill_ended(attempt.attempt_id, attempt.workers["prefill"].incarnation)
            for role in ev.ROLES:
                granter = self._relay.known_granter(attempt.workers[role].incarnation)
                if granter is not None:
                    granter.end(attempt.attempt_id, attempt.epoch)
        for timer in generation.timers:
            timer.cancel()
        if generation.deadline is not None:
            generation.deadline.cancel()
        if self._running.pop(generation.request_id, None) is None:
            return
        record = generation.record()
        if record["interruption"] is not None:
            self._interruptions.append(
                (generation.tenant, self._clock_ns(), record["interruption"] | {"request_id": generation.request_id})
            )
        self._book.ended(generation.request_id, generation.tenant, record)
        if generation.trace is not None:
            ended_ns = self._clock_ns() - generation.machine.admitted_ns
            generation.trace.generation_ended(record, ended_ns=ended_ns)
        if generation.machine.phase is not Phase.FINISHED:
            logger.info("request_ended request_id=%s phase=%s", generation.request_id, record["phase"])

    def _on_worker_gone(self, incarnation: str) -> None:
        """A life is proved over."""
        self._relay.forget(incarnation)
        self._placement.worker_gone(incarnation)
        for request in tuple(self._running.values()):
            request.step(ev.WorkerGone(now_ns=self._clock_ns(), incarnation=incarnation))
