"""The journal: sufficient for every retry decision, bounded, and wrong when an entry is taken away."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core import attempt_events as ev
from cluster.core.attempt_events import WorkerRef
from cluster.core.attempts import RequestMachine
from cluster.core.journal import NOTES_MAX, replay

ROLES = st.sampled_from(("prefill", "decode"))
LIVES = st.sampled_from(("p-1", "d-1", "p-2", "d-2", "p-3", "d-3"))


def make_ref(role: str, number: int) -> WorkerRef:
    return WorkerRef(worker_id=f"{role}-{number}", incarnation=f"{role[0]}-{number}", pid=number, node="n")


class Follower:
    """Follows the orders that concern routing, so that any sequence of events makes a lawful run."""

    def __init__(self, max_attempts: int, stream: bool, told_by_event: bool) -> None:
        self.machine = RequestMachine(
            "req", stream, max_attempts=max_attempts, admitted_ns=0, lease_ms=100, told_by_event=told_by_event
        )
        self.now_ns = 0
        self.num_closed = 0
        self.ends: list[ev.Instruction] = []
        self._route()

    def _route(self) -> None:
        number = len(self.machine.attempts) + 1
        self.take(
            ev.Routed,
            attempt_id=f"att-{number}",
            prefill=make_ref("prefill", number),
            decode=make_ref("decode", number),
        )

    def take(self, event: type[ev.Event], **fields: Any) -> None:
        self.now_ns += 1
        orders = self.machine.step(event(now_ns=self.now_ns, **fields))  # type: ignore[arg-type]
        self.machine.check_invariants()
        for order in orders:
            assert not self.num_closed or isinstance(order, ev.DropTokens), f"{order} after the books were closed"
            if isinstance(order, ev.RouteAgain):
                assert not self.machine.first_delta_sent
                self._route()
            elif isinstance(order, ev.Fail | ev.Interrupt):
                self.ends.append(order)
            elif isinstance(order, ev.Close):
                self.num_closed += 1
                assert order.num_generated >= order.num_delivered

    def play(self, draw: tuple[str, int, str, str, int]) -> None:
        """Takes one drawn event, when it can come at all."""
        machine, (kind, epoch, role, life, number) = self.machine, draw
        current = machine.current
        about = {"attempt_id": f"att-{epoch}", "epoch": epoch}
        can_write = current is not None and current.num_received > 0 and not machine.is_ended
        match kind:
            case "tokens":
                first = max(0, (current.num_received if current else 0) + number - 1)
                end = "stop" if number == 3 else None
                self.take(ev.TokensArrived, **about, first_index=first, num_tokens=1 + number, end=end)
            case "first_delta" if can_write and not machine.first_delta_sent:
                self.take(ev.FirstDelta)
            case "delivered" if machine.first_delta_sent and current is not None:
                self.take(ev.Delivered, num_tokens=min(current.num_received, machine.num_delivered + number))
            case "stop" if can_write:
                self.take(ev.StopMatched)
            case "completed" if machine.upstream_done and machine.first_delta_sent:
                self.take(ev.Completed)
            case "told" if machine.is_ended:
                self.take(ev.AnswerEnded)
            case "fault":
                self.take(ev.AttemptFaulted, **about, role=role, reason="engine_fault", message="")
            case "acked":
                self.take(ev.CancelAcked, **about, role=role, num_generated=number)
            case "timer":
                self.take(ev.TimerFired, **about, role=role)
            case "lapsed":
                self.take(ev.LeaseLapsed, **about, role=role)
            case "refused":
                self.take(ev.WorkerRefused, **about, role=role, code="no_capacity", message="")
            case "reserved":
                self.take(ev.BlocksReserved, **about)
            case "prefilled":
                self.take(ev.PrefillEnded, **about)
            case "gone" | "lost" | "back":
                self.take({"gone": ev.WorkerGone, "lost": ev.LinkLost, "back": ev.LinkBack}[kind], incarnation=life)
            case "client":
                self.take(ev.ClientGone, reason="client_gone")
            case "deadline":
                self.take(ev.DeadlineReached)
            case "drained":
                self.take(ev.DrainEnded)


KINDS = (
    *("tokens", "reserved", "prefilled", "fault", "acked", "timer", "lapsed", "gone", "lost", "back") * 2,
    *("refused", "first_delta", "delivered", "stop", "completed", "told", "client", "deadline", "drained"),
)
DRAWS = st.tuples(st.sampled_from(KINDS), st.integers(1, 4), ROLES, LIVES, st.integers(0, 3))


@given(st.lists(DRAWS, max_size=60), st.integers(1, 4), st.booleans(), st.booleans())
@settings(max_examples=400, deadline=None)
def test_any_order_of_events_keeps_every_rule(
    draws: list[tuple[str, int, str, str, int]], max_attempts: int, stream: bool, told_by_event: bool
) -> None:
    """One ending, books closed once, no attempt beside an unfenced one, and a journal that explains it all."""
    follower = Follower(max_attempts, stream, told_by_event)
    for draw in draws:
        follower.play(draw)
    assert len(follower.ends) <= 1
    assert follower.num_closed <= 1
    machine = follower.machine
    replayed = replay(json.loads(json.dumps(machine.journal.entries)))
    assert replayed.is_sufficient, (replayed.decisions, replayed.recorded)
    assert replayed.verdict == machine.may_run_again()
    assert replayed.facts.first_delta_sent is machine.first_delta_sent


def make_retried() -> RequestMachine:
    """Returns a machine whose first attempt was lost by a fault and a lease, and that runs again."""
    follower = Follower(2, True, False)
    follower.take(ev.BlocksReserved, attempt_id="att-1", epoch=1)
    follower.take(ev.AttemptFaulted, attempt_id="att-1", epoch=1, role="prefill", reason="transfer_failed", message="x")
    follower.take(ev.TimerFired, attempt_id="att-1", epoch=1, role="decode")
    return follower.machine


def test_entries_tell_how_each_side_was_fenced() -> None:
    """In order: start, dispatches, fault, lease, decision, next attempt."""
    kept = [
        (entry["event"], entry.get("role"), entry.get("by"))
        for entry in make_retried().journal.entries
        if entry["event"] != "phase"
    ]
    assert kept == [
        ("attempt_started", None, None),
        ("dispatched", "decode", None),
        ("dispatched", "prefill", None),
        ("fenced", "prefill", "fault"),
        ("attempt_ended", None, None),
        ("fenced", "decode", "lease_ran_out"),
        ("retry_asked", None, None),
        ("retry_decision", None, None),
        ("attempt_started", None, None),
        ("dispatched", "decode", None),
    ]


def test_a_journal_without_its_fence_does_not_explain_the_decision() -> None:
    """Sufficiency is tested by taking something away."""
    entries = [entry for entry in make_retried().journal.entries if entry.get("by") != "lease_ran_out"]
    replayed = replay(entries)
    assert not replayed.is_sufficient
    assert [verdict.allowed for verdict in replayed.decisions] == [False]


def test_attempt_entries_carry_lease_budget_and_model() -> None:
    """Fields of A5."""
    machine = RequestMachine("req", True, max_attempts=3, admitted_ns=5, lease_ms=2000, model="m@abc")
    machine.step(ev.Routed(now_ns=7, attempt_id="att-1", prefill=make_ref("prefill", 1), decode=make_ref("decode", 1)))
    started = machine.journal.entries[0]
    assert (started["at_ns"], started["epoch"], started["remaining_attempts"]) == (2, 1, 2)
    assert (started["lease_ms"], started["model"]) == (2000, "m@abc")


def test_notes_are_bounded_and_decisions_are_never_dropped() -> None:
    """A link that flaps for hours cannot push a retry decision out of the journal."""
    follower = Follower(2, True, False)
    for _ in range(NOTES_MAX + 50):
        follower.take(ev.LinkLost, incarnation="d-1")
        follower.take(ev.LinkBack, incarnation="d-1")
    follower.take(ev.AttemptFaulted, attempt_id="att-1", epoch=1, role="decode", reason="engine_fault", message="")
    journal = follower.machine.journal
    assert journal.num_dropped > 0
    assert len(journal.entries) <= NOTES_MAX + 20
    assert [e["event"] for e in journal.entries if e["event"] == "retry_decision"] == ["retry_decision"]
    assert replay(journal.entries).is_sufficient
