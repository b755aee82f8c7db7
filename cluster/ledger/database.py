"""One connection to the ledger's database, SQLite or PostgreSQL by URL.

Owns the SQLAlchemy engine and the creation of the tables. Maps the library's errors: what may pass is
``LedgerUnavailable``, what will not is ``EnvironmentProblem`` or ``BadInput``. Blocking; never called on an event loop.

Life cycle: ``open_database`` -> ``transaction`` ... -> ``close``. Safe to use from several threads.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import URL, make_url

from cluster.ledger import tables
from kvstore.errors import BadInput, EnvironmentProblem, RetryableError

BUSY_TIMEOUT_S = 5.0
"""Longest wait for another process that writes to the same SQLite file, and for a connection to PostgreSQL."""
SWITCH_RETRY_S = 0.005
POOL_SIZE_MAX = 4


class LedgerUnavailable(RetryableError):
    """The database does not answer; the same call may succeed later."""


class Database:
    """The engine behind the ledger."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._reader = engine.execution_options(kopir_reads_only=True)

    @property
    def dialect(self) -> str:
        """``sqlite`` or ``postgresql``."""
        return self._engine.dialect.name

    @contextmanager
    def transaction(self, *, reads_only: bool = False) -> Iterator[sa.Connection]:
        """Commits at the end, rolls back on an exception. Raises: LedgerUnavailable.

        ``reads_only`` does not wait for a writer of the same SQLite file.
        """
        try:
            with (self._reader if reads_only else self._engine).begin() as connection:
                yield connection
        except (sa.exc.DBAPIError, sa.exc.TimeoutError) as error:
            raise LedgerUnavailable(f"ledger: {_first_line(error)}") from error

    def upsert(self, table: sa.Table, row: dict[str, Any], *, key: str) -> Any:
        """Returns the statement that writes ``row`` over whatever stands under its key."""
        insert = self.insert(table).values(row)
        return insert.on_conflict_do_update(
            index_elements=[key], set_={name: value for name, value in row.items() if name != key}
        )

    def insert(self, table: sa.Table) -> Any:
        """Returns an INSERT of this dialect; it can carry ``on_conflict_do_update``."""
        if self.dialect == "postgresql":
            from sqlalchemy.dialects.postgresql import insert as postgresql_insert

            return postgresql_insert(table)
        from sqlalchemy.dialects.sqlite import insert as sqlite_insert

        return sqlite_insert(table)

    def close(self) -> None:
        """Closes every connection."""
        self._engine.dispose()


def open_database(url: str) -> Database:
    """Connects, makes missing tables, checks the version of present ones.

    Raises: BadInput for a URL that names nothing usable; EnvironmentProblem for a ledger of another version;
    LedgerUnavailable if nothing answers.
    """
    parsed = parse_url(url)
    try:
        engine = _make_engine(parsed)
    except (sa.exc.ArgumentError, sa.exc.NoSuchModuleError, ImportError) as error:
        raise BadInput("ledger.url", parsed.render_as_string(), _first_line(error)) from error
    database = Database(engine)
    try:
        _make_tables(database)
    except BaseException:
        database.close()
        raise
    return database


def parse_url(url: str) -> URL:
    """Returns the URL with its driver. Raises: BadInput, without the password in its text."""
    try:
        parsed = make_url(url)
    except (sa.exc.ArgumentError, ValueError) as error:
        raise BadInput("ledger.url", "...", "not a database URL such as sqlite:///kopir.db") from error
    if parsed.drivername == "postgresql":
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.get_backend_name() not in ("sqlite", "postgresql"):
        raise BadInput("ledger.url", parsed.render_as_string(), "expected sqlite or postgresql")
    return parsed


def absolute_url(url: str, folder: Path) -> str:
    """Returns ``url`` with a relative SQLite path made absolute from ``folder``: processes have their own folders."""
    parsed = parse_url(url)
    if parsed.get_backend_name() != "sqlite" or parsed.database in (None, "", ":memory:"):
        return url
    assert parsed.database is not None
    return parsed.set(database=str(folder / parsed.database)).render_as_string(hide_password=False)


def _make_engine(url: URL) -> sa.Engine:
    if url.get_backend_name() == "sqlite":
        if url.database in (None, "", ":memory:"):
            raise BadInput("ledger.url", str(url), "the ledger has to survive its process: name a file")
        engine = sa.create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_S}, pool_size=POOL_SIZE_MAX)
        sa.event.listen(engine, "connect", _prepare_sqlite)
        sa.event.listen(engine, "begin", _begin_sqlite)
        return engine
    return sa.create_engine(
        url,
        connect_args={"connect_timeout": int(BUSY_TIMEOUT_S), "options": "-c statement_timeout=10000"},
        pool_size=POOL_SIZE_MAX,
        pool_pre_ping=True,
    )


def _begin_sqlite(connection: sa.Connection) -> None:
    # A transaction that reads first and writes later could not be retried by SQLite: take the write lock at once.
    reads_only = connection.get_execution_options().get("kopir_reads_only", False)
    connection.exec_driver_sql("BEGIN" if reads_only else "BEGIN IMMEDIATE")


def _prepare_sqlite(connection: sqlite3.Connection, _: object) -> None:
    connection.isolation_level = None  # ``_begin_sqlite`` says BEGIN, not the driver.
    # WAL: readers and one writer do not stop each other; FULL: a commit is on disk when it returns.
    _switch_to_wal(connection)
    connection.execute("PRAGMA synchronous=FULL")


def _switch_to_wal(connection: sqlite3.Connection) -> None:
    # Of two connections that switch a new file at once SQLite refuses one without waiting: to wait could deadlock.
    # Nothing is held here, so that asking again is safe.
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            is_busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
            if not is_busy or time.monotonic() > deadline:
                raise
        time.sleep(SWITCH_RETRY_S)


def _make_tables(database: Database) -> None:
    with database.transaction() as connection:
        if database.dialect == "postgresql":
            # Two ingresses that start together must not make the same table at the same time.
            connection.execute(sa.text("SELECT pg_advisory_xact_lock(706964)"))
        tables.metadata.create_all(connection)
        found = connection.execute(sa.select(tables.schema_version.c.version)).scalar()
        if found is None:
            connection.execute(sa.insert(tables.schema_version).values(id=1, version=tables.SCHEMA_VERSION))
        elif found != tables.SCHEMA_VERSION:
            raise EnvironmentProblem(
                f"the ledger has schema version {found}, this Kopir needs {tables.SCHEMA_VERSION}; name another one"
            )


def _first_line(error: BaseException) -> str:
    text = str(getattr(error, "orig", None) or error)
    return text.splitlines()[0] if text else type(error).__name__
