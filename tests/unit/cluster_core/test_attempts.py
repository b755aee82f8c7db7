"""The attempt ledger, transition by transition: what each event does in each state, with exact orders."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.core import attempt_events as ev
from cluster.core.attempt_events import WorkerRef
from cluster.core.attempts import Phase, RequestMachine, RetryTerms
from cluster.core.journal import replay
from cluster.core.retry_budget import RetryBudget

P0 = WorkerRef(worker_id="prefill-0", incarnation="p0#1", pid=1, node="n")
D0 = WorkerRef(worker_id="decode-0", incarnation="d0#1", pid=2, node="n")
P1 = WorkerRef(worker_id="prefill-1", incarnation="p1#1", pid=3, node="n")
D1 = WorkerRef(worker_id="decode-1", incarnation="d1#1", pid=4, node="n")
FIRST: dict[str, Any] = {"attempt_id": "att-1", "epoch": 1}
SECOND: dict[str, Any] = {"attempt_id": "att-2", "epoch": 2}


class Driver:
    """Feeds a machine events at rising times and checks its invariants after each."""

    def __init__(
        self,
        *,
        max_attempts: int = 2,
        stream: bool = True,
        told_by_event: bool = False,
        terms: RetryTerms | None = None,
    ) -> None:
        self.machine = RequestMachine(
            "req-1",
            stream,
            max_attempts=max_attempts,
            admitted_ns=0,
            told_by_event=told_by_event,
            terms=terms or RetryTerms(),
        )
        self.now_ns = 0

    def __call__(self, event: type[ev.Event], **fields: Any) -> list[ev.Instruction]:
        self.now_ns += 1
        orders = self.machine.step(event(now_ns=self.now_ns, **fields))  # type: ignore[arg-type]
        self.machine.check_invariants()
        return orders

    @property
    def phase(self) -> Phase:
        return self.machine.phase

    def route(self, number: int = 1) -> list[ev.Instruction]:
        prefill, decode = ((P0, D0), (P1, D1))[number - 1]
        return self(ev.Routed, attempt_id=f"att-{number}", prefill=prefill, decode=decode)

    def prefill(self, about: dict[str, Any] = FIRST) -> Driver:
        self.route(about["epoch"])
        self(ev.BlocksReserved, **about)
        return self

    def decode(self, num_tokens: int = 3, about: dict[str, Any] = FIRST) -> Driver:
        self.prefill(about)
        self(ev.PrefillEnded, **about)
        self(ev.TokensArrived, **about, first_index=0, num_tokens=num_tokens)
        return self

    def deliver(self, num_tokens: int = 3) -> Driver:
        self.decode(num_tokens)
        self(ev.FirstDelta)
        self(ev.Delivered, num_tokens=num_tokens)
        return self


def cancels(role: str, reason: str, about: dict[str, Any] = FIRST) -> list[ev.Instruction]:
    """Returns the two orders that stop one side."""
    key = (about["attempt_id"], about["epoch"])
    return [ev.SendCancel(*key, role, reason), ev.WaitForFence(*key, role)]  # type: ignore[arg-type]


def test_one_request_walks_through_every_phase() -> None:
    """Contract section 6, the straight way."""
    driver = Driver()
    assert driver.phase is Phase.ADMITTED
    assert driver.route() == [ev.SendReserve("att-1", 1)]
    assert driver.phase is Phase.RESERVING
    assert driver(ev.BlocksReserved, **FIRST) == [ev.SendPrefill("att-1", 1)]
    assert driver.phase is Phase.PREFILLING
    assert driver(ev.PrefillBegan, **FIRST, cached_tokens=16) == []
    assert driver(ev.PrefillEnded, **FIRST, spans_ns={"compute": 5}) == []
    assert driver.phase is Phase.HANDING_OFF
    assert driver(ev.TokensArrived, **FIRST, first_index=0, num_tokens=2) == [ev.Deliver(0, 2, None)]
    assert driver.phase is Phase.DECODING
    assert driver(ev.FirstDelta) == []
    assert driver.phase is Phase.DELIVERING
    assert driver(ev.Delivered, num_tokens=2) == []
    assert driver(ev.TokensArrived, **FIRST, first_index=2, num_tokens=1, end="stop") == [ev.Deliver(0, 1, "stop")]
    assert driver(ev.Delivered, num_tokens=3) == []
    assert driver(ev.Completed) == [ev.Close(3, 3, "none")]
    assert driver.phase is Phase.FINISHED
    ended = driver.machine.journal.entries[-2]
    assert (ended["event"], ended["end"], ended["delivered_output_tokens"]) == ("ended", "finished", 3)


def test_the_boundary_is_the_mark_not_the_generation() -> None:
    """A3: ten tokens computed and none written may be repeated; one written may not."""
    computed = Driver().decode(10)
    orders = computed(ev.WorkerGone, incarnation="d0#1")
    assert orders == [ev.RouteAgain(("d0#1",))]
    written = Driver().decode(10)
    written(ev.FirstDelta)
    assert written(ev.WorkerGone, incarnation="d0#1") == [
        ev.Interrupt("worker_exited", "att-1", "decode-0 exited"),
        ev.Close(10, 0, "interrupted"),
    ]


def test_prefill_death_is_fenced_on_both_sides_before_the_next_attempt() -> None:
    """A2 and B7: the dead side is fenced by its exit, the living one only by its acknowledgement."""
    driver = Driver().prefill()
    assert driver(ev.WorkerGone, incarnation="p0#1") == cancels("decode", "worker_exited")
    assert not driver.machine.may_run_again().allowed
    assert driver(ev.CancelAcked, **FIRST, role="decode", num_generated=0) == [ev.RouteAgain(("p0#1",))]
    assert driver.phase is Phase.ROUTED
    assert driver.route(2) == [ev.SendReserve("att-2", 2)]


def test_a_sent_cancel_fences_nothing_and_the_end_of_the_lease_does() -> None:
    """B7: without an acknowledgement, the timer of the lease is what ends the wait."""
    driver = Driver().prefill()
    driver(ev.AttemptFaulted, **FIRST, role="prefill", reason="engine_fault", message="oom")
    assert not driver.machine.current.is_fenced  # type: ignore[union-attr]
    assert driver(ev.TimerFired, **FIRST, role="decode") == [ev.RouteAgain(("p0#1",))]


def test_a_lost_link_alone_moves_nothing() -> None:
    """B1 and B3: a reset proves nothing; when the link is back, the request goes on, and lost frames are asked for."""
    driver = Driver().decode()
    assert driver(ev.LinkLost, incarnation="d0#1") == [ev.WaitForFence("att-1", 1, "decode")]
    assert driver(ev.LinkBack, incarnation="d0#1") == [ev.AskResend("att-1", 1, 3)]
    assert driver(ev.TimerFired, **FIRST, role="decode") == []
    assert driver(ev.TokensArrived, **FIRST, first_index=3, num_tokens=1) == [ev.Deliver(0, 1, None)]


def test_a_link_that_stays_lost_for_a_lease_is_revoked_then_fenced() -> None:
    """B6: the old lease is revoked before a new one can be granted, even when nobody hears the cancel."""
    driver = Driver().decode()
    driver(ev.LinkLost, incarnation="d0#1")
    assert driver(ev.TimerFired, **FIRST, role="decode") == [
        ev.SendCancel("att-1", 1, "decode", "network_cut"),
        ev.RouteAgain(("d0#1",), silent_nodes=("n",)),
    ]


def test_a_silent_side_lapses_without_any_broken_link() -> None:
    """Stall or one-way cut: the lease that nobody asks for ends the attempt."""
    driver = Driver().deliver()
    assert driver(ev.LeaseLapsed, **FIRST, role="decode") == [
        ev.SendCancel("att-1", 1, "decode", "lease_expired"),
        ev.Interrupt("lease_expired", "att-1", "no sign of life of decode-0 within its lease"),
        ev.Close(3, 3, "interrupted"),
    ]
    assert driver(ev.LeaseLapsed, **FIRST, role="decode") == []


def test_a_finished_prefill_may_die_lapse_or_fail() -> None:
    """After the hand-off nothing of the attempt depends on prefill any more."""
    for loss in (
        {"event": ev.WorkerGone, "incarnation": "p0#1"},
        {"event": ev.AttemptFaulted, **FIRST, "role": "prefill", "reason": "transfer_failed", "message": ""},
    ):
        driver = Driver().prefill()
        driver(ev.TokensArrived, **FIRST, first_index=0, num_tokens=1)
        assert driver(**loss) == []
        assert driver(ev.TokensArrived, **FIRST, first_index=1, num_tokens=1) == [ev.Deliver(0, 1, None)]
    driver = Driver().prefill()
    driver(ev.TokensArrived, **FIRST, first_index=0, num_tokens=1)
    assert driver(ev.LeaseLapsed, **FIRST, role="prefill") == [ev.SendCancel("att-1", 1, "prefill", "lease_expired")]
    assert driver(ev.TokensArrived, **FIRST, first_index=1, num_tokens=1) == [ev.Deliver(0, 1, None)]


def test_a_gap_is_a_fault_and_never_patched() -> None:
    """Contract section 7."""
    driver = Driver().deliver(3)
    orders = driver(ev.TokensArrived, **FIRST, first_index=4, num_tokens=2)
    assert orders == [
        ev.DropTokens(2, "gap"),
        *cancels("decode", "engine_fault"),
        ev.Interrupt("engine_fault", "att-1", "index 4 after 3 tokens"),
    ]
    assert driver(ev.CancelAcked, **FIRST, role="decode", num_generated=7) == [ev.Close(7, 3, "interrupted")]


@pytest.mark.parametrize(
    ("first_index", "num_tokens", "orders"),
    [
        (1, 2, [ev.DropTokens(2, "duplicate")]),
        (0, 1, [ev.DropTokens(1, "duplicate")]),
        (2, 3, [ev.DropTokens(1, "duplicate"), ev.Deliver(1, 2, None)]),
        (3, 1, [ev.Deliver(0, 1, None)]),
    ],
)
def test_tokens_that_were_seen_are_dropped_and_counted(
    first_index: int, num_tokens: int, orders: list[ev.Instruction]
) -> None:
    """Lower indexes after a reconnection are dropped, the rest of the frame is taken."""
    driver = Driver().decode(3)
    assert driver(ev.TokensArrived, **FIRST, first_index=first_index, num_tokens=num_tokens) == orders


def test_tokens_of_an_old_epoch_are_dropped() -> None:
    """B6: the epoch check at the ingress is the fence."""
    driver = Driver().prefill()
    driver(ev.AttemptFaulted, **FIRST, role="decode", reason="engine_fault", message="")
    driver(ev.CancelAcked, **FIRST, role="prefill", num_generated=0)
    driver.decode(1, SECOND)
    assert driver(ev.TokensArrived, **FIRST, first_index=0, num_tokens=2) == [ev.DropTokens(2, "stale_attempt")]
    unknown = driver(ev.TokensArrived, attempt_id="att-9", epoch=1, first_index=0, num_tokens=1)
    assert unknown == [ev.DropTokens(1, "stale_attempt")]
    assert driver.machine.current is not None and driver.machine.current.num_received == 1


def test_tokens_of_a_cancelled_attempt_are_dropped_until_it_is_fenced() -> None:
    """What still arrives between cancel and acknowledgement is not delivered."""
    driver = Driver().prefill()
    driver(ev.AttemptFaulted, **FIRST, role="prefill", reason="engine_fault", message="")
    assert driver(ev.TokensArrived, **FIRST, first_index=0, num_tokens=1) == [ev.DropTokens(1, "stale_attempt")]


def test_the_last_tokens_of_a_lost_attempt_make_an_interruption_once_they_go_out() -> None:
    """They waited for their reader while the attempt was lost: writing them gives the retry away, never both."""
    driver = Driver().decode()
    driver(ev.AttemptFaulted, **FIRST, role="decode", reason="engine_fault", message="x")
    assert driver.phase is Phase.ROUTED
    waiting = Driver().decode()
    waiting.machine.attempts[0].fenced.discard("prefill")
    waiting(ev.LinkLost, incarnation="d0#1")
    orders = waiting(ev.AttemptFaulted, **FIRST, role="decode", reason="engine_fault", message="x")
    assert orders == cancels("prefill", "engine_fault")
    assert waiting(ev.FirstDelta) == [ev.Interrupt("engine_fault", "att-1", "decode: x")]
    assert waiting(ev.CancelAcked, **FIRST, role="prefill", num_generated=0) == [ev.Close(3, 0, "interrupted")]


def test_a_duplicate_refusal_says_nothing_about_the_first_copy() -> None:
    """The worker has the attempt: it is neither fenced nor lost."""
    driver = Driver()
    driver.route()
    assert driver(ev.WorkerRefused, **FIRST, role="decode", code="duplicate", message="") == []
    assert driver(ev.BlocksReserved, **FIRST) == [ev.SendPrefill("att-1", 1)]


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("never_fits", ev.Fail(400, "context_length_exceeded", "decode refused: never_fits: m", False)),
        ("no_capacity", ev.Fail(503, "no_capacity", "decode refused: no_capacity: m", True)),
        ("draining", ev.Fail(503, "no_capacity", "decode refused: draining: m", True)),
        ("fingerprint", ev.Fail(502, "upstream_failed", "decode refused: fingerprint: m", False)),
    ],
)
def test_refusals_become_ordinary_errors_when_the_budget_is_spent(code: str, failure: ev.Fail) -> None:
    """Contract section 4, before the stream."""
    driver = Driver(max_attempts=1)
    driver.route()
    assert driver(ev.WorkerRefused, **FIRST, role="decode", code=code, message="m") == [
        failure,
        ev.Close(0, 0, "failed"),
    ]
    assert driver.phase is Phase.FAILED


def test_a_prefill_that_died_before_it_was_asked_loses_the_attempt() -> None:
    """Its death is known when decode answers: nothing is sent to it."""
    driver = Driver()
    driver.route()
    assert driver(ev.WorkerGone, incarnation="p0#1") == []
    assert driver(ev.BlocksReserved, **FIRST) == cancels("decode", "worker_exited")


def test_no_route_is_an_error_that_the_client_may_retry() -> None:
    """Nothing ran, so there is nothing to fence."""
    driver = Driver()
    assert driver(ev.NoRoute, message="none") == [ev.Fail(503, "no_capacity", "none", True), ev.Close(0, 0, "failed")]


@pytest.mark.parametrize("crossed", [False, True])
def test_client_gone_cancels_upstream_and_starts_nothing(crossed: bool) -> None:
    """B5, on both sides of the boundary."""
    driver = Driver().deliver() if crossed else Driver().decode()
    assert driver(ev.ClientGone, reason="client_gone") == cancels("decode", "client_gone")
    assert driver.phase is Phase.CANCELLED
    num_delivered = 3 if crossed else 0
    assert driver(ev.WorkerGone, incarnation="d0#1") == [ev.Close(3, num_delivered, "client_gone")]
    assert driver(ev.ClientGone, reason="client_gone") == []
    assert driver(ev.Completed) == []


def test_deadline_fails_before_the_boundary_and_interrupts_after_it() -> None:
    """Contract section 6, row deadline."""
    before = Driver().decode()
    assert before(ev.DeadlineReached) == [
        *cancels("decode", "deadline"),
        ev.Fail(504, "deadline_exceeded", "the request's deadline has passed", False),
    ]
    after = Driver().deliver()
    assert after(ev.DeadlineReached) == [
        *cancels("decode", "deadline"),
        ev.Interrupt("deadline", "att-1", "the request's deadline has passed"),
    ]


def test_drain_end_interrupts_what_runs_and_leaves_complete_answers_alone() -> None:
    """Contract section 6, row draining."""
    running = Driver().deliver()
    assert ev.Interrupt("shutdown", "att-1", "the server is stopping") in running(ev.DrainEnded)
    complete = Driver().deliver()
    complete(ev.TokensArrived, **FIRST, first_index=3, num_tokens=1, end="length")
    assert complete(ev.DrainEnded) == []
    assert complete(ev.Completed) == [ev.Close(4, 3, "none")]


def test_a_deadline_ends_the_wait_for_a_fence() -> None:
    """A request that waits to run again fails at its deadline; the old attempt stays fenced or waited for."""
    driver = Driver().prefill()
    driver(ev.WorkerGone, incarnation="p0#1")
    failed = driver(ev.DeadlineReached)
    assert failed == [ev.Fail(504, "deadline_exceeded", "the request's deadline has passed", False)]
    assert driver(ev.CancelAcked, **FIRST, role="decode", num_generated=0) == [ev.Close(0, 0, "failed")]


def test_stop_string_cancels_decode_and_counts_the_rest_as_discarded() -> None:
    """Tokens after the match are generated and not wanted."""
    driver = Driver().deliver(3)
    assert driver(ev.StopMatched) == cancels("decode", "stop_string")
    assert driver(ev.TokensArrived, **FIRST, first_index=3, num_tokens=2) == [ev.DropTokens(2, "not_wanted")]
    assert driver(ev.Completed) == []
    assert driver(ev.CancelAcked, **FIRST, role="decode", num_generated=6) == [ev.Close(6, 3, "stop_string")]


def test_loss_after_the_last_token_changes_nothing() -> None:
    """The answer is complete; only writing is left."""
    driver = Driver().deliver(3)
    driver(ev.TokensArrived, **FIRST, first_index=3, num_tokens=1, end="stop")
    assert driver(ev.WorkerGone, incarnation="d0#1") == []
    assert driver(ev.LinkLost, incarnation="p0#1") == []
    driver(ev.Delivered, num_tokens=4)
    assert driver(ev.Completed) == [ev.Close(4, 4, "none")]


def test_a_cancel_into_a_dead_link_is_repeated_when_it_is_back() -> None:
    """A cancel that was sent into a broken connection was not heard."""
    driver = Driver().deliver()
    driver(ev.ClientGone, reason="client_gone")
    driver(ev.LinkLost, incarnation="d0#1")
    assert driver(ev.LinkBack, incarnation="d0#1") == [ev.SendCancel("att-1", 1, "decode", "repeated")]


def test_an_order_into_a_dead_link_is_repeated_for_a_combined_worker() -> None:
    """Its decode side renews the one lease of both, so that no silence would ever tell of the lost order."""
    driver = Driver()
    driver(ev.Routed, attempt_id="att-1", prefill=P0, decode=P0)
    assert driver(ev.LinkBack, incarnation="p0#1") == [ev.AskResend("att-1", 1, 0)], "prefill was not ordered yet"
    assert driver(ev.BlocksReserved, **FIRST) == [ev.SendPrefill("att-1", 1)]
    assert driver(ev.LinkBack, incarnation="p0#1") == [ev.SendPrefill("att-1", 1), ev.AskResend("att-1", 1, 0)]
    driver(ev.TokensArrived, **FIRST, first_index=0, num_tokens=2)
    assert driver(ev.LinkBack, incarnation="p0#1") == [ev.AskResend("att-1", 1, 2)]
    apart = Driver().prefill()
    assert apart(ev.LinkBack, incarnation="p0#1") == [], "a prefill worker of its own lapses by itself"


def test_books_stay_open_for_a_write_under_way() -> None:
    """With ``told_by_event`` the last write is counted, whatever ended the request meanwhile."""
    driver = Driver(told_by_event=True).deliver(2)
    assert driver(ev.WorkerGone, incarnation="d0#1") == [ev.Interrupt("worker_exited", "att-1", "decode-0 exited")]
    driver(ev.Delivered, num_tokens=2)
    assert driver(ev.AnswerEnded) == [ev.Close(2, 2, "interrupted")]
    assert driver(ev.AnswerEnded) == []


def test_a_second_loss_keeps_the_first_reason() -> None:
    """The client is told what broke the attempt, not what broke afterwards."""
    driver = Driver(max_attempts=1).prefill()
    driver(ev.AttemptFaulted, **FIRST, role="prefill", reason="engine_fault", message="first")
    orders = driver(ev.WorkerGone, incarnation="d0#1")
    assert orders[0] == ev.Fail(502, "upstream_failed", "prefill: first", False)


def test_first_delta_without_a_token_is_a_programming_error() -> None:
    """A delta of a void attempt can never be marked for the next one."""
    driver = Driver().prefill()
    with pytest.raises(AssertionError, match="no token"):
        driver(ev.FirstDelta)


# --- what another attempt may cost --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("terms", "status", "why"),
    [
        (RetryTerms(budget=RetryBudget(0.0)), 502, "the retry budget of all requests is spent"),
        (RetryTerms(num_prompt_tokens=65, max_reprefill_tokens=64), 502, "would compute 65 prompt tokens"),
        (RetryTerms(deadline_ns=1), 504, "deadline is too near"),
    ],
)
def test_price_budget_and_deadline_refuse_another_attempt(terms: RetryTerms, status: int, why: str) -> None:
    """G3, G1: the client gets an ordinary error that names the reason; the journal alone explains it."""
    driver = Driver(terms=terms).prefill()
    driver(ev.WorkerGone, incarnation="p0#1")
    (failure, _) = driver(ev.CancelAcked, **FIRST, role="decode", num_generated=0)
    assert (failure.status, failure.retryable_by_client) == (status, False) and why in failure.message
    replayed = replay(driver.machine.journal.entries)
    assert replayed.is_sufficient and why in replayed.decisions[0].why


def test_what_the_store_has_costs_nothing_again() -> None:
    """G3: the price is what must be computed: less what prefill found, nothing once it had handed over."""
    terms = RetryTerms(num_prompt_tokens=100, max_reprefill_tokens=20)
    found = Driver(terms=terms).prefill()
    found(ev.PrefillBegan, **FIRST, cached_tokens=80)
    found(ev.WorkerGone, incarnation="p0#1")
    assert found(ev.CancelAcked, **FIRST, role="decode", num_generated=0) == [ev.RouteAgain(("p0#1",))]
    handed_over = Driver(terms=terms).decode()
    assert handed_over(ev.WorkerGone, incarnation="d0#1") == [ev.RouteAgain(("d0#1",))]


def test_a_failed_transfer_blames_both_ends() -> None:
    """The side that tells of it need not be the one that failed."""
    driver = Driver().prefill()
    driver(ev.AttemptFaulted, **FIRST, role="prefill", reason="transfer_failed", message="no answer")
    orders = driver(ev.CancelAcked, **FIRST, role="decode", num_generated=0)
    assert orders == [ev.RouteAgain(("d0#1", "p0#1"))]
