"""Rows of idempotency keys: the same claims on SQLite and on PostgreSQL."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cluster.ledger.database import Database
from cluster.ledger.key_store import KeyRow, KeyStore, interrupted_by_death
from cluster.ledger.request_store import RequestStore
from tests.unit.ledger.builders import make_owner


def make_key(request_id: str = "req-1", **changes: Any) -> KeyRow:
    fields = {"tenant": "t", "key": "k", "body_digest": "d", "owner": "life-a"} | changes
    return KeyRow(request_id=request_id, **fields)


def test_one_of_many_gets_the_key(database: Database) -> None:
    """Sixteen claims at once over real connections: one is told that it has it, all others who has."""
    store = KeyStore(database)
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda n: store.claim(make_key(f"req-{n}"), now_ms=1), range(16)))
    winners = [f"req-{number}" for number, row in enumerate(found) if row is None]
    assert len(winners) == 1
    assert {row.request_id for row in found if row is not None} == set(winners)


def test_keys_of_tenants_are_apart(database: Database) -> None:
    """The same text is another key."""
    store = KeyStore(database)
    assert store.claim(make_key(), now_ms=1) is None
    assert store.claim(make_key("req-2", tenant="other"), now_ms=1) is None


def test_a_whole_answer_is_kept(database: Database) -> None:
    """Byte for byte, whatever script it is in."""
    store, row = KeyStore(database), make_key()
    store.claim(row, now_ms=1)
    body = '{"text": "Grüße 你好 😀 \\u2028"}'.encode()
    assert store.finish(row, body, now_ms=2)
    found = store.claim(make_key("req-2"), now_ms=3)
    assert found is not None and (found.state, found.response, found.request_id) == ("finished", body, "req-1")
    assert not store.release(row) and not store.interrupt(row, {}, now_ms=4)


def test_a_stream_goes_its_way(database: Database) -> None:
    """running, sent, then interrupted or finished; each step once, and none backwards."""
    store, row = KeyStore(database), make_key()
    store.claim(row, now_ms=1)
    assert not store.interrupt(row, {"reason": "x"}, now_ms=1), "nothing went out yet"
    assert store.mark_sent(row, now_ms=2) and not store.mark_sent(row, now_ms=2)
    assert not store.release(row), "something may have gone out"
    assert store.interrupt(row, {"reason": "worker_exited"}, now_ms=3)
    found = store.find("t", "k")
    assert found is not None and (found.state, found.interruption) == ("interrupted", {"reason": "worker_exited"})
    assert not store.finish(row, None, now_ms=4)


def test_what_released_its_key_has_left_nothing(database: Database) -> None:
    """The key is free for another body."""
    store, row = KeyStore(database), make_key()
    store.claim(row, now_ms=1)
    assert store.release(row) and not store.release(row)
    assert store.claim(make_key("req-2", body_digest="other"), now_ms=2) is None


def test_only_the_dead_lose_a_key_and_then_they_change_nothing_any_more(database: Database) -> None:
    """While the owner is registered its key is its own; after the burial one taker gets it, and the dead is fenced."""
    store, lives = KeyStore(database), RequestStore(database)
    lives.register(make_owner("life-a"), now_ms=1)
    row = make_key()
    store.claim(row, now_ms=1)
    assert not store.is_orphaned(row)
    lives.bury("life-a", 0, now_ms=2)
    assert store.is_orphaned(row)
    with ThreadPoolExecutor(8) as pool:
        takers = [make_key(f"req-{n}", owner="life-b") for n in range(2, 10)]
        taken = list(pool.map(lambda taker: store.take_over(row, taker, now_ms=3), takers))
    assert sum(taken) == 1
    assert not store.mark_sent(row, now_ms=4), "the dead one would send a second answer"
    assert not store.finish(row, b"{}", now_ms=4) and not store.release(row)
    assert store.mark_sent(takers[taken.index(True)], now_ms=5)


def test_an_orphan_that_may_have_sent_something_is_not_taken(database: Database) -> None:
    """It is interrupted, and how far it came is nobody's guess."""
    store, row = KeyStore(database), make_key()
    store.claim(row, now_ms=1)
    store.mark_sent(row, now_ms=1)
    found = store.find("t", "k")
    assert found is not None and store.is_orphaned(found)
    assert not store.take_over(found, make_key("req-2"), now_ms=2)
    record = interrupted_by_death(found).interruption
    assert record is not None and (record["reason"], record["request_id"]) == ("gateway_lost", "req-1")
    assert "delivered_output_tokens" not in record


def test_old_keys_leave_but_never_one_whose_request_runs(database: Database) -> None:
    """Ended ones and orphans go by age; a living owner's stays."""
    store, lives = KeyStore(database), RequestStore(database)
    lives.register(make_owner("life-b"), now_ms=1)
    ended, orphan, running = make_key(key="1"), make_key(key="2"), make_key(key="3", owner="life-b")
    for row in (ended, orphan, running):
        store.claim(row, now_ms=1)
    store.finish(ended, b"{}", now_ms=5)
    assert store.prune(older_than_ms=4) == 1
    assert store.prune(older_than_ms=6) == 1
    assert [store.find("t", key) is not None for key in "123"] == [False, False, True]
