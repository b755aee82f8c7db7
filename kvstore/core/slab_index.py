"""The index of a host slab: which block is in which slot, who reads it, who is writing it. A pure state machine.

Owns the state of N slots, the read leases and the write reservations, and writes the ``SlotTable`` that local readers
look into without asking. Never touches the bytes of blocks, never reads a clock: time enters as ``now_ns`` and
``deadline_ns`` of the store node's own clock.

Life cycle of a slot:

    free ──reserve──> writing ──commit──> used ──evicted──> free
    writing ──abort──> free
    writing ──expire, or the writer's connection is lost──> quarantined ──late commit or abort, writer_dead──> free
    used ──report_corrupt──> free, or quarantined until its readers are gone

Nothing is visible before its commit. An expired writable slot is not given out again until its writer is proved
dead or has acknowledged (a late commit or abort *is* an acknowledgement): a stopped writer that wakes up writes
before it asks. The block's hash, however, can be reserved anew at once, in another slot.

A read lease pins every slot of one match. Pinned slots are never evicted. A lease ends by ``release``, by its
deadline or with its reader; a reader must check after copying that its lease still stood.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from kvstore.core.event_log import BlockListener
from kvstore.core.eviction import EvictionPolicy
from kvstore.core.ids import BLOCK_DIGEST_BYTES, BlockDigest, BlockHash, TenantId
from kvstore.core.quota import NOBODY, TenantBook
from kvstore.core.slab_slots import TenantNumbers, make_slots
from kvstore.core.slab_types import (
    NO_MATCH,
    EvictedBlock,
    HolderId,
    LeasedBlock,
    LeaseId,
    MatchResult,
    ReadLease,
    ReserveOutcome,
    ReserveStatus,
    SlabCounters,
)
from kvstore.core.slot_states import SlotCounts, SlotState
from kvstore.core.slot_table import SlotRecord, SlotTable

__all__ = [
    "NO_MATCH",
    "EvictedBlock",
    "HolderId",
    "LeaseId",
    "LeasedBlock",
    "MatchResult",
    "ReadLease",
    "ReserveOutcome",
    "ReserveStatus",
    "SlabCounters",
    "SlabIndex",
]

MAX_READ_LEASES = 1 << 16
HOST_TIER = "host"
QUOTA_VICTIMS_SEEN_MAX = 4096
"""So many blocks are looked at for one of the tenant's own; other tenants must not pay for a longer search."""


@dataclass(frozen=True, slots=True)
class _Write:
    """A write that has not been acknowledged: under way, or quarantined."""

    block_hash: BlockHash
    writer: HolderId
    deadline_ns: int
    parent: tuple[int, int] | None
    """Slot and generation of the block before it in the prompt, as far as the reservation names it."""
    is_tail: bool


