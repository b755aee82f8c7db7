"""The bucket of retries: bounded at any moment and over any time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core.retry_budget import RetryBudget

S = 1_000_000_000


def test_a_burst_gets_one_second_worth_and_then_the_rate() -> None:
    """A mass failure at one moment: ten of a hundred are repeated, then ten more each second."""
    budget = RetryBudget(10.0)
    assert sum(budget.take(0) for _ in range(100)) == 10
    assert sum(budget.take(S // 2) for _ in range(100)) == 5
    assert sum(budget.take(10 * S) for _ in range(100)) == 10
    assert (budget.num_taken, budget.num_refused) == (25, 275)


def test_what_clients_repeat_is_charged() -> None:
    """Their load is the same; it is never refused here and leaves less for the gateway."""
    budget = RetryBudget(2.0)
    for _ in range(5):
        budget.charge(0)
    assert not budget.take(0)
    assert budget.take(S // 2)


@pytest.mark.parametrize(("per_s", "num_allowed"), [(0.0, 0), (0.1, 1)])
def test_a_rate_below_one_still_allows_one_and_zero_allows_none(per_s: float, num_allowed: int) -> None:
    """At once, from a full bucket."""
    budget = RetryBudget(per_s)
    assert sum(budget.take(0) for _ in range(3)) == num_allowed


@given(st.floats(0, 100), st.lists(st.tuples(st.integers(-S, 3 * S), st.booleans()), max_size=200))
def test_no_order_of_events_takes_more_than_rate_and_burst(per_s: float, steps: list[tuple[int, bool]]) -> None:
    """Also with a clock that steps back."""
    budget, now_ns, seen_ns = RetryBudget(per_s), 0, 0
    for step_ns, is_charge in steps:
        now_ns += step_ns
        seen_ns += max(step_ns, 0)
        budget.charge(now_ns) if is_charge else budget.take(now_ns)
        budget.check_invariants()
    assert budget.num_taken <= budget.limit + per_s * seen_ns / S + 1e-6
