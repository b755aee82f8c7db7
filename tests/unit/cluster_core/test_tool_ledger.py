"""Server-side tools, decisions alone: what is made, what is taken from the ledger, when it stops. Rows F2 to F4, H5."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core import tool_events as ev
from cluster.core.tool_events import Asked, Call, CallState, LoopTerms, RecordedCall, ToolResult, ToolTerms
from cluster.core.tool_ledger import LOOKUPS_MAX, ToolRun

SECOND = 1_000_000_000
OK = ToolResult("done")
BOOK = Asked("book", "d1")
READ = Asked("read", "d2")
ASKING = Asked("pay", "d3")
CAREFUL = Asked("wire", "d4")


def make_tools(**changes: int) -> dict[str, ToolTerms]:
    def tool(name: str, side_effects: bool, on_unknown: ev.OnUnknown) -> ToolTerms:
        terms = {"timeout_ns": SECOND, "max_tries": 3} | changes
        return ToolTerms(name=name, has_side_effects=side_effects, on_unknown=on_unknown, **terms)

    tools = (
        tool("book", True, "repeat_with_key"),
        tool("pay", True, "lookup"),
        tool("wire", True, "human"),
        tool("read", False, "repeat_with_key"),
    )
    return {made.name: made for made in tools}


def make_run(
    *recorded: RecordedCall, max_rounds: int = 4, max_calls: int = 8, deadline_ns: int = 600 * SECOND
) -> ToolRun:
    terms = LoopTerms(max_rounds=max_rounds, max_calls=max_calls, deadline_ns=deadline_ns)
    return ToolRun("req-1", terms, make_tools(), recorded)


def make_call(asked: Asked, round_index: int = 0, call_index: int = 0) -> Call:
    return Call(
        call_id=ev.call_id_of("req-1", round_index, call_index),
        round_index=round_index,
        call_index=call_index,
        name=asked.name,
        arguments_digest=asked.arguments_digest,
    )


def record(asked: Asked, *place: int, result: ToolResult | None = OK) -> RecordedCall:
    state = CallState.INTENDED if result is None else CallState.DONE
    return RecordedCall(make_call(asked, *place), state, result)


def one(orders: list[ev.AnyInstruction], kind: type) -> ev.AnyInstruction:
    assert len(orders) == 1 and isinstance(orders[0], kind), orders
    return orders[0]


def begin(run: ToolRun, *calls: Asked, now_ns: int = 0) -> list[ev.AnyInstruction]:
    return run.step(ev.RoundEnded(now_ns=now_ns, calls=calls))


def test_a_call_has_its_intent_before_it_and_its_result_before_the_model() -> None:
    """Intent, try, result, next round: one step each, and nothing happens before the step before it is committed."""
    run, call = make_run(), make_call(BOOK)
    assert begin(run, BOOK) == [ev.StoreIntent(call, 1)]
    assert not run.has_intent
    assert run.step(ev.IntentStored(now_ns=5, call_id=call.call_id)) == [ev.MakeCall(call, SECOND)]
    assert run.has_intent
    assert run.step(ev.Answered(now_ns=6, call_id=call.call_id, result=OK)) == [ev.StoreResult(call, OK)]
    assert run.step(ev.ResultStored(now_ns=7, call_id=call.call_id)) == [ev.NextRound((OK,), True)]
    assert begin(run) == [ev.Finish()]
    assert run.is_over and begin(run, BOOK) == []


def test_calls_are_made_in_order_one_after_the_other() -> None:
    """The second begins when the result of the first is committed; ids tell places apart."""
    run = make_run()
    one(begin(run, READ, BOOK), ev.StoreIntent)
    first, second = make_call(READ), make_call(BOOK, 0, 1)
    assert first.call_id != second.call_id
    run.step(ev.IntentStored(now_ns=1, call_id=first.call_id))
    run.step(ev.Answered(now_ns=1, call_id=first.call_id, result=OK))
    assert run.step(ev.ResultStored(now_ns=1, call_id=first.call_id)) == [ev.StoreIntent(second, 1)]
    assert run.step(ev.ResultStored(now_ns=1, call_id=first.call_id)) == [], "a late word about the first"


def test_what_is_recorded_is_taken_and_not_called() -> None:
    """A new life gets the recorded results, round for round, and shows nothing until it is past them."""
    other = ToolResult("two", is_error=True)
    run = make_run(record(READ, 1, 0, result=other), record(BOOK, 0, 0))
    assert run.has_intent and run.is_replaying
    assert begin(run, BOOK) == [ev.NextRound((OK,), True)]
    assert run.is_replaying
    assert begin(run, READ) == [ev.NextRound((other,), True)]
    assert not run.is_replaying and run.num_replayed == 2
    assert begin(run, BOOK) == [ev.StoreIntent(make_call(BOOK, 2, 0), 1)]


@pytest.mark.parametrize(
    ("recorded", "rounds"),
    [
        ([record(BOOK)], [[Asked("book", "other")]]),
        ([record(BOOK)], [[READ]]),
        ([record(BOOK)], [[]]),
        ([record(BOOK), record(READ, 0, 1)], [[BOOK]]),
        ([record(BOOK), record(READ, 1, 0)], [[BOOK, READ]]),
        ([record(BOOK), record(READ, 1, 0)], [[BOOK], []]),
        ([record(BOOK, result=None)], [[READ]]),
        ([record(BOOK), record(READ, 0, 1)], [[READ, BOOK]]),
    ],
)
def test_a_life_that_asks_for_anything_else_is_stopped(recorded: list[RecordedCall], rounds: list[list[Asked]]) -> None:
    """Other arguments, another tool, nothing, fewer, more, another order: nothing is made and nothing replayed."""
    run = make_run(*recorded)
    for calls in rounds[:-1]:
        one(begin(run, *calls), ev.NextRound)
    stop = one(begin(run, *rounds[-1]), ev.Stop)
    assert isinstance(stop, ev.Stop) and stop.code == "tool_divergence"


def test_a_round_that_broke_off_goes_on_where_it_did() -> None:
    """The first of two is recorded: only the second is made."""
    run = make_run(record(BOOK))
    assert begin(run, BOOK, READ) == [ev.StoreIntent(make_call(READ, 0, 1), 1)]


def after_try(run: ToolRun, asked: Asked, *, now_ns: int = 0) -> list[ev.AnyInstruction]:
    """The answer to a first try whose outcome is unknown."""
    call_id = make_call(asked).call_id
    one(begin(run, asked), ev.StoreIntent)
    one(run.step(ev.IntentStored(now_ns=now_ns, call_id=call_id)), ev.MakeCall)
    return run.step(ev.OutcomeUnknown(now_ns=now_ns, call_id=call_id, why="no answer"))


def test_unknown_and_safe_to_repeat_is_repeated_with_its_key() -> None:
    """After a wait, with a new committed intent; at the third unknown outcome a person has to find out."""
    run, call = make_run(), make_call(BOOK)
    orders = after_try(run, BOOK)
    for number in (2, 3):
        one(orders, ev.Wait)
        assert run.step(ev.WaitOver(now_ns=9, call_id=call.call_id)) == [ev.StoreIntent(call, number)]
        one(run.step(ev.IntentStored(now_ns=9, call_id=call.call_id)), ev.MakeCall)
        orders = run.step(ev.OutcomeUnknown(now_ns=9, call_id=call.call_id, why="no answer"))
    assert orders[0] == ev.StoreHandOver(call, "no answer")
    assert isinstance(orders[1], ev.Stop) and orders[1].code == "tool_outcome_unknown"


def test_unknown_is_looked_up_once_nothing_can_be_under_way() -> None:
    """The wait is as long as a try may take; done is taken, absent is made, running is waited for."""
    for answer, expected in (("done", ev.StoreResult), ("absent", ev.StoreIntent), ("running", ev.Wait)):
        run, call = make_run(), make_call(ASKING)
        wait = one(after_try(run, ASKING, now_ns=7), ev.Wait)
        assert isinstance(wait, ev.Wait) and wait.until_ns == 7 + SECOND
        assert run.step(ev.WaitOver(now_ns=wait.until_ns, call_id=call.call_id)) == [ev.AskTool(call)]
        found = ev.LookedUp(now_ns=2 * SECOND, call_id=call.call_id, answer=answer, result=OK)  # type: ignore[arg-type]
        one(run.step(found), expected)


def test_a_tool_that_cannot_be_asked_is_asked_a_bounded_number_of_times() -> None:
    """Then a person has to."""
    run, call = make_run(), make_call(ASKING)
    orders = after_try(run, ASKING)
    for _ in range(LOOKUPS_MAX):
        one(orders, ev.Wait)
        one(run.step(ev.WaitOver(now_ns=1, call_id=call.call_id)), ev.AskTool)
        orders = run.step(ev.LookedUp(now_ns=1, call_id=call.call_id, answer="unknown"))
        run.check_invariants()
    assert [type(order) for order in orders] == [ev.StoreHandOver, ev.Stop]


def test_unknown_for_a_person_is_handed_over_at_once() -> None:
    """In the life that saw it and in every later one; nothing is called again."""
    assert [type(order) for order in after_try(make_run(), CAREFUL)] == [ev.StoreHandOver, ev.Stop]
    for state in (CallState.INTENDED, CallState.HANDED_OVER):
        run = make_run(RecordedCall(make_call(CAREFUL), state))
        assert [type(order) for order in begin(run, CAREFUL)] == [ev.StoreHandOver, ev.Stop]


def test_a_tool_without_side_effects_is_asked_again_and_then_the_model_is_told() -> None:
    """No outcome of it is worth a person."""
    run, call = make_run(), make_call(READ)
    orders = after_try(run, READ)
    for _ in range(2):
        one(orders, ev.Wait)
        run.step(ev.WaitOver(now_ns=1, call_id=call.call_id))
        run.step(ev.IntentStored(now_ns=1, call_id=call.call_id))
        orders = run.step(ev.OutcomeUnknown(now_ns=1, call_id=call.call_id, why="no answer"))
    told = one(orders, ev.StoreResult)
    assert isinstance(told, ev.StoreResult) and told.result.is_error


def test_what_was_certainly_not_made_is_an_answer_unless_an_earlier_try_is_unknown() -> None:
    """Unreachable three times: the model is told that nothing was done. With one unknown outcome nobody can say so."""
    run, call = make_run(), make_call(BOOK)
    begin(run, BOOK)
    for number in (1, 2, 3):
        one(run.step(ev.IntentStored(now_ns=1, call_id=call.call_id)), ev.MakeCall)
        orders = run.step(ev.NotMade(now_ns=1, call_id=call.call_id, why="connection refused"))
        if number < 3:
            one(orders, ev.Wait)
            one(run.step(ev.WaitOver(now_ns=1, call_id=call.call_id)), ev.StoreIntent)
    told = one(orders, ev.StoreResult)
    assert isinstance(told, ev.StoreResult) and told.result.is_error and "nothing was done" in told.result.content
    run = make_run()
    orders = after_try(run, BOOK)
    for _ in (2, 3):
        one(orders, ev.Wait)
        run.step(ev.WaitOver(now_ns=1, call_id=call.call_id))
        run.step(ev.IntentStored(now_ns=1, call_id=call.call_id))
        orders = run.step(ev.NotMade(now_ns=1, call_id=call.call_id, why="connection refused"))
    assert [type(order) for order in orders] == [ev.StoreHandOver, ev.Stop]


def test_rounds_calls_and_time_are_bounded() -> None:
    """The last round allows no more calls; calls over the limit are not made; no try begins after the deadline."""
    run = make_run(record(READ), max_rounds=1)
    assert begin(run, READ) == [ev.NextRound((OK,), False)]
    run = make_run(record(READ), max_calls=1)
    told = one(begin(run, READ, BOOK), ev.NextRound)
    assert isinstance(told, ev.NextRound) and told.results[1].is_error and not told.may_call
    stop = one(begin(make_run(deadline_ns=5), BOOK, now_ns=5), ev.Stop)
    assert isinstance(stop, ev.Stop) and stop.code == "deadline_exceeded"


def test_a_life_that_was_taken_over_stops() -> None:
    """Whatever it was at."""
    run = make_run()
    begin(run, BOOK)
    stop = one(run.step(ev.RunTakenOver(now_ns=1)), ev.Stop)
    assert isinstance(stop, ev.Stop) and stop.code == "taken_over" and run.is_over


def test_arguments_are_the_same_in_any_writing() -> None:
    """Spaces and the order of keys do not count; values do."""
    same = {ev.canonical_arguments(text) for text in ('{"a": 1, "b": [2]}', '{"b":[2],"a":1}')}
    assert len(same) == 1 and ev.canonical_arguments('{"a": 2, "b": [2]}') not in same
    with pytest.raises(ValueError):
        ev.canonical_arguments("{")


# --- any life may end anywhere ------------------------------------------------------------------------------------

SCRIPT = [(BOOK, READ), (ASKING,), (CAREFUL, BOOK)]
"""What the model asks for, round for round, in every life."""


@dataclass
class World:
    """A ledger on disk, tools with a log, and a gateway that dies where it is told to."""

    rows: dict[tuple[int, int], RecordedCall] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)
    """Actions by call id, as the tools' own logs have them."""
    shown: dict[tuple[int, int], ToolResult] = field(default_factory=dict)

    def act(self, call: Call) -> ToolResult:
        """The tool does its work: one that may be repeated with its key does it once."""
        if call.name != "book" or not self.done[call.call_id]:
            self.done[call.call_id] += 1
        return ToolResult(f"{call.call_id} done")

    def live(self, dice: Random) -> str:
        """One life; returns how it ended."""
        now_ns = 0
        terms = LoopTerms(max_rounds=8, max_calls=16, deadline_ns=10_000 * SECOND)
        run = ToolRun("req-1", terms, make_tools(), tuple(self.rows.values()))
        orders = begin(run, *SCRIPT[0])
        while orders:
            run.check_invariants()
            order = orders.pop(0)
            now_ns += 1
            if dice.random() < 0.1:
                if isinstance(order, ev.MakeCall) and dice.random() < 0.5:
                    self.act(order.call)  # It was sent, and the gateway died before the answer came.
                return "died"
            match order:
                case ev.StoreIntent(call):
                    self.rows.setdefault(call.place, RecordedCall(call, CallState.INTENDED))
                    event: ev.AnyEvent = ev.IntentStored(now_ns=now_ns, call_id=call.call_id)
                case ev.MakeCall(call):
                    assert self.rows[call.place].result is None, "called although its result is recorded"
                    event = self._try(dice, call, now_ns)
                case ev.AskTool(call):
                    is_done = self.done[call.call_id] > 0
                    found = dice.choice(["truth", "truth", "running", "unknown"])
                    answer: ev.LookupAnswer = ("done" if is_done else "absent") if found == "truth" else found  # type: ignore[assignment]
                    result = ToolResult(f"{call.call_id} done") if answer == "done" else None
                    event = ev.LookedUp(now_ns=now_ns, call_id=call.call_id, answer=answer, result=result)
                case ev.Wait(call, until_ns):
                    now_ns = max(now_ns, until_ns)
                    event = ev.WaitOver(now_ns=now_ns, call_id=call.call_id)
                case ev.StoreResult(call, result):
                    assert self.rows[call.place].result is None, "a result is written once"
                    self.rows[call.place] = replace_row(self.rows[call.place], result)
                    event = ev.ResultStored(now_ns=now_ns, call_id=call.call_id)
                case ev.StoreHandOver():
                    continue
                case ev.NextRound(results):
                    for index, result in enumerate(results):
                        place = (run.round_index, index)
                        assert result is not None and self.rows[place].result == result, (
                            "the model saw what is not there"
                        )
                        assert self.shown.setdefault(place, result) == result, "two lives saw two results"
                    done = run.round_index + 1
                    event = ev.RoundEnded(now_ns=now_ns, calls=SCRIPT[done] if done < len(SCRIPT) else ())
                case ev.Finish():
                    return "finished"
                case ev.Stop(code):
                    return code
                case _:
                    raise AssertionError(order)
            orders += run.step(event)
        raise AssertionError("a life without an end")

    def _try(self, dice: Random, call: Call, now_ns: int) -> ev.AnyEvent:
        match dice.choice(["answer"] * 4 + ["lost", "cut", "refused"]):
            case "answer":
                return ev.Answered(now_ns=now_ns, call_id=call.call_id, result=self.act(call))
            case "lost":
                self.act(call)
                return ev.OutcomeUnknown(now_ns=now_ns, call_id=call.call_id, why="no answer")
            case "cut":
                return ev.OutcomeUnknown(now_ns=now_ns, call_id=call.call_id, why="cut")
            case _:
                return ev.NotMade(now_ns=now_ns, call_id=call.call_id, why="refused")


