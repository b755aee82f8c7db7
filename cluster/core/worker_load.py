"""What the prefill sides of workers have to do: how long a new prompt would wait there, and who did how much lately.

Pure. ``PrefillQueues`` holds the predicted cost of every prompt that was given to a worker and has not ended;
``WorkMeter`` remembers what was given to each worker, fading with time, so that an even load can be kept over minutes
and a worker that will soon be busy is known before its queue shows it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

NS_PER_S = 1_000_000_000
FADE_NS = 60 * NS_PER_S
"""Work counts for a share of 1/e after this time."""
BUSY_SHARE_MAX = 0.95
"""A worker is never expected to be busier than this: the wait of a queue has no bound at 1."""


@dataclass(slots=True)
class _Queue:
    costs_ns: dict[str, int] = field(default_factory=dict)
    """Attempt -> predicted cost, in the order in which they came."""
    free_at_ns: int = 0
    """When everything given so far is expected to be done."""


@dataclass(slots=True)
class PrefillQueues:
    """Prompts under way, by worker life. A life without prompts is not kept."""

    _queues: dict[str, _Queue] = field(default_factory=dict)

    def start(self, incarnation: str, attempt_id: str, *, cost_ns: int, now_ns: int) -> None:
        """A prompt was given to a worker. Modifies: when it is free again."""
        queue = self._queues.setdefault(incarnation, _Queue())
        assert attempt_id not in queue.costs_ns, f"{attempt_id} is under way there already"
        queue.costs_ns[attempt_id] = cost_ns
        queue.free_at_ns = max(queue.free_at_ns, now_ns) + cost_ns

    def end(self, incarnation: str, attempt_id: str, *, now_ns: int) -> None:
        """A prompt is computed or given up; an unknown one is ignored. What is left cannot take longer than itself."""
        queue = self._queues.get(incarnation)
        if queue is None or queue.costs_ns.pop(attempt_id, None) is None:
            return
        if not queue.costs_ns:
            del self._queues[incarnation]
            return
        queue.free_at_ns = min(queue.free_at_ns, now_ns + sum(queue.costs_ns.values()))

    def forget(self, incarnation: str) -> None:
        """A life is over."""
        self._queues.pop(incarnation, None)

    def wait_ns(self, incarnation: str, now_ns: int) -> int:
        """Returns how long a prompt would wait that is given to the worker now."""
        queue = self._queues.get(incarnation)
        return 0 if queue is None else max(0, queue.free_at_ns - now_ns)

    def num_prompts(self, incarnation: str) -> int:
        """Returns how many prompts are under way at a worker."""
        queue = self._queues.get(incarnation)
        return 0 if queue is None else len(queue.costs_ns)

    def check_invariants(self) -> None:
        """Asserts what must hold after every step."""
        assert all(queue.costs_ns for queue in self._queues.values()), "an idle worker is remembered"
        assert all(cost >= 0 for queue in self._queues.values() for cost in queue.costs_ns.values()), "negative cost"


@dataclass(slots=True)
class _Work:
    given_ns: float = 0.0
    num_prompts: float = 0.0
    at_ns: int = 0


@dataclass(slots=True)
class WorkMeter:
    """Work given to each worker life, fading with ``fade_ns``."""

    fade_ns: int = FADE_NS
    _works: dict[str, _Work] = field(default_factory=dict)

    def give(self, incarnation: str, *, cost_ns: int, now_ns: int) -> None:
        """A worker was given a prompt of this predicted cost."""
        work = self._faded(incarnation, now_ns)
        work.given_ns += cost_ns
        work.num_prompts += 1

    def level(self, incarnation: str, *, like: float, now_ns: int) -> None:
        """Counts a life that is new as one that did ``like`` already, or it would have to catch up with the others."""
        if incarnation not in self._works:
            self._works[incarnation] = _Work(like, 0.0, now_ns)

    def given_ns(self, incarnation: str, now_ns: int) -> float:
        """Returns what a worker was given lately, faded."""
        work = self._works.get(incarnation)
        return 0.0 if work is None else work.given_ns * self._share_left(work, now_ns)

    def expected_wait_ns(self, incarnation: str, now_ns: int) -> float:
        """Returns the wait that a queue has on average at this worker's load (M/D/1), whatever stands there now."""
        work = self._works.get(incarnation)
        if work is None or work.num_prompts <= 0:
            return 0.0
        busy = min(BUSY_SHARE_MAX, work.given_ns * self._share_left(work, now_ns) / self.fade_ns)
        return work.given_ns / work.num_prompts * busy / (2 * (1 - busy))

    def mean_cost_ns(self, now_ns: int) -> float:
        """Returns the mean cost of the prompts given lately; 0 when there were none."""
        shares = [(work, self._share_left(work, now_ns)) for work in self._works.values()]
        num_prompts = sum(work.num_prompts * share for work, share in shares)
        given_ns = sum(work.given_ns * share for work, share in shares)
        return given_ns / num_prompts if num_prompts > 0 else 0.0

    def forget(self, incarnation: str) -> None:
        """A life is over."""
        self._works.pop(incarnation, None)

    def knows(self, incarnation: str) -> bool:
        """Returns True for a life that was given work, or put on a level, before."""
        return incarnation in self._works

    def _faded(self, incarnation: str, now_ns: int) -> _Work:
        work = self._works.setdefault(incarnation, _Work(at_ns=now_ns))
        share = self._share_left(work, now_ns)
        work.given_ns *= share
        work.num_prompts *= share
        work.at_ns = max(work.at_ns, now_ns)
        return work

    def _share_left(self, work: _Work, now_ns: int) -> float:
        return math.exp(-max(0, now_ns - work.at_ns) / self.fade_ns)
