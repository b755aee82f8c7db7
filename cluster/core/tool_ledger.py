"""The tool calls of one logical request: which are made, which are taken from the ledger, and when to stop.

Pure: events in, instructions out. One ``ToolRun`` is one life of the request (one HTTP request that holds its key); it
begins with what earlier lives have recorded.

The rules it keeps:

* No try before its intent is committed; no result to the model before it is committed.
* What is recorded comes back in the same order, by place, name and digest of arguments. A life that asks for anything
  else than the next recorded call is stopped with ``tool_divergence``: nothing is replayed to it, nothing is made.
* A recorded result is given again and the tool is not called.
* After a try of unknown outcome the tool's own rule holds: repeat with the same key, ask the tool first, or a person.
  A tool without side effects is simply asked again.
* Calls are made one after the other, in the order in which the model wrote them.
* Rounds, calls, tries and time are bounded.

    round ended -> [replayed] or intent -> try -> result -> next call ... -> next round -> ... -> finish
                                  ^         | unknown
                                  +- wait <-+-> look up -> result, or intent again, or a person
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cluster.core import tool_events as ev
from cluster.core.tool_events import Asked, Call, LoopTerms, RecordedCall, ToolResult, ToolTerms

BACKOFF_NS = 200_000_000
"""Before the second try; doubled before each further one."""
BACKOFF_NS_MAX = 5_000_000_000
LOOKUPS_MAX = 8

_TOO_MANY = ToolResult("This call was not made: the limit of calls for one answer is reached.", is_error=True)


@dataclass(slots=True)
class _Progress:
    """The call that is under way."""

    call: Call
    terms: ToolTerms
    num_tries: int = 0
    num_lookups: int = 0
    is_uncertain: bool = False
    """Some try may have done its work."""
    send_before_ns: int = 0
    waits_for: str = ""
    """What comes after a wait: ``try`` or ``lookup``."""
    why: str = ""
    result: ToolResult | None = None
    """On its way into the ledger."""


@dataclass(slots=True)
class ToolRun:
    """See the module. ``recorded`` in any order; ``tools`` by name."""

    logical_id: str
    terms: LoopTerms
    tools: Mapping[str, ToolTerms]
    recorded: Sequence[RecordedCall] = ()
    round_index: int = -1
    """The round that ended last."""
    num_replayed: int = 0
    num_calls: int = 0
    """Calls that the model was allowed so far, replayed ones included."""
    has_intent: bool = False
    """Some intent of this request is in the ledger, of whatever life."""
    is_over: bool = False
    _record: list[RecordedCall] = field(init=False)
    _cursor: int = 0
    _asked: list[Call | None] = field(default_factory=list)
    """The calls of this round; None for one that is over the limit."""
    _results: list[ToolResult] = field(default_factory=list)
    _now: _Progress | None = None

    def __post_init__(self) -> None:
        self._record = sorted(self.recorded, key=lambda recorded: recorded.call.place)
        self.has_intent = bool(self._record)

    def step(self, event: ev.AnyEvent) -> list[ev.AnyInstruction]:
        """Takes one event; returns what the driver must do, in order. Modifies: the run."""
        if self.is_over:
            return []
        match event:
            case ev.RoundEnded():
                return self._round_ended(event)
            case ev.RunTakenOver():
                return [self._stop("taken_over", "the request was given to another ingress")]
            case _:
                if self._now is None or event.call_id != self._now.call.call_id:
                    return []
                return self._about_call(self._now, event)

    @property
    def is_replaying(self) -> bool:
        """Whether calls of an earlier life are still to come: until they have, nothing is shown to the client."""
        return self._cursor < len(self._record)

    def check_invariants(self) -> None:
        """Asserts what must hold after every step."""
        assert 0 <= self._cursor <= len(self._record)
        assert len(self._results) <= len(self._asked), (len(self._results), len(self._asked))
        assert self.num_calls <= self.terms.max_calls, self.num_calls
        assert self.round_index < self.terms.max_rounds or not any(self._asked), self.round_index
        if self._now is not None:
            assert self._now.num_tries <= self._now.terms.max_tries, self._now
            assert self._now.num_lookups <= LOOKUPS_MAX, self._now

    # --- a round ------------------------------------------------------------------------------------------------

    def _round_ended(self, event: ev.RoundEnded) -> list[ev.AnyInstruction]:
        assert self._now is None, f"a round ended while {self._now} was under way"
        self.round_index += 1
        self._asked, self._results = [], []
        for index, asked in enumerate(event.calls):
            is_allowed = self.num_calls < self.terms.max_calls
            self.num_calls += is_allowed
            self._asked.append(self._call(index, asked) if is_allowed else None)
        if (difference := self._difference()) is not None:
            return [self._stop("tool_divergence", difference)]
        if not event.calls:
            self.is_over = True
            return [ev.Finish()]
        return self._go_on(event.now_ns)

    def _call(self, index: int, asked: Asked) -> Call:
        return Call(
            call_id=ev.call_id_of(self.logical_id, self.round_index, index),
            round_index=self.round_index,
            call_index=index,
            name=asked.name,
            arguments_digest=asked.arguments_digest,
        )

    def _difference(self) -> str | None:
        """Returns how this round differs from what is recorded, or None. What is recorded comes first, in order."""
        expected = self._record[self._cursor :]
        asked = [call for call in self._asked if call is not None]
        for recorded, call in zip(expected, asked, strict=False):
            if recorded.call != call:
                return f"{_name(recorded.call)} is recorded, {_name(call)} was asked for"
        rest = [recorded.call for recorded in expected[len(asked) :]]
        if not asked and rest:
            return f"{_name(rest[0])} is recorded, nothing was asked for"
        if rest and rest[0].round_index == self.round_index:
            return f"{_name(rest[0])} is recorded, it was not asked for"
        return None

    def _go_on(self, now_ns: int) -> list[ev.AnyInstruction]:
        """Begins the next call of the round, or the next round."""
        self._now = None
        while len(self._results) < len(self._asked):
            call = self._asked[len(self._results)]
            if call is None:
                self._results.append(_TOO_MANY)
                continue
            terms = self.tools[call.name]
            if self._cursor == len(self._record):
                self._now = _Progress(call, terms)
                return self._begin_try(self._now, now_ns)
            recorded = self._record[self._cursor]
            self._cursor += 1
            self.num_replayed += 1
            if recorded.result is None:
                self._now = _Progress(call, terms, is_uncertain=True, why="its outcome was not recorded")
                return self._uncertain(self._now, now_ns)
            self._results.append(recorded.result)
        may_call = self.round_index + 1 < self.terms.max_rounds and self.num_calls < self.terms.max_calls
        return [ev.NextRound(tuple(self._results), may_call)]

    # --- a call -------------------------------------------------------------------------------------------------

    def _about_call(self, now: _Progress, event: ev.AnyEvent) -> list[ev.AnyInstruction]:
        match event:
            case ev.IntentStored():
                self.has_intent = True
                return [ev.MakeCall(now.call, now.send_before_ns)]
            case ev.Answered():
                return self._store(now, event.result)
            case ev.NotMade():
                return self._not_made(now, event)
            case ev.OutcomeUnknown():
                now.is_uncertain, now.why = True, event.why
                return self._uncertain(now, event.now_ns)
            case ev.LookedUp():
                return self._looked_up(now, event)
            case ev.WaitOver():
                if now.waits_for == "lookup":
                    now.num_lookups += 1
                    return [ev.AskTool(now.call)]
                return self._begin_try(now, event.now_ns)
            case ev.ResultStored():
                return self._stored(now, event.now_ns)
            case _:
                raise AssertionError(f"no rule for {event}")

    def _begin_try(self, now: _Progress, now_ns: int) -> list[ev.AnyInstruction]:
        if now_ns >= self.terms.deadline_ns:
            if now.is_uncertain and now.terms.has_side_effects:
                return self._hand_over(now, "there was no time to find out")
            return [self._stop("deadline_exceeded", f"no time was left for {now.call.name}", now.call)]
        now.num_tries += 1
        # From before the intent: a later life that sees it waits as long from then on, and so longer.
        now.send_before_ns = now_ns + now.terms.timeout_ns
        return [ev.StoreIntent(now.call, now.num_tries)]

    def _not_made(self, now: _Progress, event: ev.NotMade) -> list[ev.AnyInstruction]:
        now.why = event.why
        if now.num_tries < now.terms.max_tries and event.now_ns < self.terms.deadline_ns:
            return [self._wait(now, "try", event.now_ns + _backoff_ns(now.num_tries))]
        if now.is_uncertain:
            if now.terms.has_side_effects:
                return self._hand_over(now, now.why)
            return self._store(now, ToolResult(f"The tool gave no answer: {now.why}.", is_error=True))
        result = ToolResult(f"The tool could not be reached; nothing was done: {event.why}.", is_error=True)
        return self._store(now, result)

    def _uncertain(self, now: _Progress, now_ns: int) -> list[ev.AnyInstruction]:
        """It may have happened: follows the tool's rule."""
        terms = now.terms
        is_left = now.num_tries < terms.max_tries and now_ns < self.terms.deadline_ns
        if not terms.has_side_effects:
            if is_left:
                return [self._wait(now, "try", now_ns + _backoff_ns(now.num_tries))]
            return self._store(now, ToolResult(f"The tool gave no answer: {now.why}.", is_error=True))
        if terms.on_unknown == "repeat_with_key" and is_left:
            return [self._wait(now, "try", now_ns + _backoff_ns(now.num_tries))]
        if terms.on_unknown == "lookup" and now.num_lookups < LOOKUPS_MAX:
            # What was sent may be on its way, or at work, for as long as a try may take: nothing asked before says no.
            return [self._wait(now, "lookup", now_ns + terms.timeout_ns)]
        return self._hand_over(now, now.why)

    def _looked_up(self, now: _Progress, event: ev.LookedUp) -> list[ev.AnyInstruction]:
        if event.answer == "done":
            assert event.result is not None, "done without a result"
            return self._store(now, event.result)
        if event.answer == "absent":
            now.is_uncertain = False
            if now.num_tries < now.terms.max_tries:
                return self._begin_try(now, event.now_ns)
            result = ToolResult(f"The tool gave no answer; it says that nothing was done: {now.why}.", is_error=True)
            return self._store(now, result)
        if now.num_lookups < LOOKUPS_MAX and event.now_ns < self.terms.deadline_ns:
            return [self._wait(now, "lookup", event.now_ns + _backoff_ns(now.num_lookups))]
        return self._hand_over(now, "it still runs" if event.answer == "running" else "the tool could not be asked")

    def _stored(self, now: _Progress, now_ns: int) -> list[ev.AnyInstruction]:
        assert now.result is not None, f"{_name(now.call)} has no result to be stored"
        self._results.append(now.result)
        return self._go_on(now_ns)

    # --- helpers ------------------------------------------------------------------------------------------------

    def _store(self, now: _Progress, result: ToolResult) -> list[ev.AnyInstruction]:
        now.result = result
        return [ev.StoreResult(now.call, result)]

    def _wait(self, now: _Progress, waits_for: str, until_ns: int) -> ev.Wait:
        now.waits_for = waits_for
        return ev.Wait(now.call, until_ns)

    def _hand_over(self, now: _Progress, why: str) -> list[ev.AnyInstruction]:
        message = f"nobody knows whether {now.call.name} was done: {why}"
        return [ev.StoreHandOver(now.call, why), self._stop("tool_outcome_unknown", message, now.call)]

    def _stop(self, code: ev.StopCode, message: str, call: Call | None = None) -> ev.Stop:
        self.is_over = True
        self._now = None
        return ev.Stop(code, message, call)


def _backoff_ns(num_before: int) -> int:
    return int(min(BACKOFF_NS << max(0, num_before - 1), BACKOFF_NS_MAX))


def _name(call: Call) -> str:
    return f"{call.name}({call.arguments_digest[:12]}) at {call.round_index}.{call.call_index}"
