"""Load or recompute: predictions, deadlines, and the promise that a slow tier is never worse than no cache."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load_choice import load_choice
from kvstore.core.load_cost import (
    BUDGET_NS_MAX,
    GRANT_NS,
    LOSS_SHARE,
    SAMPLE_TOKENS_MIN,
    SMALL_NS,
    STEP_MAX,
    LoadCost,
    LoadPlan,
)

MS = 1_000_000
TOKEN_NS = 1 * MS
BLOCK = 368_640


def plan_of(cost: LoadCost, num_blocks: int) -> LoadPlan:
    return cost.plan("disk", num_bytes=BLOCK * num_blocks, num_tokens=16 * num_blocks)


def prompt(cost: LoadCost, num_blocks: int, load_ns: int) -> int:
    """Serves one cached prompt of 16-token blocks whose load would take ``load_ns``; returns the time it took."""
    num_tokens, num_bytes = 16 * num_blocks, BLOCK * num_blocks
    plan = plan_of(cost, num_blocks)
    compute_ns = TOKEN_NS * num_tokens
    if plan.starts and load_ns <= plan.deadline_ns:
        cost.loaded("disk", num_bytes=num_bytes, num_tokens=num_tokens, took_ns=load_ns)
        return load_ns
    lost_ns = 0
    if plan.starts:
        lost_ns = plan.deadline_ns
        cost.abandoned("disk", plan, num_bytes=num_bytes, num_tokens=0, took_ns=lost_ns)
    else:
        cost.skipped("disk")
    cost.computed(num_tokens, compute_ns)
    return lost_ns + compute_ns


def make_warm() -> LoadCost:
    cost = LoadCost()
    cost.computed(1000, 1000 * TOKEN_NS)
    return cost


@given(st.lists(st.tuples(st.integers(1, 200), st.integers(0, 10_000 * MS)), max_size=60))
def test_a_slow_tier_is_never_worse_than_no_cache(prompts: list[tuple[int, int]]) -> None:
    """Whatever each load takes: the sum stays below that without a cache, plus the share and the grant."""
    cost, spent_ns, without_ns = make_warm(), 0, 1000 * TOKEN_NS
    for num_blocks, load_ns in prompts:
        spent_ns += prompt(cost, num_blocks, load_ns)
        without_ns += TOKEN_NS * 16 * num_blocks
        assert spent_ns <= (1 + LOSS_SHARE) * without_ns + GRANT_NS + len(prompts)
        assert 0 <= cost.budget_ns <= BUDGET_NS_MAX


@pytest.mark.parametrize("seed", range(3))
def test_no_kind_of_tier_makes_a_workload_slower_than_none(seed: int) -> None:
    """Slow, failing, hanging and pausing tiers: the bound of the bench holds for each, and a good tier is used."""
    rows, targets = load_choice(seed)
    assert all(target.ok for target in targets), targets
    sums = {(row["kind"], row["way"]): row["total_s"] for row in rows}
    assert sums["1500 MB/s", "learned"] == sums["1500 MB/s", "wait"]


def test_a_fast_tier_is_used_every_time() -> None:
    """100 prompts that load in a hundredth of their prefill: all are loaded."""
    cost = make_warm()
    for _ in range(100):
        assert prompt(cost, 32, TOKEN_NS * 512 // 100) == TOKEN_NS * 512 // 100


def test_a_tier_that_turned_slow_is_left_alone_and_found_again() -> None:
    """Slow: what was saved before pays for a few more tries, at most a tenth. Fast again: it is found."""
    cost, compute_ns = make_warm(), TOKEN_NS * 2048
    for _ in range(20):
        prompt(cost, 128, compute_ns // 50)
    times = [prompt(cost, 128, 100 * compute_ns) for _ in range(200)]
    assert compute_ns < sum(times[100:]) / 100 <= 1.1 * compute_ns
    times = [prompt(cost, 128, compute_ns // 50) for _ in range(400)]
    assert times[-1] == compute_ns // 50


def test_a_load_that_hangs_costs_what_such_loads_take_and_a_little() -> None:
    """Known to take 100 ms: after 650 ms it is given up, not after the 2 s that computing takes."""
    cost = make_warm()
    for _ in range(20):
        prompt(cost, 128, 100 * MS)
    assert prompt(cost, 128, 1 << 60) == pytest.approx(STEP_MAX * 100 * MS + SMALL_NS + 2048 * TOKEN_NS, abs=MS)


def test_a_tier_that_hung_at_its_first_use_is_not_asked_again_at_once() -> None:
    """Nothing known: one load is lost, at most the grant; the next ones are not started."""
    cost = make_warm()
    assert prompt(cost, 128, 1 << 60) <= GRANT_NS * (1 + LOSS_SHARE) + 2048 * TOKEN_NS
    assert not any(plan_of(cost, num_blocks).starts for num_blocks in (16, 128, 1000))


def test_a_single_pause_does_not_condemn_a_tier() -> None:
    """One load a hundred times slower than the others moves the prediction by at most GAIN x (STEP_MAX - 1)."""
    cost = make_warm()
    for _ in range(20):
        prompt(cost, 32, MS)
    assert plan_of(cost, 32).predicted_ns == MS
    cost.loaded("disk", num_bytes=32 * BLOCK, num_tokens=512, took_ns=100 * MS)
    assert plan_of(cost, 32).predicted_ns == pytest.approx(1.6 * MS, abs=2)


def test_no_load_starts_when_its_prediction_exceeds_the_recomputation() -> None:
    """A tier known to need 20 ms per block is not asked for blocks that are computed in 16 ms; a short one may be."""
    cost = LoadCost()
    cost.loaded("disk", num_bytes=BLOCK, num_tokens=16, took_ns=20 * MS)
    cost.computed(1000, 1000 * TOKEN_NS)
    assert not plan_of(cost, 32).starts
    assert plan_of(cost, 12).starts, "within what is small"
    assert cost.plan("other", num_bytes=32 * BLOCK, num_tokens=512).starts


def test_a_prefill_of_one_token_says_nothing_of_a_token() -> None:
    """Prompts that were loaded whole compute one token each: the rate stays that of real prefills."""
    cost = make_warm()
    for _ in range(20):
        prompt(cost, 128, MS)
    before = plan_of(cost, 1000)
    for _ in range(100):
        cost.computed(SAMPLE_TOKENS_MIN - 1, 1000 * TOKEN_NS)
    assert plan_of(cost, 1000) == before
