"""Virtual time: one queue of events, lives that run them, and the log of everything that happened.

Owns the clock and the queue. An event belongs to a *life* (one incarnation of a process) or to the world. A dead life
runs nothing more; a paused one keeps its events and runs them, in order, when it goes on. That is what SIGSTOP does: a
process can stop between any two events, such as a check and the act it allows.

Never reads a real clock and draws no randomness. Equal inputs give equal logs, on every machine.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import msgspec

PPM = 1_000_000
EVENTS_MAX = 100_000
"""More events than this in one run are a world that spins."""


class Life:
    """One incarnation of a simulated process, with its own clock."""

    __slots__ = ("backlog", "dead", "drift_ppm", "incarnation", "name", "offset_ns", "paused")

    def __init__(self, name: str, incarnation: str, *, offset_ns: int = 0, drift_ppm: int = 0) -> None:
        self.name = name
        self.incarnation = incarnation
        self.offset_ns = offset_ns
        self.drift_ppm = drift_ppm
        self.paused = False
        self.dead = False
        self.backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []


class Kernel:
    """The queue of events and the virtual clock, in nanoseconds since the start."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.num_events = 0
        self.log: list[tuple[Any, ...]] = []
        self._queue: list[tuple[int, int, Life | None, Callable[..., None], tuple[Any, ...]]] = []
        self._seq = 0

    def at(self, delay_ns: int, life: Life | None, call: Callable[..., None], *args: Any) -> None:
        """Runs ``call(*args)`` after ``delay_ns`` of true time, if ``life`` is not dead by then."""
        assert delay_ns >= 0, delay_ns
        self._seq += 1
        heapq.heappush(self._queue, (self.now_ns + delay_ns, self._seq, life, call, args))

    def clock_ns(self, life: Life) -> int:
        """Returns what the clock of a life shows now."""
        return life.offset_ns + self.now_ns + self.now_ns * life.drift_ppm // PPM

    def note(self, *what: Any) -> None:
        """Adds a fact to the log: plain strings and numbers."""
        self.log.append((self.now_ns, *what))

    def pause(self, life: Life) -> None:
        """Stops a life where it stands; its events wait."""
        life.paused = True

    def resume(self, life: Life) -> None:
        """Lets a paused life go on; what waited runs now, in order."""
        life.paused = False
        backlog, life.backlog = life.backlog, []
        for call, args in backlog:
            self.at(0, life, call, *args)

    def run(self, *, until_ns: int) -> bool:
        """Runs events up to ``until_ns``. Returns True when none is left at all; False also beyond ``EVENTS_MAX``."""
        queue, log = self._queue, self.log
        pop = heapq.heappop
        while queue:
            if queue[0][0] > until_ns or self.num_events >= EVENTS_MAX:
                self.now_ns = until_ns
                return False
            now_ns, _, life, call, args = pop(queue)
            self.now_ns = now_ns
            if life is not None:
                if life.dead:
                    continue
                if life.paused:
                    life.backlog.append((call, args))
                    continue
            self.num_events += 1
            log.append((now_ns, life.name if life is not None else "", call.__name__))
            call(*args)
        return True

    def log_hash(self) -> str:
        """Returns the BLAKE2b-128 of the whole log, as hex digits."""
        return blake2b(msgspec.msgpack.encode(self.log), digest_size=16).hexdigest()
