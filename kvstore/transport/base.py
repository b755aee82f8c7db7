"""The contract of every block transport: connect to a peer, push blocks, receive blocks, know what is still in flight.

A transport moves bytes and verifies digests. It knows nothing of attempts, leases or pools; the caller names each
transfer by a tag that is never used twice at the receiving transport, and guarantees that the memory of a transfer
stays alive and untouched until the transfer is *settled*: reported OK or CORRUPT, reported by ``on_settled``, or its
peer proved dead and ``peer_lost`` complete. TIMEOUT and PEER_LOST settle nothing: a stopped peer may still wake up.

Thread-safe. Life cycle of a peer: connect -> push/receive ... -> disconnect | peer_lost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from enum import Enum

import msgspec

TAG_MAX = (1 << 63) - 1


class TransferResult(Enum):
    """What became of one block."""

    OK = "ok"
    CORRUPT = "corrupt"
    """Arrived, with another digest."""
    EXPIRED = "expired"
    """Came for an attempt that is over; used by callers, never by a transport."""
    TIMEOUT = "timeout"
    PEER_LOST = "peer_lost"


SETTLED = frozenset({TransferResult.OK, TransferResult.CORRUPT})
"""Results after which nobody outside touches the block's memory."""


class BlockSend(msgspec.Struct, frozen=True, gc=False):
    """Source of one block."""

    tag: int
    block: memoryview


class BlockReceive(msgspec.Struct, frozen=True, gc=False):
    """Destination of one block. ``digest``: 16 bytes of xxh3-128 that it must have, or None for no verification."""

    tag: int
    block: memoryview
    digest: bytes | None


Results = list[TransferResult]


class Transport(ABC):
    """Moves blocks between this process and its peers."""

    name: str

    on_settled: Callable[[list[int]], None] | None = None
    """Called on the transport's thread with tags of receives that ended after their result was TIMEOUT."""

    @abstractmethod
    def address(self) -> bytes:
        """Returns what a peer needs to connect."""

    def address_for(self, peer: str) -> bytes:
        """Returns what incarnation ``peer`` needs to connect: the same until it is proved dead. May block for a moment.

        What reaches this side from there goes past what others send, so that one who dies in mid-message stops nobody.
        Raises: PeerLost when the transport is closed.
        """
        return self.address()

    @abstractmethod
    def connect(self, peer: str, address: bytes, *, same_host: bool, deadline_s: float) -> None:
        """Connects to incarnation ``peer`` and warms the link; both sides call it at about the same time.

        Idempotent; concurrent calls for one peer share one attempt. Raises: PeerLost, DeadlineExceeded.
        """

    @abstractmethod
    def push(self, peer: str, sends: Sequence[BlockSend], *, deadline_s: float) -> Future[Results]:
        """Sends blocks; one result per block, in order."""

    @abstractmethod
    def receive(self, peer: str, receives: Sequence[BlockReceive], *, deadline_s: float) -> Future[Results]:
        """Receives blocks that the peer has pushed or is about to; one result per block, in order."""

    @abstractmethod
    def probe(self, peer: str, *, deadline_s: float) -> Future[float]:
        """Sends a few bytes there and back; gives the seconds that took, without the caller's own threads.

        The future fails with DeadlineExceeded when the peer does not answer, with PeerLost when there is no link.
        """

    @abstractmethod
    def peer_lost(self, peer: str, *, proved_dead: bool) -> Future[None]:
        """Ends everything in flight with PEER_LOST and closes the endpoint; others go on.

        With ``proved_dead``, transfers of this peer count as settled once the future is done.
        """

    @abstractmethod
    def outstanding(self, peer: str) -> frozenset[int]:
        """Returns the tags of transfers with this peer that are not settled."""

    @abstractmethod
    def stats(self) -> dict[str, int]:
        """Returns counters that only grow: ``<name>_blocks``, ``<name>_bytes`` and failures by kind."""

    @abstractmethod
    def close(self) -> None:
        """Ends every transfer and the transport's thread. Safe to call twice."""
