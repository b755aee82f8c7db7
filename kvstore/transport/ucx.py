"""Block transport over UCX.

One thread owns the UCX device and the links; everybody else hands it commands. It sleeps while nothing moves, on a
descriptor that commands, peers and the network wake. Endpoints are made from worker addresses.

Same host: shared memory and cross-memory attach, the receiver copies. Other hosts: TCP. Both report a broken
connection once they touch it; the link is then closed and can be made anew once both sides have called ``peer_lost``.
A stopped peer breaks nothing, so every wait has a deadline, and callers say when a peer is proved dead.

Life cycle of a link: connect -> warming -> ready -> closing -> gone. Blocks move on ready links only.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstore.digest import block_digest
from kvstore.errors import DeadlineExceeded, PeerLost
from kvstore.transport.base import BlockReceive, BlockSend, Results, Transport
from kvstore.transport.pieces import PIECE_BYTES, BrokenPieces, LandingPieces, Pieces, cut
from kvstore.transport.transfers import Batch, Direction, PromisedFuture, RequestEnd, TransferBook, bytes_of, fail
from kvstore.transport.ucx_device import UcxDevice
from kvstore.transport.ucx_links import CLOSE_DEADLINE_S, Link, UcxLinks, Waiter
from kvstore.transport.ucx_reads import DirectReceive, DirectRequest, LinkReads

logger = logging.getLogger(__name__)

SPIN_S = 200e-6
"""How long the thread keeps looking after something moved, while a peer's next piece is probably on its way. Longer
than an idle core takes to wake on a virtual machine: a shorter look would end just before the answer of a peer that
slept, and both sides would go on waking each other for every message."""
SPIN_AWAITED_S = 1e-3
"""The same while somebody waits for blocks: bounded, because a peer that computes may be silent for long."""
LOOKS = 16
"""At the network, between two looks at deadlines, while the thread stays awake."""
STILL_STEPS_MAX = 1
"""Looks without a movement before the thread lets others run between two looks."""
WAIT_S_MAX = 0.05
"""Bound of a sleep while something is in flight, should a wake-up ever be missed."""
IDLE_WAIT_S = 1.0
NAP_S = 500e-6
"""Pause of a sender whose receivers copy by themselves: without it, every block's acknowledgement would wake it, and
the receiver would pay for the wake-up."""
NAP_S_TOTAL = 0.02
"""After so long without a movement such a sender sleeps until it is woken."""
NAP_BLOCK_BYTES = 64 << 10
"""Blocks from this size on move by the receiver's copy alone; smaller ones need the sender's help."""
INBOX_DEADLINE_S = 10.0
CALL_MARGIN_S = 2.0
"""How much longer a caller waits than its deadline, so that the transport's own answer arrives first."""


@dataclass(frozen=True, slots=True)
class _Command:
    """Something to do on the transport's thread; a fault in it goes to ``future``."""

    run: Callable[[], None]
    future: Future[Any] | None = None


