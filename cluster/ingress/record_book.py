"""What became of requests: those that ended here, from memory, and those of any ingress, through the ledger.

Owns the records of ended requests of this ingress (bounded) and the way to the others: the ledger's row of a request
says who owns it; while that ingress lives it is asked, because only it knows the present state.
Without a ledger (tests, tools) only the memory answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

from cluster.ingress.siblings import SHARE_DEADLINE_S, AskRequest, AskShare, Share, Siblings
from cluster.ledger.database import LedgerUnavailable
from cluster.ledger.key_store import KeyStore
from cluster.ledger.request_ledger import RequestLedger
from cluster.ledger.request_store import OwnerRow, RequestRow
from cluster.ledger.tool_store import ToolStore
from kvstore.errors import KopirError
from kvstore.net.handshake import PeerInfo

logger = logging.getLogger(__name__)

RECORDS_MAX = 2048
LEDGER_DEADLINE_S = 5.0
CANCEL_MARGIN_S = 1.0
UNREACHABLE_POLL_S = 0.1
SIBLINGS_MAX = 64
"""So many are asked for one status."""


class RecordBook:
    """Records of requests, found by id and tenant."""

    def __init__(self, owner: str, *, lease_ms: int) -> None:
        self._owner = owner
        self._lease_s = lease_ms / 1000
        self._ended: OrderedDict[str, tuple[str, dict[str, Any]]] = OrderedDict()
        self._known: dict[str, tuple[str, bool, int]] = {}
        """request_id -> what the ledger was told last: (phase, first_delta_sent, delivered_output_tokens)."""
        self._ledger: RequestLedger | None = None
        self._siblings: Siblings | None = None

    async def open(
        self,
        url: str,
        *,
        me: PeerInfo,
        secret: bytes,
        host: str,
        answer: Callable[[str, str, bool], Awaitable[dict[str, Any] | None]],
        share: Share | None,
        retention_s: float,
        clock_ns: Callable[[], int],
    ) -> None:
        """Joins the ledger at ``url``. Raises: BadInput, EnvironmentProblem, LedgerUnavailable."""
        siblings = Siblings(me=me, secret=secret, answer=answer, share=share)
        address = await siblings.start(host)
        row = OwnerRow(self._owner, me.peer_id, *address, 0)
        ledger = RequestLedger(url, row, lease_ms=int(self._lease_s * 1000), retention_s=retention_s, clock_ns=clock_ns)
        try:
            await asyncio.to_thread(ledger.start)
        except BaseException:
            await siblings.close()
            raise
        self._siblings, self._ledger = siblings, ledger

    async def close(self) -> None:
        """Writes what is not written yet and leaves the ledger."""
        if self._siblings is not None:
            await self._siblings.close()
        if self._ledger is not None:
            await asyncio.to_thread(self._ledger.close)

    @property
    def keys(self) -> KeyStore | None:
        """Idempotency keys; None without a ledger."""
        return None if self._ledger is None else self._ledger.keys

    @property
    def tools(self) -> ToolStore | None:
        """Tool calls; None without a ledger."""
        return None if self._ledger is None else self._ledger.tools

    @property
    def rejected(self) -> int:
        """Connections to the siblings' port that could not prove themselves."""
        return 0 if self._siblings is None else self._siblings.rejected

    # --- from the driver ------------------------------------------------------------------------------------

    def running(self, tenant: str, record: Callable[[], dict[str, Any]], told: tuple[str, str, bool, int]) -> None:
        """Takes the state of a running request, ``told`` = (request_id, phase, first_delta_sent, delivered).

        ``record`` is called only when something changed since the last time.
        """
        request_id, *state = told
        if self._ledger is None or self._known.get(request_id) == tuple(state):
            return
        self._known[request_id] = (told[1], told[2], told[3])
        self._note(request_id, tenant, record(), is_ended=False)

    def ended(self, request_id: str, tenant: str, record: dict[str, Any]) -> None:
        """Takes the final record of a request of this ingress."""
        self._known.pop(request_id, None)
        self._ended[request_id] = (tenant, record)
        while len(self._ended) > RECORDS_MAX:
            self._ended.popitem(last=False)
        self._note(request_id, tenant, record, is_ended=True)

    def _note(self, request_id: str, tenant: str, record: dict[str, Any], *, is_ended: bool) -> None:
        if self._ledger is None:
            return
        self._ledger.note(
            RequestRow(
                request_id=request_id,
                tenant=tenant,
                owner=self._owner,
                phase=record["phase"],
                is_ended=is_ended,
                first_delta_sent=record["first_delta_sent"],
                delivered_output_tokens=record["delivered_output_tokens"],
                record=record,
            )
        )

    # --- questions ------------------------------------------------------------------------------------------

    def ended_here(self, request_id: str, tenant: str) -> dict[str, Any] | None:
        """Returns the record of a request that ended in this process not long ago."""
        owner, record = self._ended.get(request_id, ("", None))
        return record if owner == tenant else None

    async def find(self, request_id: str, tenant: str, *, cancel: bool = False) -> dict[str, Any] | None:
        """Returns the record of a request that does not run here; asks its owner when that is another ingress.

        With ``cancel`` the owner cancels first; if it cannot be reached, returns once the ledger calls it gone.
        """
        record = self.ended_here(request_id, tenant)
        if record is not None or self._ledger is None:
            return record
        row = await self._row(request_id, tenant)
        if row is None or row.is_ended or row.owner == self._owner:
            return row.record if row is not None else None
        answer = await self._ask_owner(row, cancel=cancel)
        if answer is not None:
            return answer
        if cancel:
            row = await self._wait_for_burial(row) or row
        return row.record | ({} if row.is_ended else {"owner": "unreachable"})

    async def shares(self, tenant: str | None) -> list[dict[str, Any]]:
        """Returns what the other ingresses contribute to the status; of one that does not answer, its name alone."""
        if self._ledger is None or self._siblings is None:
            return []
        try:
            async with asyncio.timeout(LEDGER_DEADLINE_S):
                owners = await asyncio.to_thread(self._ledger.list_owners)
        except (LedgerUnavailable, TimeoutError) as error:
            logger.warning("siblings_not_known error=%s", error)
            return []
        others = [row for row in owners if row.owner != self._owner]
        return list(await asyncio.gather(*(self._share_of(row, tenant) for row in others[:SIBLINGS_MAX])))

    async def _share_of(self, row: OwnerRow, tenant: str | None) -> dict[str, Any]:
        assert self._siblings is not None
        try:
            share = await self._siblings.ask(row.host, row.port, AskShare(tenant), deadline_s=SHARE_DEADLINE_S)
        except KopirError as error:
            logger.info("sibling_silent owner=%s error=%s", row.owner, error)
            share = None
        return share or {"ingress": [{"id": row.ingress_id, "pid": None, "streams": None}]}

    async def _row(self, request_id: str, tenant: str) -> RequestRow | None:
        assert self._ledger is not None
        try:
            async with asyncio.timeout(LEDGER_DEADLINE_S):
                return await asyncio.to_thread(self._ledger.find, request_id, tenant=tenant)
        except (LedgerUnavailable, TimeoutError) as error:
            logger.warning("ledger_not_asked request_id=%s error=%s", request_id, error)
            return None

    async def _ask_owner(self, row: RequestRow, *, cancel: bool) -> dict[str, Any] | None:
        assert self._ledger is not None and self._siblings is not None
        try:
            owner = await asyncio.to_thread(self._ledger.find_owner, row.owner)
            if owner is None:
                return None
            ask = AskRequest(row.request_id, row.tenant, cancel)
            deadline_s = 2 * self._lease_s + CANCEL_MARGIN_S
            return await self._siblings.ask(owner.host, owner.port, ask, deadline_s=deadline_s)
        except KopirError as error:
            logger.warning("owner_unreachable request_id=%s owner=%s error=%s", row.request_id, row.owner, error)
            return None

    async def _wait_for_burial(self, row: RequestRow) -> RequestRow | None:
        """The owner does not answer: either it comes back, or its silence ends its requests. Bounded by both."""
        assert self._ledger is not None
        deadline_s = 2 * self._ledger.silence_ns / 1e9
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    found = await self._row(row.request_id, row.tenant)
                    if found is None or found.is_ended:
                        return found
                    await asyncio.sleep(UNREACHABLE_POLL_S)
        except TimeoutError:
            return None
