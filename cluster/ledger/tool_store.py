"""Rows of tool calls: what was intended, what came of it, and whose turn it is.

Owns the statements. Blocking calls; each is one transaction that is committed when it returns. A *run* is one logical
request with server-side tools; every life of it (an HTTP request that holds its key) takes it up with a higher epoch,
and every later write asks for that epoch: a life that was declared dead and wakes up writes nothing, so does nothing.

    intended -> done | handed_over          a call; its intent may be written again, with one more try

What a run must begin with (seed, clock, digest of the rendered prompt) is frozen by its first life. A run without calls
has done nothing to anybody, so a later life may begin it afresh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from cluster.core.tool_events import Call, CallState, RecordedCall, ToolResult, action_key
from cluster.ledger.database import Database, LedgerUnavailable
from cluster.ledger.tables import tool_calls, tool_runs

PRUNE_ROWS_MAX = 1000
OPEN_TRIES_MAX = 8
MAX_WHY_CHARS = 400


class Frozen(Struct, frozen=True, kw_only=True):
    """What is the same for every life of a logical request (row F3)."""

    seed: int
    unix_s: float
    """The clock that templates see."""
    prompt_digest: str
    """SHA-256 of the first round's rendered prompt, in hex."""
    model: str
    """Revision of what generates; another one would ask for other calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One logical request. ``key``: the client's idempotency key; without one there is a single life."""

    tenant: str
    key: str | None
    body_digest: str
    request_id: str
    logical_id: str
    frozen: Frozen
    epoch: int = 1


