"""``Idempotency-Key``: one answer for one key, whoever asks how often, also when an ingress dies in between.

Owns the way of a keyed request through the ledger. A claim is committed before anything runs; for a stream, that its
first byte goes out is committed before it does; a whole answer is committed before it is written. What cannot be
committed is not done: without the ledger a keyed request is refused. Requests without a key never come here.

The key of an ingress that is gone waits out the lease of the attempt, then it is free, or interrupted when something
may have gone out.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec

from cluster.ingress.api.errors import ApiError, Conflict, InvalidRequest, NotReady
from cluster.ledger.database import LedgerUnavailable
from cluster.ledger.key_store import KeyRow, KeyStore, interrupted_by_death

logger = logging.getLogger(__name__)

MAX_KEY_CHARS = 255
MAX_REPLAY_BYTES = 4 << 20
"""A larger answer is not kept: who asks again hears that it was answered."""
HEADER = "idempotency-key"
_clean_ups: set[asyncio.Task[None]] = set()
"""Clean-ups that outlive a cancelled handler; the loop alone would not keep them."""


class KeyHold:
    """A key that this request holds. Its calls follow each other, also when who awaits one is cancelled."""

    def __init__(self, store: KeyStore, row: KeyRow, *, unix_s: Callable[[], float]) -> None:
        self._store = store
        self._row = row
        self._unix_s = unix_s
        self._last: asyncio.Task[Any] | None = None
        self._was_marked = False
        self._went_out = False
        """Something was written to the client: the key is never free again, whatever the ledger says."""

    async def sent(self) -> None:
        """To be awaited before the first byte of a stream. Raises: Conflict, NotReady; then nothing may go out."""
        self._was_marked = True
        if not await self._call(self._store.mark_sent, self._row, now_ms=self._now_ms()):
            raise _taken(self._row)

    async def finished(self, response: bytes | None = None) -> None:
        """A whole answer (before it is written), or None: a stream (after its end was written).

        Raises: Conflict, NotReady; a whole answer may not go out then.
        """
        self._went_out |= response is None
        if response is not None and len(response) > MAX_REPLAY_BYTES:
            await self.sent()
            response = None
        if not await self._call(self._store.finish, self._row, response, now_ms=self._now_ms()):
            raise _taken(self._row)

    async def interrupted(self, interruption: dict[str, Any]) -> None:
        """The answer broke after its first byte."""
        self._went_out = True
        await self._call(self._store.interrupt, self._row, interruption, now_ms=self._now_ms())

    async def release(self) -> None:
        """Nothing went out. Changes nothing where something did."""
        if self._went_out:
            return
        await self._call(self._store.release, self._row)
        if self._was_marked:
            await self._call(self._store.unsend, self._row)

    async def _call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        before = self._last

        async def run() -> Any:
            if before is not None:
                await asyncio.wait((before,))
            return await asyncio.to_thread(function, *arguments, **named)

        self._last = asyncio.ensure_future(run())
        try:
            return await asyncio.shield(self._last)
        except LedgerUnavailable as error:
            raise _no_ledger(error) from error

    def _now_ms(self) -> int:
        return int(self._unix_s() * 1000)


class IdempotencyKeys:
    """The keys of one ingress. ``store`` returns None while there is no ledger."""

    def __init__(
        self,
        store: Callable[[], KeyStore | None],
        *,
        owner: str,
        lease_s: float,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._owner = owner
        self._lease_s = lease_s
        self._unix_s = unix_s

    async def claim(self, key: str, *, tenant: str, request_id: str, path: str, body: bytes) -> KeyHold | KeyRow:
        """Returns the hold on a key that is free, or the row of a whole answer to be replayed.

        Raises: InvalidRequest for a key that is none; Conflict; NotReady when the ledger does not answer.
        """
        check_key(key)
        try:
            store = self._store()
        except LedgerUnavailable as error:
            raise _no_ledger(error) from error
        if store is None:
            raise NotReady("idempotency keys need the ledger, which this server does not have", code="no_ledger")
        row = KeyRow(
            tenant=tenant, key=key, body_digest=digest_of_body(path, body), request_id=request_id, owner=self._owner
        )
        claiming = asyncio.ensure_future(self._claim(store, row))
        try:
            return await asyncio.shield(claiming)
        except asyncio.CancelledError:
            # The client left. The row may be written all the same, and nobody else would free it.
            giving_up = asyncio.ensure_future(_give_up(claiming))
            _clean_ups.add(giving_up)
            giving_up.add_done_callback(_clean_ups.discard)
            raise

    async def _claim(self, store: KeyStore, row: KeyRow) -> KeyHold | KeyRow:
        try:
            found = await asyncio.to_thread(store.claim, row, now_ms=int(self._unix_s() * 1000))
            if found is not None:
                found = await self._resolve(store, found, row)
        except LedgerUnavailable as error:
            raise _no_ledger(error) from error
        return KeyHold(store, row, unix_s=self._unix_s) if found is None else found

    async def _resolve(self, store: KeyStore, found: KeyRow, row: KeyRow) -> KeyRow | None:
        """Returns None when the key became ours after all, a row to replay, or raises what it is."""
        if found.body_digest != row.body_digest:
            message = "This idempotency key was used with another body."
            raise Conflict(message, code="idempotency_key_reused", request_id=found.request_id)
        if found.is_open and await asyncio.to_thread(store.is_orphaned, found):
            # Its ingress is gone. What it had started may run until its lease has ended, so long nothing begins.
            await asyncio.sleep(self._lease_s)
            if found.state == "sent":
                found = interrupted_by_death(found)
            elif await asyncio.to_thread(store.take_over, found, row, now_ms=int(self._unix_s() * 1000)):
                logger.info("key_taken_over request_id=%s before=%s", row.request_id, found.request_id)
                return None
        if found.state == "interrupted":
            message = "The answer to this idempotency key was interrupted."
            raise Conflict(
                message, code="request_interrupted", request_id=found.request_id, interruption=found.interruption
            )
        if found.state == "finished" and found.response is not None:
            return found
        if found.state == "finished":
            message = "The answer to this idempotency key was delivered; it is not kept."
            raise Conflict(message, code="request_finished", request_id=found.request_id)
        message = "A request with this idempotency key is under way."
        raise Conflict(message, code="request_in_progress", request_id=found.request_id)


async def _give_up(claiming: asyncio.Future[KeyHold | KeyRow]) -> None:
    """Frees a key that nobody waits for any more, once it is known whether it became ours."""
    try:
        claimed = await claiming
        if isinstance(claimed, KeyHold):
            await claimed.release()
    except ApiError as error:
        logger.info("claim_given_up error=%s", error)


def check_key(key: str) -> None:
    """Raises: InvalidRequest for a key that is empty, long, or not printable ASCII."""
    if not 1 <= len(key) <= MAX_KEY_CHARS or not (key.isascii() and key.isprintable()):
        message = f"Idempotency-Key: expected 1 to {MAX_KEY_CHARS} printable ASCII characters."
        raise InvalidRequest(message, param="Idempotency-Key")


def digest_of_body(path: str, body: bytes) -> str:
    """Returns a digest that is equal for equal JSON, whatever its spaces and the order of its keys."""
    canonical = msgspec.json.encode(msgspec.json.decode(body), order="sorted")
    return hashlib.sha256(path.encode() + b"\n" + canonical).hexdigest()


def _taken(row: KeyRow) -> Conflict:
    message = "This idempotency key was given to another request, because this server was taken for dead."
    return Conflict(message, code="request_in_progress", request_id=row.request_id)


def _no_ledger(error: LedgerUnavailable) -> NotReady:
    logger.warning("key_refused error=%s", error)
    return NotReady("The ledger does not answer; a request with an idempotency key needs it.", code="no_ledger")
