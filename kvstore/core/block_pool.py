"""The block pool of one worker: which slot of the pool belongs to whom, as a pure state machine.

Owns the state of N slots and the attempts that hold them. Never touches the bytes of a block, never reads a clock,
never waits: time enters as ``now_ns`` and ``deadline_ns`` of one clock, the caller's.

Life cycle of a slot:

    free ──reserve──> reserved ──landed──> owned ──release──> free
    free ──allocate / extend─────────────> owned ──vacate──> free
    owned ──share──> cached ──last hold ends, room is needed──> free
    reserved, owned ──release or expire while a peer may still touch it──> quarantined
    quarantined ──writer_done | peer_dead──> free

*Reserved* is a destination that a peer will write. *Owned* is local: computed here or completely received.
*Cached* is a complete block under its hash (``kvstore.core.prefix_cache``): nobody writes it any more, so any number
of attempts may hold it, and it stays when all have ended, until the room is needed. A block that is not complete is
its attempt's alone. A cached block that a peer may still read is not given away either, but may be shared meanwhile.
*Quarantined* fences memory: a stopped peer that wakes up can still write into (or read from) the slot, so it is
given out again only when every transfer that named it is complete, or its peer is proved dead and the connection
is closed.

A slot's generation rises each time the slot is given out, so a reference (slot, generation) to an earlier life is
recognised. A tag is given once in the life of the pool. Expected outcomes are typed results: ``Reservation``,
``NoCapacityResult``, ``NeverFits``, ``StaleAttempt``.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvstore.core.eviction import EvictionPolicy, LruPolicy
from kvstore.core.ids import AttemptId, BlockDigest, BlockHash, Incarnation
from kvstore.core.messages import DestinationBlock
from kvstore.core.pool_types import (
    CachedBlock,
    NeverFits,
    NoCapacityResult,
    PoolCounts,
    QuarantinedSlot,
    QuarantineReason,
    Reservation,
    SlotState,
    StaleAttempt,
)
from kvstore.core.prefix_cache import PrefixCache

__all__ = [
    "BlockPool",
    "CachedBlock",
    "NeverFits",
    "NoCapacityResult",
    "PoolCounts",
    "QuarantineReason",
    "QuarantinedSlot",
    "Reservation",
    "SlotState",
    "StaleAttempt",
]

MAX_TAG = (1 << 63) - 1
MAX_RETIRED_ATTEMPTS = 4096
"""How many finished attempts are remembered, so that a late duplicate of their reservation is refused."""


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

    def __init__(
        self,
        num_blocks: int,
        *,
        quarantine_limit_blocks: int | None = None,
        policy: EvictionPolicy | None = None,
        keeps_cached: bool = True,
    ) -> None:
        """``quarantine_limit_blocks`` only raises a flag in ``counts``; default: half of the pool.

        ``policy``: which cached block leaves first when room is needed; default LRU. Without ``keeps_cached`` a
        complete block may be shared, but goes with the last attempt that holds it.
        """
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
        self._cache = PrefixCache(policy if policy is not None else LruPolicy(num_blocks), keeps_idle=keeps_cached)
        self._quarantine: dict[tuple[int, AttemptId, int], QuarantinedSlot] = {}
        """By slot and ended attempt: a cached block may have been read for several."""
        self._num_quarantined = 0
        """Slots in state QUARANTINED."""
        self._retired: OrderedDict[AttemptId, int] = OrderedDict()
        self._num_reserved = 0
        self._next_tag = 1
        self.num_evicted = 0
        """Cached blocks that had to leave; only grows."""

    # --- taking slots -------------------------------------------------------------------------------------

    def reserve(
        self,
        attempt_id: AttemptId,
        epoch: int,
        *,
        num_blocks: int,
        deadline_ns: int | None,
        writer: Incarnation | None = None,
        cached: Sequence[BlockHash] = (),
    ) -> Reservation | NoCapacityResult | NeverFits | StaleAttempt:
        """Reserves slots that a peer will write. All or nothing.

        The attempt expires at ``deadline_ns`` (see ``expire``) as long as a slot has not landed; None: never.
        ``writer`` may be bound later (``bind_peer``), but before the first transfer is posted. ``cached``: blocks of
        the pool (``match``) that the attempt shares instead of the first of its ``num_blocks``.
        """
        refusal = self._refuse_new(attempt_id, epoch, num_blocks, cached)
        if refusal is not None:
            return refusal
        self._attempts[attempt_id] = _new_attempt(epoch, deadline_ns, writer)
        return self._give(attempt_id, num_blocks, SlotState.RESERVED, cached)

    def allocate(
        self,
        attempt_id: AttemptId,
        epoch: int,
        *,
        num_blocks: int,
        reader: Incarnation | None = None,
        cached: Sequence[BlockHash] = (),
    ) -> Reservation | NoCapacityResult | NeverFits | StaleAttempt:
        """Gives a new attempt slots that this worker fills itself. ``reader``: the peer that will read them.

        ``cached`` as in ``reserve``.
        """
        refusal = self._refuse_new(attempt_id, epoch, num_blocks, cached)
        if refusal is not None:
            return refusal
        self._attempts[attempt_id] = _new_attempt(epoch, None, reader)
        return self._give(attempt_id, num_blocks, SlotState.OWNED, cached)

    def extend(
        self, attempt_id: AttemptId, epoch: int, *, num_blocks: int, cached: Sequence[BlockHash] = ()
    ) -> Reservation | NoCapacityResult | NeverFits | StaleAttempt:
        """Gives an attempt more slots for its own tokens; they are owned at once. All or nothing.

        ``cached`` as in ``reserve``.
        """
        attempt = self._current(attempt_id, epoch)
        if attempt is None:
            return StaleAttempt(attempt_id, epoch)
        refusal = self._refuse_size(num_blocks, len(attempt.slots), cached)
        return refusal or self._give(attempt_id, num_blocks, SlotState.OWNED, cached)

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

    # --- complete blocks ----------------------------------------------------------------------------------

    def match(self, hashes: Sequence[BlockHash]) -> tuple[CachedBlock, ...]:
        """Returns the cached blocks of ``hashes``, from the first one on without a gap. Nothing is held by that."""
        blocks = []
        for block_hash in hashes:
            block = self.find(block_hash)
            if block is None:
                break
            blocks.append(block)
        return tuple(blocks)

    def find(self, block_hash: BlockHash) -> CachedBlock | None:
        """Returns one cached block, or None."""
        slot = self._cache.slot_of(block_hash)
        facts = self._cache.facts(slot) if slot is not None else None
        if slot is None or facts is None:
            return None
        return CachedBlock(slot, self._generation[slot], *facts)

    def num_taken(self, num_blocks: int, hashes: Sequence[BlockHash]) -> int:
        """Returns how many available slots it takes to give out so many blocks, the cached of ``hashes`` among them."""
        return num_blocks - sum(not self._cache.is_idle(block.slot) for block in self.match(hashes))

    def share(
        self, attempt_id: AttemptId, epoch: int, *, index: int, block_hash: BlockHash, digest: BlockDigest
    ) -> bool:
        """Block ``index`` of an attempt's table is complete, as its digest says, and nobody writes it any more.

        Others may hold it from now on, and it stays when the attempt ends. Returns False, changing nothing, when the
        attempt is stale or the pool has this block in another slot already. The block must be owned.
        """
        attempt = self._current(attempt_id, epoch)
        if attempt is None:
            return False
        slot = attempt.slots[index]
        if self._state[slot] is SlotState.CACHED:
            facts = self._cache.facts(slot)
            assert facts is None or facts[0] == block_hash, f"slot {slot} holds another block than {block_hash.hex()}"
            return facts is not None
        assert self._state[slot] is SlotState.OWNED, f"slot {slot} is {self._state[slot].value}: not complete"
        if not self._cache.publish(slot, block_hash, digest):
            return False
        self._state[slot] = SlotState.CACHED
        self._holder[slot] = None
        return True

    def drop(self, block_hash: BlockHash) -> bool:
        """A cached block is not what it should be: nobody is given it any more. Returns False for an unknown one.

        Attempts that hold it keep their slot, but ``is_intact`` tells them.
        """
        if self._cache.slot_of(block_hash) is None:
            return False
        slot = self._cache.drop(block_hash)
        if slot is not None:
            self._set_free(slot)
        return True

    def is_intact(self, block: CachedBlock) -> bool:
        """Returns True while the slot holds this block, in this life, and it was not dropped."""
        return self.is_current(block.slot, block.generation) and self._cache.facts(block.slot) == (
            block.block_hash,
            block.digest,
        )

    def cached_hashes(self) -> list[BlockHash]:
        """Returns every block that can be found now."""
        return self._cache.hashes()

    def on_cached(self, listener: Callable[[BlockHash, bool], None]) -> None:
        """Calls ``listener(hash, is_here)`` whenever a block can be found from now on, or not any more."""
        self._cache.on_change = listener

    def on_dropped(self, listener: Callable[[int], None]) -> None:
        """Calls ``listener(slot)`` for each dropped block when nobody holds it any more: its bytes may be cleared."""
        self._cache.on_dropped = listener

    def flush(self) -> int:
        """Forgets every cached block, at once where nobody holds it. Returns how many slots are free by that."""
        freed = 0
        for block_hash in self._cache.hashes():
            slot = self._cache.drop(block_hash)
            if slot is not None:
                self._set_free(slot)
                freed += 1
        return freed

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
        """Takes all slots from an attempt that goes on: it may be extended again. Returns how many it held.

        Every slot must be owned, and no peer may be able to touch one. 0 for a stale attempt.
        """
        attempt = self._current(attempt_id, epoch)
        if attempt is None:
            return 0
        assert attempt.num_reserved == 0, f"{attempt_id}: {attempt.num_reserved} slots have not landed"
        slots, attempt.slots = attempt.slots, []
        for slot, parent in self._leaf_first(slots):
            self._let_go(slot, parent=parent)
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
        for key, entry in self._quarantine.items():
            if incarnation in entry.peers:
                self._quarantine[key] = replace(entry, peers=entry.peers - {incarnation})
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
        free, cached = len(self._free), self._cache.num_idle
        quarantined = self._num_quarantined + self._cache.num_fenced
        return PoolCounts(
            free=free,
            reserved=self._num_reserved,
            owned=self._total - free - cached - quarantined - self._num_reserved,
            cached=cached,
            quarantined=quarantined,
            total=self._total,
            attempts=len(self._attempts),
            quarantine_over_limit=quarantined > self._quarantine_limit,
        )

    def check_invariants(self) -> None:
        """Raises: AssertionError when the books do not agree with each other."""
        self._cache.check_invariants()
        held = Counter(slot for attempt in self._attempts.values() for slot in attempt.slots)
        fenced = Counter(slot for slot, _, _ in self._quarantine)
        states = self._state
        shared = {slot for slot in range(self._total) if states[slot] is SlotState.CACHED}
        own = [slot for slot in held.elements() if slot not in shared]
        locked = [slot for slot in fenced.elements() if slot not in shared]
        everywhere = sorted((*self._free, *own, *locked, *shared))
        assert everywhere == list(range(self._total)), f"slots lost or held twice: {everywhere}"
        assert all(states[slot] is SlotState.FREE for slot in self._free), "free list holds a slot in use"
        assert len(shared) == len(self._cache), (shared, len(self._cache))
        for slot in shared:
            assert self._cache.holds(slot) == (held[slot], fenced[slot]), f"holds of slot {slot} miscounted"
        assert all(states[slot] is SlotState.QUARANTINED for slot in locked), "locked without a fence"
        assert self._num_quarantined == len(locked), (self._num_quarantined, locked)
        for (slot, *_), entry in self._quarantine.items():
            assert entry.slot == slot and entry.peers, f"quarantined for nobody: {entry}"
            assert entry.generation == self._generation[slot], entry
        for attempt_id, attempt in self._attempts.items():
            ours = [slot for slot in attempt.slots if slot not in shared]
            assert all(self._holder[slot] == attempt_id for slot in ours), attempt_id
            assert {states[slot] for slot in ours} <= {SlotState.RESERVED, SlotState.OWNED}, (attempt_id, ours)
            num_reserved = sum(states[slot] is SlotState.RESERVED for slot in ours)
            assert num_reserved == attempt.num_reserved, (attempt_id, attempt)
        assert self._num_reserved == sum(a.num_reserved for a in self._attempts.values()), self._num_reserved
        assert len(self._retired) <= MAX_RETIRED_ATTEMPTS, len(self._retired)

    # --- inside -------------------------------------------------------------------------------------------

    def _current(self, attempt_id: AttemptId, epoch: int) -> _Attempt | None:
        attempt = self._attempts.get(attempt_id)
        return attempt if attempt is not None and attempt.epoch == epoch else None

    def _refuse_new(
        self, attempt_id: AttemptId, epoch: int, num_blocks: int, cached: Sequence[BlockHash]
    ) -> NoCapacityResult | NeverFits | StaleAttempt | None:
        retired_epoch = self._retired.get(attempt_id)
        if attempt_id in self._attempts or (retired_epoch is not None and epoch <= retired_epoch):
            return StaleAttempt(attempt_id, epoch)
        return self._refuse_size(num_blocks, 0, cached)

    def _refuse_size(
        self, num_blocks: int, num_held: int, cached: Sequence[BlockHash]
    ) -> NoCapacityResult | NeverFits | None:
        assert 0 <= len(cached) <= num_blocks, (num_blocks, len(cached))
        if num_held + num_blocks > self._total:
            return NeverFits(num_held + num_blocks, self._total)
        # A cached block that nobody holds cannot be shared and given away at once.
        num_free = self.counts().available - sum(self._cache.is_idle(self._slot_of(item)) for item in cached)
        if num_blocks - len(cached) > num_free:
            return NoCapacityResult(num_blocks, num_free + len(cached), self.counts().quarantined)
        return None

    def _slot_of(self, block_hash: BlockHash) -> int:
        slot = self._cache.slot_of(block_hash)
        assert slot is not None, f"{block_hash.hex()} is not cached here: match it first"
        return slot

    def _give(
        self, attempt_id: AttemptId, num_blocks: int, state: SlotState, cached: Sequence[BlockHash]
    ) -> Reservation:
        attempt = self._attempts[attempt_id]
        shared = self.match(cached)
        # Held first: making room must not take them.
        for block in shared:
            self._cache.pin(block.slot)
            attempt.slots.append(block.slot)
        num_new = num_blocks - len(shared)
        self._make_room(num_new)
        blocks = []
        for _ in range(num_new):
            slot = self._free.popleft()
            assert self._next_tag <= MAX_TAG, self._next_tag
            self._generation[slot] += 1
            self._state[slot] = state
            self._holder[slot] = attempt_id
            blocks.append(DestinationBlock(slot, self._generation[slot], self._next_tag))
            attempt.slots.append(slot)
            self._next_tag += 1
        if state is SlotState.RESERVED:
            attempt.num_reserved += num_new
            self._num_reserved += num_new
        return Reservation(tuple(blocks), shared)

    def _make_room(self, num_blocks: int) -> None:
        """Lets cached blocks go until so many slots are free; the caller knows that they will be."""
        victims = self._cache.victims(max(0, num_blocks - len(self._free)))
        self.num_evicted += len(victims)
        for slot in victims:
            self._set_free(slot)

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
        for slot, parent in self._leaf_first(attempt.slots):
            reason = reserved_reason if self._state[slot] is SlotState.RESERVED else owned_reason
            self._let_go(slot, to_fence=reason is not None, parent=parent)
            if reason is None:
                continue
            if self._state[slot] is not SlotState.CACHED:
                self._state[slot] = SlotState.QUARANTINED
                self._num_quarantined += 1
            self._quarantine[slot, attempt_id, attempt.epoch] = QuarantinedSlot(
                slot, self._generation[slot], attempt_id, attempt.epoch, reason, frozenset(attempt.peers), now_ns
            )
        self._num_reserved -= attempt.num_reserved
        self._retired.pop(attempt_id, None)
        self._retired[attempt_id] = attempt.epoch
        if len(self._retired) > MAX_RETIRED_ATTEMPTS:
            self._retired.popitem(last=False)

    def _leave_quarantine(self, entries: Iterable[QuarantinedSlot]) -> int:
        """Ends quarantines; returns how many slots may be given out again by that."""
        leaving = list(entries)
        before = self.counts().available
        for entry in leaving:
            del self._quarantine[entry.slot, entry.attempt_id, entry.epoch]
            if self._state[entry.slot] is not SlotState.CACHED:
                self._num_quarantined -= 1
                self._set_free(entry.slot)
            elif self._cache.unfence(entry.slot):
                self._set_free(entry.slot)
        return self.counts().available - before

    def _leaf_first(self, slots: Sequence[int]) -> list[tuple[int, int | None]]:
        """Returns in which order slots are let go, each with its cached parent: that must never be older than its leaf.

        ``slots``: the block table of an attempt.
        """
        is_cached = [self._state[slot] is SlotState.CACHED for slot in slots]
        own: list[tuple[int, int | None]] = [(slots[i], None) for i in range(len(slots)) if not is_cached[i]]
        parents = [slots[i - 1] if i and is_cached[i - 1] else None for i in range(len(slots))]
        return own + [(slots[i], parents[i]) for i in reversed(range(len(slots))) if is_cached[i]]

    def _let_go(self, slot: int, *, to_fence: bool = False, parent: int | None = None) -> None:
        """An attempt does not hold a slot any more. With ``to_fence`` it is not free yet: a peer may touch it."""
        if self._state[slot] is SlotState.CACHED:
            if self._cache.unpin(slot, to_fence=to_fence, parent=parent):
                self._set_free(slot)
        elif not to_fence:
            self._set_free(slot)

    def _set_free(self, slot: int) -> None:
        self._state[slot] = SlotState.FREE
        self._holder[slot] = None
        self._free.append(slot)