class SlabIndex:
    """Hash to slot of one host slab. Belongs to one thread."""

    def __init__(
        self,
        num_slots: int,
        *,
        policy: EvictionPolicy,
        table: SlotTable | None = None,
        book: TenantBook | None = None,
        block_bytes: int = 1,
        tier_below: bool = False,
        listener: BlockListener | None = None,
    ) -> None:
        """``policy`` and ``table`` must be made for ``num_slots`` slots and belong to this index alone.

        ``listener`` is told which blocks come and go.
        ``book`` is shared with the other tiers of the node; each block counts ``block_bytes`` there.
        ``tier_below``: what a ``reserve`` evicts is noted for ``take_evicted``, which the owner calls after each one;
        and every block is admitted, because what this tier refuses would never reach the tier below.
        """
        assert num_slots >= 1, num_slots
        self._total = num_slots
        self._policy = policy
        self._slots = make_slots(num_slots)
        self._used = SlotTable(num_slots) if table is None else table
        assert self._used.num_slots == num_slots and len(self._used) == 0, (num_slots, len(self._used))
        self._book = TenantBook() if book is None else book
        self._block_bytes = block_bytes
        self._listener = listener
        self._tenants = TenantNumbers()
        self._writing: dict[int, _Write] = {}
        self._writing_hashes: dict[BlockHash, int] = {}
        self._abandoned: dict[int, _Write] = {}
        """Slots quarantined because their writer may still write."""
        self._condemned: set[int] = set()
        """Slots quarantined because a corrupt block in them is still pinned."""
        self._unread: set[int] = set()
        """Slots whose block was brought here for a reader that has not been given it yet."""
        self._leases: dict[LeaseId, ReadLease] = {}
        self._evicted: list[EvictedBlock] | None = [] if tier_below else None
        self._next_lease_id = 1
        self._write_deadlines: list[tuple[int, int, int]] = []
        self._lease_deadlines: list[tuple[int, LeaseId]] = []
        self.counters = SlabCounters()

    # --- writing ------------------------------------------------------------------------------------------

    def reserve(
        self,
        hashes: Sequence[BlockHash],
        *,
        writer: HolderId,
        deadline_ns: int,
        tenant: TenantId = NOBODY,
        parent: BlockHash | None = None,
        ends_prompt: bool = True,
        is_put: bool = True,
    ) -> tuple[ReserveOutcome, ...]:
        """Gives the writer one slot per hash that nobody has or writes, evicting where needed.

        A tenant at its quota gets a slot only in exchange for one of its own blocks. Returns one outcome per hash,
        in order. A hash named twice is IN_PROGRESS the second time. After the first NO_ROOM or OVER_QUOTA every
        further new hash has the same outcome: a block without its parent could never be matched.

        ``parent``: the block before the first of ``hashes`` in their prompt. ``ends_prompt``: the last of them is the
        last of the prompt. ``is_put``: the writer has computed these blocks; one that gets no slot counts as visited.
        """
        outcomes: list[ReserveOutcome] = []
        refused: list[int] = []
        # The blocks of the same request that are here already are kept from being evicted for its own tail.
        own = {slot for slot in map(self._used.find, hashes) if slot is not None}
        refusal: ReserveStatus | None = None
        above = None if parent is None else self._life_of(self._slot_of(parent))
        if above is not None and self._evicted is None:
            # With a tier below it may leave for them: a prompt longer than this tier passes through it.
            own.add(above[0])
        for idx, block_hash in enumerate(hashes):
            is_tail = ends_prompt and idx == len(hashes) - 1
            if block_hash in self._used:
                above = self._life_of(self._used.find(block_hash))
                outcomes.append(ReserveOutcome(ReserveStatus.PRESENT))
                continue
            if block_hash in self._writing_hashes:
                above = self._life_of(self._writing_hashes[block_hash])
                outcomes.append(ReserveOutcome(ReserveStatus.IN_PROGRESS))
                continue
            taken = refusal or self._take_slot(block_hash, tenant, own, is_tail=is_tail)
            if isinstance(taken, ReserveStatus):
                refusal = taken
                self._count_refusal(taken)
                refused.append(idx)
                outcomes.append(ReserveOutcome(taken))
                continue
            slot = taken
            self._slots.generation[slot] += 1
            generation = self._slots.generation[slot]
            self._writing[slot] = _Write(block_hash, writer, deadline_ns, above, is_tail)
            above = (slot, generation)
            self._writing_hashes[block_hash] = slot
            heappush(self._write_deadlines, (deadline_ns, slot, generation))
            outcomes.append(ReserveOutcome(ReserveStatus.GRANTED, slot, generation))
        if is_put:
            self._note_refused(hashes, refused, outcomes, ends_prompt=ends_prompt)
        return tuple(outcomes)

    def _note_refused(
        self, hashes: Sequence[BlockHash], refused: list[int], outcomes: list[ReserveOutcome], *, ends_prompt: bool
    ) -> None:
        """Tells the policy, leaf first, of blocks that were computed in vain."""
        is_part = self._evicted is not None and any(o.status is ReserveStatus.GRANTED for o in outcomes)
        if is_part:
            # With a tier below the writer comes again with the rest, which is visited only once.
            return
        for idx in reversed(refused):
            self._policy.on_refused(hashes[idx], is_tail=ends_prompt and idx == len(hashes) - 1)

    def take_evicted(self) -> tuple[EvictedBlock, ...]:
        """Returns what was evicted since the last call; their bytes stand until those who reserved are told."""
        evicted = tuple(self._evicted or ())
        if self._evicted:
            self._evicted.clear()
        return evicted

    def commit(
        self,
        block_hash: BlockHash,
        *,
        slot: int,
        generation: int,
        digest: BlockDigest,
        writer: HolderId,
        for_reader: bool = False,
    ) -> bool:
        """Makes a written block visible. The caller commits the blocks of one prefix leaf first.

        ``for_reader``: it came from another tier or node because somebody asked for it; that they read it then is the
        same visit.

        Returns False, with the block invisible, when the reservation is not (or no longer) the writer's; if its
        slot was quarantined it is free now, because a writer that commits has stopped writing.
        """
        assert len(digest) == BLOCK_DIGEST_BYTES, len(digest)
        write = self._writing.get(slot)
        if write is None or not self._is_write_of(write, block_hash, slot, generation, writer):
            self.counters.refused_commits += 1
            self._acknowledge(block_hash, slot, generation, writer)
            return False
        self._forget_write(slot)
        self._used.insert(slot, block_hash, digest, generation)
        self._policy.on_insert(slot, block_hash, parent=self._living(write.parent), is_tail=write.is_tail)
        if for_reader:
            self._unread.add(slot)
        if self._listener is not None:
            self._listener.added(HOST_TIER, block_hash)
        self.counters.committed_blocks += 1
        return True

    def abort(self, block_hash: BlockHash, *, slot: int, generation: int, writer: HolderId) -> bool:
        """The writer gives its reservation up and has stopped writing: the slot is free. False: not its own."""
        write = self._writing.get(slot)
        if write is not None and self._is_write_of(write, block_hash, slot, generation, writer):
            self._forget_write(slot)
            self._free(slot)
        elif not self._acknowledge(block_hash, slot, generation, writer):
            return False
        self.counters.aborted_blocks += 1
        return True

    def writer_lost(self, writer: HolderId) -> int:
        """The writer's connection is gone, but not proved dead: its slots are quarantined. Returns how many."""
        slots = [slot for slot, write in self._writing.items() if write.writer == writer]
        for slot in slots:
            self._abandon(slot)
        return len(slots)

    def writer_dead(self, writer: HolderId) -> int:
        """The writer is proved dead, or declares that it writes nothing any more: its slots are free. How many."""
        self.writer_lost(writer)
        slots = [slot for slot, write in self._abandoned.items() if write.writer == writer]
        for slot in slots:
            del self._abandoned[slot]
            self._free(slot)
        return len(slots)

    # --- reading ------------------------------------------------------------------------------------------

    def match(
        self,
        hashes: Sequence[BlockHash],
        *,
        reader: HolderId,
        now_ns: int,
        deadline_ns: int,
        ends_prompt: bool = True,
        counts_misses: bool = True,
    ) -> MatchResult:
        """Finds the longest prefix of ``hashes`` that is committed without a gap and pins it until ``deadline_ns``.

        Too many standing leases make it a miss. ``ends_prompt``: the last of ``hashes`` is the last of the prompt.
        ``counts_misses`` False: the reader counts them itself (``missed``), because it asks part by part.
        """
        slots: list[int] = []
        for block_hash in hashes:
            slot = self._used.find(block_hash)
            if slot is None:
                break
            slots.append(slot)
        if slots and len(self._leases) >= MAX_READ_LEASES:
            self.counters.refused_leases += 1
            slots.clear()
        self.counters.hit_blocks += len(slots)
        if counts_misses:
            self.counters.missed_blocks += len(hashes) - len(slots)
        if not slots:
            return NO_MATCH
        for idx in range(len(slots) - 1, -1, -1):
            slot = slots[idx]
            self._slots.pins[slot] += 1
            parent = slots[idx - 1] if idx else None
            is_tail = ends_prompt and idx == len(hashes) - 1
            self._hit(slot, hashes[idx], parent=parent, is_tail=is_tail)
        lease_id = LeaseId(self._next_lease_id)
        self._next_lease_id += 1
        self._leases[lease_id] = ReadLease(lease_id, reader, now_ns, deadline_ns, tuple(slots))
        heappush(self._lease_deadlines, (deadline_ns, lease_id))
        return MatchResult(lease_id, tuple(self._leased_block(slot) for slot in slots))

    def touch(self, block_hash: BlockHash, *, slot: int, generation: int, is_tail: bool = False) -> bool:
        """A reader copied this block without asking, a while ago: it counts as a hit. False: it has left since.

        The caller touches the blocks of one prefix leaf first. ``is_tail``: it is the last one of its prompt.
        """
        if self._slots.generation[slot] != generation or self._used.hash_at(slot) != block_hash:
            return False
        self.counters.hit_blocks += 1
        self._hit(slot, block_hash, parent=None, is_tail=is_tail)
        return True

    def missed(self, num_blocks: int) -> None:
        """A reader did not find so many blocks, without asking."""
        self.counters.missed_blocks += num_blocks

    def release(self, lease_id: LeaseId, *, reader: HolderId) -> bool:
        """Ends a read lease. False: it stands no more, or belongs to another reader."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.reader != reader:
            return False
        self._end_lease(lease_id)
        return True

    def reader_lost(self, reader: HolderId) -> int:
        """The reader's connection is gone: its leases end. Returns how many."""
        lease_ids = [lease_id for lease_id, lease in self._leases.items() if lease.reader == reader]
        for lease_id in lease_ids:
            self._end_lease(lease_id)
        return len(lease_ids)

    def report_corrupt(self, block_hash: BlockHash, *, slot: int, generation: int) -> bool:
        """Removes a block whose bytes did not have its digest. False: that life of the slot is over already.

        The slot is given out again only after its last reader is gone.
        """
        if self._used.find(block_hash) != slot or self._slots.generation[slot] != generation:
            return False
        self._remove(slot)
        self.counters.corrupt_blocks += 1
        if self._slots.pins[slot]:
            self._condemned.add(slot)
        else:
            self._free(slot)
        return True

    # --- time ---------------------------------------------------------------------------------------------

    def expire(self, now_ns: int) -> None:
        """Ends read leases and quarantines unfinished writes whose deadline has come (deadline <= now)."""
        while self._lease_deadlines and self._lease_deadlines[0][0] <= now_ns:
            _, lease_id = heappop(self._lease_deadlines)
            if lease_id in self._leases:
                self._end_lease(lease_id)
                self.counters.expired_leases += 1
        while self._write_deadlines and self._write_deadlines[0][0] <= now_ns:
            _, slot, generation = heappop(self._write_deadlines)
            if slot in self._writing and self._slots.generation[slot] == generation:
                self._abandon(slot)
                self.counters.expired_write_blocks += 1

    def next_deadline_ns(self) -> int | None:
        """Returns when ``expire`` may have something to do next, or None."""
        heads = [heap[0][0] for heap in (self._lease_deadlines, self._write_deadlines) if heap]
        return min(heads, default=None)

    # --- looking ------------------------------------------------------------------------------------------

    @property
    def num_slots(self) -> int:
        """Slots of the slab, whatever is in them."""
        return self._total

    def hashes(self) -> list[BlockHash]:
        """Returns the committed blocks, in no particular order. O(slots)."""
        found = map(self._used.hash_at, self._used.slots())
        return [block_hash for block_hash in found if block_hash is not None]

    def __contains__(self, block_hash: BlockHash) -> bool:
        """Returns True when the block is committed. Pins nothing and is no hit."""
        return block_hash in self._used

    def is_known(self, block_hash: BlockHash) -> bool:
        """Returns True when a reservation would give no slot for this block: it is here, or being written."""
        return block_hash in self._used or block_hash in self._writing_hashes

    def state_of(self, slot: int) -> SlotState:
        """Returns the state of one slot in [0, total)."""
        if slot in self._writing:
            return SlotState.WRITING
        if slot in self._abandoned or slot in self._condemned:
            return SlotState.QUARANTINED
        return SlotState.FREE if self._used.hash_at(slot) is None else SlotState.USED

    @property
    def num_leases(self) -> int:
        """Standing read leases."""
        return len(self._leases)

    def leases(self) -> tuple[ReadLease, ...]:
        """Returns the standing read leases, oldest first."""
        return tuple(self._leases.values())

    def record_at(self, slot: int) -> SlotRecord | None:
        """Returns what is in one slot in [0, total), if a committed block is."""
        return self._used.read(slot)

    def tenant_of_slot(self, slot: int) -> TenantId:
        """Returns whom a slot that is not free is charged to."""
        return self._tenants.name(self._slots.tenant[slot])

    def has_unfinished_writes(self, writer: HolderId) -> bool:
        """Returns True while a slot waits for this writer's commit, abort or death."""
        return any(w.writer == writer for book in (self._writing, self._abandoned) for w in book.values())

    def counts(self) -> SlotCounts:
        """Returns how many slots are in which state. O(slots of standing leases)."""
        pinned = {slot for lease in self._leases.values() for slot in lease.slots}
        return SlotCounts(
            free=len(self._slots.free),
            used=len(self._used),
            writing=len(self._writing),
            quarantined=len(self._abandoned) + len(self._condemned),
            total=self._total,
            pinned=len(pinned),
        )

    def audit(self, slots: range) -> list[str]:
        """Returns what is wrong in the sums and in these slots, one sentence each; empty when all is well.

        Cheap enough for a running node: O(blocks of standing leases + slots). Slots beyond the slab are skipped.
        """
        counts = self.counts()
        findings = []
        total = counts.free + counts.used + counts.writing + counts.quarantined
        if total != counts.total:
            findings.append(f"free + used + writing + quarantined is {total}, not {counts.total}: {counts}")
        pins = Counter(slot for lease in self._leases.values() for slot in lease.slots)
        for slot in range(slots.start, min(slots.stop, self._total)):
            if pins[slot] != self._slots.pins[slot]:
                findings.append(f"slot {slot} has {self._slots.pins[slot]} pins, its leases {pins[slot]}")
            if self.state_of(slot) is SlotState.USED:
                record = self._used.read(slot)
                if record is None or self._used.find(record.block_hash) != slot:
                    findings.append(f"slot {slot} is used but its record or bucket is damaged")
                elif record.generation != self._slots.generation[slot]:
                    findings.append(f"slot {slot} shows generation {record.generation} of an earlier life")
        return findings

    def check_invariants(self) -> None:
        """Raises: AssertionError when the books do not agree with each other."""
        books = (self._slots.free, self._used.slots(), self._writing, self._abandoned, self._condemned)
        everywhere = sorted(slot for book in books for slot in book)
        assert everywhere == list(range(self._total)), f"slots lost or held twice: {everywhere}"
        free = set(self._slots.free)
        pins = [0] * self._total
        for lease in self._leases.values():
            for slot in lease.slots:
                pins[slot] += 1
        assert pins == list(self._slots.pins), f"pins {list(self._slots.pins)} but leases hold {pins}"
        assert all(pins[slot] == 0 for slot in self._slots.free), "a pinned slot is free"
        assert all(pins[slot] == 0 for book in (self._writing, self._abandoned) for slot in book), "pinned and writable"
        assert all(pins[slot] for slot in self._condemned), "condemned without a reader"
        assert self._unread <= set(self._used.slots()), "unread and not there"
        self._used.check_invariants()
        self._book.check_invariants()
        charged = Counter(self._tenants.name(self._slots.tenant[slot]) for slot in everywhere if slot not in free)
        usage = {tenant: tiers.get(HOST_TIER, 0) for tenant, tiers in self._book.usage().items()}
        assert usage == {tenant: num * self._block_bytes for tenant, num in charged.items()}, (usage, charged)
        assert self._writing_hashes == {write.block_hash: slot for slot, write in self._writing.items()}, "writes"
        assert not any(block_hash in self._used for block_hash in self._writing_hashes), "visible while it is written"
        assert sorted(self._policy.victims()) == sorted(self._used.slots()), "the policy lost or invented a slot"

    # --- inside -------------------------------------------------------------------------------------------

    def _take_slot(
        self, block_hash: BlockHash, tenant: TenantId, keep: set[int], *, is_tail: bool
    ) -> int | ReserveStatus:
        """Returns a slot for the block, charged to the tenant, or why there is none."""
        has_quota = self._book.has_room(tenant, self._block_bytes)
        if has_quota and self._slots.free:
            slot = self._slots.free.popleft()
        else:
            if has_quota and self._evicted is None and not self._policy.admits(block_hash, is_tail=is_tail):
                self.counters.not_admitted_blocks += 1
                return ReserveStatus.NO_ROOM
            victim = self._victim(keep, of=None if has_quota else self._tenants.find(tenant))
            if victim is None:
                return ReserveStatus.NO_ROOM if has_quota else ReserveStatus.OVER_QUOTA
            slot = victim
            self._note_evicted(slot)
            self._remove(slot)
            self._refund(slot)
            self.counters.evicted_blocks += 1
            if not self._book.has_room(tenant, self._block_bytes):
                # The quota was lowered below what the tenant uses: what left makes no room yet.
                self._slots.free.append(slot)
                return ReserveStatus.OVER_QUOTA
        self._book.charge(tenant, HOST_TIER, self._block_bytes)
        self._slots.tenant[slot] = self._tenants.take(tenant)
        return slot

    def _victim(self, keep: set[int], *, of: int | None) -> int | None:
        """Returns the slot that should leave next; ``of``: among those of this tenant number, within bounds."""
        pins, tenants = self._slots.pins, self._slots.tenant
        for num_seen, slot in enumerate(self._policy.victims()):
            if of is not None and num_seen >= QUOTA_VICTIMS_SEEN_MAX:
                return None
            if pins[slot] == 0 and slot not in keep and (of is None or tenants[slot] == of):
                return slot
        return None

    def _hit(self, slot: int, block_hash: BlockHash, *, parent: int | None, is_tail: bool) -> None:
        if slot in self._unread:
            self._unread.discard(slot)
        else:
            self._policy.on_hit(slot, block_hash, parent=parent, is_tail=is_tail)

    def _slot_of(self, block_hash: BlockHash) -> int | None:
        """Returns where a block is or is being written."""
        slot = self._used.find(block_hash)
        return self._writing_hashes.get(block_hash) if slot is None else slot

    def _living(self, life: tuple[int, int] | None) -> int | None:
        """Returns the slot of a block that was here or being written, unless it has left: a stranger may be there."""
        if life is None or self._slots.generation[life[0]] != life[1]:
            return None
        return life[0] if life[0] in self._writing or self._used.hash_at(life[0]) is not None else None

    def _life_of(self, slot: int | None) -> tuple[int, int] | None:
        return None if slot is None else (slot, self._slots.generation[slot])

    def _note_evicted(self, slot: int) -> None:
        block_hash = self._used.hash_at(slot)
        if self._evicted is not None and block_hash is not None:
            digest = self._used.digest_at(slot)
            self._evicted.append(EvictedBlock(slot, block_hash, digest, self.tenant_of_slot(slot)))

    def _count_refusal(self, status: ReserveStatus) -> None:
        if status is ReserveStatus.OVER_QUOTA:
            self.counters.over_quota_blocks += 1
        else:
            self.counters.no_room_blocks += 1

    def _refund(self, slot: int) -> None:
        number = self._slots.tenant[slot]
        self._book.refund(self._tenants.name(number), HOST_TIER, self._block_bytes)
        self._tenants.give_back(number)

    def _free(self, slot: int) -> None:
        self._refund(slot)
        self._slots.free.append(slot)

    def _remove(self, slot: int) -> None:
        block_hash = self._used.hash_at(slot)
        assert block_hash is not None, slot
        self._policy.on_remove(slot, block_hash)
        self._unread.discard(slot)
        self._used.remove(slot)
        if self._listener is not None:
            self._listener.removed(HOST_TIER, block_hash)

    def _leased_block(self, slot: int) -> LeasedBlock:
        return LeasedBlock(slot, self._slots.generation[slot], self._used.digest_at(slot))

    def _is_write_of(self, write: _Write, block_hash: BlockHash, slot: int, generation: int, writer: HolderId) -> bool:
        same_life = self._slots.generation[slot] == generation
        return same_life and write.block_hash == block_hash and write.writer == writer

    def _acknowledge(self, block_hash: BlockHash, slot: int, generation: int, writer: HolderId) -> bool:
        """Frees an abandoned slot whose own writer has just said that it stopped writing."""
        write = self._abandoned.get(slot)
        if write is None or not self._is_write_of(write, block_hash, slot, generation, writer):
            return False
        del self._abandoned[slot]
        self._free(slot)
        return True

    def _forget_write(self, slot: int) -> _Write:
        write = self._writing.pop(slot)
        del self._writing_hashes[write.block_hash]
        return write

    def _abandon(self, slot: int) -> None:
        self._abandoned[slot] = self._forget_write(slot)

    def _end_lease(self, lease_id: LeaseId) -> None:
        for slot in self._leases.pop(lease_id).slots:
            self._slots.pins[slot] -= 1
            if self._slots.pins[slot] == 0 and slot in self._condemned:
                self._condemned.discard(slot)
                self._free(slot)
