"""Block transport inside one process: the same contract as UCX, without threads, clocks or luck.

``InprocHub`` is the wire and the kernel: it holds what was posted, copies, kills and stops. Nothing moves by itself;
whoever owns the hub calls ``step``, and a block takes two steps, so that anything can happen between its halves.
As over UCX on one host, the receiver copies out of the sender's memory: a stopped sender's posted blocks still land,
a dead one's never complete.

Life cycle: a hub is made with a clock -> transports are made on it -> connect, push, receive -> ``step`` until the
wanted futures are done. Futures are resolved, and ``on_settled`` is called, within ``step``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvstore.errors import DeadlineExceeded, PeerLost
from kvstore.transport.base import BlockReceive, BlockSend, Results, Transport
from kvstore.transport.transfers import Batch, Direction, PromisedFuture, RequestEnd, TransferBook, bytes_of

ADDRESS_BYTES = 8


@dataclass(slots=True, eq=False)
class InprocRequest:
    """One posted send or receive: what a request object is to UCX."""

    owner: InprocTransport
    peer_address: bytes
    tag: int
    buffer: np.ndarray
    completed: bool = False
    end: RequestEnd = RequestEnd.DONE

    def finish(self, end: RequestEnd) -> None:
        self.end = end
        self.completed = True


@dataclass(slots=True, eq=False)
class Copy:
    """A send that has met its receive. ``num_bytes_copied`` is 0, then half, then the copy is over."""

    send: InprocRequest
    receive: InprocRequest
    num_bytes_copied: int = 0


@dataclass(slots=True)
class _Port:
    """A transport as the hub sees it."""

    transport: InprocTransport
    is_alive: bool = True
    is_stopped: bool = False
    posted_receives: dict[int, list[InprocRequest]] = field(default_factory=dict)
    unmatched_sends: dict[int, list[InprocRequest]] = field(default_factory=dict)


class InprocHub:
    """Joins transports of one process. ``clock`` returns seconds, as ``time.monotonic`` does. Not thread-safe.

    ``choose`` picks which of n copies moves next, as an index in [0, n); the default is the oldest.
    """

    def __init__(self, clock: Callable[[], float], *, choose: Callable[[int], int] = lambda num_copies: 0) -> None:
        self.clock = clock
        self.copies: list[Copy] = []
        self._choose = choose
        self._ports: dict[bytes, _Port] = {}
        self._addresses = itertools.count(1)

    # --- for whoever drives it --------------------------------------------------------------------------------

    def step(self) -> bool:
        """Copies one half of one block, then lets every running transport look at what has ended and at the clock.

        Returns True when something moved.
        """
        movable = [copy for copy in self.copies if self._is_movable(copy)]
        if movable:
            self._advance(movable[self._choose(len(movable))])
        moved = bool(movable)
        for port in tuple(self._ports.values()):
            if port.is_alive and not port.is_stopped:
                moved |= port.transport.collect()
        return moved

    def run(self) -> None:
        """Steps until nothing moves."""
        while self.step():
            pass

    def kill(self, address: bytes) -> None:
        """Ends a process at once: its transport does nothing any more, and says so to nobody."""
        port = self._ports[address]
        port.is_alive = False
        # A reader of a dead process's memory gets an error, and UCX then neither completes nor repeats.
        self.copies = [
            copy
            for copy in self.copies
            if copy.send.owner is not port.transport and copy.receive.owner is not port.transport
        ]
        for other in self._ports.values():
            for tag, sends in tuple(other.unmatched_sends.items()):
                other.unmatched_sends[tag] = [send for send in sends if send.owner is not port.transport]

    def stop(self, address: bytes) -> None:
        """SIGSTOP: the transport acts no more; its memory can still be read."""
        self._ports[address].is_stopped = True

    def resume(self, address: bytes) -> None:
        """SIGCONT."""
        self._ports[address].is_stopped = False

    # --- for transports ---------------------------------------------------------------------------------------

    def attach(self, transport: InprocTransport) -> bytes:
        """Returns the new address of ``transport``."""
        address = next(self._addresses).to_bytes(ADDRESS_BYTES, "big")
        self._ports[address] = _Port(transport)
        return address

    def detach(self, address: bytes) -> None:
        """Forgets a transport that has closed; what was posted to or by it never moves again."""
        self.kill(address)
        del self._ports[address]

    def check_reachable(self, address: bytes) -> None:
        """Raises: PeerLost when nobody lives at ``address``; DeadlineExceeded when it is stopped."""
        port = self._ports.get(address)
        if port is None or not port.is_alive:
            raise PeerLost("nobody lives at this address")
        if port.is_stopped:
            raise DeadlineExceeded("the peer does not answer")

    def post_send(self, request: InprocRequest) -> None:
        """Offers a block; it waits at the receiver until a receive with its tag is posted."""
        port = self._ports.get(request.peer_address)
        if port is None or not port.is_alive:
            return
        waiting = port.posted_receives.get(request.tag)
        if waiting:
            self.copies.append(Copy(request, waiting.pop(0)))
        else:
            port.unmatched_sends.setdefault(request.tag, []).append(request)

    def post_receive(self, request: InprocRequest) -> None:
        port = self._ports[request.owner.address()]
        waiting = port.unmatched_sends.get(request.tag)
        if waiting:
            self.copies.append(Copy(waiting.pop(0), request))
        else:
            port.posted_receives.setdefault(request.tag, []).append(request)

    def cancel(self, owner: InprocTransport, peer_address: bytes) -> None:
        """Takes back all that ``owner`` posted to or from ``peer_address``: its requests end as broken."""
        ours = [copy for copy in self.copies if owner in (copy.send.owner, copy.receive.owner)]
        for copy in ours:
            mine = copy.send if copy.send.owner is owner else copy.receive
            if mine.peer_address == peer_address:
                self.copies.remove(copy)
                mine.finish(RequestEnd.BROKEN)
        for port in self._ports.values():
            for requests in (*port.posted_receives.values(), *port.unmatched_sends.values()):
                for request in tuple(requests):
                    if request.owner is owner and request.peer_address == peer_address:
                        requests.remove(request)
                        request.finish(RequestEnd.BROKEN)

    def _is_movable(self, copy: Copy) -> bool:
        port = self._ports.get(copy.receive.owner.address())
        return port is not None and port.is_alive and not port.is_stopped

    def _advance(self, copy: Copy) -> None:
        """Modifies: one half of the destination; the requests when it was the second half."""
        source, target = copy.send.buffer, copy.receive.buffer
        num_bytes = min(source.nbytes, target.nbytes)
        half = num_bytes // 2
        if copy.num_bytes_copied == 0 and half:
            target[:half] = source[:half]
            copy.num_bytes_copied = half
            return
        target[copy.num_bytes_copied : num_bytes] = source[copy.num_bytes_copied : num_bytes]
        self.copies.remove(copy)
        copy.receive.finish(RequestEnd.DAMAGED if source.nbytes > target.nbytes else RequestEnd.DONE)
        copy.send.finish(RequestEnd.DONE)


class InprocTransport(Transport):
    """One side on a hub, see the module."""

    name = "inproc"

    def __init__(self, hub: InprocHub) -> None:
        self._hub = hub
        self._book = TransferBook(self.name, _ended)
        self._book.on_settled = self._notify_settled
        self._addresses: dict[str, bytes] = {}
        self._is_open = True
        self._address = hub.attach(self)

    def address(self) -> bytes:
        return self._address

    def connect(self, peer: str, address: bytes, *, same_host: bool, deadline_s: float) -> None:
        """Connects at once or not at all: there is nobody to wait for within one process."""
        if not self._is_open:
            raise PeerLost("the transport is closed")
        if peer not in self._addresses:
            self._hub.check_reachable(address)
            self._addresses[peer] = address

    def push(self, peer: str, sends: Sequence[BlockSend], *, deadline_s: float) -> Future[Results]:
        buffers = [bytes_of(send.block, is_written=False) for send in sends]
        tags = [send.tag for send in sends]
        deadline = self._hub.clock() + deadline_s
        return self._post(Batch(peer, Direction.SEND, tags, [None] * len(tags), deadline, buffers))

    def receive(self, peer: str, receives: Sequence[BlockReceive], *, deadline_s: float) -> Future[Results]:
        buffers = [bytes_of(receive.block, is_written=True) for receive in receives]
        tags, digests = [receive.tag for receive in receives], [receive.digest for receive in receives]
        deadline = self._hub.clock() + deadline_s
        return self._post(Batch(peer, Direction.RECEIVE, tags, digests, deadline, buffers))

    def probe(self, peer: str, *, deadline_s: float) -> Future[float]:
        """Ends at once: a stopped peer counts as one that did not answer in time."""
        future: Future[float] = PromisedFuture()
        try:
            if not self._is_open or peer not in self._addresses:
                raise PeerLost(f"no link to {peer}")
            self._hub.check_reachable(self._addresses[peer])
            future.set_result(0.0)
        except (PeerLost, DeadlineExceeded) as error:
            future.set_exception(error)
        return future

    def peer_lost(self, peer: str, *, proved_dead: bool) -> Future[None]:
        future: Future[None] = PromisedFuture()
        if self._is_open:
            self._book.count("peers_lost")
            self._lose_link(peer)
            if proved_dead:
                self._book.settle_peer(peer)
        future.set_result(None)
        return future

    def outstanding(self, peer: str) -> frozenset[int]:
        return self._book.outstanding(peer)

    def stats(self) -> dict[str, int]:
        return self._book.stats()

    def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        for peer in tuple(self._addresses):
            self._lose_link(peer)
        self._book.give_up_all()
        self._hub.detach(self._address)

    def collect(self) -> bool:
        """Reports what has ended; the hub calls it. Returns True when something had."""
        return self._book.collect(self._hub.clock())

    def check_invariants(self) -> None:
        self._book.check_invariants()

    def _post(self, batch: Batch) -> Future[Results]:
        self._book.admit(batch)
        address = self._addresses.get(batch.peer)
        if address is None or not self._is_open:
            self._book.refuse(batch)
            return batch.future
        post = self._hub.post_send if batch.direction is Direction.SEND else self._hub.post_receive
        for tag, buffer in zip(batch.tags, batch.buffers, strict=True):
            request = InprocRequest(self, address, tag, buffer)
            batch.requests.append(request)
            post(request)
        self._book.begin(batch)
        return batch.future

    def _lose_link(self, peer: str) -> None:
        address = self._addresses.pop(peer, None)
        self._book.give_up_peer(peer)
        if address is not None:
            self._hub.cancel(self, address)

    def _notify_settled(self, tags: list[int]) -> None:
        if self.on_settled is not None:
            self.on_settled(tags)


def _ended(request: Any) -> RequestEnd:
    assert isinstance(request, InprocRequest)
    return request.end
