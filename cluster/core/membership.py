"""Which workers the cluster has, what state each is in, and when a lost one is started again.

A pure state machine owned by the controller. A *slot* is a place for one worker (``decode-0``); each life in it
has its own incarnation. Soft state: nothing here survives the controller, workers announce themselves again.

Slot life: starting -> joining -> ready -> draining | lost; refused when the fingerprint differs. A lost slot is
started again after a back-off, at most ``RESTARTS_MAX`` times in ``RESTART_WINDOW_NS``. A draining one gets nothing
new; it is taken back (ready) or removed with its slot.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

RESTARTS_MAX = 5
RESTART_WINDOW_NS = 300 * 10**9
RESTART_DELAY_NS_MIN = 200 * 10**6
RESTART_DELAY_NS_MAX = 30 * 10**9
GONE_KEPT_MAX = 64


class SlotState(Enum):
    """Worker states of the contract."""

    STARTING = "starting"
    JOINING = "joining"
    READY = "ready"
    DRAINING = "draining"
    REFUSED = "refused"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Slot:
    """One worker slot as everybody may see it."""

    worker_id: str
    role: str
    state: SlotState
    incarnation: str
    pid: int | None = None
    refused_fields: tuple[str, ...] = ()
    restart_at_ns: int | None = None
    """When the replacement is due; None while alive or when the limit is reached."""


@dataclass(slots=True)
class Membership:
    """The controller's view. ``version`` grows with every change, so that watchers can wait for the next one."""

    version: int = 0
    slots: dict[str, Slot] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)
    """Incarnations proved dead, oldest first, at most ``GONE_KEPT_MAX``."""
    _restarts_ns: dict[str, list[int]] = field(default_factory=dict)

    def starting(self, worker_id: str, role: str, incarnation: str) -> None:
        """A new life begins in a slot. Modifies: the slot."""
        self._put(Slot(worker_id, role, SlotState.STARTING, incarnation))

    def joined(self, worker_id: str, incarnation: str, *, pid: int) -> bool:
        """The process is up and has its model. Returns False for a life that is over already."""
        return self._change(worker_id, incarnation, state=SlotState.JOINING, pid=pid)

    def refused(self, worker_id: str, incarnation: str, fields: tuple[str, ...]) -> bool:
        """The life may not serve: its fingerprint differs in ``fields``."""
        return self._change(worker_id, incarnation, state=SlotState.REFUSED, refused_fields=fields)

    def ready(self, worker_id: str, incarnation: str) -> bool:
        """The life may serve requests."""
        return self._change(worker_id, incarnation, state=SlotState.READY)

    def draining(self, worker_id: str, incarnation: str) -> bool:
        """The life gets nothing new and goes once it has nothing left; ``ready`` takes it back."""
        return self._change(worker_id, incarnation, state=SlotState.DRAINING)

    def removed(self, worker_id: str, incarnation: str) -> bool:
        """A life is proved over and its slot goes with it. Returns False for a slot that has another life, or none."""
        slot = self.slots.get(worker_id)
        if slot is None or slot.incarnation != incarnation:
            return False
        if slot.state is not SlotState.LOST:
            self.gone = [*self.gone, incarnation][-GONE_KEPT_MAX:]
        del self.slots[worker_id]
        self._restarts_ns.pop(worker_id, None)
        self.version += 1
        return True

    def lost(self, worker_id: str, incarnation: str, now_ns: int) -> Slot | None:
        """A life is proved over. Returns its slot, with the time of its replacement, or None if that was known."""
        slot = self.slots.get(worker_id)
        if slot is None or slot.incarnation != incarnation or slot.state is SlotState.LOST:
            return None
        self.gone = [*self.gone, incarnation][-GONE_KEPT_MAX:]
        recent = [t for t in self._restarts_ns.get(worker_id, []) if now_ns - t < RESTART_WINDOW_NS]
        restart_at_ns = None
        if len(recent) < RESTARTS_MAX:
            delay_ns = min(RESTART_DELAY_NS_MIN << len(recent), RESTART_DELAY_NS_MAX)
            restart_at_ns = now_ns + delay_ns
            recent.append(now_ns)
        self._restarts_ns[worker_id] = recent
        lost = replace(slot, state=SlotState.LOST, restart_at_ns=restart_at_ns)
        self._put(lost)
        return lost

    def ready_slots(self, *roles: str) -> list[Slot]:
        """Returns the ready slots of these roles in name order."""
        return [
            self.slots[name]
            for name in sorted(self.slots)
            if self.slots[name].state is SlotState.READY and self.slots[name].role in roles
        ]

    def check_invariants(self) -> None:
        """Asserts what must hold after every step."""
        assert len(self.gone) <= GONE_KEPT_MAX, len(self.gone)
        for name, slot in self.slots.items():
            assert slot.worker_id == name, (name, slot)
            assert slot.state is SlotState.LOST or slot.restart_at_ns is None, slot
            assert slot.state is not SlotState.READY or slot.pid is not None, slot
        alive = [s.incarnation for s in self.slots.values() if s.state is not SlotState.LOST]
        assert len(alive) == len(set(alive)), "two slots live the same incarnation"

    def _change(self, worker_id: str, incarnation: str, **changes: object) -> bool:
        slot = self.slots.get(worker_id)
        if slot is None or slot.incarnation != incarnation or slot.state in (SlotState.LOST, SlotState.REFUSED):
            return False
        self._put(replace(slot, **changes))  # type: ignore[arg-type]
        return True

    def _put(self, slot: Slot) -> None:
        self.slots[slot.worker_id] = slot
        self.version += 1
