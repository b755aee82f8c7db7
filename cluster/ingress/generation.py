"""One logical request while it runs: its machine, the tokens on their way to the client, and its record.

Owns the request machine and the queue of events for the HTTP layer. Carries out what the machine orders through the
``Links`` it was given; decides nothing itself. Lives on the event loop of the ingress.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from cluster.core import attempt_events as ev
from cluster.core.attempts import Phase, RequestMachine
from cluster.ingress.api.backend import (
    CancelReason,
    Ended,
    Generation,
    GenerationEvent,
    Interrupted,
    Restarted,
    TokenBatch,
)
from cluster.ingress.api.errors import ApiError, InvalidRequest, NotReady, UpstreamFailed
from cluster.ingress.placement import Placed
from cluster.ingress.tracing import RequestTrace
from kvstore.core.messages import GenerationSpec, StreamDelta

CACHED_TOKENS_DEADLINE_S = 1.0


class Orders(Protocol):
    """Who carries out the orders that leave the process."""

    def send_reserve(self, generation: RunningRequest, order: ev.SendReserve) -> None: ...

    def send_prefill(self, generation: RunningRequest, order: ev.SendPrefill) -> None: ...

    def send_cancel(self, generation: RunningRequest, order: ev.SendCancel) -> None: ...

    def ask_resend(self, generation: RunningRequest, order: ev.AskResend) -> None: ...

    def wait_for_fence(self, generation: RunningRequest, order: ev.WaitForFence) -> None: ...

    def route(self, generation: RunningRequest, avoid: tuple[str, ...], silent_nodes: tuple[str, ...] = ()) -> None: ...

    def give_credit(self, generation: RunningRequest, max_index: int) -> None: ...

    def count_dropped(self, order: ev.DropTokens) -> None: ...

    def closed(self, generation: RunningRequest, order: ev.Close) -> None: ...


class RunningRequest(Generation):
    """A ``Generation`` driven by its machine."""

    def __init__(
        self,
        spec: GenerationSpec,
        *,
        machine: RequestMachine,
        tenant: str,
        label: str | None,
        orders: Orders,
        clock_ns: Callable[[], int],
        backlog_tokens: int,
        placed: Placed,
        facts: Mapping[str, Any],
        trace: RequestTrace | None = None,
    ) -> None:
        self.spec = spec
        self.machine = machine
        self.tenant = tenant
        self.label = label
        self.placed = placed
        self.ticket: Any = None
        self.trace = trace
        self._orders = orders
        self._clock_ns = clock_ns
        self._backlog_tokens = backlog_tokens
        self._credit = backlog_tokens
        self._facts = facts if trace is None else {**facts, "trace_id": trace.trace_id}
        self._cached_by_tier: dict[str, int] = {}
        self._queue: deque[GenerationEvent | ApiError] = deque()
        self._arrived = asyncio.Event()
        self._cached: asyncio.Event = asyncio.Event()
        self._cached_tokens = 0
        self._interruption: dict[str, Any] | None = None
        self._gave_tokens = False
        self.deadline: asyncio.TimerHandle | None = None
        self.timers: set[asyncio.TimerHandle] = set()

    # --- for the HTTP layer ---------------------------------------------------------------------------------

    @property
    def request_id(self) -> str:
        return self.machine.request_id

    @property
    def attempt_id(self) -> str:
        current = self.machine.current
        return current.attempt_id if current is not None else ""

    @property
    def cached_tokens(self) -> int:
        return self._cached_tokens

    @property
    def has_restarted(self) -> bool:
        return any(isinstance(item, Restarted) for item in self._queue)

    async def arrived(self) -> None:
        while not self._queue:
            self._arrived.clear()
            await self._arrived.wait()

    def take_ready(self) -> TokenBatch | None:
        if not self._queue or not self._gave_tokens or not isinstance(self._queue[0], TokenBatch):
            return None
        batch = self._queue.popleft()
        assert isinstance(batch, TokenBatch)
        self._renew_credit(batch.first_index + len(batch.token_ids))
        return batch

    async def next(self) -> GenerationEvent:
        await self.arrived()
        if isinstance(self._queue[0], TokenBatch) and not self._gave_tokens:
            # Prefill says how much was cached on another connection than the one the token came by.
            try:
                async with asyncio.timeout(CACHED_TOKENS_DEADLINE_S):
                    await self._cached.wait()
            except TimeoutError:
                self._cached.set()
            if not self._queue:
                return await self.next()
        event = self._queue.popleft()
        if isinstance(event, ApiError | Interrupted):
            # Whoever asks for the next event has written the ones before: what was delivered is final.
            self._answer_ended()
        if isinstance(event, ApiError):
            raise event
        if isinstance(event, TokenBatch):
            self._gave_tokens = True
            self._renew_credit(event.first_index + len(event.token_ids))
        return event

    def mark_first_delta(self) -> None:
        if self.machine.is_ended:
            failure = next((item for item in self._queue if isinstance(item, ApiError)), None)
            raise failure or UpstreamFailed("the request has ended")
        self.step(ev.FirstDelta(now_ns=self._clock_ns()))

    def delivered(self, num_tokens: int) -> None:
        self.step(ev.Delivered(now_ns=self._clock_ns(), num_tokens=num_tokens))

    def completed(self, *, rest: str = "") -> None:
        self.step(ev.Completed(now_ns=self._clock_ns(), rest=rest))

    @property
    def is_cancelled(self) -> bool:
        return self.machine.phase is Phase.CANCELLED

    def note(self, event: str, **fields: Any) -> None:
        self.machine.journal.note(self._clock_ns(), event, len(self.machine.attempts), **fields)

    async def finish_stop(self) -> None:
        self.step(ev.StopMatched(now_ns=self._clock_ns()))

    async def cancel(self, reason: CancelReason) -> None:
        if reason == "client_stalled" and not self.machine.is_ended:
            self._interruption = _interruption(reason, self.attempt_id, "the client stopped reading")
        self.step(ev.ClientGone(now_ns=self._clock_ns(), reason=reason))
        self._answer_ended()

    def _answer_ended(self) -> None:
        self.step(ev.AnswerEnded(now_ns=self._clock_ns()))

    def cancel_by_id(self) -> None:
        """Stops a request whose client still reads, and ends its answer."""
        self.step(ev.ClientGone(now_ns=self._clock_ns(), reason="cancelled"))
        why = "the request was cancelled"
        # As with any interruption, what waits behind the event under way is not delivered: the books are closed.
        self._queue.clear()
        if self.machine.first_delta_sent:
            self._put(Interrupted("cancelled", self.attempt_id, why))
        else:
            self._put(UpstreamFailed(why, code="request_cancelled", status=409))

    # --- for the backend ------------------------------------------------------------------------------------

    def step(self, event: ev.AnyEvent, delta: StreamDelta | None = None) -> None:
        """Feeds the machine and carries out its orders. ``delta`` holds the tokens of a ``TokensArrived``."""
        for order in self.machine.step(event):
            self._carry_out(order, delta)

    def on_prefill_began(self, event: ev.PrefillBegan) -> None:
        """Takes the number of cached tokens of the current attempt."""
        current = self.machine.current
        if current is not None and (current.attempt_id, current.epoch) == (event.attempt_id, event.epoch):
            self._cached_tokens = event.cached_tokens
            self._cached_by_tier = event.cached_by_tier
            self._cached.set()
        self.step(event)

    def record(self) -> dict[str, Any]:
        """Returns the journal of this request as JSON-ready data (contract section 1)."""
        machine = self.machine
        return {
            "request_id": machine.request_id,
            "label": self.label,
            "phase": machine.phase.value,
            "stream": machine.stream,
            "first_delta_sent": machine.first_delta_sent,
            "delivered_output_tokens": machine.num_delivered,
            "prompt_tokens": len(self.spec.prompt_token_ids),
            "cached_tokens": self._cached_tokens,
            "cached_tokens_by_tier": self._cached_by_tier,
            **self._facts,
            "seed": self.spec.sampling.seed,
            "remaining_retry_budget": machine.max_attempts - len(machine.attempts),
            "attempts": [_attempt_record(attempt, machine.admitted_ns) for attempt in machine.attempts],
            "interruption": self._interruption_record(),
            "events": machine.journal.entries,
            "events_dropped": machine.journal.num_dropped,
        }

    def _interruption_record(self) -> dict[str, Any] | None:
        if self._interruption is None:
            return None
        return {**self._interruption, "delivered_output_tokens": self.machine.num_delivered}

    def _carry_out(self, order: ev.Instruction, delta: StreamDelta | None) -> None:
        match order:
            case ev.Deliver():
                assert delta is not None, "tokens without their frame"
                self._deliver(order, delta)
            case ev.DropTokens():
                self._orders.count_dropped(order)
            case ev.SendReserve():
                self._orders.send_reserve(self, order)
            case ev.SendPrefill():
                self._orders.send_prefill(self, order)
            case ev.SendCancel():
                self._orders.send_cancel(self, order)
            case ev.WaitForFence():
                self._orders.wait_for_fence(self, order)
            case ev.AskResend():
                self._orders.ask_resend(self, order)
            case ev.RouteAgain():
                self._restart()
                self._orders.route(self, order.avoid, order.silent_nodes)
            case ev.Fail():
                self._put(_failure(order))
            case ev.Interrupt():
                self._interrupt(order)
            case ev.Close():
                self._orders.closed(self, order)

    def _deliver(self, order: ev.Deliver, delta: StreamDelta) -> None:
        if order.num_tokens:
            logprobs = delta.logprobs[order.skip :] if delta.logprobs is not None else None
            self._put(TokenBatch(delta.first_index + order.skip, delta.token_ids[order.skip :], logprobs))
        if order.end is not None:
            self._put(Ended(order.end))

    def _interrupt(self, order: ev.Interrupt) -> None:
        self._interruption = _interruption(order.reason, order.attempt_id, order.message)
        # Only the event under way is finished; what waits behind it is not delivered.
        self._queue.clear()
        self._put(Interrupted(order.reason, order.attempt_id, order.message))

    def _restart(self) -> None:
        """The tokens of the old attempt are void."""
        self._queue.clear()
        self._cached.clear()
        self._credit = self._backlog_tokens
        self._gave_tokens = False
        self._put(Restarted(self.attempt_id))

    def repeat_credit(self) -> None:
        """Gives the credit of the current attempt once more: the message may have died with a link."""
        self._orders.give_credit(self, self._credit)

    def _renew_credit(self, num_taken: int) -> None:
        if self._credit - num_taken <= self._backlog_tokens // 2:
            self._credit = num_taken + self._backlog_tokens
            self._orders.give_credit(self, self._credit)

    def _put(self, item: GenerationEvent | ApiError) -> None:
        self._queue.append(item)
        self._arrived.set()


def _failure(order: ev.Fail) -> ApiError:
    match order.status:
        case 400:
            return InvalidRequest(order.message, param="max_tokens", code=order.code)
        case 503:
            return NotReady(order.message, code=order.code)
        case _:
            advice = None if order.retryable_by_client else False
            return UpstreamFailed(order.message, code=order.code, status=order.status, should_retry=advice)


def _interruption(reason: str, attempt_id: str, message: str) -> dict[str, Any]:
    return {
        "code": "upstream_decode_interrupted",
        "reason": reason,
        "attempt_id": attempt_id,
        "message": message,
        "partial_output": True,
        "retryable": False,
    }


def _attempt_record(attempt: Any, admitted_ns: int) -> dict[str, Any]:
    return {
        "attempt_id": attempt.attempt_id,
        "epoch": attempt.epoch,
        "prefill": msgspec.to_builtins(attempt.workers["prefill"]),
        "decode": msgspec.to_builtins(attempt.workers["decode"]),
        "started_ns": attempt.started_ns - admitted_ns,
        "ended_ns": attempt.ended_ns - admitted_ns if attempt.ended_ns is not None else None,
        "end_reason": attempt.end_reason,
        "received_tokens": attempt.num_received,
        "generated_tokens": attempt.num_generated,
        "fenced": attempt.is_fenced,
    }
