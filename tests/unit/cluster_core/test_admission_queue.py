"""Classes in front of the seats: order, quotas, reserve, deadlines, and an honest time to come back."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core.admission import Refused
from cluster.core.admission_queue import RETRY_AFTER_S_MAX, AdmissionQueue, Started, Waiting

S = 1_000_000_000
CLASSES = {"interactive": 1.0, "background": 0.5}


def make_queue(num_seats: int = 2, *, limit: int = 100, reserve: float = 0.0, max_wait_s: int = 10) -> AdmissionQueue:
    return AdmissionQueue(num_seats, limit, CLASSES, reserve_share=reserve, max_wait_ns=max_wait_s * S)


def fill(queue: AdmissionQueue, *, took_s: int) -> None:
    """Every seat is taken, and requests have taken so long up to now."""
    for number in range(queue.num_seats):
        queue.enter(f"old-{number}", "interactive", now_ns=0)
        queue.leave(f"old-{number}", now_ns=took_s * S)
    for number in range(queue.num_seats):
        assert queue.enter(f"run-{number}", "interactive", now_ns=took_s * S) == Started()


def test_the_first_class_is_served_first_and_each_class_in_order() -> None:
    """Who came first within a class goes first."""
    queue = make_queue(2)
    fill(queue, took_s=1)
    for name, request_class in (("b1", "background"), ("i1", "interactive"), ("i2", "interactive")):
        assert isinstance(queue.enter(name, request_class, now_ns=S), Waiting)
    assert queue.leave("run-0", now_ns=2 * S) == ["i1"]
    assert queue.leave("run-1", now_ns=2 * S) == ["i2"]
    assert queue.leave("i1", now_ns=3 * S) == ["b1"]
    queue.check_invariants()


def test_a_class_never_holds_more_than_its_quota() -> None:
    """The seats beyond it stay free for the others, who do not wait behind it."""
    queue = make_queue(4)
    assert [type(queue.enter(f"b{n}", "background", now_ns=0)) for n in range(3)] == [Started, Started, Waiting]
    assert queue.enter("i", "interactive", now_ns=0) == Started()
    assert queue.leave("b0", now_ns=S) == ["b2"]
    assert (queue.num_seated("background"), queue.num_seated("interactive")) == (2, 1)


def test_the_reserve_is_for_the_first_class() -> None:
    """Background stops before it."""
    queue = AdmissionQueue(10, 100, {"interactive": 1.0, "background": 1.0}, reserve_share=0.2)
    kinds = [type(queue.enter(f"b{n}", "background", now_ns=0)) for n in range(9)]
    assert kinds == [Started] * 8 + [Waiting]
    assert queue.enter("i0", "interactive", now_ns=0) == Started()
    assert queue.enter("i1", "interactive", now_ns=0) == Started()


def test_whoever_cannot_be_served_in_time_is_refused_at_once_with_the_time_to_come_back() -> None:
    """Two seats, four seconds each: the sixth in line would wait 12 s where 10 are allowed."""
    queue = make_queue(2)
    fill(queue, took_s=4)
    for number in range(5):
        assert isinstance(queue.enter(f"w{number}", "interactive", now_ns=4 * S), Waiting)
    refused = queue.enter("late", "interactive", now_ns=4 * S)
    assert refused == Refused(429, "queue_full", "the wait would be about 12 s", 2)
    soon = queue.enter("hurry", "interactive", now_ns=4 * S, deadline_ns=5 * S)
    assert isinstance(soon, Refused) and soon.retry_after_s == 11
    assert queue.door.num_refused == 2


def test_before_anything_has_ended_the_oldest_says_how_long_it_takes() -> None:
    """Never a promise of a second that nobody has seen."""
    queue = make_queue(1)
    queue.enter("run", "interactive", now_ns=0)
    refused = queue.enter("new", "interactive", now_ns=30 * S)
    assert isinstance(refused, Refused) and refused.retry_after_s == 20


def test_time_to_wait_ends() -> None:
    """The refusal names what is left; one that was started meanwhile is not refused."""
    queue = make_queue(1)
    fill(queue, took_s=4)
    waiting = queue.enter("a", "interactive", now_ns=4 * S)
    assert waiting == Waiting(14 * S)
    assert queue.expire("a", now_ns=13 * S) is None
    refused = queue.expire("a", now_ns=14 * S)
    assert isinstance(refused, Refused) and (refused.status, refused.retry_after_s) == (429, 4)
    assert queue.expire("run-0", now_ns=99 * S) is None
    assert queue.leave("run-0", now_ns=15 * S) == []
    queue.check_invariants()


def test_everything_inside_is_bounded() -> None:
    """The bound counts those who wait; its refusal is as honest."""
    queue = make_queue(1, limit=2)
    fill(queue, took_s=3)
    assert isinstance(queue.enter("a", "interactive", now_ns=3 * S), Waiting)
    refused = queue.enter("b", "interactive", now_ns=3 * S)
    assert isinstance(refused, Refused) and (refused.code, refused.retry_after_s) == ("overloaded", 6)


def test_a_request_of_several_answers_takes_as_many_seats() -> None:
    """One that asks for more than there are gets all of them once, and nobody starves it."""
    queue = make_queue(4)
    assert queue.enter("a", "interactive", num_seats=3, now_ns=0) == Started()
    assert isinstance(queue.enter("big", "interactive", num_seats=16, now_ns=0), Waiting)
    assert isinstance(queue.enter("small", "interactive", now_ns=0), Waiting)
    assert queue.leave("a", now_ns=S) == ["big"]
    assert queue.leave("big", now_ns=2 * S) == ["small"]


def test_a_drain_sends_the_waiting_away_and_lets_the_running_finish() -> None:
    """503 for everybody who comes."""
    queue = make_queue(1)
    queue.enter("run", "interactive", now_ns=0)
    queue.enter("wait", "interactive", now_ns=0)
    assert queue.drain() == ["wait"]
    refused = queue.enter("new", "interactive", now_ns=0)
    assert isinstance(refused, Refused) and refused.status == 503
    assert queue.leave("run", now_ns=S) == []
    assert len(queue.door) == 0


steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("enter"), st.sampled_from(["interactive", "background"]), st.integers(1, 6), st.integers(0, 30)
        ),
        st.tuples(st.just("leave"), st.integers(0, 20)),
        st.tuples(st.just("wait"), st.integers(1, 8)),
        st.tuples(st.just("give up"), st.integers(0, 20)),
    ),
    max_size=80,
)


@settings(deadline=None, max_examples=200)
@given(steps, st.integers(1, 6), st.sampled_from([0.0, 0.2, 0.5]))
def test_in_any_order_of_events_seats_are_bounded_and_nobody_waits_for_ever(
    story: list[tuple],
    num_seats: int,
    reserve: float,  # type: ignore[type-arg]
) -> None:
    """Books agree after each step; every refusal has a time below two minutes; at the end everybody was served."""
    queue = make_queue(num_seats, limit=12, reserve=reserve, max_wait_s=20)
    now_ns, number = 0, 0
    running: list[str] = []
    waiting: dict[str, int] = {}

    def expire() -> None:
        for name in [name for name, until_ns in waiting.items() if until_ns <= now_ns]:
            refused = queue.expire(name, now_ns=now_ns)
            assert refused is not None and 1 <= (refused.retry_after_s or 0) <= RETRY_AFTER_S_MAX
            del waiting[name]

    def leave(name: str) -> None:
        waiting.pop(name, None)
        for started in queue.leave(name, now_ns=now_ns):
            del waiting[started]
            running.append(started)

    for what, *arguments in story:
        if what == "enter":
            request_class, seats, deadline_s = arguments
            number += 1
            name = f"r{number}"
            deadline_ns = now_ns + deadline_s * S if deadline_s else None
            answer = queue.enter(name, request_class, num_seats=seats, now_ns=now_ns, deadline_ns=deadline_ns)
            if isinstance(answer, Started):
                running.append(name)
            elif isinstance(answer, Waiting):
                assert answer.until_ns <= (deadline_ns or now_ns + 20 * S)
                waiting[name] = answer.until_ns
            else:
                assert 1 <= (answer.retry_after_s or 0) <= RETRY_AFTER_S_MAX
        elif what == "leave" and running:
            leave(running.pop(arguments[0] % len(running)))
        elif what == "give up" and waiting:
            leave(list(waiting)[arguments[0] % len(waiting)])
        elif what == "wait":
            now_ns += arguments[0] * S
            expire()
        queue.check_invariants()
    while running:
        leave(running.pop(0))
        queue.check_invariants()
    assert not waiting, "somebody waits beside an empty house"
    assert len(queue.door) == 0


def test_more_seats_start_who_waits_and_fewer_put_nobody_off() -> None:
    """Who asked for more seats than there are now gets all that its class has."""
    queue = AdmissionQueue(2, 8, {"a": 1.0}, max_wait_ns=10**9)
    for name in ("one", "two"):
        assert isinstance(queue.enter(name, "a", now_ns=0), Started)
    assert isinstance(queue.enter("wide", "a", num_seats=2, now_ns=0), Waiting)
    assert queue.resize(1, now_ns=1) == [] and queue.num_seated() == 2
    assert queue.leave("one", now_ns=2) == [], "one of two is left, and there is one seat"
    assert queue.leave("two", now_ns=3) == ["wide"] and queue.num_seated() == 1
    assert isinstance(queue.enter("next", "a", now_ns=4, deadline_ns=None), Waiting)
    assert queue.resize(3, now_ns=5) == ["next"]
    queue.check_invariants()
