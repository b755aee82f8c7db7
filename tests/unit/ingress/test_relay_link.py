"""The ingress's end of a link to a worker."""

from __future__ import annotations

from typing import Any, cast

import pytest

from cluster.ingress.relay import WorkerLink
from kvstore.core.lease import LeaseGranter
from kvstore.core.messages import Credit
from kvstore.errors import KopirError, NoCapacity, PeerLost
from kvstore.net.channel import Channel
from kvstore.net.handshake import PeerInfo


class FailingChannel:
    """Takes nothing any more."""

    peer = PeerInfo(role="decode", peer_id="decode-0", incarnation="d0#1", pid=1, host_identity="h")

    def __init__(self, error: KopirError) -> None:
        self._error = error
        self.is_aborted = False

    def send_nowait(self, message: Any) -> None:
        raise self._error

    def abort(self) -> None:
        self.is_aborted = True


@pytest.mark.parametrize("error", [NoCapacity("16 MiB are unsent"), PeerLost("closed")])
def test_a_link_that_loses_a_message_is_cut(error: KopirError) -> None:
    """A lost credit would hold its stream for ever: it is given once more only when the worker is back."""
    channel = FailingChannel(error)
    link = WorkerLink(cast(Channel, channel), LeaseGranter(1000))
    assert not link.send(Credit(attempt_id="att-1", epoch=1, max_index=8))
    assert channel.is_aborted
