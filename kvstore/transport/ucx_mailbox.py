"""Messages of one size from one peer: at any time one receive is posted for them, and it outlives the link.

UCX does not say whether it takes a posted receive back when an endpoint closes. One that stays would swallow the first
message of the next link to the same address; therefore that link goes on with it.

Life cycle: made -> ``attach`` to a link's endpoint -> ``take`` ... -> ``attach`` to the next one ...; dropped once the
peer is proved dead.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.errors import PeerLost
from kvstore.transport.transfers import RequestEnd
from kvstore.transport.ucx_device import UcxDevice


class Mailbox:
    """See the module. ``tag`` belongs to the sender. All calls on the transport's thread."""

    def __init__(self, device: UcxDevice, tag: int, num_bytes: int) -> None:
        self._device = device
        self._tag = tag
        self._into = np.zeros(num_bytes, np.uint8)
        self._endpoint: Any = None
        self._request: Any = None
        self._is_inherited = False
        """The posted receive is of an earlier link, which may end it."""

    def attach(self, endpoint: Any) -> None:
        """Takes the messages of a new link. Raises: PeerLost."""
        self._endpoint = endpoint
        if self._request is None:
            self._request = self._device.receive(endpoint, self._into, self._tag)
        else:
            self._is_inherited = True

    def take(self) -> bytes | None:
        """Returns the next message that has come, or None. Raises: PeerLost when the link is broken."""
        while self._request.completed:
            has_come = self._device.ended(self._request) is RequestEnd.DONE
            if not has_come and not self._is_inherited:
                raise PeerLost("a message of the link broke")
            message = self._into.tobytes()
            self._is_inherited = False
            self._request = self._device.receive(self._endpoint, self._into, self._tag)
            if has_come:
                return message
        return None
