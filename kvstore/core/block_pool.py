"""The block pool of one worker: which slot of the pool belongs to whom, as a pure state machine.

Owns the state of N slots and the attempts that hold them. Never touches the bytes of a block, never reads a clock,
never waits: time enters as ``now_ns`` and ``deadline_ns`` of one clock, the caller's.

Life cycle of a slot:

    free ──reserve──> reserved ──landed──> owned ──release──> free
    free ──allocate / extend─────────────> owned ──vacate──> free
    reserved, owned ──release or expire while a peer may still touch it──> quarantined
    quarantined ──writer_done | peer_dead──> free

*Reserved* is a destination that a peer will write. *Owned* is local: computed here or completely received.
*Quarantined* fences memory: a stopped peer that wakes up can still write into (or read from) the slot, so it is
given out again only when every transfer that named it is complete, or its peer is proved dead and the connection
is closed.

A slot's generation rises each time the slot is given out, so a reference (slot, generation) to an earlier life is
recognised. A tag is given once in the life of the pool. Expected outcomes are typed results: ``Reservation``,
``NoCapacityResult``, ``NeverFits``, ``StaleAttempt``.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum

from kvstore.core.ids import AttemptId, Incarnation
from kvstore.core.messages import DestinationBlock

MAX_TAG = (1 << 63) - 1
MAX_RETIRED_ATTEMPTS = 4096
"""How many finished attempts are remembered, so that a late duplicate of their reservation is refused."""


class SlotState(Enum):
    """Where a slot is in its life cycle."""

    FREE = "free"
    RESERVED = "reserved"
    OWNED = "owned"
    QUARANTINED = "quarantined"


class QuarantineReason(Enum):
    """Why a slot may not be given out yet."""

    RELEASED_WHILE_WRITTEN = "released_while_written"
    RELEASED_WHILE_READ = "released_while_read"
    EXPIRED_WHILE_WRITTEN = "expired_while_written"


@dataclass(frozen=True, slots=True)
class Reservation:
    """Slots given to an attempt, in block order; each with its generation and its never reused tag."""

    blocks: tuple[DestinationBlock, ...]


@dataclass(frozen=True, slots=True)
class NoCapacityResult:
    """Not now: fewer slots are free than asked for; the same call may succeed later. Nothing was taken."""

    num_blocks: int
    num_free: int
    num_quarantined: int


@dataclass(frozen=True, slots=True)
class NeverFits:
    """Not ever: the pool has fewer slots than asked for. Nothing was taken."""

    num_blocks: int
    num_total: int


@dataclass(frozen=True, slots=True)
class StaleAttempt:
    """The (attempt, epoch) is unknown, finished, superseded or already there. Nothing was changed."""

    attempt_id: AttemptId
    epoch: int


@dataclass(frozen=True, slots=True)
class QuarantinedSlot:
    """One slot under quarantine: which life of it, why, and whose deaths would end it."""

    slot: int
    generation: int
    attempt_id: AttemptId
    epoch: int
    reason: QuarantineReason
    peers: frozenset[Incarnation]
    since_ns: int


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """``free + reserved + owned + quarantined == total`` at any time."""

    free: int
    reserved: int
    owned: int
    quarantined: int
    total: int
    attempts: int
    quarantine_over_limit: bool
    """More slots are quarantined than the pool's limit: the peers concerned must be cut off for good."""


@dataclass(slots=True)
class _Attempt:
    epoch: int
    deadline_ns: int | None
    peers: set[Incarnation]
    """Processes that may touch the slots and are not proved dead; never more than the pairs of one request."""
    was_bound: bool
    slots: list[int] = field(default_factory=list)
    num_reserved: int = 0


def _new_attempt(epoch: int, deadline_ns: int | None, peer: Incarnation | None) -> _Attempt:
    peers = set() if peer is None else {peer}
    return _Attempt(epoch=epoch, deadline_ns=deadline_ns, peers=peers, was_bound=bool(peers))


