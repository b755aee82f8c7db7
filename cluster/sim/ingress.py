"""The ingress of a simulation: drives the real ledger, granters, admission and routing. Follows ``cluster.ingress``.

The writer towards the client records the boundary in one event and writes in the next, so that the ingress can be
stopped or killed, and its attempts lost, between the two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from cluster.core import attempt_events as ev
from cluster.core.admission import Admission
from cluster.core.attempt_events import WorkerRef
from cluster.core.routing import Candidate, CoolDown, NoPair, Pair, choose_pair, elsewhere
from cluster.sim.client import Batch, Broken, Ended, Restarted, SimRequest
from cluster.sim.kernel import Life
from cluster.sim.network import Link
from cluster.sim.scenario import MS, Ask
from cluster.sim.worker import BLOCK_TOKENS, SimWorker
from kvstore.core.lease import LeaseGranter
from kvstore.core.messages import (
    AttemptFault,
    Cancel,
    CancelAck,
    Credit,
    Frame,
    GenerationSpec,
    LeaseAsk,
    Prefill,
    PrefillDone,
    PrefillStarted,
    Refused,
    Resend,
    Reserve,
    Reserved,
    StreamDelta,
)

if TYPE_CHECKING:
    from cluster.sim.world import World

WRITE_NS_MAX = 4_000_000
FENCE_STEP_NS = 100_000


class IngressProcess(ABC):
    """One life of an ingress, whatever drives it."""

    life: Life
    running: dict[str, SimRequest]
    """Requests whose books are open."""
    untold: dict[str, SimRequest]
    """Requests whose clients may still wait for their ending."""
    is_draining = False
    """It takes nothing new and will exit."""

    @property
    @abstractmethod
    def num_leases(self) -> int:
        """How many attempts are granted or grantable."""

    @abstractmethod
    def submit(self, ask: Ask) -> None:
        """A client's request arrives."""

    @abstractmethod
    def deadline_passes(self, request: SimRequest) -> None:
        """The time of a request is over."""

    @abstractmethod
    def client_leaves(self, request: SimRequest) -> None:
        """The client of a request goes away, or cancels it."""

    @abstractmethod
    def drain(self) -> None:
        """Takes nothing new from now on."""

    @abstractmethod
    def end_drain(self) -> None:
        """Ends what still runs."""

    @abstractmethod
    def end(self) -> None:
        """The run is over."""

    @abstractmethod
    def on_gone(self, incarnation: str) -> None:
        """A worker life is proved over."""

    @abstractmethod
    def on_link_up(self, link: Link) -> None: ...

    @abstractmethod
    def on_link_down(self, link: Link) -> None: ...

    @abstractmethod
    def on_message(self, link: Link, message: Any) -> None: ...


