"""The visit table against a plain dictionary, and its bound."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.ids import BlockHash
from kvstore.core.visits import MAX_VISITS, WAYS, Visits, VisitTable


def h(number: int) -> BlockHash:
    return BlockHash(hashlib.blake2b(number.to_bytes(8, "big"), digest_size=32).digest())


@given(st.lists(st.integers(0, 5), max_size=80))
def test_it_counts_and_dates_like_a_dictionary_while_everything_fits(visits: list[int]) -> None:
    """Before each visit the table returns the count so far and the visits since the latest one."""
    table = VisitTable(64)
    seen: dict[int, tuple[int, int]] = {}
    for now, number in enumerate(visits, start=1):
        count, last = seen.get(number, (0, 0))
        expected = Visits(count, now - last) if count else None
        assert table.visit(h(number)) == expected
        seen[number] = (count + 1, now)
        table.check_invariants()
    for number, (count, last) in seen.items():
        assert table.look(h(number)) == Visits(count, len(visits) - last)
        assert table.num_visits(h(number)) == count
    assert table.look(h(99)) is None
    assert table.num_visits(h(99)) == 0


def test_the_block_visited_longest_ago_is_forgotten_first() -> None:
    """One set of WAYS entries keeps the latest WAYS blocks."""
    table = VisitTable(WAYS)
    assert table.num_entries == WAYS
    for number in range(WAYS):
        table.visit(h(number))
    table.visit(h(0))
    table.visit(h(100))
    assert [number for number in range(WAYS) if table.num_visits(h(number))] == [0, 2, 3, 4, 5, 6, 7]
    assert (table.num_visits(h(0)), table.num_visits(h(100))) == (2, 1)


def test_counting_stops_at_its_bound() -> None:
    """A block asked for more often than MAX_VISITS keeps that count."""
    table = VisitTable(WAYS)
    for _ in range(MAX_VISITS + 5):
        table.visit(h(1))
    assert table.num_visits(h(1)) == MAX_VISITS


def test_a_tag_of_zero_is_no_empty_entry() -> None:
    """A block whose tag is 0 is unknown at first and found after its visit, between empty entries."""
    table = VisitTable(WAYS)
    zero = BlockHash(bytes(32))
    assert table.look(zero) is None
    assert table.visit(zero) is None
    table.visit(h(1))
    assert table.look(zero) == Visits(1, 1)