class BlockPool:
    """Slots of one worker's device pool. Belongs to one thread."""

    def __init__(self, num_blocks: int, *, quarantine_limit_blocks: int | None = None) -> None:
        """``quarantine_limit_blocks`` only raises a flag in ``counts``; default: half of the pool."""
        assert num_blocks >= 1, num_blocks
        self._total = num_blocks
        self._quarantine_limit = num_blocks // 2 if quarantine_limit_blocks is None else quarantine_limit_blocks
        self._state = [SlotState.FREE] * num_blocks
        self._generation = [0] * num_blocks
        self._holder: list[AttemptId | None] = [None] * num_blocks
        # The slot that has been free longest is given out first: a stray late write then meets a slot whose last
        # life ended as long ago as possible.
        self._free: deque[int] = deque(range(num_blocks))
        self._attempts: dict[AttemptId, _Attempt] = {}
        self._quarantine: dict[int, QuarantinedSlot] = {}
        self._retired: OrderedDict[AttemptId, int] = OrderedDict()
        self._num_reserved = 0
        self._next_tag = 1

    # --- taking slots -------------------------------------------------------------------------------------

    def reserve(
        self,
        attempt_id: AttemptId,
        epoch: int,
        *,
        num_blocks: int,
        deadline_ns: int | None,
        writer: Incarnation | None = None,
    ) -> Reservation | NoCapacityResult | NeverFits | StaleAttempt:
        """Reserves slots that a peer will write. All or nothing.

        The attempt expires at ``deadline_ns`` (see ``expire``) as long as a slot has not landed; None: never.
        ``writer`` may be bound later (``bind_peer``), but before the first transfer is posted.
        """
        refusal = self._refuse_new(attempt_id, epoch, num_blocks)
        if refusal is not None:
            return refusal
        self._attempts[attempt_id] = _new_attempt(epoch, deadline_ns, writer)
        return self._give(attempt_id, num_blocks, SlotState.RESERVED)

    def allocate(
        self, attempt_id: AttemptId, epoch: int, *, num_blocks: int, reader: Incarnation | None = None
    ) -> Reservation | NoCapacityResult | NeverFits | StaleAttempt:
        """Gives a new attempt slots that this worker fills itself. ``reader``: the peer that will read them."""
        refusal = self._refuse_new(attempt_id, epoch, num_blocks)
        if refusal is not None:
            return refusal
        self._attempts[attempt_id] = _new_attempt(epoch, None, reader)
        return self._give(attempt_id, num_blocks, SlotState.OWNED)

    def extend(
        self, attempt_id: AttemptId, epoch: int, *, num_blocks: int
    ) -> Reservation | NoCapacityResult | NeverFits | StaleAttempt:
        """Gives an attempt more slots for its own tokens; they are owned at once. All or nothing."""
        attempt = self._current(attempt_id, epoch)
        if attempt is None:
            return StaleAttempt(attempt_id, epoch)
        return self._refuse_size(num_blocks, len(attempt.slots)) or self._give(attempt_id, num_blocks, SlotState.OWNED)

    def bind_peer(self, attempt_id: AttemptId, epoch: int, peer: Incarnation) -> bool:
        """Names a process that will touch the attempt's slots, before the first transfer. False: stale.

        A source that is pushed again to another peer has several; its slots then wait for all of them.
        """
        attempt = self._current(attempt_id, epoch)
        if attempt is None:
            return False
        attempt.peers.add(peer)
        attempt.was_bound = True
        return True

    def renew(self, attempt_id: AttemptId, epoch: int, *, deadline_ns: int | None) -> bool:
        """Moves the deadline of a reservation; None ends it (after the hand-off). False: stale."""
        attempt = self._current(attempt_id, epoch)
        if attempt is None:
            return False
        attempt.deadline_ns = deadline_ns
        return True

    def landed(self, attempt_id: AttemptId, epoch: int, *, slot: int, generation: int) -> bool:
        """The transfer into a reserved slot is complete and its digest was right: the slot is owned.

        Returns False, changing nothing, when attempt, epoch or generation is stale or the slot is not reserved.
        """
        attempt = self._current(attempt_id, epoch)
        if attempt is None or not self.is_current(slot, generation):
            return False
        if self._holder[slot] != attempt_id or self._state[slot] is not SlotState.RESERVED:
            return False
        self._state[slot] = SlotState.OWNED
        attempt.num_reserved -= 1
        self._num_reserved -= 1
        return True

    # --- giving slots back --------------------------------------------------------------------------------

    def release(
        self,
        attempt_id: AttemptId,
        epoch: int,
        *,
        now_ns: int,
        writer_may_still_write: bool = False,
        reader_may_still_read: bool = False,
    ) -> bool:
        """Ends an attempt. Slots no peer can touch become free, the others are quarantined.

        ``writer_may_still_write``: slots that have not landed are quarantined (destination side), unless no peer
        was ever bound. ``reader_may_still_read``: every slot is quarantined (source side); the reader must be
        bound. Both are void once every peer is proved dead. Returns False for a stale attempt.
        """
        if self._current(attempt_id, epoch) is None:
            return False
        self._end(
            attempt_id,
            now_ns,
            reserved_reason=QuarantineReason.RELEASED_WHILE_WRITTEN if writer_may_still_write else None,
            owned_reason=QuarantineReason.RELEASED_WHILE_READ if reader_may_still_read else None,
        )
        return True

    def vacate(self, attempt_id: AttemptId, epoch: int) -> int:
        """Takes all slots from an attempt that goes on: it may be extended again. Returns how many are free now.

        Every slot must be owned, and no peer may be able to touch one. 0 for a stale attempt.
        """
        attempt = self._current(attempt_id, epoch)
        if attempt is None:
            return 0
        assert attempt.num_reserved == 0, f"{attempt_id}: {attempt.num_reserved} slots have not landed"
        slots, attempt.slots = attempt.slots, []
        for slot in slots:
            self._set_free(slot)
        return len(slots)

    def expire(self, now_ns: int) -> tuple[tuple[AttemptId, int], ...]:
        """Ends every attempt whose deadline has come while a slot has not landed; returns them.

        With a peer bound, slots that have not landed are quarantined; without one nothing was ever posted.
        """
        expired = tuple(
            (attempt_id, attempt.epoch)
            for attempt_id, attempt in self._attempts.items()
            if attempt.num_reserved and attempt.deadline_ns is not None and attempt.deadline_ns <= now_ns
        )
        for attempt_id, _ in expired:
            self._end(attempt_id, now_ns, reserved_reason=QuarantineReason.EXPIRED_WHILE_WRITTEN, owned_reason=None)
        return expired

    def writer_done(self, attempt_id: AttemptId, epoch: int) -> int:
        """Every transfer of this attempt is complete, on both sides: its quarantine ends. Returns slots freed."""
        return self._leave_quarantine(
            entry for entry in self._quarantine.values() if (entry.attempt_id, entry.epoch) == (attempt_id, epoch)
        )

    def peer_dead(self, incarnation: Incarnation) -> int:
        """The peer is proved dead *and* the connection to it is closed: its quarantine ends. Returns slots freed.

        Attempts that named it stay until they are released; nobody can touch their slots any more.
        """
        for attempt in self._attempts.values():
            attempt.peers.discard(incarnation)
        for slot, entry in self._quarantine.items():
            if incarnation in entry.peers:
                self._quarantine[slot] = replace(entry, peers=entry.peers - {incarnation})
        return self._leave_quarantine(entry for entry in self._quarantine.values() if not entry.peers)

    # --- looking ------------------------------------------------------------------------------------------

    def is_current(self, slot: int, generation: int) -> bool:
        """Returns True while the slot lives the life that ``generation`` names."""
        if not 0 <= slot < self._total or self._state[slot] is SlotState.FREE:
            return False
        return self._generation[slot] == generation

    def state_of(self, slot: int) -> SlotState:
        """Returns the state of one slot in [0, total)."""
        return self._state[slot]

    def blocks_of(self, attempt_id: AttemptId, epoch: int) -> tuple[int, ...]:
        """Returns the attempt's slots in block order; empty when it is stale."""
        attempt = self._current(attempt_id, epoch)
        return () if attempt is None else tuple(attempt.slots)

    def quarantined(self) -> tuple[QuarantinedSlot, ...]:
        """Returns what is quarantined, oldest first, for status pages."""
        return tuple(self._quarantine.values())

    def next_deadline_ns(self) -> int | None:
        """Returns when ``expire`` has something to do next, or None."""
        return min(
            (a.deadline_ns for a in self._attempts.values() if a.num_reserved and a.deadline_ns is not None),
            default=None,
        )

    def counts(self) -> PoolCounts:
        """Returns how many slots are in which state."""
        free, quarantined = len(self._free), len(self._quarantine)
        return PoolCounts(
            free=free,
            reserved=self._num_reserved,
            owned=self._total - free - quarantined - self._num_reserved,
            quarantined=quarantined,
            total=self._total,
            attempts=len(self._attempts),
            quarantine_over_limit=quarantined > self._quarantine_limit,
        )

    def check_invariants(self) -> None:
        """Raises: AssertionError when the books do not agree with each other."""
        held = [slot for attempt in self._attempts.values() for slot in attempt.slots]
        everywhere = sorted((*self._free, *held, *self._quarantine))
        assert everywhere == list(range(self._total)), f"slots lost or held twice: {everywhere}"
        assert all(self._state[slot] is SlotState.FREE for slot in self._free), "free list holds a slot in use"
        for slot, entry in self._quarantine.items():
            assert self._state[slot] is SlotState.QUARANTINED and entry.slot == slot, entry
            assert entry.peers, f"quarantined for nobody: {entry}"
            assert entry.generation == self._generation[slot], entry
        for attempt_id, attempt in self._attempts.items():
            assert all(self._holder[slot] == attempt_id for slot in attempt.slots), attempt_id
            states = [self._state[slot] for slot in attempt.slots]
            assert set(states) <= {SlotState.RESERVED, SlotState.OWNED}, (attempt_id, states)
            assert states.count(SlotState.RESERVED) == attempt.num_reserved, (attempt_id, attempt)
        assert self._num_reserved == sum(a.num_reserved for a in self._attempts.values()), self._num_reserved
        assert len(self._retired) <= MAX_RETIRED_ATTEMPTS, len(self._retired)

    # --- inside -------------------------------------------------------------------------------------------

    def _current(self, attempt_id: AttemptId, epoch: int) -> _Attempt | None:
        attempt = self._attempts.get(attempt_id)
        return attempt if attempt is not None and attempt.epoch == epoch else None

    def _refuse_new(
        self, attempt_id: AttemptId, epoch: int, num_blocks: int
    ) -> NoCapacityResult | NeverFits | StaleAttempt | None:
        retired_epoch = self._retired.get(attempt_id)
        if attempt_id in self._attempts or (retired_epoch is not None and epoch <= retired_epoch):
            return StaleAttempt(attempt_id, epoch)
        return self._refuse_size(num_blocks, 0)

    def _refuse_size(self, num_blocks: int, num_held: int) -> NoCapacityResult | NeverFits | None:
        assert num_blocks >= 0, num_blocks
        if num_held + num_blocks > self._total:
            return NeverFits(num_held + num_blocks, self._total)
        if num_blocks > len(self._free):
            return NoCapacityResult(num_blocks, len(self._free), len(self._quarantine))
        return None

    def _give(self, attempt_id: AttemptId, num_blocks: int, state: SlotState) -> Reservation:
        attempt = self._attempts[attempt_id]
        blocks = []
        for _ in range(num_blocks):
            slot = self._free.popleft()
            assert self._next_tag <= MAX_TAG, self._next_tag
            self._generation[slot] += 1
            self._state[slot] = state
            self._holder[slot] = attempt_id
            blocks.append(DestinationBlock(slot, self._generation[slot], self._next_tag))
            attempt.slots.append(slot)
            self._next_tag += 1
        if state is SlotState.RESERVED:
            attempt.num_reserved += num_blocks
            self._num_reserved += num_blocks
        return Reservation(tuple(blocks))

    def _end(
        self,
        attempt_id: AttemptId,
        now_ns: int,
        *,
        reserved_reason: QuarantineReason | None,
        owned_reason: QuarantineReason | None,
    ) -> None:
        """Takes an attempt out of the books; a reason given means: quarantine the slots in that state."""
        attempt = self._attempts.pop(attempt_id)
        if not attempt.peers:
            # A peer is bound before its first transfer is posted, so without one no transfer can be under way.
            assert owned_reason is None or attempt.was_bound, f"{attempt_id}: released to a reader never bound"
            reserved_reason = owned_reason = None
        for slot in attempt.slots:
            reason = reserved_reason if self._state[slot] is SlotState.RESERVED else owned_reason
            if reason is None:
                self._set_free(slot)
                continue
            self._state[slot] = SlotState.QUARANTINED
            self._quarantine[slot] = QuarantinedSlot(
                slot, self._generation[slot], attempt_id, attempt.epoch, reason, frozenset(attempt.peers), now_ns
            )
        self._num_reserved -= attempt.num_reserved
        self._retired.pop(attempt_id, None)
        self._retired[attempt_id] = attempt.epoch
        if len(self._retired) > MAX_RETIRED_ATTEMPTS:
            self._retired.popitem(last=False)

    def _leave_quarantine(self, entries: Iterable[QuarantinedSlot]) -> int:
        leaving = list(entries)
        for entry in leaving:
            del self._quarantine[entry.slot]
            self._set_free(entry.slot)
        return len(leaving)

    def _set_free(self, slot: int) -> None:
        self._state[slot] = SlotState.FREE
        self._holder[slot] = None
        self._free.append(slot)
