"""Rows of idempotency keys: who answers a key, and what became of it.

Owns the statements. Blocking calls; each is one transaction that is committed when it returns. A row belongs to one
request of one owner (a life of an ingress); every later change asks for both, so that an owner that was declared dead
and comes back changes nothing.

    claim -> running -> sent (the first byte of a stream may be out) -> finished | interrupted
                     -> finished (a whole answer, with its body)
                     -> (removed: nothing went out, the key is free again)
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa

from cluster.ledger.database import Database, LedgerUnavailable
from cluster.ledger.tables import idempotency_keys, owners

PRUNE_ROWS_MAX = 1000
CLAIM_TRIES_MAX = 8
OPEN_STATES = ("running", "sent")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRow:
    """One key of one tenant. ``response``: a whole answer's body; ``interruption``: how it broke, JSON-ready."""

    tenant: str
    key: str
    body_digest: str
    request_id: str
    owner: str
    state: str = "running"
    response: bytes | None = None
    interruption: dict[str, Any] | None = None

    @property
    def is_open(self) -> bool:
        """Whether its owner may still be at it."""
        return self.state in OPEN_STATES


class KeyStore:
    """Reads and writes key rows."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def claim(self, row: KeyRow, *, now_ms: int) -> KeyRow | None:
        """Makes the key ours. Returns None when it is, else the row that stands there. Raises: LedgerUnavailable."""
        values = {**_values(row), "created_at_ms": now_ms, "updated_at_ms": now_ms}
        insert = self._database.insert(idempotency_keys).values(values).on_conflict_do_nothing()
        insert = insert.returning(idempotency_keys.c.key)
        for _ in range(CLAIM_TRIES_MAX):
            with self._database.transaction() as connection:
                if connection.execute(insert).first() is not None:
                    return None
                found = connection.execute(_select(row.tenant, row.key)).mappings().first()
                if found is not None:
                    return _row(found)
            # It was released between the two statements: claim again.
        raise LedgerUnavailable("ledger: a key was claimed and released by others over and over")

    def find(self, tenant: str, key: str) -> KeyRow | None:
        """Returns the row of a key."""
        with self._database.transaction(reads_only=True) as connection:
            found = connection.execute(_select(tenant, key)).mappings().first()
            return None if found is None else _row(found)

    def is_orphaned(self, row: KeyRow) -> bool:
        """Whether the owner of an open row has left or was buried."""
        query = sa.select(owners.c.owner).where(owners.c.owner == row.owner)
        with self._database.transaction(reads_only=True) as connection:
            return row.is_open and connection.execute(query).first() is None

    def take_over(self, orphan: KeyRow, row: KeyRow, *, now_ms: int) -> bool:
        """Gives the key of an orphan of which nothing went out to ``row``. False: it is not as it was."""
        values = {**_values(row), "updated_at_ms": now_ms}
        with self._database.transaction() as connection:
            return connection.execute(_update(orphan, "running").values(values)).rowcount == 1

    def mark_sent(self, row: KeyRow, *, now_ms: int) -> bool:
        """The first byte of a stream goes out next. False: the key is another's by now, and nothing may go out."""
        return self._set(row, "running", now_ms=now_ms, state="sent")

    def finish(self, row: KeyRow, response: bytes | None, *, now_ms: int) -> bool:
        """The answer is complete; a whole one is kept. False: the key is another's by now."""
        was = "sent" if response is None else "running"
        text = None if response is None else response.decode()
        return self._set(row, was, now_ms=now_ms, state="finished", response=text)

    def interrupt(self, row: KeyRow, interruption: dict[str, Any], *, now_ms: int) -> bool:
        """The answer broke after its first byte. False: the key is another's, or nothing of it went out."""
        return self._set(row, "sent", now_ms=now_ms, state="interrupted", interruption=json.dumps(interruption))

    def release(self, row: KeyRow) -> bool:
        """Nothing went out: the key is free. False: something did, or the key is another's."""
        with self._database.transaction() as connection:
            delete = sa.delete(idempotency_keys).where(*_is(row), idempotency_keys.c.state == "running")
            return connection.execute(delete).rowcount == 1

    def unsend(self, row: KeyRow) -> bool:
        """Frees a key that was marked as sent when, after all, nothing could be written."""
        with self._database.transaction() as connection:
            delete = sa.delete(idempotency_keys).where(*_is(row), idempotency_keys.c.state == "sent")
            return connection.execute(delete).rowcount == 1

    def prune(self, older_than_ms: int) -> int:
        """Removes keys whose answer ended, or whose owner is gone, before ``older_than_ms``; bounded per call."""
        gone = ~sa.exists().where(owners.c.owner == idempotency_keys.c.owner)
        old = (
            sa.select(idempotency_keys.c.tenant, idempotency_keys.c.key)
            .where(
                idempotency_keys.c.updated_at_ms < older_than_ms,
                sa.or_(idempotency_keys.c.state.not_in(OPEN_STATES), gone),
            )
            .limit(PRUNE_ROWS_MAX)
        )
        with self._database.transaction() as connection:
            found = [tuple(row) for row in connection.execute(old)]
            for tenant, key in found:
                connection.execute(
                    sa.delete(idempotency_keys).where(
                        idempotency_keys.c.tenant == tenant, idempotency_keys.c.key == key
                    )
                )
        return len(found)

    def _set(self, row: KeyRow, was: str, *, now_ms: int, **values: Any) -> bool:
        with self._database.transaction() as connection:
            return connection.execute(_update(row, was).values(updated_at_ms=now_ms, **values)).rowcount == 1


def interrupted_by_death(row: KeyRow) -> KeyRow:
    """Returns an orphan of which something went out as what it is: interrupted, how far is not known."""
    interruption = {
        "code": "upstream_decode_interrupted",
        "reason": "gateway_lost",
        "request_id": row.request_id,
        "message": "the ingress that held this request is gone",
        "partial_output": True,
        "retryable": False,
    }
    return replace(row, state="interrupted", interruption=interruption)


def _is(row: KeyRow) -> tuple[Any, ...]:
    table = idempotency_keys.c
    return (
        table.tenant == row.tenant,
        table.key == row.key,
        table.owner == row.owner,
        table.request_id == row.request_id,
    )


def _update(row: KeyRow, was: str) -> Any:
    return sa.update(idempotency_keys).where(*_is(row), idempotency_keys.c.state == was)


def _select(tenant: str, key: str) -> Any:
    return sa.select(idempotency_keys).where(idempotency_keys.c.tenant == tenant, idempotency_keys.c.key == key)


def _values(row: KeyRow) -> dict[str, Any]:
    return {
        "tenant": row.tenant,
        "key": row.key,
        "body_digest": row.body_digest,
        "request_id": row.request_id,
        "owner": row.owner,
        "state": row.state,
    }


def _row(found: Any) -> KeyRow:
    response, interruption = found["response"], found["interruption"]
    return KeyRow(
        **{name: found[name] for name in ("tenant", "key", "body_digest", "request_id", "owner", "state")},
        response=None if response is None else response.encode(),
        interruption=None if interruption is None else json.loads(interruption),
    )
