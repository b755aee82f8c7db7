"""Ingresses ask each other: a client may come to any of them with a request id, or for the status of all.

Owns the port on which siblings ask this ingress, and the dialing of theirs. One short authenticated connection per
question (``kvstore.net``), with a deadline; nothing is kept open.

    asker -> owner   AskRequest{request_id, tenant, cancel}
    owner -> asker   RequestAnswer{record}        record: the journal as JSON bytes, None when it is not known here
    asker -> any     AskShare{tenant}             tenant: whose streams may be told, None for everybody's
    any -> asker     RequestAnswer{record}        record: its share of the status as JSON bytes
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from msgspec import Meta, Struct

from kvstore.errors import DeadlineExceeded, KopirError, ProtocolError
from kvstore.net.channel import Channel, ChannelServer, connect
from kvstore.net.handshake import PeerInfo

logger = logging.getLogger(__name__)

ASK_DEADLINE_S = 2.0
SHARE_DEADLINE_S = 1.0
"""To ask for a record; a cancel may besides take the lease that it waits for."""
_Name = Annotated[str, Meta(max_length=256)]

Answerer = Callable[[str, str, bool], Awaitable[dict[str, Any] | None]]
"""(request_id, tenant, cancel) -> record of a request of this ingress, or None."""
Share = Callable[[str | None], dict[str, Any]]
"""tenant, or None for all -> this ingress's share of the status."""


class AskRequest(Struct, frozen=True, tag_field="t", tag=True, forbid_unknown_fields=True):
    """Asks the owner about one request."""

    request_id: _Name
    tenant: _Name
    cancel: bool = False


class AskShare(Struct, frozen=True, tag_field="t", tag=True, forbid_unknown_fields=True):
    """Asks an ingress for its share of the status."""

    tenant: _Name | None


class RequestAnswer(Struct, frozen=True, tag_field="t", tag=True, forbid_unknown_fields=True):
    """The owner's answer."""

    record: Annotated[bytes, Meta(max_length=1 << 24)] | None


class Siblings:
    """Both sides of the talk between ingresses."""

    def __init__(self, *, me: PeerInfo, secret: bytes, answer: Answerer, share: Share | None = None) -> None:
        self._me = me
        self._secret = secret
        self._answer = answer
        self._share = share
        self._server = ChannelServer(secret=secret, me=me, decode=AskRequest | AskShare, on_channel=self._on_channel)

    async def start(self, host: str) -> tuple[str, int]:
        """Listens; returns (host, port)."""
        await self._server.start(host)
        return self._server.host, self._server.port

    async def close(self) -> None:
        """Stops listening."""
        await self._server.close()

    @property
    def rejected(self) -> int:
        """Connections that could not prove themselves."""
        return self._server.rejected

    async def ask(
        self, host: str, port: int, ask: AskRequest | AskShare, *, deadline_s: float = ASK_DEADLINE_S
    ) -> dict[str, Any] | None:
        """Returns the record, or the share, that the sibling at ``host:port`` has; None when it knows none.

        Raises: DeadlineExceeded, PeerLost, AuthenticationError, ProtocolError.
        """
        try:
            async with asyncio.timeout(deadline_s):
                channel = await connect(host, port, secret=self._secret, me=self._me, decode=RequestAnswer)
                try:
                    await channel.send(ask)
                    answer = await channel.recv()
                finally:
                    channel.abort()
        except TimeoutError as error:
            raise DeadlineExceeded(f"the ingress at {host}:{port} did not answer within {deadline_s} s") from error
        if answer.record is None:
            return None
        try:
            record = json.loads(answer.record)
        except ValueError as error:
            raise ProtocolError(f"the ingress at {host}:{port} sent a record that is no JSON") from error
        if not isinstance(record, dict):
            raise ProtocolError(f"the ingress at {host}:{port} sent a record that is no object")
        return record

    async def _on_channel(self, channel: Channel) -> None:
        try:
            async with asyncio.timeout(ASK_DEADLINE_S):
                ask = await channel.recv()
            if isinstance(ask, AskRequest):
                record = await self._answer(ask.request_id, ask.tenant, ask.cancel)
            else:
                record = None if self._share is None else self._share(ask.tenant)
            await channel.send(RequestAnswer(None if record is None else json.dumps(record).encode()))
            await channel.close()
        except (KopirError, TimeoutError) as error:
            logger.info("sibling_gone peer=%s error=%s", channel.peer.peer_id, error)
