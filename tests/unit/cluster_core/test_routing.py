"""Routing: the least loaded pair that can hold the request, failing lives set aside for a while."""

from __future__ import annotations

from cluster.core.attempt_events import WorkerRef
from cluster.core.routing import (
    COOL_DOWN_NS_MAX,
    COOL_DOWN_NS_MIN,
    COOL_DOWNS_MAX,
    Candidate,
    CoolDown,
    NoPair,
    Pair,
    elsewhere,
)
from cluster.core.routing import choose_pair as choose


def make(name: str, role: str, *, load: int = 0, pool_blocks: int = 8, node: str = "n") -> Candidate:
    return Candidate(WorkerRef(worker_id=name, incarnation=f"{name}#1", pid=1, node=node), role, load, pool_blocks)


def names(pair: Pair | NoPair) -> tuple[str, str]:
    assert isinstance(pair, Pair), pair
    return pair.prefill.worker_id, pair.decode.worker_id


def test_the_least_loaded_pair_is_chosen_and_ties_go_by_name() -> None:
    """Equal inputs give the same pair, in whatever order they come."""
    candidates = [
        make("p1", "prefill", load=1),
        make("p0", "prefill", load=1),
        make("d0", "decode", load=2),
        make("d1", "decode", load=1),
    ]
    assert names(choose(candidates, prompt_blocks=1, total_blocks=2)) == ("p0", "d1")
    assert names(choose(reversed(candidates), prompt_blocks=1, total_blocks=2)) == ("p0", "d1")


def test_lives_that_failed_this_request_come_last_but_come() -> None:
    """One pair left is better than none."""
    candidates = [make("p0", "prefill"), make("d0", "decode"), make("d1", "decode", load=9)]
    assert names(choose(candidates, prompt_blocks=1, total_blocks=1, avoid=("d0#1",))) == ("p0", "d1")
    assert names(choose(candidates, prompt_blocks=1, total_blocks=1, avoid=("d0#1", "d1#1", "p0#1"))) == ("p0", "d0")


def test_a_host_that_fell_silent_is_left_alone_while_there_is_another_pair() -> None:
    """Its other workers are cut off as well; without a pair elsewhere, they are all there is."""
    silent = [make("p0", "prefill", node="a"), make("d0", "decode", node="a")]
    away = [make("p1", "prefill", node="b", load=9), make("d1", "decode", node="b", load=9)]
    assert elsewhere([*silent, *away], ["a"]) == away
    assert elsewhere([*silent, away[0]], ["a"]) == [*silent, away[0]]
    assert elsewhere(silent, []) == silent


def test_pools_that_can_never_hold_it_are_passed_over() -> None:
    """Prefill needs the prompt's blocks, decode those of the answer too."""
    small = [make("p0", "prefill", pool_blocks=4), make("d0", "decode", pool_blocks=4)]
    refused = choose(small, prompt_blocks=4, total_blocks=5)
    assert refused == NoPair("needs 5 KV blocks, more than the pools of any pair", never=True)
    assert names(choose([*small, make("d1", "decode", load=5)], prompt_blocks=4, total_blocks=5)) == ("p0", "d1")


def test_without_a_pair_nothing_is_said_about_never() -> None:
    """A missing worker may come back."""
    assert choose([make("p0", "prefill")], prompt_blocks=1, total_blocks=99) == NoPair(
        "no connected pair of prefill and decode workers"
    )


def test_a_combined_worker_takes_both_sides_when_it_is_less_loaded() -> None:
    """It competes with the pair by the more loaded of the two."""
    pair = [make("p0", "prefill", load=2), make("d0", "decode")]
    assert names(choose([*pair, make("c0", "combined", load=1)], prompt_blocks=1, total_blocks=1)) == ("c0", "c0")
    assert names(choose([*pair, make("c0", "combined", load=2)], prompt_blocks=1, total_blocks=1)) == ("p0", "d0")
    assert names(choose([make("c0", "combined", load=9)], prompt_blocks=1, total_blocks=1)) == ("c0", "c0")


def test_failures_in_a_row_double_the_time_aside_and_success_ends_it() -> None:
    """Bounded above, and in memory."""
    cool = CoolDown()
    cool.failed("d0#1", 0)
    assert cool.set_aside(COOL_DOWN_NS_MIN - 1) == ("d0#1",)
    assert cool.set_aside(COOL_DOWN_NS_MIN) == ()
    cool.failed("d0#1", 0)
    assert cool.set_aside(2 * COOL_DOWN_NS_MIN - 1) == ("d0#1",)
    for _ in range(40):
        cool.failed("d0#1", 0)
    assert cool.set_aside(COOL_DOWN_NS_MAX) == ()
    cool.succeeded("d0#1")
    assert cool.set_aside(0) == ()
    for number in range(COOL_DOWNS_MAX + 5):
        cool.failed(f"x{number}", 0)
    assert len(cool.set_aside(0)) == COOL_DOWNS_MAX
