"""LRU against a plain list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.eviction import LruPolicy
from kvstore.core.ids import BlockHash

NUM_SLOTS = 6


def h(slot: int) -> BlockHash:
    return BlockHash(bytes([slot]) * 32)


@given(st.lists(st.tuples(st.sampled_from(["touch", "remove"]), st.integers(0, NUM_SLOTS - 1)), max_size=60))
def test_victims_come_least_recently_used_first(events: list[tuple[str, int]]) -> None:
    """After every event the order is that of a list to whose end each used slot is moved."""
    policy = LruPolicy(NUM_SLOTS)
    expected: list[int] = []
    for kind, slot in events:
        if kind == "remove":
            if slot in expected:
                expected.remove(slot)
                policy.on_remove(slot, h(slot))
        elif slot in expected:
            expected.remove(slot)
            expected.append(slot)
            policy.on_hit(slot, h(slot))
        else:
            expected.append(slot)
            policy.on_insert(slot, h(slot))
        assert list(policy.victims()) == expected
