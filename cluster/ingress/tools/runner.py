"""The tools of one request: carries out what its ``ToolRun`` orders, in the ledger and over HTTP.

Owns one life of a logical request's tool calls. Decides nothing itself (``cluster.core.tool_ledger``). A try that has
begun is finished and written down also when the client has left meanwhile, so that the next life finds its result.

Life cycle: ``ToolRunner(...)`` -> ``round(calls)`` after each round of the model -> next round, or finished.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.core import tool_events as ev
from cluster.core.tool_events import Asked, Call, ToolResult
from cluster.core.tool_ledger import ToolRun
from cluster.ingress.api.errors import ApiError, Conflict, NotReady, UpstreamFailed
from cluster.ingress.tools.caller import Outcome, ToolCaller
from cluster.ingress.tools.metrics import ToolMetrics
from cluster.ledger.database import LedgerUnavailable
from cluster.ledger.tool_store import RunRow, ToolStore
from cluster.tools_source import ServerTool

logger = logging.getLogger(__name__)

STORE_TRIES_MAX = 4
"""Tries to write down a result that is in hand; without it the model may not see it."""
STORE_RETRY_S = 0.25
LOOKUP_TIMEOUT_S = 10.0
_open_turns: set[asyncio.Task[Any]] = set()
"""Turns whose request is gone; the loop alone would not keep them."""


class Note(Protocol):
    """Writes into the journal of the round that asked for the calls."""

    def __call__(self, event: str, **fields: Any) -> None: ...


class ToolStopped(UpstreamFailed):
    """The calls of an answer could not go on. ``reason`` is what an interrupted stream says."""

    def __init__(self, message: str, *, code: str, status: int, reason: str, call: Mapping[str, Any] | None) -> None:
        super().__init__(message, code=code, status=status, should_retry=False)
        self.reason = reason
        self.call = call

    def fields(self) -> dict[str, Any]:
        return {} if self.call is None else {"tool_call": dict(self.call)}


class _Left(Exception):
    """Whoever wanted the calls is gone; nothing new begins."""


@dataclass(frozen=True, slots=True)
class WantedCall:
    """A call as the model wrote it; ``arguments`` is JSON."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolWork:
    """What runs share: the ledger, the tools, the way to them, clocks."""

    store: ToolStore
    tools: Mapping[str, ServerTool]
    caller: ToolCaller
    metrics: ToolMetrics
    clock_ns: Callable[[], int]
    """A clock that goes on while the machine sleeps."""
    unix_s: Callable[[], float]


