"""The receiving process of the transfer bench, and the references that are measured beside it.

Life cycle: started by the bench with a pipe -> ``Setup`` -> any number of steps, each answered once -> ``None`` ends.
Both processes run on one machine, so that one monotonic clock times a transfer from push to landing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from bench.network import Place, call_inside
from kvstore.digest import block_digest
from kvstore.transport.base import BlockReceive, BlockSend, TransferResult, Transport
from kvstore.transport.ucx import UcxTransport

DEADLINE_S = 20.0
SENDER, RECEIVER = "bench-sender", "bench-receiver"
PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Setup:
    """The receiver's memory."""

    pool_bytes: int


@dataclass(frozen=True, slots=True)
class Relink:
    """Open a fresh transport and connect it to the sender at ``address``: by memory, or over a cable from ``place``."""

    address: bytes
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class Land:
    """Receive blocks that were pushed: tags from ``first_tag`` on; ``digests`` None means no verification."""

    first_tag: int
    num_blocks: int
    block_bytes: int
    digests: Sequence[bytes] | None


@dataclass(frozen=True, slots=True)
class Landed:
    """When the blocks had landed (``time.perf_counter``), how long the call took, what the process spent."""

    landed_at: float
    receive_s: float
    cpu_s: float
    all_ok: bool


@dataclass(frozen=True, slots=True)
class Reference:
    """Measure memcpy and digest over the same blocks of the same pool, on this process's core."""

    num_blocks: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Referenced:
    memcpy_s: float
    digest_s: float


@dataclass(frozen=True, slots=True)
class Watch:
    """Post one receive at a time for single blocks, say so each time, and answer with the landing times at the end."""

    first_tag: int
    num_repeats: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Echo:
    """Send back 64 bytes for each message, from the transport's own thread."""

    first_tag: int
    num_repeats: int
    block_bytes: int


class Pool:
    """Memory that is walked through from end to end, so that no step finds its bytes in a cache."""

    def __init__(self, size_bytes: int) -> None:
        self._memory = np.zeros(size_bytes, np.uint8)
        # Touched once: the first touch of a page is the kernel's work, not the transfer's.
        self._memory[::PAGE_BYTES] = 1
        self._next = 0

    def fill(self, seed: int) -> None:
        """Writes random bytes. Modifies: all of the pool."""
        generator = np.random.default_rng(seed)
        self._memory[:] = np.frombuffer(generator.bytes(self._memory.nbytes), np.uint8)

    def take(self, num_blocks: int, block_bytes: int) -> np.ndarray:
        """Returns the next blocks of the walk: shape (num_blocks, block_bytes), uint8, contiguous."""
        size = num_blocks * block_bytes
        if self._next + size > self._memory.nbytes:
            self._next = 0
        start = self._next
        self._next += -(-size // PAGE_BYTES) * PAGE_BYTES
        return self._memory[start : start + size].reshape(num_blocks, block_bytes)


def serve(connection: Connection) -> None:
    """Runs the receiving process until it is told to end."""
    _Receiver(connection).run()


class _Receiver:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._transport: Transport | None = None
        self._pool = Pool(PAGE_BYTES)

    def run(self) -> None:
        while (step := self._connection.recv()) is not None:
            match step:
                case Setup():
                    self._pool = Pool(step.pool_bytes)
                    self._connection.send(True)
                case Relink():
                    self._relink(step)
                case Land():
                    self._connection.send(self._land(step))
                case Reference():
                    self._connection.send(self._measure_reference(step))
                case Watch():
                    self._watch(step)
                case Echo():
                    self._echo(step)
                case _:
                    raise AssertionError(f"unknown step {step!r}")
        if self._transport is not None:
            self._transport.close()

    def _relink(self, step: Relink) -> None:
        if self._transport is not None:
            self._transport.close()
        self._transport = open_transport(step.place)
        self._connection.send(self._transport.address_for(SENDER))
        self._transport.connect(SENDER, step.address, same_host=step.place is None, deadline_s=DEADLINE_S)
        self._connection.send(True)

    def _land(self, step: Land) -> Landed:
        assert self._transport is not None
        blocks = self._pool.take(step.num_blocks, step.block_bytes)
        digests: Sequence[bytes | None] = step.digests or [None] * step.num_blocks
        cpu_before, before = time.process_time(), time.perf_counter()
        receives = [
            BlockReceive(step.first_tag + index, memoryview(blocks[index]), digests[index])
            for index in range(step.num_blocks)
        ]
        results = self._transport.receive(SENDER, receives, deadline_s=DEADLINE_S).result()
        landed_at = time.perf_counter()
        all_ok = all(result is TransferResult.OK for result in results)
        return Landed(landed_at, landed_at - before, time.process_time() - cpu_before, all_ok)

    def _measure_reference(self, step: Reference) -> Referenced:
        source = self._pool.take(step.num_blocks, step.block_bytes)
        target = self._pool.take(step.num_blocks, step.block_bytes)
        before = time.perf_counter()
        for index in range(step.num_blocks):
            target[index] = source[index]
        copied = time.perf_counter()
        blocks = self._pool.take(step.num_blocks, step.block_bytes)
        digest_before = time.perf_counter()
        for index in range(step.num_blocks):
            block_digest(blocks[index])
        return Referenced(copied - before, time.perf_counter() - digest_before)

    def _watch(self, step: Watch) -> None:
        assert self._transport is not None
        landed: list[float] = []
        for index in range(step.num_repeats):
            block = memoryview(self._pool.take(1, step.block_bytes)[0])
            receive = BlockReceive(step.first_tag + index, block, None)
            at: Future[float] = Future()
            future = self._transport.receive(SENDER, [receive], deadline_s=DEADLINE_S)
            future.add_done_callback(lambda _done, at=at: at.set_result(time.perf_counter()))  # type: ignore[misc]
            self._connection.send(True)
            landed.append(at.result())
            assert future.result() == [TransferResult.OK]
        self._connection.send(landed)

    def _echo(self, step: Echo) -> None:
        transport = self._transport
        assert transport is not None
        into, out = memoryview(bytearray(step.block_bytes)), memoryview(bytes(step.block_bytes))
        done: Future[None] = Future()

        def post(index: int) -> None:
            receive = BlockReceive(step.first_tag + index, into, None)
            future = transport.receive(SENDER, [receive], deadline_s=DEADLINE_S)
            future.add_done_callback(lambda _done: answer(index))

        def answer(index: int) -> None:
            if index + 1 < step.num_repeats:
                post(index + 1)
            sent = transport.push(SENDER, [BlockSend(step.first_tag + index, out)], deadline_s=DEADLINE_S)
            if index + 1 == step.num_repeats:
                sent.add_done_callback(lambda _done: done.set_result(None))

        post(0)
        self._connection.send(True)
        done.result()
        self._connection.send(True)


def open_transport(place: Place | None) -> UcxTransport:
    """Returns a transport here, or one at the end of a cable that knows no other device."""
    if place is None:
        return UcxTransport()
    return call_inside(place, lambda: UcxTransport(network_devices=(place.device,)))


def percentiles_us(samples_s: list[float]) -> dict[str, Any]:
    """Returns p50, p99 and p999 of samples in seconds, in microseconds; a tail that has too few samples is None."""
    from bench.report import quantile

    return {
        "p50_us": round(quantile(samples_s, 0.5) * 1e6, 2),
        "p99_us": round(quantile(samples_s, 0.99) * 1e6, 2) if len(samples_s) >= 100 else None,
        "p999_us": round(quantile(samples_s, 0.999) * 1e6, 2) if len(samples_s) >= 1000 else None,
    }
