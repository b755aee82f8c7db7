"""Looks over a store node's shoulder while it runs: do its books add up, does every lease end?

Owns a timer of the node's loop and the counts of what it found. It reads the index and changes nothing. Each look is
bounded: the sums, the leases, and the next ``SLOTS_PER_LOOK`` slots, so that a whole slab is looked at in turn.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvstore.core.slab_index import SlabIndex

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
SLOTS_PER_LOOK = 256
LEASE_OVERDUE_NS = 2_000_000_000
"""A lease that stands so long after its deadline was forgotten by the node's timer."""


class Auditor:
    """One per store node. Life cycle: ``start`` -> looks once per ``PERIOD_S`` -> ``close``."""

    def __init__(self, index: SlabIndex, *, loop: asyncio.AbstractEventLoop, clock_ns: Callable[[], int]) -> None:
        self._index = index
        self._loop = loop
        self._clock_ns = clock_ns
        self._timer: asyncio.TimerHandle | None = None
        self._next_slot = 0
        self.num_looks = 0
        self.num_findings = 0

    def start(self) -> None:
        """Begins to look."""
        self._timer = self._loop.call_later(PERIOD_S, self._on_timer)

    def close(self) -> None:
        """Looks no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def look(self) -> list[str]:
        """Looks once; returns what is wrong, one sentence each, after counting and logging it."""
        findings = self._index.audit(range(self._next_slot, self._next_slot + SLOTS_PER_LOOK))
        self._next_slot += SLOTS_PER_LOOK
        if self._next_slot >= self._index.num_slots:
            self._next_slot = 0
        overdue_ns = self._clock_ns() - LEASE_OVERDUE_NS
        findings += [
            f"lease {lease.lease_id} of {lease.reader} stands after its deadline"
            for lease in self._index.leases()
            if lease.deadline_ns < overdue_ns
        ]
        self.num_looks += 1
        self.num_findings += len(findings)
        for finding in findings:
            logger.error("store_audit_failed %s", finding)
        return findings

    def _on_timer(self) -> None:
        self.look()
        self.start()
