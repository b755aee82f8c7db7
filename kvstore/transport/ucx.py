"""Block transport over UCX.

One thread owns the UCX context, worker and endpoints; everybody else hands it commands. It sleeps on its command
queue while nothing is in flight, because the receiving side is told over the control channel when blocks were
posted. Endpoints are made from worker addresses.

Same host: endpoint error handling off, so that UCX takes shared memory and cross-memory attach, with the receiver
copying (``UCX_RNDV_SCHEME=get_zcopy``): a stopped sender that wakes up then has nothing to write. Other hosts: error
handling on, so that UCX takes a network transport and reports a broken connection by itself.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvstore.digest import block_digest
from kvstore.errors import DeadlineExceeded, EnvironmentProblem, PeerLost
from kvstore.transport.base import BlockReceive, BlockSend, Results, Transport, TransferResult

logger = logging.getLogger(__name__)

UCX_CONFIG = {"RNDV_SCHEME": "get_zcopy"}
WARM_TAG_BIT = 1 << 63
"""Block tags have 63 bits; the upper half belongs to warm-up messages."""
WARM_BYTES = 256 << 10
"""Large enough for the rendezvous path that blocks take."""
SPIN_STEPS = 200
"""Progress calls without a completion before the thread gives the core away for a moment."""
PAUSE_S = 50e-6
ZOMBIE_POLL_S = 0.02
CLOSE_DEADLINE_S = 1.0
CALL_MARGIN_S = 2.0


@dataclass(slots=True)
class _Batch:
    """Transfers that were asked for together and report together."""

    peer: str
    tags: list[int]
    requests: list[Any]
    buffers: list[Any]
    deadline: float
    future: Future[Results]
    receives: Sequence[BlockReceive] | None
    results: list[TransferResult | None] = field(default_factory=list)
    num_open: int = 0


@dataclass(slots=True)
class _Zombie:
    """A transfer that was given up but may still touch memory; keeps that memory referenced."""

    peer: str
    tag: int
    request: Any
    buffer: Any
    is_receive: bool


@dataclass(slots=True)
class _Warming:
    """A connect under way."""

    peer: str
    requests: list[Any]
    buffers: list[Any]
    deadline: float
    future: Future[None]


class UcxTransport(Transport):
    """See the module. ``progress`` runs on one thread only, the transport's own."""

    name = "ucx"

    def __init__(self) -> None:
        """Raises: EnvironmentProblem when UCX cannot be loaded or opened."""
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._endpoints: dict[str, Any] = {}
        self._connecting: dict[str, Future[None]] = {}
        self._batches: list[_Batch] = []
        self._warmings: list[_Warming] = []
        self._zombies: list[_Zombie] = []
        self._outstanding: dict[str, set[int]] = {}
        self._lock = threading.Lock()
        self._stats = dict.fromkeys(
            ("ucx_sent_blocks", "ucx_sent_bytes", "ucx_received_blocks", "ucx_received_bytes", "ucx_corrupt_blocks",
             "ucx_timeouts", "ucx_peers_lost"), 0,
        )
        self._closed = False
        opened: Future[bytes] = Future()
        self._thread = threading.Thread(target=self._run, args=(opened,), name="kopir-ucx", daemon=True)
        self._thread.start()
        self._address = opened.result()

    # --- any thread -----------------------------------------------------------------------------------------

    def address(self) -> bytes:
        return self._address

    def connect(self, peer: str, address: bytes, *, same_host: bool, deadline_s: float) -> None:
        with self._lock:
            future = self._connecting.get(peer)
            if future is None or (future.done() and future.exception() is not None):
                future = self._connecting[peer] = Future()
                deadline = time.monotonic() + deadline_s
                fresh = future
                self._commands.put(lambda: self._connect(peer, address, same_host, deadline, fresh))
        try:
            future.result(deadline_s + CALL_MARGIN_S)
        except TimeoutError as error:
            raise DeadlineExceeded(f"no transport link to {peer} within {deadline_s} s") from error

    def push(self, peer: str, sends: Sequence[BlockSend], *, deadline_s: float) -> Future[Results]:
        future: Future[Results] = Future()
        deadline = time.monotonic() + deadline_s
        self._submit(lambda: self._push(peer, sends, deadline, future), future, len(sends))
        return future

    def receive(self, peer: str, receives: Sequence[BlockReceive], *, deadline_s: float) -> Future[Results]:
        future: Future[Results] = Future()
        deadline = time.monotonic() + deadline_s
        self._submit(lambda: self._receive(peer, receives, deadline, future), future, len(receives))
        return future

    def peer_lost(self, peer: str, *, proved_dead: bool) -> Future[None]:
        future: Future[None] = Future()
        if self._closed:
            future.set_result(None)
        else:
            self._commands.put(lambda: self._peer_lost(peer, proved_dead, future))
        return future

    def outstanding(self, peer: str) -> frozenset[int]:
        with self._lock:
            return frozenset(self._outstanding.get(peer, ()))

    def stats(self) -> dict[str, int]:
        with self._lock:
            return dict(self._stats)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._commands.put(None)
        self._thread.join(CLOSE_DEADLINE_S * 2)

    def _submit(self, command: Callable[[], None], future: Future[Results], num_blocks: int) -> None:
        if self._closed:
            future.set_result([TransferResult.PEER_LOST] * num_blocks)
        else:
            self._commands.put(command)

    # --- the transport's thread -------------------------------------------------------------------------------

    def _run(self, opened: Future[bytes]) -> None:
        try:
            self._open()
            opened.set_result(bytes(self._lib.UCXAddress.create_from_worker(self._worker)))
        except Exception as error:
            opened.set_exception(EnvironmentProblem(f"UCX cannot be used: {error}"))
            return
        idle_steps = 0
        while self._take_commands():
            if not self._batches and not self._warmings and not self._zombies:
                continue
            self._worker.progress()
            if self._collect():
                idle_steps = 0
                continue
            idle_steps += 1
            # A receiver is told when its blocks are there, so it may spin; a sender waits for somebody else.
            if idle_steps > SPIN_STEPS or not any(batch.receives for batch in self._batches):
                time.sleep(PAUSE_S)
        self._end_all()

    def _open(self) -> None:
        # Imported on this thread: the library must not be loaded where nobody transfers.
        from ucxx._lib import libucxx
        from ucxx._lib.arr import Array

        self._lib = libucxx
        self._array = Array
        self._context = libucxx.UCXContext(UCX_CONFIG)
        self._worker = libucxx.UCXWorker(self._context)

    def _take_commands(self) -> bool:
        """Carries out waiting commands; sleeps while nothing is in flight. Returns False to end."""
        busy = bool(self._batches or self._warmings)
        timeout = None if not self._zombies else ZOMBIE_POLL_S
        while True:
            try:
                command = self._commands.get(block=not busy, timeout=timeout)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            busy = True

    def _connect(self, peer: str, address: bytes, same_host: bool, deadline: float, future: Future[None]) -> None:
        try:
            endpoint = self._lib.UCXEndpoint.create_from_worker_address(
                self._worker,
                self._lib.UCXAddress.create_from_buffer(address),
                endpoint_error_handling=not same_host,
            )
            self._endpoints[peer] = endpoint
            out, into = np.ones(WARM_BYTES, np.uint8), np.zeros(WARM_BYTES, np.uint8)
            requests = [
                endpoint.tag_send(self._array(out), tag=self._lib.UCXXTag(_warm_tag(self._address))),
                endpoint.tag_recv(self._array(into), tag=self._lib.UCXXTag(_warm_tag(address))),
            ]
            self._warmings.append(_Warming(peer, requests, [out, into], deadline, future))
        except Exception as error:
            future.set_exception(PeerLost(f"no transport link to {peer}: {error}"))

    def _push(self, peer: str, sends: Sequence[BlockSend], deadline: float, future: Future[Results]) -> None:
        endpoint = self._endpoints.get(peer)
        if endpoint is None:
            future.set_result([TransferResult.PEER_LOST] * len(sends))
            return
        buffers = [np.frombuffer(send.block, np.uint8) for send in sends]
        requests = [
            endpoint.tag_send(self._array(buffer), tag=self._lib.UCXXTag(send.tag))
            for send, buffer in zip(sends, buffers, strict=True)
        ]
        self._begin(_Batch(peer, [send.tag for send in sends], requests, buffers, deadline, future, None))

    def _receive(self, peer: str, receives: Sequence[BlockReceive], deadline: float, future: Future[Results]) -> None:
        endpoint = self._endpoints.get(peer)
        if endpoint is None:
            future.set_result([TransferResult.PEER_LOST] * len(receives))
            return
        buffers = [np.frombuffer(receive.block, np.uint8) for receive in receives]
        requests = [
            endpoint.tag_recv(self._array(buffer), tag=self._lib.UCXXTag(receive.tag))
            for receive, buffer in zip(receives, buffers, strict=True)
        ]
        tags = [receive.tag for receive in receives]
        self._begin(_Batch(peer, tags, requests, buffers, deadline, future, receives))

    def _begin(self, batch: _Batch) -> None:
        batch.results = [None] * len(batch.tags)
        batch.num_open = len(batch.tags)
        with self._lock:
            self._outstanding.setdefault(batch.peer, set()).update(batch.tags)
        self._batches.append(batch)

    def _collect(self) -> bool:
        """Reports what has completed or run out of time. Returns True when something moved."""
        moved = False
        now = time.monotonic()
        for batch in tuple(self._batches):
            moved |= self._collect_batch(batch)
            if batch.num_open and now >= batch.deadline:
                self._give_up(batch, TransferResult.TIMEOUT)
            if not batch.num_open:
                self._batches.remove(batch)
                _resolve(batch.future, [result for result in batch.results if result is not None])
        for warming in tuple(self._warmings):
            if all(request.completed for request in warming.requests):
                self._warmings.remove(warming)
                _resolve_connect(warming)
                moved = True
            elif now >= warming.deadline:
                self._warmings.remove(warming)
                self._zombies += [
                    _Zombie(warming.peer, -1, request, buffer, False)
                    for request, buffer in zip(warming.requests, warming.buffers, strict=True)
                    if not request.completed
                ]
                warming.future.set_exception(DeadlineExceeded(f"the link to {warming.peer} did not warm up in time"))
        return self._collect_zombies() or moved

    def _collect_batch(self, batch: _Batch) -> bool:
        moved = False
        for index, request in enumerate(batch.requests):
            if batch.results[index] is not None or not request.completed:
                continue
            moved = True
            batch.num_open -= 1
            batch.results[index] = self._verdict(batch, index, request)
        return moved

    def _verdict(self, batch: _Batch, index: int, request: Any) -> TransferResult:
        """Result of one completed transfer; a receive is verified here."""
        kind = "received" if batch.receives is not None else "sent"
        with self._lock:
            self._outstanding[batch.peer].discard(batch.tags[index])
        try:
            request.check_error()
        except Exception as error:
            logger.warning("transfer_failed peer=%s tag=%d error=%s", batch.peer, batch.tags[index], error)
            self._count("ucx_peers_lost", 1)
            return TransferResult.PEER_LOST
        self._count(f"ucx_{kind}_blocks", 1)
        self._count(f"ucx_{kind}_bytes", batch.buffers[index].nbytes)
        if batch.receives is not None:
            expected = batch.receives[index].digest
            if expected is not None and block_digest(batch.buffers[index]) != expected:
                self._count("ucx_corrupt_blocks", 1)
                return TransferResult.CORRUPT
        return TransferResult.OK

    def _give_up(self, batch: _Batch, result: TransferResult) -> None:
        for index, request in enumerate(batch.requests):
            if batch.results[index] is None:
                batch.results[index] = result
                batch.num_open -= 1
                if result is TransferResult.TIMEOUT:
                    self._count("ucx_timeouts", 1)
                self._zombies.append(
                    _Zombie(batch.peer, batch.tags[index], request, batch.buffers[index], batch.receives is not None)
                )

    def _collect_zombies(self) -> bool:
        done = [zombie for zombie in self._zombies if zombie.request.completed]
        if not done:
            return False
        self._zombies = [zombie for zombie in self._zombies if not zombie.request.completed]
        self._settle(done)
        return True

    def _settle(self, zombies: list[_Zombie]) -> None:
        with self._lock:
            for zombie in zombies:
                self._outstanding.get(zombie.peer, set()).discard(zombie.tag)
        tags = [zombie.tag for zombie in zombies if zombie.is_receive]
        if tags and self.on_settled is not None:
            self.on_settled(tags)

    def _peer_lost(self, peer: str, proved_dead: bool, future: Future[None]) -> None:
        for batch in [batch for batch in self._batches if batch.peer == peer]:
            self._collect_batch(batch)
            self._give_up(batch, TransferResult.PEER_LOST)
            self._batches.remove(batch)
            _resolve(batch.future, [result for result in batch.results if result is not None])
        for warming in [warming for warming in self._warmings if warming.peer == peer]:
            self._warmings.remove(warming)
            warming.future.set_exception(PeerLost(f"{peer} is gone"))
        self._close_endpoint(peer)
        with self._lock:
            self._connecting.pop(peer, None)
        if proved_dead:
            dead = [zombie for zombie in self._zombies if zombie.peer == peer]
            self._zombies = [zombie for zombie in self._zombies if zombie.peer != peer]
            self._settle(dead)
        self._count("ucx_peers_lost", 1)
        future.set_result(None)

    def _close_endpoint(self, peer: str) -> None:
        """Dropping an endpoint is not enough: only a closed one lets the worker go on to serve others."""
        endpoint = self._endpoints.pop(peer, None)
        if endpoint is None:
            return
        try:
            closing = endpoint.close()
            deadline = time.monotonic() + CLOSE_DEADLINE_S
            while not closing.completed and time.monotonic() < deadline:
                self._worker.progress()
        except Exception as error:
            logger.warning("endpoint_close_failed peer=%s error=%s", peer, error)

    def _end_all(self) -> None:
        for peer in list(self._endpoints):
            self._peer_lost(peer, False, Future())
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            if command is not None:
                # Endpoints are gone, so each late command ends at once with PEER_LOST.
                command()

    def _count(self, name: str, amount: int) -> None:
        with self._lock:
            self._stats[name] += amount


def _warm_tag(address: bytes) -> int:
    """Returns the tag of the warm-up message of the transport that lives at ``address``."""
    return WARM_TAG_BIT | (int.from_bytes(block_digest(address)[:8], "little") & (WARM_TAG_BIT - 1))


def _resolve(future: Future[Results], results: Results) -> None:
    if not future.done():
        future.set_result(results)


def _resolve_connect(warming: _Warming) -> None:
    try:
        for request in warming.requests:
            request.check_error()
    except Exception as error:
        warming.future.set_exception(PeerLost(f"no transport link to {warming.peer}: {error}"))
        return
    warming.future.set_result(None)
