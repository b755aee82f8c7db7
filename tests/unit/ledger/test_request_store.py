"""Rows of requests and owners: the same claims on SQLite and on PostgreSQL."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import pytest
import sqlalchemy as sa

from cluster.ledger import database as database_module
from cluster.ledger import tables
from cluster.ledger.database import Database, LedgerUnavailable, absolute_url, open_database
from cluster.ledger.request_store import RequestStore
from kvstore.errors import BadInput, EnvironmentProblem
from tests.unit.ledger.builders import make_owner, make_row


def test_the_newest_state_of_a_request_is_found_by_its_tenant_only(database: Database) -> None:
    """A second write replaces the first; another tenant sees nothing."""
    store = RequestStore(database)
    store.write([make_row(), make_row(delivered_output_tokens=5, first_delta_sent=True)], now_ms=10)
    found = store.find("req-1", tenant="t")
    assert found == make_row(delivered_output_tokens=5, first_delta_sent=True)
    assert store.find("req-1", tenant="other") is None
    assert store.find("req-2", tenant="t") is None


def test_a_write_is_all_or_nothing(database: Database) -> None:
    """One row that cannot be written takes the whole batch back."""
    store = RequestStore(database)
    bad = make_row("req-2", phase=None)
    with pytest.raises(LedgerUnavailable):
        store.write([make_row("req-1"), bad], now_ms=1)
    assert store.find("req-1", tenant="t") is None


def test_burial_ends_what_was_open_with_a_lower_bound_and_touches_nothing_else(database: Database) -> None:
    """Open requests of the dead become interrupted/gateway_lost; what is not known is null, not a guess."""
    store = RequestStore(database)
    store.register(make_owner("life-a"), now_ms=1)
    store.register(make_owner("life-b"), now_ms=1)
    ended = make_row("req-3", phase="finished", is_ended=True, delivered_output_tokens=9, first_delta_sent=True)
    store.write(
        [make_row("req-1"), make_row("req-2", first_delta_sent=True, delivered_output_tokens=4), ended], now_ms=2
    )
    store.write([make_row("req-4", owner="life-b")], now_ms=2)

    assert sorted(store.bury("life-a", 0, now_ms=3)) == ["req-1", "req-2"]

    unsent, sent = store.find("req-1", tenant="t"), store.find("req-2", tenant="t")
    assert unsent is not None and sent is not None
    assert (unsent.phase, unsent.is_ended) == ("interrupted", True)
    assert unsent.record["first_delta_sent"] is None, "a delta may have gone out after the last write"
    assert unsent.record["interruption"]["partial_output"] is None
    assert sent.record["first_delta_sent"] is True
    interruption = sent.record["interruption"]
    assert (interruption["reason"], interruption["delivered_output_tokens"]) == ("gateway_lost", 4)
    assert (interruption["delivered_output_tokens_is"], interruption["attempt_id"]) == ("lower_bound", "att-1")
    assert interruption["retryable"] is False
    assert store.find("req-3", tenant="t") == ended
    assert store.find("req-4", tenant="t") == make_row("req-4", owner="life-b")
    assert [row.owner for row in store.list_owners()] == ["life-b"]


def test_an_owner_that_showed_life_is_not_buried(database: Database) -> None:
    """The burial rests on the beat that was read; one beat later it does nothing."""
    store = RequestStore(database)
    store.register(make_owner(), now_ms=1)
    store.write([make_row()], now_ms=1)
    assert store.beat("life-a") is True
    assert store.bury("life-a", 0, now_ms=2) == []
    assert store.find("req-1", tenant="t") == make_row()
    assert [row.beat for row in store.list_owners()] == [1]


def test_only_one_of_many_watchers_buries(database: Database) -> None:
    """Eight at once: one gets the requests, seven get nothing, nobody fails."""
    store = RequestStore(database)
    store.register(make_owner(), now_ms=1)
    store.write([make_row(f"req-{number}") for number in range(5)], now_ms=1)
    results: list[list[str]] = []
    gate = threading.Barrier(8)

    def bury() -> None:
        gate.wait()
        results.append(store.bury("life-a", 0, now_ms=2))

    threads = [threading.Thread(target=bury) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(len(found) for found in results) == [0, 0, 0, 0, 0, 0, 0, 5]


def test_a_buried_owner_learns_it_and_its_own_word_replaces_the_guess(database: Database) -> None:
    """Somebody who was only stopped: its beat says so, and what it knows stands in the end."""
    store = RequestStore(database)
    store.register(make_owner(), now_ms=1)
    store.write([make_row()], now_ms=1)
    store.bury("life-a", 0, now_ms=2)
    assert store.beat("life-a") is False
    final = make_row(phase="finished", is_ended=True, first_delta_sent=True, delivered_output_tokens=7)
    store.write([final], now_ms=3)
    assert store.find("req-1", tenant="t") == final


def test_prune_removes_old_ended_requests_only(database: Database) -> None:
    """A running request is never old."""
    store = RequestStore(database)
    store.write([make_row("old", is_ended=True, phase="finished"), make_row("running")], now_ms=100)
    store.write([make_row("new", is_ended=True, phase="finished")], now_ms=200)
    assert store.prune(150) == 1
    present = [name for name in ("old", "running", "new") if store.find(name, tenant="t") is not None]
    assert present == ["running", "new"]


def test_a_ledger_outlives_its_process(ledger_url: str) -> None:
    """What was written is there after everything was closed and opened again."""
    first = open_database(ledger_url)
    RequestStore(first).write([make_row()], now_ms=1)
    first.close()
    second = open_database(ledger_url)
    assert RequestStore(second).find("req-1", tenant="t") == make_row()
    second.close()


def test_a_ledger_of_another_version_is_refused(ledger_url: str) -> None:
    """The text says both versions and what to do."""
    database = open_database(ledger_url)
    with database.transaction() as connection:
        connection.execute(sa.update(tables.schema_version).values(version=99))
    database.close()
    with pytest.raises(EnvironmentProblem, match="schema version 99, this Kopir needs 1; name another"):
        open_database(ledger_url)


def test_many_processes_may_make_the_ledger_at_once(ledger_url: str) -> None:
    """Ingresses that start together find one set of tables."""
    assert open_at_once(ledger_url, count=6) == []


def test_a_switch_to_the_write_ahead_log_waits_for_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite refuses that switch at once while somebody writes: we ask again until he is done."""
    writer = sqlite3.connect(tmp_path / "kopir.db", isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    monkeypatch.setattr(database_module.time, "sleep", lambda _: writer.in_transaction and writer.execute("ROLLBACK"))
    open_database(f"sqlite:///{tmp_path}/kopir.db").close()
    assert not writer.in_transaction
    writer.close()


def test_a_file_that_stays_locked_is_refused_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for the switch is bounded; the text says why."""
    monkeypatch.setattr(database_module, "BUSY_TIMEOUT_S", 0.1)
    holder = sqlite3.connect(tmp_path / "kopir.db", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.raises(LedgerUnavailable, match="database is locked"):
        open_database(f"sqlite:///{tmp_path}/kopir.db")
    holder.execute("ROLLBACK")
    holder.close()


def open_at_once(url: str, *, count: int) -> list[BaseException]:
    """Returns the errors of ``count`` threads that open one ledger in the same moment."""
    failures: list[BaseException] = []
    gate = threading.Barrier(count)

    def open_it() -> None:
        gate.wait()
        try:
            open_database(url).close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=open_it) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return failures


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("mysql://root@localhost/x", "expected sqlite or postgresql"),
        ("no url", "not a database URL"),
        ("sqlite://", "name a file"),
        ("sqlite:///:memory:", "name a file"),
        ("postgresql+nothing://localhost/x", "nothing"),
    ],
)
def test_a_url_that_cannot_serve_is_refused_by_name(url: str, why: str) -> None:
    """The field is named; a password never appears."""
    with pytest.raises(BadInput, match=why) as caught:
        open_database(url)
    assert caught.value.field == "ledger.url"


def test_a_password_never_shows_in_a_complaint() -> None:
    """Neither for a wrong kind of database nor for one that does not answer."""
    with pytest.raises(BadInput) as caught:
        open_database("mysql://me:secret@localhost/x")
    assert "secret" not in str(caught.value)
    with pytest.raises(LedgerUnavailable) as away:
        open_database("postgresql://me:secret@127.0.0.1:1/x")
    assert "secret" not in str(away.value)


def test_a_folder_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    """One line, no trace of the library."""
    with pytest.raises(LedgerUnavailable, match="unable to open database file"):
        open_database(f"sqlite:///{tmp_path}/missing/kopir.db")


def test_a_relative_file_is_taken_from_the_folder_of_the_serve() -> None:
    """Workers and ingresses have their own working folders."""
    assert absolute_url("sqlite:///kopir.db", Path("/srv/kopir")) == "sqlite:////srv/kopir/kopir.db"
    assert absolute_url("sqlite:////var/kopir.db", Path("/srv")) == "sqlite:////var/kopir.db"
    url = "postgresql://me:secret@db/kopir"
    assert absolute_url(url, Path("/srv")) == url