class UcxTransport(Transport):
    """See the module."""

    name = "ucx"

    def __init__(
        self, *, has_network: bool = True, network_devices: tuple[str, ...] = (), has_direct_reads: bool = True
    ) -> None:
        """Opens UCX. Without ``has_network`` no socket is opened and peers are on this host only.

        Without ``has_direct_reads`` blocks of peers on this host move by UCX alone, as where memory cannot be read.
        ``network_devices``: interfaces to listen on, empty means all; UCX asks nobody there who he is.
        Raises: EnvironmentProblem when UCX cannot be loaded or opened.
        """
        self._make_device: Callable[[], UcxDevice] = lambda: UcxDevice(
            has_network=has_network, network_devices=network_devices
        )
        self._has_direct_reads = has_direct_reads
        self._commands: deque[_Command] = deque()
        self._lock = threading.Lock()
        self._is_open = True
        """Guarded by the lock together with appending: a command accepted while open is carried out."""
        self._is_asleep = False
        """Set before the thread looks at the commands for the last time, so that one of both sees the other."""
        self._is_ending = False
        self._device: UcxDevice
        self._book: TransferBook
        self._links: UcxLinks
        self._busy_until = self._nap_until = 0.0
        self._num_still = 0
        opened: Future[bytes] = Future()
        self._thread = threading.Thread(target=self._run, args=(opened,), name="kopir-ucx", daemon=True)
        self._thread.start()
        self._address = opened.result()

    # --- any thread -------------------------------------------------------------------------------------------

    def address(self) -> bytes:
        return self._address

    def address_for(self, peer: str) -> bytes:
        future: Future[bytes] = PromisedFuture()
        if not self._enqueue(lambda: future.set_result(self._device.open_inbox(peer)), future):
            raise PeerLost("the transport is closed")
        return future.result(INBOX_DEADLINE_S)

    def connect(self, peer: str, address: bytes, *, same_host: bool, deadline_s: float) -> None:
        waiter = Waiter(time.monotonic() + deadline_s, PromisedFuture())
        if not self._enqueue(lambda: self._links.connect(peer, address, same_host, waiter), waiter.future):
            raise PeerLost("the transport is closed")
        try:
            waiter.future.result(deadline_s + CALL_MARGIN_S)
        except TimeoutError as error:
            raise DeadlineExceeded(f"no transport link to {peer} within {deadline_s} s") from error

    def push(self, peer: str, sends: Sequence[BlockSend], *, deadline_s: float) -> Future[Results]:
        buffers = [bytes_of(send.block, is_written=False) for send in sends]
        tags = [send.tag for send in sends]
        deadline = time.monotonic() + deadline_s
        return self._submit(Batch(peer, Direction.SEND, tags, [None] * len(tags), deadline, buffers))

    def receive(self, peer: str, receives: Sequence[BlockReceive], *, deadline_s: float) -> Future[Results]:
        buffers = [bytes_of(receive.block, is_written=True) for receive in receives]
        tags, digests = [receive.tag for receive in receives], [receive.digest for receive in receives]
        deadline = time.monotonic() + deadline_s
        return self._submit(Batch(peer, Direction.RECEIVE, tags, digests, deadline, buffers))

    def probe(self, peer: str, *, deadline_s: float) -> Future[float]:
        future: Future[float] = PromisedFuture()
        deadline = time.monotonic() + deadline_s
        if not self._enqueue(lambda: self._links.ask(peer, deadline, future), future):
            fail(future, PeerLost("the transport is closed"))
        return future

    def peer_lost(self, peer: str, *, proved_dead: bool) -> Future[None]:
        future: Future[None] = PromisedFuture()
        if not self._enqueue(lambda: self._peer_lost(peer, proved_dead, future), future):
            future.set_result(None)
        return future

    def outstanding(self, peer: str) -> frozenset[int]:
        return self._book.outstanding(peer)

    def stats(self) -> dict[str, int]:
        return self._book.stats()

    def close(self) -> None:
        self._enqueue(self._end, None, is_last=True)
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * CLOSE_DEADLINE_S)

    def _submit(self, batch: Batch) -> Future[Results]:
        self._book.admit(batch)
        if not self._enqueue(lambda: self._post(batch), batch.future):
            self._book.refuse(batch)
        return batch.future

    def _enqueue(self, run: Callable[[], None], future: Future[Any] | None, *, is_last: bool = False) -> bool:
        """Returns False when the transport is closed."""
        with self._lock:
            if not self._is_open:
                return False
            self._is_open = not is_last
            self._commands.append(_Command(run, future))
            if self._is_asleep:
                # Inside the lock, because the end of the thread closes what this writes to.
                self._device.wake()
        return True

    # --- the transport's thread: loop -------------------------------------------------------------------------

    def _run(self, opened: Future[bytes]) -> None:
        try:
            # Made on this thread, because UCX gives its worker to one thread only.
            self._device = self._make_device()
            self._book = TransferBook(self.name, self._ended, digest=_digest)
            self._book.on_settled = self._notify_settled
            self._links = UcxLinks(self._device, self._book, has_direct_reads=self._has_direct_reads)
            self._book.on_broken = self._links.on_broken
        except BaseException as error:
            opened.set_exception(error)
            return
        opened.set_result(self._device.address)
        try:
            while not self._is_ending:
                self._step()
        except Exception:
            # Nobody may wait for a thread that is gone: from here on every call ends with PEER_LOST.
            logger.exception("transport_failed")
        finally:
            self._end_all()

    def _step(self) -> None:
        moved = self._run_commands()
        moved |= self._look()
        now = time.monotonic()
        moved |= self._book.collect(now)
        moved |= self._links.collect(now)
        if moved:
            self._nap_until = now + NAP_S_TOTAL
            # A sender whose receivers copy by themselves has nothing to hurry for.
            batches = self._book.batches()
            is_passive = batches and all(batch.is_passive for batch in batches)
            is_awaited = any(batch.direction is Direction.RECEIVE for batch in batches)
            self._busy_until = now if is_passive else now + (SPIN_AWAITED_S if is_awaited else SPIN_S)
        if now >= self._busy_until:
            self._rest(now)
        elif moved:
            self._num_still = 0
        else:
            self._num_still += 1
            if self._num_still > STILL_STEPS_MAX:
                # The peer may wait for this very core.
                os.sched_yield()

    def _look(self) -> bool:
        """Moves the next piece. While the thread stays awake anyway, it looks for one a few times before it looks at
        everything else, which takes many times as long. Returns True when something moved.
        """
        device = self._device
        if device.progress():
            return True
        if self._links.has_work or time.monotonic() >= self._busy_until:
            return False
        for _ in range(LOOKS):
            if device.progress():
                return True
            if self._commands:
                break
        return False

    def _rest(self, now: float) -> None:
        """Gives the core away until something may have happened."""
        if self._links.has_work:
            return
        is_asked = self._links.is_waiting
        if not (self._book.num_batches or self._book.num_given_up or is_asked):
            self._sleep(IDLE_WAIT_S)
            return
        if now < self._nap_until and all(batch.is_passive for batch in self._book.batches()) and not is_asked:
            self._sleep(NAP_S, is_nap=True)
            return
        deadline = self._book.next_deadline()
        self._sleep(WAIT_S_MAX if deadline is None else min(WAIT_S_MAX, max(0.0, deadline - now)))

    def _sleep(self, timeout_s: float, *, is_nap: bool = False) -> None:
        self._is_asleep = True
        if not self._commands:
            (self._device.nap if is_nap else self._device.sleep)(timeout_s)
        self._is_asleep = False

    def _run_commands(self) -> bool:
        """Carries out the commands that wait. One that fails is logged and ends with its fault."""
        ran = False
        while self._commands:
            command = self._commands.popleft()
            ran = True
            try:
                command.run()
            except Exception as error:
                logger.exception("command_failed")
                if command.future is not None and not command.future.done():
                    command.future.set_exception(error)
        return ran

    def _end(self) -> None:
        self._is_ending = True

    def _end_all(self) -> None:
        """Ends everything, also after a fault of this thread: no future stays open."""
        with self._lock:
            self._is_open = False
        try:
            self._run_commands()
            self._links.close_all()
        except Exception:
            logger.exception("transport_end_failed")
        self._book.give_up_all()
        self._links.fail_all()
        self._device.close()
        # What UCX has let go of is settled; requests that are kept would keep UCX's workers, as long as this object.
        self._book.collect(time.monotonic())
        self._links.forget()

    # --- the transport's thread: transfers --------------------------------------------------------------------

    def _post(self, batch: Batch) -> None:
        link = self._links.ready(batch.peer)
        if link is None:
            self._book.refuse(batch)
            return
        is_send = batch.direction is Direction.SEND
        if link.reads is not None:
            self._post_direct(link.reads, batch)
        try:
            for tag, buffer, digest in _unposted(batch):
                batch.requests.append(self._post_block(link, batch.direction, tag, buffer, digest is not None))
        except PeerLost as error:
            logger.warning("post_failed peer=%s error=%s", batch.peer, error)
        batch.is_settled_by_end = self._device.is_settled_by_end(batch.direction, same_host=link.same_host)
        batch.is_passive = (
            is_send and link.same_host and all(buffer.nbytes >= NAP_BLOCK_BYTES for buffer in batch.buffers)
        )
        self._book.begin(batch)

    def _post_direct(self, reads: LinkReads, batch: Batch) -> None:
        """Offers or wants the blocks of a batch. Modifies: ``batch.requests``."""
        if batch.direction is Direction.SEND:
            batch.requests += reads.send(batch.tags, batch.buffers)
        else:
            receives = [
                DirectReceive(tag, buffer, is_verified=digest is not None)
                for tag, buffer, digest in zip(batch.tags, batch.buffers, batch.digests, strict=True)
            ]
            reads.receive(receives)
            batch.requests += receives

    def _post_block(self, link: Link, direction: Direction, tag: int, buffer: np.ndarray, is_verified: bool) -> Any:
        """Returns the request of one block. Raises: PeerLost when not a single piece could be posted."""
        post = self._device.send if direction is Direction.SEND else self._device.receive
        if buffer.nbytes <= PIECE_BYTES:
            return post(link.endpoint, buffer, tag)
        requests: list[Any] = []
        try:
            for piece in cut(buffer):
                requests.append(post(link.endpoint, piece, tag))
        except PeerLost:
            if not requests:
                raise
            # What was posted can still move; the link is broken and ends it.
            return BrokenPieces(requests)
        if direction is Direction.RECEIVE and is_verified:
            return LandingPieces(requests, buffer)
        return Pieces(requests)

    def _ended(self, request: Any) -> RequestEnd:
        if isinstance(request, DirectRequest):
            return request.end
        if not isinstance(request, Pieces):
            return self._device.ended(request)
        if isinstance(request, BrokenPieces):
            return RequestEnd.BROKEN
        ends = {self._device.ended(piece) for piece in request.requests}
        return next((end for end in (RequestEnd.BROKEN, RequestEnd.DAMAGED) if end in ends), RequestEnd.DONE)

    def _peer_lost(self, peer: str, proved_dead: bool, future: Future[None]) -> None:
        self._book.count("peers_lost")
        self._links.lose(peer, proved_dead=proved_dead, future=future)

    def _notify_settled(self, tags: list[int]) -> None:
        if self.on_settled is not None:
            self.on_settled(tags)


def _digest(request: Any, buffer: np.ndarray) -> bytes:
    return request.digest() if isinstance(request, (LandingPieces, DirectReceive)) else block_digest(buffer)


def _unposted(batch: Batch) -> list[tuple[int, np.ndarray, bytes | None]]:
    """Returns tag, buffer and digest of the blocks of ``batch`` that have no request yet."""
    start = len(batch.requests)
    return list(zip(batch.tags[start:], batch.buffers[start:], batch.digests[start:], strict=True))