class KeyReused(Exception):
    """The key has tool calls of another body."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.request_id = request_id


class ToolStore:
    """Reads and writes runs and calls."""

    def __init__(self, database: Database) -> None:
        self._database = database

    # --- runs -----------------------------------------------------------------------------------------------

    def open(self, row: RunRow, *, now_ms: int) -> tuple[RunRow, list[RecordedCall]]:
        """Takes up the run of a key, or begins one; returns it as it is in force, and what it has recorded.

        Raises: KeyReused; LedgerUnavailable.
        """
        for _ in range(OPEN_TRIES_MAX):
            with self._database.transaction() as connection:
                found = None if row.key is None else self._find_by_key(connection, row.tenant, row.key)
                if found is not None:
                    return self._take_up(connection, found, row, now_ms)
                values = {**_run_values(row), "created_at_ms": now_ms, "updated_at_ms": now_ms}
                insert = self._database.insert(tool_runs).values(values).on_conflict_do_nothing()
                if connection.execute(insert.returning(tool_runs.c.logical_id)).first() is not None:
                    return row, []
            # Somebody began it between the two statements: take it up.
        raise LedgerUnavailable("ledger: a run was begun and removed by others over and over")

    def _take_up(
        self, connection: sa.Connection, found: Any, row: RunRow, now_ms: int
    ) -> tuple[RunRow, list[RecordedCall]]:
        calls = self._calls(connection, found["logical_id"])
        frozen = row.frozen
        if calls:
            if found["body_digest"] != row.body_digest:
                raise KeyReused(found["request_id"])
            frozen = msgspec.json.decode(found["frozen"], type=Frozen)
        taken = RunRow(
            tenant=row.tenant,
            key=row.key,
            body_digest=row.body_digest,
            request_id=row.request_id,
            logical_id=found["logical_id"],
            frozen=frozen,
            epoch=found["epoch"] + 1,
        )
        update = sa.update(tool_runs).where(tool_runs.c.logical_id == taken.logical_id)
        connection.execute(update.values({**_run_values(taken), "updated_at_ms": now_ms}))
        return taken, calls

    def _find_by_key(self, connection: sa.Connection, tenant: str, key: str) -> Any:
        query = sa.select(tool_runs).where(tool_runs.c.tenant == tenant, tool_runs.c.key == key).with_for_update()
        return connection.execute(query).mappings().first()

    def _calls(self, connection: sa.Connection, logical_id: str) -> list[RecordedCall]:
        query = sa.select(tool_calls).where(tool_calls.c.logical_id == logical_id)
        query = query.order_by(tool_calls.c.round_index, tool_calls.c.call_index)
        return [_recorded(found) for found in connection.execute(query).mappings()]

    # --- calls ----------------------------------------------------------------------------------------------

    def intend(self, run: RunRow, call: Call, *, now_ms: int) -> bool:
        """One more try of a call is about to be made. False: the run is another's by now, and nothing may be sent."""
        values = {
            "logical_id": run.logical_id,
            "round_index": call.round_index,
            "call_index": call.call_index,
            "call_id": call.call_id,
            "request_id": run.request_id,
            "name": call.name,
            "arguments_digest": call.arguments_digest,
            "state": CallState.INTENDED.value,
            "num_tries": 1,
            "is_error": False,
            "why": "",
            "created_at_ms": now_ms,
            "updated_at_ms": now_ms,
        }
        insert = self._database.insert(tool_calls).values(values)
        again = insert.on_conflict_do_update(
            index_elements=["logical_id", "round_index", "call_index"],
            set_={
                "num_tries": tool_calls.c.num_tries + 1,
                "state": CallState.INTENDED.value,
                "updated_at_ms": now_ms,
            },
            where=sa.and_(
                tool_calls.c.result.is_(None),
                tool_calls.c.name == call.name,
                tool_calls.c.arguments_digest == call.arguments_digest,
            ),
        )
        with self._database.transaction() as connection:
            return self._is_ours(connection, run, now_ms) and (
                connection.execute(again.returning(tool_calls.c.call_id)).first() is not None
            )

    def settle(self, run: RunRow, call: Call, result: ToolResult, *, now_ms: int) -> bool:
        """Keeps the result of a call, once. False: the run is another's by now, or the call has its result."""
        return self._set(run, call, now_ms, state=CallState.DONE.value, result=result.content, is_error=result.is_error)

    def hand_over(self, run: RunRow, call: Call, why: str, *, now_ms: int) -> bool:
        """Nobody could find out what came of a call."""
        return self._set(run, call, now_ms, state=CallState.HANDED_OVER.value, why=why[:MAX_WHY_CHARS])

    def _set(self, run: RunRow, call: Call, now_ms: int, **values: Any) -> bool:
        update = sa.update(tool_calls).where(
            tool_calls.c.logical_id == run.logical_id,
            tool_calls.c.round_index == call.round_index,
            tool_calls.c.call_index == call.call_index,
            tool_calls.c.result.is_(None),
        )
        with self._database.transaction() as connection:
            if not self._is_ours(connection, run, now_ms):
                return False
            return connection.execute(update.values(updated_at_ms=now_ms, **values)).rowcount == 1

    def _is_ours(self, connection: sa.Connection, run: RunRow, now_ms: int) -> bool:
        """Locks the run for this transaction, so that nobody takes it up before what follows is committed."""
        touch = sa.update(tool_runs).where(tool_runs.c.logical_id == run.logical_id, tool_runs.c.epoch == run.epoch)
        return connection.execute(touch.values(updated_at_ms=now_ms)).rowcount == 1

    # --- for people, and the end ------------------------------------------------------------------------------

    def calls_of_request(self, request_id: str, *, tenant: str) -> list[dict[str, Any]]:
        """Returns the calls of the logical request that an HTTP request belongs to, JSON-ready, in order.

        Neither arguments nor results: those may be anybody's secrets.
        """
        mine = sa.select(tool_runs.c.logical_id).where(tool_runs.c.request_id == request_id)
        made = sa.select(tool_calls.c.logical_id).where(tool_calls.c.request_id == request_id)
        query = (
            sa.select(tool_calls, tool_runs.c.tenant)
            .join(tool_runs, tool_runs.c.logical_id == tool_calls.c.logical_id)
            .where(tool_runs.c.tenant == tenant, tool_runs.c.logical_id.in_(sa.union(mine, made)))
            .order_by(tool_calls.c.round_index, tool_calls.c.call_index)
        )
        with self._database.transaction(reads_only=True) as connection:
            return [_for_people(found) for found in connection.execute(query).mappings()]

    def prune(self, older_than_ms: int) -> int:
        """Removes runs that nobody touched since ``older_than_ms``, with their calls; bounded per call."""
        old = sa.select(tool_runs.c.logical_id).where(tool_runs.c.updated_at_ms < older_than_ms)
        old = old.limit(PRUNE_ROWS_MAX).with_for_update(skip_locked=True)
        with self._database.transaction() as connection:
            found = [row[0] for row in connection.execute(old)]
            for table in (tool_calls, tool_runs):
                connection.execute(sa.delete(table).where(table.c.logical_id.in_(found)))
        return len(found)


def _run_values(row: RunRow) -> dict[str, Any]:
    return {
        "logical_id": row.logical_id,
        "tenant": row.tenant,
        "key": row.key,
        "body_digest": row.body_digest,
        "request_id": row.request_id,
        "epoch": row.epoch,
        "frozen": msgspec.json.encode(row.frozen).decode(),
    }


def _recorded(found: Any) -> RecordedCall:
    call = Call(
        call_id=found["call_id"],
        round_index=found["round_index"],
        call_index=found["call_index"],
        name=found["name"],
        arguments_digest=found["arguments_digest"],
    )
    result = None if found["result"] is None else ToolResult(found["result"], found["is_error"])
    return RecordedCall(call, CallState(found["state"]), result)


def _for_people(found: Any) -> dict[str, Any]:
    return {
        "tool_call_id": found["call_id"],
        "idempotency_key": action_key(found["tenant"], found["logical_id"], found["call_id"]),
        "round": found["round_index"],
        "name": found["name"],
        "arguments_sha256": found["arguments_digest"],
        "state": found["state"],
        "is_error": found["is_error"],
        "tries": found["num_tries"],
        "why": found["why"],
        "recorded_by": found["request_id"],
        "intended_at_ms": found["created_at_ms"],
        "updated_at_ms": found["updated_at_ms"],
    }
