"""One side of a transfer, in this process or in another one, with the same calls: what the transport tests drive.

``Side`` wraps a transport and the memory of its blocks. ``RemoteSide`` is a ``Side`` in a process of its own that can
be stopped and killed. Content of a block is a function of (seed, tag, size), so both ends know it without asking.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvstore.digest import block_digest
from kvstore.transport.base import BlockReceive, BlockSend, Transport

CALL_DEADLINE_S = 60.0
FILLER = 0xEE
FLOOD_BURST, FLOOD_PAUSE_S = 64, 0.5e-3


def content(tag: int, size: int, seed: int = 0) -> np.ndarray:
    """Returns what the block of ``tag`` holds: uint8, shape (size,)."""
    return np.frombuffer(np.random.default_rng((seed, tag)).bytes(size), np.uint8).copy()


def digest_of(tag: int, size: int, seed: int = 0) -> bytes:
    return bytes(block_digest(content(tag, size, seed)))


class Side:
    """A transport with its blocks. Every call returns plain values, so that it can be made over a pipe."""

    def __init__(self, make_transport: Callable[[], Transport]) -> None:
        self.transport = make_transport()
        self.transport.on_settled = self._on_settled
        self._settled: list[int] = []
        self._blocks: dict[tuple[str, int], np.ndarray] = {}
        self._futures: dict[str, Future[Any]] = {}

    def address(self) -> bytes:
        return self.transport.address()

    def address_for(self, peer: str) -> bytes:
        return self.transport.address_for(peer)

    def connect(self, peer: str, address: bytes, same_host: bool, deadline_s: float = 10.0) -> str:
        """Returns "ok" or the name of the error."""
        try:
            self.transport.connect(peer, address, same_host=same_host, deadline_s=deadline_s)
        except Exception as error:
            return type(error).__name__
        return "ok"

    def push(self, name: str, peer: str, tags: list[int], size: int, deadline_s: float = 20.0, seed: int = 0) -> None:
        """Starts to push the blocks of ``tags``; their results are asked for under ``name``.

        Another ``seed`` than 0 gives other bytes than the receiver's digests expect.
        """
        sends = []
        for tag in tags:
            block = self._blocks["send", tag] = content(tag, size, seed)
            sends.append(BlockSend(tag, memoryview(block)))
        self._futures[name] = self.transport.push(peer, sends, deadline_s=deadline_s)

    def flood(self, peer: str, first_tag: int, size: int) -> None:
        """Offers blocks that nobody wants, one message after another, from a thread that only the process ends."""
        block = memoryview(content(first_tag, size))

        def offer() -> None:
            for tag in itertools.count(first_tag):
                self.transport.push(peer, [BlockSend(tag, block)], deadline_s=CALL_DEADLINE_S)
                if tag % FLOOD_BURST == 0:
                    time.sleep(FLOOD_PAUSE_S)

        threading.Thread(target=offer, daemon=True).start()

    def push_damaged(self, name: str, peer: str, tags: list[int], size: int, flips: dict[int, int]) -> None:
        """Pushes blocks with one bit flipped in each that ``flips`` names: tag -> bit."""
        sends = []
        for tag in tags:
            block = self._blocks["send", tag] = content(tag, size)
            if tag in flips:
                block[flips[tag] // 8] ^= 1 << flips[tag] % 8
            sends.append(BlockSend(tag, memoryview(block)))
        self._futures[name] = self.transport.push(peer, sends, deadline_s=20.0)

    def receive(
        self, name: str, peer: str, tags: list[int], size: int, deadline_s: float = 20.0, verify: bool = True
    ) -> None:
        receives = []
        for tag in tags:
            block = self._blocks["receive", tag] = np.full(size, FILLER, np.uint8)
            receives.append(BlockReceive(tag, memoryview(block), digest_of(tag, size) if verify else None))
        self._futures[name] = self.transport.receive(peer, receives, deadline_s=deadline_s)

    def results(self, name: str, timeout_s: float = 30.0) -> list[str]:
        """Waits; returns the result of each block by name, in order."""
        return [result.name for result in self._futures[name].result(timeout_s)]

    def is_done(self, name: str) -> bool:
        return self._futures[name].done()

    def has(self, name: str) -> bool:
        return name in self._futures

    def landed(self, tag: int) -> bytes:
        """Returns the digest of what the destination of ``tag`` holds now."""
        return bytes(block_digest(self._blocks["receive", tag]))

    def fill(self, kind: str, tag: int, value: int) -> None:
        """Gives the memory of a block to somebody else."""
        self._blocks[kind, tag][:] = value

    def forget(self) -> None:
        """Lets go of all blocks and results: nothing may be under way."""
        self._blocks.clear()
        self._futures.clear()

    def has_only(self, kind: str, tag: int, value: int) -> bool:
        return bool((self._blocks[kind, tag] == value).all())

    def probe(self, peer: str, deadline_s: float = 5.0) -> str:
        """Returns "ok" or the name of the error."""
        try:
            assert 0 <= self.transport.probe(peer, deadline_s=deadline_s).result(deadline_s + 1) < deadline_s
        except Exception as error:
            return type(error).__name__
        return "ok"

    def peer_lost(self, peer: str, proved_dead: bool) -> None:
        self.transport.peer_lost(peer, proved_dead=proved_dead).result(10)

    def outstanding(self, peer: str) -> list[int]:
        return sorted(self.transport.outstanding(peer))

    def settled(self) -> list[int]:
        return sorted(self._settled)

    def stats(self) -> dict[str, int]:
        return self.transport.stats()

    def cpu_s(self) -> float:
        return time.process_time()

    def pid(self) -> int:
        return os.getpid()

    def close(self) -> None:
        self.transport.close()

    def start(self, name: str, *arguments: Any) -> Callable[[], Any]:
        """Makes a call and returns the function that gives its answer; over a pipe both halves are apart."""
        value = getattr(self, name)(*arguments)
        return lambda: value

    def _on_settled(self, tags: list[int]) -> None:
        self._settled += tags


class PumpedSide(Side):
    """A side over a backend that moves nothing by itself: whoever waits lets it move, and time pass."""

    def __init__(self, make_transport: Callable[[], Transport], *, pump: Callable[[float], None]) -> None:
        super().__init__(make_transport)
        self._pump = pump

    def results(self, name: str, timeout_s: float = 30.0) -> list[str]:
        self._pump(0.0)
        if not self._futures[name].done():
            self._pump(timeout_s)
        return super().results(name, 0.0)

    def is_done(self, name: str) -> bool:
        self._pump(0.0)
        return super().is_done(name)

    def outstanding(self, peer: str) -> list[int]:
        self._pump(0.0)
        return super().outstanding(peer)

    def settled(self) -> list[int]:
        self._pump(0.0)
        return super().settled()


class RemoteSide:
    """A ``Side`` in another process; its calls go over a pipe, one at a time."""

    def __init__(self, make_transport: Callable[[], Transport]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._lock = threading.Lock()
        self.process = context.Process(target=_serve, args=(theirs, make_transport), daemon=True)
        self.process.start()
        theirs.close()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *arguments, **keywords: self._call(name, arguments, keywords)

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Ends the process at once and waits until it is gone."""
        self.process.kill()
        self.process.join(10)

    def end(self) -> None:
        """Frees everything, whatever state the process is in."""
        if self.process.is_alive():
            self.signal(signal.SIGCONT)
            self.kill()
        self._connection.close()

    def start(self, name: str, *arguments: Any) -> Callable[[], Any]:
        """Sends a call and returns the function that waits for its answer."""
        self._lock.acquire()
        self._connection.send((name, arguments, {}))
        return self._answer

    def _call(self, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        self._lock.acquire()
        self._connection.send((name, arguments, keywords))
        return self._answer()

    def _answer(self) -> Any:
        try:
            if not self._connection.poll(CALL_DEADLINE_S):
                raise TimeoutError("the other side does not answer")
            value = self._connection.recv()
        finally:
            self._lock.release()
        if isinstance(value, BaseException):
            raise value
        return value


def _serve(connection: Connection, make_transport: Callable[[], Transport]) -> None:
    side = Side(make_transport)
    while True:
        try:
            name, arguments, keywords = connection.recv()
        except (EOFError, OSError):
            return
        try:
            value = getattr(side, name)(*arguments, **keywords)
        except Exception as error:
            value = error
        connection.send(value)
