"""Rows of requests and of the ingresses that own them.

Owns the statements. Blocking calls; each is one transaction. An *owner* is one life of an ingress. Who is dead is
decided elsewhere (``cluster.core.owner_watch``); ``bury`` only checks that nothing has changed since it was decided.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from cluster.ledger.database import Database
from cluster.ledger.tables import owners, requests

PRUNE_ROWS_MAX = 1000
"""Rows that one call removes at most, so that no transaction gets long."""
GATEWAY_LOST = "gateway_lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow:
    """What the ledger keeps of one request. ``record`` is its journal, JSON-ready."""

    request_id: str
    tenant: str
    owner: str
    phase: str
    is_ended: bool
    first_delta_sent: bool
    delivered_output_tokens: int
    record: dict[str, Any]


@dataclass(frozen=True, slots=True)
class OwnerRow:
    """One registered life of an ingress, and where its siblings reach it."""

    owner: str
    ingress_id: str
    host: str
    port: int
    beat: int


class RequestStore:
    """Reads and writes request rows."""

    def __init__(self, database: Database) -> None:
        self._database = database

    # --- owners -------------------------------------------------------------------------------------------

    def register(self, row: OwnerRow, *, now_ms: int) -> None:
        """Announces a life; harmless when it stands there already."""
        values = {
            "owner": row.owner,
            "ingress_id": row.ingress_id,
            "host": row.host,
            "port": row.port,
            "beat": row.beat,
            "registered_at_ms": now_ms,
        }
        with self._database.transaction() as connection:
            connection.execute(self._database.upsert(owners, values, key="owner"))

    def beat(self, owner: str) -> bool:
        """Shows that ``owner`` lives. Returns False if it was buried meanwhile."""
        statement = sa.update(owners).where(owners.c.owner == owner).values(beat=owners.c.beat + 1)
        with self._database.transaction() as connection:
            return connection.execute(statement).rowcount == 1

    def list_owners(self) -> list[OwnerRow]:
        """Returns every registered life."""
        columns = (owners.c.owner, owners.c.ingress_id, owners.c.host, owners.c.port, owners.c.beat)
        with self._database.transaction(reads_only=True) as connection:
            return [OwnerRow(*row) for row in connection.execute(sa.select(*columns))]

    def leave(self, owner: str) -> None:
        """Removes a life that has ended all its requests itself."""
        with self._database.transaction() as connection:
            connection.execute(sa.delete(owners).where(owners.c.owner == owner))

    def bury(self, owner: str, beat: int, *, now_ms: int) -> list[str]:
        """Ends what a dead owner left open as ``interrupted``, reason ``gateway_lost``; returns those request ids.

        Does nothing and returns [] if the owner has shown life since ``beat`` was read, or somebody else buried it.
        """
        with self._database.transaction() as connection:
            claim = sa.delete(owners).where(owners.c.owner == owner, owners.c.beat == beat)
            if connection.execute(claim).rowcount != 1:
                return []
            open_rows = connection.execute(
                sa.select(requests.c.request_id, requests.c.record, requests.c.first_delta_sent).where(
                    requests.c.owner == owner, requests.c.is_ended.is_(False)
                )
            ).all()
            for request_id, record, sent in open_rows:
                connection.execute(
                    sa.update(requests)
                    .where(requests.c.request_id == request_id)
                    .values(
                        phase="interrupted",
                        is_ended=True,
                        updated_at_ms=now_ms,
                        record=json.dumps(_gateway_lost(json.loads(record), sent=sent)),
                    )
                )
            return [request_id for request_id, _, _ in open_rows]

    # --- requests -----------------------------------------------------------------------------------------

    def write(self, rows: Sequence[RequestRow], *, now_ms: int) -> None:
        """Writes the newest state of requests, in order; what a living owner says replaces what was guessed."""
        if not rows:
            return
        values = [
            {
                "request_id": row.request_id,
                "tenant": row.tenant,
                "owner": row.owner,
                "phase": row.phase,
                "is_ended": row.is_ended,
                "first_delta_sent": row.first_delta_sent,
                "delivered_output_tokens": row.delivered_output_tokens,
                "updated_at_ms": now_ms,
                "admitted_at_ms": now_ms,
                "record": json.dumps(row.record),
            }
            for row in rows
        ]
        insert = self._database.insert(requests)
        newer = {name: insert.excluded[name] for name in values[0] if name not in ("request_id", "admitted_at_ms")}
        with self._database.transaction() as connection:
            # One statement for all rows: building one for each takes longer than the database does.
            connection.execute(insert.on_conflict_do_update(index_elements=["request_id"], set_=newer), values)

    def find(self, request_id: str, *, tenant: str) -> RequestRow | None:
        """Returns the row of a request of ``tenant``; None when there is none."""
        columns = (
            requests.c.request_id,
            requests.c.tenant,
            requests.c.owner,
            requests.c.phase,
            requests.c.is_ended,
            requests.c.first_delta_sent,
            requests.c.delivered_output_tokens,
            requests.c.record,
        )
        query = sa.select(*columns).where(requests.c.request_id == request_id, requests.c.tenant == tenant)
        with self._database.transaction(reads_only=True) as connection:
            found = connection.execute(query).mappings().first()
        if found is None:
            return None
        return RequestRow(**{**found, "record": json.loads(found["record"])})

    def find_owner(self, owner: str) -> OwnerRow | None:
        """Returns where a life can be reached; None once it left or was buried."""
        return next((row for row in self.list_owners() if row.owner == owner), None)

    def prune(self, older_than_ms: int) -> int:
        """Removes ended requests last touched before ``older_than_ms``; returns how many (bounded per call)."""
        old = (
            sa.select(requests.c.request_id)
            .where(requests.c.is_ended.is_(True), requests.c.updated_at_ms < older_than_ms)
            .limit(PRUNE_ROWS_MAX)
        )
        with self._database.transaction() as connection:
            return connection.execute(sa.delete(requests).where(requests.c.request_id.in_(old))).rowcount


def _gateway_lost(record: dict[str, Any], *, sent: bool) -> dict[str, Any]:
    """Returns the record with the ending that nobody saw. What was written last is all that is known."""
    delivered = record.get("delivered_output_tokens", 0)
    attempts = record.get("attempts") or [{}]
    interruption = {
        "code": "upstream_decode_interrupted",
        "reason": GATEWAY_LOST,
        "attempt_id": attempts[-1].get("attempt_id", ""),
        "message": "the ingress that held this request is gone",
        "partial_output": True if sent else None,
        "delivered_output_tokens": delivered,
        "delivered_output_tokens_is": "lower_bound",
        "retryable": False,
    }
    # Written behind: a delta may have gone out after the last write, so "no" would be a guess.
    known = True if sent else None
    return {**record, "phase": "interrupted", "first_delta_sent": known, "interruption": interruption}
