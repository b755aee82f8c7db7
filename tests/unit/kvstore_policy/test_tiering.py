"""Verdicts of a tier edge, one rule at a time."""

from __future__ import annotations

import pytest

from kvstore.core.ids import BlockHash
from kvstore.core.tiering import Demotion, EdgeLimits, LowerTier, TierEdge

A, B = BlockHash(b"a" * 32), BlockHash(b"b" * 32)
ROOMY = LowerTier(total=100, free=50)
FULL = LowerTier(total=100, free=0)


def make_edge() -> TierEdge:
    return TierEdge(10, 100, limits=EdgeLimits(min_visits_when_full=2, max_pending_writes=4))


def test_a_free_slot_below_is_used_for_any_block() -> None:
    """With room below, a block that was asked for once is written too."""
    edge = make_edge()
    edge.on_visit([A])
    assert edge.demote(A, lower=ROOMY, is_below=False) is Demotion.WRITE


def test_a_one_hit_block_replaces_nothing() -> None:
    """Once the lower tier is full, only a block that was asked for again is worth a write."""
    edge = make_edge()
    edge.on_visit([A, B])
    edge.on_visit([A])
    assert edge.demote(B, lower=FULL, is_below=False) is Demotion.DROP_ONE_HIT
    assert edge.demote(A, lower=FULL, is_below=False) is Demotion.WRITE
    assert edge.counters.dropped_one_hit == 1


def test_nothing_is_written_twice() -> None:
    """A block that is below, or on its way there, costs no second write, early or late."""
    edge = make_edge()
    assert edge.demote(A, lower=ROOMY, is_below=True) is Demotion.KEPT_BELOW
    assert edge.write_early(A, lower=ROOMY, is_below=True) is Demotion.KEPT_BELOW
    assert edge.counters.kept_below == 1


def test_the_queue_of_writes_is_bounded_and_a_tier_that_is_off_gets_nothing() -> None:
    """Full queue: busy. Switched off or without slots: off. Neither depends on how good the block is."""
    edge = make_edge()
    edge.on_visit([A])
    edge.on_visit([A])
    assert edge.demote(A, lower=LowerTier(100, 50, pending_writes=4), is_below=False) is Demotion.DROP_BUSY
    assert edge.demote(A, lower=LowerTier(100, 50, accepts_writes=False), is_below=False) is Demotion.DROP_OFF
    assert edge.demote(A, lower=LowerTier(0, 0), is_below=False) is Demotion.DROP_OFF
    assert edge.counters.to_dict()["dropped_off"] == 2


@pytest.mark.parametrize(
    ("lower", "verdict"),
    [
        (ROOMY, Demotion.WRITE),
        (LowerTier(100, 5), Demotion.LATER),
        (LowerTier(100, 6), Demotion.WRITE),
        (LowerTier(100, 50, pending_writes=2), Demotion.LATER),
        (LowerTier(100, 50, accepts_writes=False), Demotion.LATER),
    ],
)
def test_early_writes_push_nothing_out(lower: LowerTier, verdict: Demotion) -> None:
    """A commit is copied down at once only with room to spare and a queue that is at most half full."""
    assert make_edge().write_early(A, lower=lower, is_below=False) is verdict


def test_only_what_the_lower_tier_took_counts_as_written() -> None:
    """A verdict is an intention; what had no buffer or slot below is counted apart."""
    edge = make_edge()
    for is_taken, is_early in ((True, True), (True, False), (True, False), (False, True), (False, False)):
        edge.wrote(is_taken=is_taken, is_early=is_early)
    assert (edge.counters.written_early, edge.counters.written, edge.counters.not_taken) == (1, 2, 2)