class ToolRunner:
    """See the module."""

    def __init__(self, run: ToolRun, row: RunRow, work: ToolWork) -> None:
        self.run = run
        self.row = row
        self._work = work
        self._arguments: dict[str, bytes] = {}
        """By call id, in one fixed writing."""
        self._left = asyncio.Event()
        """Set when whoever wanted the calls is gone."""
        self._may_go_on: Callable[[], bool] = lambda: True
        self._note: Note = _no_note

    async def round(
        self, calls: Sequence[WantedCall], *, note: Note | None = None, may_go_on: Callable[[], bool] | None = None
    ) -> ev.NextRound | ev.Finish:
        """Takes the calls of a round (none: the answer is complete); returns once all have their results.

        ``may_go_on`` is asked before anything new begins. Raises: ToolStopped, Conflict, NotReady.
        """
        self._note = note or _no_note
        self._may_go_on = may_go_on or self._may_go_on
        asked = [self._asked(index, call) for index, call in enumerate(calls)]
        turn = asyncio.ensure_future(self._turn(ev.RoundEnded(now_ns=self._work.clock_ns(), calls=tuple(asked))))
        try:
            return await asyncio.shield(turn)
        except asyncio.CancelledError:
            self._left.set()
            _open_turns.add(turn)
            turn.add_done_callback(_forget)
            # A try is bounded by its time limit, and so is this.
            await asyncio.wait((turn,))
            raise

    def _asked(self, index: int, call: WantedCall) -> Asked:
        try:
            canonical, digest = ev.canonical_arguments(call.arguments or "{}")
        except ValueError as error:
            # The grammar binds arguments, so this is a fault of ours.
            raise ApiError(f"the arguments of {call.name} are not JSON", code="internal_error") from error
        self._arguments[ev.call_id_of(self.row.logical_id, self.run.round_index + 1, index)] = canonical
        return Asked(call.name, digest)

    async def _turn(self, event: ev.AnyEvent) -> ev.NextRound | ev.Finish:
        before = self.run.num_replayed
        orders = self.run.step(event)
        self._tell_replayed(before)
        while orders:
            order = orders.pop(0)
            if isinstance(order, ev.NextRound | ev.Finish):
                return order
            if isinstance(order, ev.Stop):
                raise self._stopped(order)
            happened = await self._carry_out(order)
            if happened is not None:
                before = self.run.num_replayed
                orders += self.run.step(happened)
                self._tell_replayed(before)
        raise AssertionError(f"the run of {self.row.logical_id} does not go on")

    def _tell_replayed(self, before: int) -> None:
        for _ in range(before, self.run.num_replayed):
            self._note("tool_replayed", logical_id=self.row.logical_id)
            self._work.metrics.replayed.inc()

    async def _carry_out(self, order: ev.AnyInstruction) -> ev.AnyEvent | None:
        match order:
            case ev.StoreIntent(call, number):
                self._check_wanted()
                return await self._store_intent(call, number)
            case ev.MakeCall(call, send_before_ns):
                return await self._make_call(call, send_before_ns)
            case ev.AskTool(call):
                self._check_wanted()
                return await self._ask_tool(call)
            case ev.Wait(call, until_ns):
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._left.wait(), max(0, until_ns - self._work.clock_ns()) / 1e9)
                self._check_wanted()
                return ev.WaitOver(now_ns=self._work.clock_ns(), call_id=call.call_id)
            case ev.StoreResult(call, result):
                return await self._store_result(call, result)
            case ev.StoreHandOver(call, why):
                await self._store_hand_over(call, why)
                return None
            case _:
                raise AssertionError(f"no way to carry out {order}")

    def _check_wanted(self) -> None:
        if self._left.is_set():
            raise _Left
        if not self._may_go_on():
            raise ToolStopped(
                "the request was cancelled", code="request_cancelled", status=409, reason="cancelled", call=None
            )

    # --- the ledger -----------------------------------------------------------------------------------------

    async def _store_intent(self, call: Call, number: int) -> ev.AnyEvent:
        self._note("tool_intent", tool=call.name, call_id=call.call_id, number=number)
        # Also when the commit fails: it may have gone through.
        self.run.has_intent = True
        try:
            is_ours = await asyncio.to_thread(self._work.store.intend, self.row, call, now_ms=self._now_ms())
        except LedgerUnavailable as error:
            raise _no_ledger(call, "the call was not made", error) from error
        now_ns = self._work.clock_ns()
        return ev.IntentStored(now_ns=now_ns, call_id=call.call_id) if is_ours else ev.RunTakenOver(now_ns=now_ns)

    async def _store_result(self, call: Call, result: ToolResult) -> ev.AnyEvent:
        for number in range(1, STORE_TRIES_MAX + 1):
            try:
                is_kept = await asyncio.to_thread(
                    self._work.store.settle, self.row, call, result, now_ms=self._now_ms()
                )
                break
            except LedgerUnavailable as error:
                if number == STORE_TRIES_MAX:
                    raise _no_ledger(call, "the result could not be recorded", error) from error
                await asyncio.sleep(STORE_RETRY_S)
        now_ns = self._work.clock_ns()
        if not is_kept:
            return ev.RunTakenOver(now_ns=now_ns)
        self._note("tool_result", tool=call.name, call_id=call.call_id, is_error=result.is_error)
        self._work.metrics.calls.labels(call.name, "error" if result.is_error else "done").inc()
        return ev.ResultStored(now_ns=now_ns, call_id=call.call_id)

    async def _store_hand_over(self, call: Call, why: str) -> None:
        self._note("tool_handed_over", tool=call.name, call_id=call.call_id, why=why)
        self._work.metrics.calls.labels(call.name, "unknown").inc()
        about = (self.row.request_id, call.name, call.call_id, why)
        logger.error("tool_handed_over request_id=%s tool=%s call_id=%s why=%s", *about)
        try:
            await asyncio.to_thread(self._work.store.hand_over, self.row, call, why, now_ms=self._now_ms())
        except LedgerUnavailable as error:
            # The intent without a result says the same.
            logger.warning("hand_over_not_written request_id=%s error=%s", self.row.request_id, error)

    # --- the tool -------------------------------------------------------------------------------------------

    async def _make_call(self, call: Call, send_before_ns: int) -> ev.AnyEvent:
        tool, key = self._work.tools[call.name], self._key(call)
        left_s = (send_before_ns - self._work.clock_ns()) / 1e9
        begin_ns = self._work.clock_ns()
        if left_s <= 0:
            # This process stood still between intent and try: whoever took over may have made the call.
            outcome = Outcome("not_made", why="the gateway stood still before it")
        else:
            outcome = await self._work.caller.call(tool, self._arguments[call.call_id], key=key, timeout_s=left_s)
        now_ns = self._work.clock_ns()
        self._work.metrics.seconds.labels(call.name).observe((now_ns - begin_ns) / 1e9)
        if outcome.kind == "answered":
            assert outcome.result is not None, call
            return ev.Answered(now_ns=now_ns, call_id=call.call_id, result=outcome.result)
        self._note("tool_try_failed", tool=call.name, call_id=call.call_id, outcome=outcome.kind, why=outcome.why)
        kind = ev.NotMade if outcome.kind == "not_made" else ev.OutcomeUnknown
        return kind(now_ns=now_ns, call_id=call.call_id, why=outcome.why)

    async def _ask_tool(self, call: Call) -> ev.AnyEvent:
        tool = self._work.tools[call.name]
        timeout_s = min(LOOKUP_TIMEOUT_S, tool.timeout_s)
        answer, result = await self._work.caller.look_up(tool, key=self._key(call), timeout_s=timeout_s)
        self._note("tool_looked_up", tool=call.name, call_id=call.call_id, answer=answer)
        return ev.LookedUp(now_ns=self._work.clock_ns(), call_id=call.call_id, answer=answer, result=result)

    def _key(self, call: Call) -> str:
        return ev.action_key(self.row.tenant, self.row.logical_id, call.call_id)

    def _now_ms(self) -> int:
        return int(self._work.unix_s() * 1000)

    # --- the end --------------------------------------------------------------------------------------------

    def _stopped(self, stop: ev.Stop) -> ApiError:
        self._note("tool_stop", code=stop.code, why=stop.message)
        self._work.metrics.stops.labels(stop.code).inc()
        about = None
        if stop.call is not None:
            key = self._key(stop.call)
            about = {"id": stop.call.call_id, "name": stop.call.name, "idempotency_key": key}
        match stop.code:
            case "taken_over":
                message = "This request was given to another ingress, because this server was taken for dead."
                return Conflict(message, code="request_in_progress", request_id=self.row.request_id)
            case "tool_divergence":
                message = f"The model asked for another tool call than the recorded one: {stop.message}."
                return ToolStopped(message, code=stop.code, status=409, reason=stop.code, call=about)
            case "deadline_exceeded":
                message = f"The deadline of the tool calls has passed: {stop.message}."
                return ToolStopped(message, code=stop.code, status=504, reason="deadline", call=about)
            case _:
                message = f"A tool call needs a person: {stop.message}."
                return ToolStopped(message, code=stop.code, status=502, reason=stop.code, call=about)


def _no_ledger(call: Call, what: str, error: LedgerUnavailable) -> NotReady:
    logger.warning("tool_ledger_unavailable tool=%s call_id=%s error=%s", call.name, call.call_id, error)
    refusal = NotReady(f"The ledger of tool calls does not answer; {what}.", code="no_ledger")
    refusal.should_retry = False
    return refusal


def _no_note(event: str, **fields: Any) -> None:
    """Where there is no journal."""


def _forget(turn: asyncio.Task[Any]) -> None:
    _open_turns.discard(turn)
    if not turn.cancelled() and (error := turn.exception()) is not None and not isinstance(error, _Left | ApiError):
        logger.error("tool_turn_failed", exc_info=error)
