"""The same tests on SQLite and on PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from cluster.ledger import tables
from cluster.ledger.database import Database, open_database
from tests.unit.ledger.postgres import PostgresServer, find_programs


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A server for this run. Skips where PostgreSQL is not installed (it is, wherever `.ci/run` runs)."""
    programs = find_programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed on this machine (initdb and pg_ctl not found)")
    with PostgresServer(programs) as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def ledger_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A URL of an empty ledger."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'kopir.db'}"
        return
    url = request.getfixturevalue("postgres").url
    yield url
    engine = sa.create_engine(url)
    tables.metadata.drop_all(engine)
    engine.dispose()


@pytest.fixture
def database(ledger_url: str) -> Iterator[Database]:
    database = open_database(ledger_url)
    yield database
    database.close()
