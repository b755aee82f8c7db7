"""The ledger of one ingress: writes its requests behind, shows that it lives, buries those that do not.

Owns one thread that does all the writing, so that no database ever delays a token. What is handed over is coalesced by
request (only the newest state is written) and bounded; while the database is away it waits, and is written later.

Life cycle: ``start`` (opens, registers) -> ``note`` ... ``find`` ... -> ``close`` (writes the rest, leaves).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from cluster.core.owner_watch import OwnerWatch
from cluster.ledger.database import Database, LedgerUnavailable, open_database
from cluster.ledger.key_store import KeyStore
from cluster.ledger.request_store import OwnerRow, RequestRow, RequestStore
from cluster.ledger.tool_store import ToolStore

logger = logging.getLogger(__name__)

PENDING_MAX = 8192
"""Requests whose newest state waits to be written; the oldest gives way and is counted."""
WRITE_ROWS_MAX = 256
FLUSH_S = 0.1
PRUNE_EVERY_S = 60.0
SILENCE_MS_MIN = 5_000
LEASES_OF_SILENCE = 3
CLOSE_DEADLINE_S = 5.0


class RequestLedger:
    """Request rows of one ingress, written behind."""

    def __init__(
        self,
        url: str,
        me: OwnerRow,
        *,
        lease_ms: int,
        retention_s: float,
        clock_ns: Callable[[], int],
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        self._url = url
        self._me = me
        self._retention_ms = int(retention_s * 1000)
        self._clock_ns = clock_ns
        self._unix_s = unix_s
        self.silence_ns = max(SILENCE_MS_MIN, LEASES_OF_SILENCE * lease_ms) * 1_000_000
        self._watch = OwnerWatch(me.owner, self.silence_ns)
        self._beat_ns = self.silence_ns // 8
        self._next_beat_ns = 0
        self._next_prune_ns = 0
        self._pending: OrderedDict[str, RequestRow] = OrderedDict()
        self._writing: dict[str, RequestRow] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._database: Database | None = None
        self._store: RequestStore | None = None
        self.keys: KeyStore | None = None
        """Idempotency keys, in the same database; None before ``start``. Written at once, not behind."""
        self.tools: ToolStore | None = None
        """Tool calls, likewise."""
        self._thread = threading.Thread(target=self._run, name="kopir-ledger", daemon=True)
        self.num_written = 0
        self.num_lost = 0
        """Rows that were never written: too many waited, or the database stayed away until the end."""
        self.num_buried = 0
        self.is_available = True

    def start(self) -> None:
        """Opens the database and announces this ingress. Blocking.

        Raises: BadInput, EnvironmentProblem, LedgerUnavailable.
        """
        self._database = open_database(self._url)
        self._store = RequestStore(self._database)
        self.keys = KeyStore(self._database)
        self.tools = ToolStore(self._database)
        self._store.register(self._me, now_ms=self._now_ms())
        self._thread.start()

    def note(self, row: RequestRow) -> None:
        """Takes the newest state of a request, to be written soon. Never waits for the database."""
        with self._lock:
            self._pending.pop(row.request_id, None)
            self._pending[row.request_id] = row
            if len(self._pending) > PENDING_MAX:
                self._pending.popitem(last=False)
                self.num_lost += 1
        self._wake.set()

    def find(self, request_id: str, *, tenant: str) -> RequestRow | None:
        """Returns the newest known state of a request, of any ingress. Blocking. Raises: LedgerUnavailable."""
        with self._lock:
            waiting = self._pending.get(request_id) or self._writing.get(request_id)
        if waiting is not None:
            return waiting if waiting.tenant == tenant else None
        assert self._store is not None, "not started"
        return self._store.find(request_id, tenant=tenant)

    def find_owner(self, owner: str) -> OwnerRow | None:
        """Returns where an ingress is reached; None when it left or was buried. Blocking. Raises: LedgerUnavailable."""
        assert self._store is not None, "not started"
        return self._store.find_owner(owner)

    def list_owners(self) -> list[OwnerRow]:
        """Returns every registered ingress, this one included. Blocking. Raises: LedgerUnavailable."""
        assert self._store is not None, "not started"
        return self._store.list_owners()

    def close(self) -> None:
        """Writes what waits (bounded by ``CLOSE_DEADLINE_S``), takes this ingress off the list, disconnects."""
        self._closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_DEADLINE_S)
        if self._database is not None:
            self._database.close()

    # --- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        assert self._store is not None
        while not self._closing:
            self._wake.wait(FLUSH_S if self._pending else self._beat_ns / 1e9 / 2)
            self._wake.clear()
            self._turn(self._store)
            if not self.is_available:
                # The next beat is near enough; do not hammer a database that is away.
                time.sleep(FLUSH_S)
        self._turn(self._store)
        self.num_lost += len(self._pending)
        try:
            self._store.leave(self._me.owner)
        except LedgerUnavailable as error:
            logger.warning("ledger_not_left error=%s", error)

    def _turn(self, store: RequestStore) -> None:
        try:
            self._flush(store)
            self._keep_alive(store)
        except LedgerUnavailable as error:
            if self.is_available:
                logger.error("ledger_unavailable error=%s", error)
            self.is_available = False
        else:
            if not self.is_available:
                logger.info("ledger_back waiting_rows=%d", len(self._pending))
            self.is_available = True

    def _flush(self, store: RequestStore) -> None:
        while True:
            with self._lock:
                while self._pending and len(self._writing) < WRITE_ROWS_MAX:
                    request_id, row = self._pending.popitem(last=False)
                    self._writing[request_id] = row
                rows = list(self._writing.values())
            if not rows:
                return
            try:
                store.write(rows, now_ms=self._now_ms())
            except LedgerUnavailable:
                self._put_back()
                raise
            with self._lock:
                self.num_written += len(rows)
                self._writing.clear()

    def _put_back(self) -> None:
        with self._lock:
            newer = self._pending
            self._pending = OrderedDict(self._writing | newer)
            self._writing.clear()

    def _keep_alive(self, store: RequestStore) -> None:
        now_ns = self._clock_ns()
        if now_ns >= self._next_beat_ns:
            self._next_beat_ns = now_ns + self._beat_ns
            if not store.beat(self._me.owner):
                logger.warning("ledger_was_buried owner=%s", self._me.owner)
                store.register(self._me, now_ms=self._now_ms())
            beats = [(row.owner, row.beat) for row in store.list_owners()]
            for silent in self._watch.observe(beats, now_ns=self._clock_ns()):
                lost = store.bury(silent.owner, silent.beat, now_ms=self._now_ms())
                self.num_buried += 1
                logger.warning("ingress_buried owner=%s lost_requests=%d", silent.owner, len(lost))
        if now_ns >= self._next_prune_ns:
            self._next_prune_ns = now_ns + int(PRUNE_EVERY_S * 1e9)
            store.prune(self._now_ms() - self._retention_ms)
            assert self.keys is not None and self.tools is not None
            self.keys.prune(self._now_ms() - self._retention_ms)
            self.tools.prune(self._now_ms() - self._retention_ms)

    def _now_ms(self) -> int:
        return int(self._unix_s() * 1000)