def replace_row(row: RecordedCall, result: ToolResult) -> RecordedCall:
    return RecordedCall(row.call, CallState.DONE, result)


@settings(max_examples=500, deadline=None)
@given(st.integers(0, 1 << 40))
def test_whatever_dies_wherever_no_action_happens_twice(seed: int) -> None:
    """Up to twelve lives, each of which may die at every step and meet every failure of a tool: each action happens at
    most once (reading tools may read again), what a result says is so, and a life ends in a known way."""
    world, dice = World(), Random(seed)
    ends = []
    for _ in range(12):
        ends.append(world.live(dice))
        for call_id, num_done in world.done.items():
            row = next(row for row in world.rows.values() if row.call.call_id == call_id)
            assert row.call.name == "read" or num_done == 1, f"{row.call.name} happened {num_done} times"
        if ends[-1] == "finished":
            break
    assert set(ends) <= {"died", "finished", "tool_outcome_unknown"}, ends
    for row in world.rows.values():
        if row.result is not None and not row.result.is_error:
            assert world.done[row.call.call_id] >= 1
        elif row.result is not None and "nothing was done" in row.result.content:
            assert not world.done[row.call.call_id]


def test_the_lives_of_the_test_above_end_in_every_way() -> None:
    """Otherwise it would prove nothing."""
    ends: Counter[str] = Counter()
    for seed in range(200):
        world, dice = World(), Random(seed)
        for _ in range(12):
            ends[world.live(dice)] += 1
    assert min(ends[end] for end in ("died", "finished", "tool_outcome_unknown")) > 50, ends