class SimIngress(IngressProcess):
    """Level 1: drives the cores by itself."""

    def __init__(self, world: World, life: Life) -> None:
        self.world = world
        self.kernel = world.kernel
        self.life = life
        self.timing = world.scenario.shape.timing
        self.running: dict[str, SimRequest] = {}
        self.untold = self.running
        self._admission = Admission(world.scenario.shape.max_requests)
        self._by_attempt: dict[str, SimRequest] = {}
        self._links: dict[str, Link] = {}
        self._workers: dict[str, tuple[WorkerRef, str]] = {}
        self._granters: dict[str, LeaseGranter] = {}
        self._gone: set[str] = set()
        self._cool = CoolDown()
        self._watching = False
        self.num_dropped: dict[str, int] = {}

    @property
    def now_ns(self) -> int:
        """What this ingress's clock shows."""
        return self.kernel.clock_ns(self.life)

    # --- requests -----------------------------------------------------------------------------------------------

    def submit(self, ask: Ask) -> None:
        """A client's request arrives."""
        request_id = f"req-{ask.number}"
        shape = self.world.scenario.shape
        spec = GenerationSpec(
            prompt_token_ids=tuple(range(ask.prompt_blocks * BLOCK_TOKENS)), max_tokens=ask.max_tokens
        )
        machine = self.world.parts.machine(
            request_id,
            ask.stream,
            max_attempts=shape.max_attempts,
            admitted_ns=self.now_ns,
            lease_ms=self.timing.lease_ms,
            told_by_event=True,
        )
        request = SimRequest(ask, request_id, spec, machine, self.life.incarnation, shape.backlog_tokens)
        self.world.asks[request_id] = ask
        refused = self._admission.admit(request_id)
        pair = self._choose(request, ())
        if refused is not None or (isinstance(pair, NoPair) and pair.never):
            self._admission.leave(request_id)
            self.world.tell("on_told", request, "rejected", refused.status if refused is not None else 400)
            return
        self.world.tell("on_admitted", request)
        self.running[request_id] = request
        if ask.deadline_ns is not None:
            self.kernel.at(ask.deadline_ns, self.life, self.deadline_passes, request)
        if ask.leaves_after_ns is not None:
            self.kernel.at(ask.leaves_after_ns, self.life, self.client_leaves, request)
        self._route(request, ())
        self._watch()

    def deadline_passes(self, request: SimRequest) -> None:
        """The time of a request is over."""
        if not request.machine.closed:
            self.step(request, ev.DeadlineReached(now_ns=self.now_ns))

    def client_leaves(self, request: SimRequest) -> None:
        """The client of a request goes away, or cancels it."""
        if request.told:
            return
        if request.ask.cancels:
            self.step(request, ev.ClientGone(now_ns=self.now_ns, reason="cancelled"))
            if not request.told and not any(isinstance(item, Broken) for item in request.queue):
                request.queue.clear()
                self._put(request, Broken("cancelled", None))
            return
        # The writer is gone with its client: nothing more is written or counted.
        request.told = True
        request.queue.clear()
        self.world.tell("on_told", request, "client_gone", None)
        self.step(request, ev.ClientGone(now_ns=self.now_ns, reason="client_gone"))
        self.step(request, ev.AnswerEnded(now_ns=self.now_ns))

    def drain(self) -> None:
        """Takes nothing new from now on."""
        self.is_draining = True
        self._admission.drain()

    def end_drain(self) -> None:
        """Ends what still runs."""
        for request in tuple(self.running.values()):
            self.step(request, ev.DrainEnded(now_ns=self.now_ns))

    def end(self) -> None:
        """The run is over: nothing is left to do here."""

    # --- the machine ----------------------------------------------------------------------------------------------

    def step(self, request: SimRequest, event: ev.AnyEvent, delta: StreamDelta | None = None) -> None:
        """Feeds a machine and carries out its orders."""
        machine = request.machine
        self.world.cover(machine, event)
        before = machine.phase
        orders = machine.step(event)
        machine.check_invariants()
        if machine.phase is not before:
            self.world.on_state(request)
        for order in orders:
            self.kernel.note(request.request_id, type(order).__name__)
            self._carry_out(request, order, delta)

    def _carry_out(self, request: SimRequest, order: ev.Instruction, delta: StreamDelta | None) -> None:
        match order:
            case ev.Deliver():
                assert delta is not None, "tokens without their frame"
                self._deliver(request, order, delta)
            case ev.DropTokens():
                self.num_dropped[order.reason] = self.num_dropped.get(order.reason, 0) + order.num_tokens
            case ev.SendReserve():
                self._send_reserve(request, order)
            case ev.SendPrefill():
                self._send_prefill(request, order)
            case ev.SendCancel():
                self._send_cancel(request, order)
            case ev.WaitForFence():
                self._wait_for_fence(request, order)
            case ev.AskResend():
                link = self._links.get(self._incarnation(request, order.attempt_id, "decode"))
                if link is not None:
                    link.send(self, Resend(attempt_id=order.attempt_id, epoch=order.epoch, next_index=order.next_index))
            case ev.RouteAgain():
                self.world.tell("on_route_again", request)
                request.queue.clear()
                request.credit = self.world.scenario.shape.backlog_tokens
                self._put(request, Restarted())
                self._route(request, order.avoid, order.silent_nodes)
            case ev.Fail():
                self._put(request, Broken("error", order.status))
            case ev.Interrupt():
                # Only the event under way is finished; what waits behind it is not delivered.
                request.queue.clear()
                self._put(request, Broken("interrupted", order.reason))
            case ev.Close():
                self._close(request, order)

    def _deliver(self, request: SimRequest, order: ev.Deliver, delta: StreamDelta) -> None:
        first_index = delta.first_index + order.skip
        key = (delta.attempt_id, delta.epoch)
        self.world.tell("on_accepted", request, key, first_index, order.num_tokens)
        if request.told:
            return
        if order.num_tokens:
            request.queue.append(Batch(first_index, delta.token_ids[order.skip :]))
        if order.end is not None:
            request.queue.append(Ended())
        self._wake(request)

    def _route(self, request: SimRequest, avoid: tuple[str, ...], silent_nodes: tuple[str, ...] = ()) -> None:
        pair = self._choose(request, (*avoid, *self._cool.set_aside(self.now_ns)), silent_nodes)
        if isinstance(pair, NoPair):
            self.step(request, ev.NoRoute(now_ns=self.now_ns, message=pair.why))
            return
        attempt_id = self.world.new_attempt_id()
        self._by_attempt[attempt_id] = request
        self.step(
            request, ev.Routed(now_ns=self.now_ns, attempt_id=attempt_id, prefill=pair.prefill, decode=pair.decode)
        )

    def _choose(self, request: SimRequest, avoid: tuple[str, ...], silent_nodes: tuple[str, ...] = ()) -> Pair | NoPair:
        load: dict[str, int] = {}
        for other in self.running.values():
            attempt = other.machine.current
            if attempt is not None:
                for role in ev.ROLES:
                    if role not in attempt.fenced:
                        incarnation = attempt.workers[role].incarnation
                        load[incarnation] = load.get(incarnation, 0) + 1
        pool_blocks = self.world.scenario.shape.pool_blocks
        candidates = [
            Candidate(ref, role, load.get(incarnation, 0), pool_blocks)
            for incarnation, (ref, role) in self._workers.items()
            if incarnation in self._links and incarnation not in self._gone
        ]
        candidates = elsewhere(candidates, silent_nodes)
        ask = request.ask
        total = -(-(ask.prompt_blocks * BLOCK_TOKENS + ask.max_tokens - 1) // BLOCK_TOKENS)
        return choose_pair(candidates, prompt_blocks=ask.prompt_blocks, total_blocks=total, avoid=avoid)

    def _send_reserve(self, request: SimRequest, order: ev.SendReserve) -> None:
        message = Reserve(
            request_id=request.request_id,
            attempt_id=order.attempt_id,
            epoch=order.epoch,
            spec=request.spec,
            reservation_ms=self.timing.reservation_ms,
        )
        self._dispatch(request, "decode", message)

    def _send_prefill(self, request: SimRequest, order: ev.SendPrefill) -> None:
        assert request.ticket is not None, order
        message = Prefill(
            request_id=request.request_id,
            attempt_id=order.attempt_id,
            epoch=order.epoch,
            spec=request.spec,
            ticket=request.ticket,
        )
        self._dispatch(request, "prefill", message)

    def _dispatch(self, request: SimRequest, role: ev.Role, message: Reserve | Prefill) -> None:
        incarnation = self._incarnation(request, message.attempt_id, role)
        self._granter(incarnation).dispatch(message.attempt_id, message.epoch, now_ns=self.now_ns)
        link = self._links.get(incarnation)
        if link is None or not link.send(self, message):
            refused = ev.WorkerRefused(
                now_ns=self.now_ns,
                attempt_id=message.attempt_id,
                epoch=message.epoch,
                role=role,
                code="no_capacity",
                message="not connected",
            )
            self.kernel.at(0, self.life, self.step, request, refused)

    def _send_cancel(self, request: SimRequest, order: ev.SendCancel) -> None:
        incarnation = self._incarnation(request, order.attempt_id, order.role)
        self._granter(incarnation).revoke(order.attempt_id, order.epoch)
        link = self._links.get(incarnation)
        if link is not None:
            link.send(self, Cancel(attempt_id=order.attempt_id, epoch=order.epoch, reason=order.reason))

    def _wait_for_fence(self, request: SimRequest, order: ev.WaitForFence) -> None:
        wait_ns = max(0, self._safe_after_ns(request, order) - self.now_ns)
        self.kernel.at(wait_ns and wait_ns + FENCE_STEP_NS, self.life, self._on_fence_due, request, order)

    def _on_fence_due(self, request: SimRequest, order: ev.WaitForFence) -> None:
        if request.machine.closed:
            return
        if self._safe_after_ns(request, order) > self.now_ns:
            self._wait_for_fence(request, order)
            return
        self.step(
            request,
            ev.TimerFired(now_ns=self.now_ns, attempt_id=order.attempt_id, epoch=order.epoch, role=order.role),
        )

    def _safe_after_ns(self, request: SimRequest, order: ev.WaitForFence) -> int:
        granter = self._granters.get(self._incarnation(request, order.attempt_id, order.role))
        return (granter.safe_after_ns(order.attempt_id, order.epoch) if granter is not None else None) or 0

    def _close(self, request: SimRequest, order: ev.Close) -> None:
        self.world.tell("on_closed", request, order)
        for attempt in request.machine.attempts:
            self._by_attempt.pop(attempt.attempt_id, None)
            for role in ev.ROLES:
                granter = self._granters.get(attempt.workers[role].incarnation)
                if granter is not None:
                    granter.end(attempt.attempt_id, attempt.epoch)
        self.running.pop(request.request_id, None)
        self._admission.leave(request.request_id)

    # --- the writer -----------------------------------------------------------------------------------------------

    def _put(self, request: SimRequest, item: Any) -> None:
        if not request.told:
            request.queue.append(item)
            self._wake(request)

    def _wake(self, request: SimRequest) -> None:
        if not request.busy and request.queue and not request.told:
            request.busy = True
            self.kernel.at(request.ask.read_ns, self.life, self._on_writer, request)

    def _on_writer(self, request: SimRequest) -> None:
        """Takes one item; what it brings is written in a later event."""
        request.busy = False
        if request.told or not request.queue:
            return
        item = request.queue.popleft()
        match item:
            case Batch():
                self._take(request, item)
            case Restarted():
                request.restart()
                self._wake(request)
            case Ended():
                self._begin_write(request, len(request.taken), ending="finished")
            case Broken():
                self._tell(request, item.ending, item.detail)
                self.step(request, ev.AnswerEnded(now_ns=self.now_ns))

    def _take(self, request: SimRequest, batch: Batch) -> None:
        request.taken.extend(batch.token_ids)
        num_taken = len(request.taken)
        if request.credit - num_taken <= self.world.scenario.shape.backlog_tokens // 2:
            request.credit = num_taken + self.world.scenario.shape.backlog_tokens
            self._give_credit(request)
        stop_at = request.ask.stop_string_at
        if stop_at is not None and num_taken > stop_at and not request.machine.is_ended:
            self.step(request, ev.StopMatched(now_ns=self.now_ns))
            self._begin_write(request, num_taken, ending="finished")
            return
        num_visible = request.num_visible()
        if request.ask.stream and num_visible > request.num_shown:
            self._begin_write(request, num_visible, ending=None)
        else:
            self._wake(request)

    def _begin_write(self, request: SimRequest, num_tokens: int, *, ending: str | None) -> None:
        """Records the boundary before the first write, then writes."""
        machine = request.machine
        first = not request.started
        if first and machine.is_ended:
            # Too late: the request has failed meanwhile, and that is in the queue or was told.
            self._wake(request)
            return
        request.started = request.busy = True
        if first and self.world.parts.mark_before_write:
            self.step(request, ev.FirstDelta(now_ns=self.now_ns))
        delay_ns = self.world.work.skewed(0, WRITE_NS_MAX)
        self.kernel.at(delay_ns, self.life, self._on_write, request, num_tokens, ending, first)

    def _on_write(self, request: SimRequest, num_tokens: int, ending: str | None, first: bool) -> None:
        request.busy = False
        if request.told:
            return
        self.world.tell("on_wrote", request, tuple(request.taken[request.num_shown : num_tokens]))
        request.num_shown = num_tokens
        if first and not self.world.parts.mark_before_write:
            request.busy = True
            self.kernel.at(WRITE_NS_MAX, self.life, self._on_written_late, request, ending)
            return
        self._written(request, ending)

    def _on_written_late(self, request: SimRequest, ending: str | None) -> None:
        """Only for the planted bug that records the boundary after the write."""
        request.busy = False
        if not request.told and not request.machine.is_ended and request.num_shown:
            self.step(request, ev.FirstDelta(now_ns=self.now_ns))
            self._written(request, ending)

    def _written(self, request: SimRequest, ending: str | None) -> None:
        self.step(request, ev.Delivered(now_ns=self.now_ns, num_tokens=request.num_shown))
        if ending is None:
            self._wake(request)
            return
        self._tell(request, ending, request.num_shown)
        if request.machine.is_ended:
            # Cancelled while the last bytes went out: the client has a whole answer all the same.
            self.step(request, ev.AnswerEnded(now_ns=self.now_ns))
        else:
            self.step(request, ev.Completed(now_ns=self.now_ns))

    def _tell(self, request: SimRequest, ending: str, detail: Any) -> None:
        request.told = True
        self.world.tell("on_told", request, ending, detail)

    def _give_credit(self, request: SimRequest) -> None:
        attempt = request.machine.current
        if attempt is None:
            return
        link = self._links.get(attempt.workers["decode"].incarnation)
        if link is not None:
            link.send(self, Credit(attempt_id=attempt.attempt_id, epoch=attempt.epoch, max_index=request.credit))

    # --- workers ----------------------------------------------------------------------------------------------------

    def on_link_up(self, link: Link) -> None:
        """A worker dialled in."""
        worker = link.peer_of(self)
        assert isinstance(worker, SimWorker), worker
        incarnation = worker.life.incarnation
        if incarnation in self._gone:
            return
        self._links[incarnation] = link
        self._workers[incarnation] = (worker.ref, worker.role)
        for request in tuple(self.running.values()):
            self.step(request, ev.LinkBack(now_ns=self.now_ns, incarnation=incarnation))
            attempt = request.machine.current
            if attempt is not None and attempt.workers["decode"].incarnation == incarnation:
                # A credit that was lost with the old connection would stop the stream for good.
                self._give_credit(request)

    def on_link_down(self, link: Link) -> None:
        """A connection ended; that proves nothing."""
        incarnation = link.peer_of(self).life.incarnation
        if self._links.get(incarnation) is not link:
            return
        del self._links[incarnation]
        for request in tuple(self.running.values()):
            self.step(request, ev.LinkLost(now_ns=self.now_ns, incarnation=incarnation))

    def on_gone(self, incarnation: str) -> None:
        """A worker life is proved over."""
        self._gone.add(incarnation)
        self._links.pop(incarnation, None)
        self._granters.pop(incarnation, None)
        for request in tuple(self.running.values()):
            self.step(request, ev.WorkerGone(now_ns=self.now_ns, incarnation=incarnation))

    def on_message(self, link: Link, message: Any) -> None:
        """Takes one message of a worker."""
        incarnation = link.peer_of(self).life.incarnation
        if isinstance(message, LeaseAsk):
            link.send(self, self._granter(incarnation).on_ask(message, self.now_ns))
        elif isinstance(message, Frame):
            self._on_frame(message)
        else:
            request = self._by_attempt.get(message.attempt_id)
            if request is not None:
                self._on_attempt_message(request, incarnation, message)

    def _on_frame(self, frame: Frame) -> None:
        for delta in frame.streams:
            request = self._by_attempt.get(delta.attempt_id)
            if request is not None:
                event = ev.TokensArrived(
                    now_ns=self.now_ns,
                    attempt_id=delta.attempt_id,
                    epoch=delta.epoch,
                    first_index=delta.first_index,
                    num_tokens=len(delta.token_ids),
                    end=delta.end,
                )
                self.step(request, event, delta)

    def _on_attempt_message(self, request: SimRequest, incarnation: str, message: Any) -> None:
        about: dict[str, Any] = {"now_ns": self.now_ns, "attempt_id": message.attempt_id, "epoch": message.epoch}
        role = self._role(request, message.attempt_id, incarnation)
        match message:
            case Reserved():
                request.ticket = message.ticket
                self.step(request, ev.BlocksReserved(**about))
            case Refused():
                refused = ev.WorkerRefused(**about, role=role, code=message.code, message=message.message)
                self.step(request, refused)
            case PrefillStarted():
                self.step(request, ev.PrefillBegan(**about, cached_tokens=message.cached_tokens))
            case PrefillDone():
                self.step(request, ev.PrefillEnded(**about))
            case AttemptFault():
                for side in ev.ROLES:
                    if self._incarnation(request, message.attempt_id, side) == incarnation:
                        self._cool.failed(incarnation, self.now_ns)
                self.step(
                    request, ev.AttemptFaulted(**about, role=role, reason=message.reason, message=message.message)
                )
            case CancelAck():
                self.step(request, ev.CancelAcked(**about, role=role, num_generated=message.num_generated))

    # --- leases -------------------------------------------------------------------------------------------------------

    def _granter(self, incarnation: str) -> LeaseGranter:
        granter = self._granters.get(incarnation)
        if granter is None:
            granter = self._granters[incarnation] = self.world.parts.granter(self.timing.lease_ms)
        return granter

    def _watch(self) -> None:
        if not self._watching:
            self._watching = True
            self.kernel.at(self.timing.lease_ms * MS // 3, self.life, self._on_watch)

    def _on_watch(self) -> None:
        """Finds the sides that nobody has asked for, and looks again while anything runs."""
        self._watching = False
        for incarnation, granter in list(self._granters.items()):
            granter.check_invariants()
            for attempt_id, epoch in granter.lapse(self.now_ns):
                request = self._by_attempt.get(attempt_id)
                if request is not None:
                    role = self._role(request, attempt_id, incarnation)
                    lapsed = ev.LeaseLapsed(now_ns=self.now_ns, attempt_id=attempt_id, epoch=epoch, role=role)
                    self.step(request, lapsed)
        if self.running:
            self._watch()

    @property
    def num_leases(self) -> int:
        """How many attempts are granted or grantable."""
        return sum(len(granter) for granter in self._granters.values())

    def _incarnation(self, request: SimRequest, attempt_id: str, role: ev.Role) -> str:
        for attempt in request.machine.attempts:
            if attempt.attempt_id == attempt_id:
                return attempt.workers[role].incarnation
        raise AssertionError(f"{attempt_id} is no attempt of {request.request_id}")

    def _role(self, request: SimRequest, attempt_id: str, incarnation: str) -> ev.Role:
        is_prefill = self._incarnation(request, attempt_id, "prefill") == incarnation
        return "prefill" if is_prefill else "decode"
