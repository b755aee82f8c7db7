"""Messages of one size to and from one peer.

For those that come one receive is posted, and it outlives the link.

UCX does not say whether it takes a posted receive back when an endpoint closes. One that stays would swallow the first
message of the next link to the same address; therefore that link goes on with it.

Life cycle: made -> ``attach`` to a link's endpoint -> ``take`` ... -> ``attach`` to the next one ...; dropped once the
peer is proved dead.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from kvstore.errors import PeerLost
from kvstore.transport.transfers import RequestEnd
from kvstore.transport.ucx_device import Prepared, UcxDevice


class Mailbox:
    """See the module. ``tag`` belongs to the sender. All calls on the transport's thread."""

    def __init__(self, device: UcxDevice, tag: int, num_bytes: int) -> None:
        self._device = device
        self._tag = tag
        self._into = device.prepare(num_bytes)
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
        """Returns the next message that has come, or None. Raises: PeerLost when the link is broken.

        The next receive is posted by the next call: whoever answers a message shall not wait for it.
        """
        if self._request is None:
            self._request = self._device.receive(self._endpoint, self._into, self._tag)
        while self._request.completed:
            has_come = self._device.ended(self._request) is RequestEnd.DONE
            if not has_come and not self._is_inherited:
                raise PeerLost("a message of the link broke")
            message = self._into.array.tobytes()
            self._is_inherited = False
            self._request = None
            if has_come:
                return message
            self._request = self._device.receive(self._endpoint, self._into, self._tag)
        return None


class Outbox:
    """Sends messages of one size over a link; their memory is used again once UCX is through with it."""

    def __init__(self, device: UcxDevice, endpoint: Any, tag: int, num_bytes: int) -> None:
        self._device = device
        self._endpoint = endpoint
        self._tag = tag
        self._num_bytes = num_bytes
        self._sent: deque[tuple[Any, Prepared]] = deque()
        """Oldest first; they complete in that order."""

    def send(self, message: bytes) -> None:
        """Sends ``message``, filled up with what was there. Raises: PeerLost."""
        if self._sent and self._sent[0][0].completed:
            buffer = self._sent.popleft()[1]
        else:
            buffer = self._device.prepare(self._num_bytes)
        buffer.array.data[: len(message)] = message
        self._sent.append((self._device.send(self._endpoint, buffer, self._tag), buffer))
