"""The ledger of one ingress: behind, but never wrong; and the dead are found without comparing clocks."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import pytest

from cluster.ledger import request_ledger
from cluster.ledger.database import LedgerUnavailable
from cluster.ledger.request_ledger import RequestLedger
from kvstore.net.host import boottime_ns
from tests.unit.ledger.builders import make_owner, make_row
from tests.unit.ledger.postgres import PostgresServer

DEADLINE_S = 30.0


@pytest.fixture
def make_ledger(ledger_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], RequestLedger]]:
    """Returns ``make(owner, clock_ns=...)``: a started ledger with a silence of 300 ms by that clock."""
    monkeypatch.setattr(request_ledger, "SILENCE_MS_MIN", 300)
    made: list[RequestLedger] = []

    def make(owner: str, clock_ns: Callable[[], int] = boottime_ns) -> RequestLedger:
        ledger = RequestLedger(ledger_url, make_owner(owner), lease_ms=50, retention_s=60, clock_ns=clock_ns)
        ledger.start()
        made.append(ledger)
        return ledger

    yield make
    for ledger in made:
        ledger.close()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "condition did not come true"
        time.sleep(0.005)


class SteppedClock:
    """Goes on only when every living ledger has shown that it lives, so that no load makes one look silent."""

    def __init__(self) -> None:
        self._now_ns = boottime_ns()

    def __call__(self) -> int:
        return self._now_ns

    def step(self, *living: RequestLedger) -> None:
        """Lets pass the time after which each has to show itself, and waits until each has."""
        owners = {ledger._me.owner for ledger in living}
        before = {row.owner: row.beat for row in living[0].list_owners()}
        self._now_ns += living[0]._beat_ns
        until(lambda: all(r.beat > before[r.owner] for r in living[0].list_owners() if r.owner in owners))


def test_another_ingress_reads_what_one_wrote(make_ledger: Callable[[str], RequestLedger]) -> None:
    """Any ingress answers about any request, of the right tenant."""
    one, other = make_ledger("life-a"), make_ledger("life-b")
    one.note(make_row())
    assert one.find("req-1", tenant="t") == make_row(), "the owner knows it at once"
    until(lambda: other.find("req-1", tenant="t") == make_row())
    assert one.find("req-1", tenant="x") is None


def test_a_silent_ingress_is_buried_and_a_living_one_is_not(make_ledger: Callable[..., RequestLedger]) -> None:
    """The dead one's open request ends as gateway_lost; the watcher itself and its requests stay."""
    clock = SteppedClock()
    watcher = make_ledger("life-b", clock)
    watcher.note(make_row("req-2", owner="life-b"))
    dead = make_ledger("life-a", clock)
    dead.note(make_row("req-1", first_delta_sent=True, delivered_output_tokens=3))
    until(lambda: dead.num_written == 1)
    # As a killed process: its thread ends, nothing is taken back.
    dead._store.leave = lambda owner: None  # type: ignore[union-attr,method-assign]
    dead.close()

    num_steps = 0
    while not ((row := watcher.find("req-1", tenant="t")) and row.is_ended):
        clock.step(watcher)
        num_steps += 1
        assert num_steps <= 24, "three times as long as it may be silent"
    assert num_steps >= 8, "buried before it was silent for long enough"
    row = watcher.find("req-1", tenant="t")
    assert row is not None and row.record["interruption"]["reason"] == "gateway_lost"
    assert row.record["interruption"]["delivered_output_tokens"] == 3
    assert watcher.find("req-2", tenant="t") == make_row("req-2", owner="life-b")
    assert watcher.num_buried == 1
    assert watcher.find_owner("life-a") is None and watcher.find_owner("life-b") is not None


def test_an_ingress_that_leaves_is_not_buried(make_ledger: Callable[[str], RequestLedger]) -> None:
    """A clean end takes it off the list after its last rows are written."""
    other = make_ledger("life-b")
    one = make_ledger("life-a")
    one.note(make_row(is_ended=True, phase="finished"))
    one.close()
    assert other.find_owner("life-a") is None
    found = other.find("req-1", tenant="t")
    assert found is not None and found.phase == "finished"
    assert one.num_lost == 0


def test_only_the_newest_state_is_written_and_the_queue_is_bounded(
    make_ledger: Callable[[str], RequestLedger], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the database is away nothing piles up: one row per request, and at most PENDING_MAX of them."""
    monkeypatch.setattr(request_ledger, "PENDING_MAX", 10)
    ledger = make_ledger("life-a")
    store = ledger._store
    assert store is not None
    write = store.write
    calls = itertools.count()

    def away(rows: object, *, now_ms: int) -> None:
        next(calls)
        raise LedgerUnavailable("away")

    monkeypatch.setattr(store, "write", away)
    ledger.note(make_row("req-0"))
    until(lambda: next(calls) > 0 and not ledger.is_available)
    for delivered in range(50):
        ledger.note(make_row("req-1", delivered_output_tokens=delivered))
    for number in range(2, 14):
        ledger.note(make_row(f"req-{number}"))
    assert ledger.num_lost >= 3
    monkeypatch.setattr(store, "write", write)
    until(lambda: ledger.is_available and not ledger._pending and not ledger._writing)
    assert store.find("req-13", tenant="t") == make_row("req-13")
    assert ledger.num_written <= 14


def test_a_postgresql_that_goes_away_and_comes_back_loses_nothing(postgres: PostgresServer) -> None:
    """Requests go on meanwhile; what happened is written when it is back."""
    ledger = RequestLedger(postgres.url, make_owner("life-a"), lease_ms=50, retention_s=60, clock_ns=boottime_ns)
    ledger.start()
    try:
        postgres.stop()
        ledger.note(make_row("req-1", is_ended=True, phase="finished"))
        until(lambda: not ledger.is_available)
        postgres.start()
        until(lambda: ledger.is_available and ledger.num_written == 1)
        found = ledger.find("req-1", tenant="t")
        assert found is not None and found.phase == "finished"
    finally:
        ledger.close()
