"""Which block is in which slot of the disk tier: states, pins, quarantine and charges. A pure core.

Owns the truth about the slots of one disk file, as the running node knows it; the headers in the file say the same
to the next node (``kvstore.store.disk.layout``). It never sees bytes or files: the driver writes, then commits here;
it reads under a pin, then unpins.

    FREE -> reserve -> WRITING -> commit -> USED -> evicted by a reserve or for room -> FREE
                               -> abort -> FREE
                                            USED -> quarantine -> QUARANTINED -> release_quarantined -> FREE

A slot whose block was damaged is not used again until somebody says so: the medium below it is in doubt. Generations
grow over all slots and lives, so of two headers for one block the younger is the one with the higher generation.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from kvstore.core.counters import Counters
from kvstore.core.event_log import BlockListener
from kvstore.core.eviction import EvictionPolicy
from kvstore.core.ids import BlockDigest, BlockHash, TenantId
from kvstore.core.quota import TenantBook
from kvstore.core.slab_slots import TenantNumbers
from kvstore.core.slot_states import SlotCounts, SlotState
from kvstore.core.slot_table import SlotRecord, SlotTable

DISK_TIER = "disk"
ORIGIN_BYTES = 16
NO_ORIGIN = bytes(ORIGIN_BYTES)
QUOTA_VICTIMS_SEEN_MAX = 4096
"""So many blocks are looked at for one of the tenant's own; others must not pay for a longer search."""


@dataclass(frozen=True, slots=True)
class DiskBlock:
    """One whole block in its slot, as its header says it. ``origin``: digest of namespace and fingerprint."""

    slot: int
    generation: int
    block_hash: BlockHash
    digest: BlockDigest
    tenant: TenantId
    origin: bytes = NO_ORIGIN


@dataclass(frozen=True, slots=True)
class DiskGrant:
    """One slot to write into, in the life that ``generation`` names."""

    slot: int
    generation: int


@dataclass(slots=True)
class DiskCounters(Counters):
    """What happened since the index was made; each only grows."""

    recovered_blocks: int = 0
    stale_blocks: int = 0
    """Recovered blocks of which a younger copy was found."""
    committed_blocks: int = 0
    aborted_blocks: int = 0
    evicted_blocks: int = 0
    no_room_blocks: int = 0
    damaged_blocks: int = 0


class DiskIndex:
    """Hash to slot of one disk file. Belongs to one thread."""

    def __init__(
        self,
        num_slots: int,
        *,
        policy: EvictionPolicy,
        book: TenantBook,
        block_bytes: int,
        recovered: Iterable[DiskBlock] = (),
        listener: BlockListener | None = None,
    ) -> None:
        """``recovered``: what the headers of the file say. Of two copies of a block the older one counts as free.

        ``policy`` is made for ``num_slots``; ``book`` is shared with the other tiers of the node. ``listener`` is told
        which blocks come and go, from now on.
        """
        assert num_slots >= 1, num_slots
        self._total = num_slots
        self._policy = policy
        self._book = book
        self._block_bytes = block_bytes
        self._used = SlotTable(num_slots)
        self._tenants = TenantNumbers()
        self._tenant = array("H", bytes(2 * num_slots))
        self._pins = array("I", bytes(4 * num_slots))
        self._origins = bytearray(ORIGIN_BYTES * num_slots)
        self._writing: dict[BlockHash, DiskGrant] = {}
        self._writing_slots: dict[int, BlockHash] = {}
        self._quarantined: set[int] = set()
        self._next_generation = 1
        self.counters = DiskCounters()
        self._listener: BlockListener | None = None
        self._recover(recovered)
        self._listener = listener
        taken = set(self._used.slots())
        # A stack, lowest slot on top: a tier that is not full stays within the beginning of its file.
        self._free = array("I", (slot for slot in range(num_slots - 1, -1, -1) if slot not in taken))

    def _recover(self, blocks: Iterable[DiskBlock]) -> None:
        # Oldest first, so that the policy takes what was written last for the newest.
        for block in sorted(blocks, key=lambda block: block.generation):
            earlier = self._used.find(block.block_hash)
            if earlier is not None:
                self._remove(earlier)
                self._refund(earlier)
                self.counters.stale_blocks += 1
            self._charge(block.slot, block.tenant, block.origin)
            self._used.insert(block.slot, block.block_hash, block.digest, block.generation)
            self._policy.on_insert(block.slot, block.block_hash)
            self._next_generation = block.generation + 1
        self.counters.recovered_blocks = len(self._used)

    # --- writing ------------------------------------------------------------------------------------------

    def reserve(self, block_hash: BlockHash, *, tenant: TenantId, origin: bytes = NO_ORIGIN) -> DiskGrant | None:
        """Gives one slot for a block that is not here and not on its way, evicting where needed; None: no room.

        A tenant at its quota gets a slot only in exchange for one of its own blocks.
        """
        assert block_hash not in self._used and block_hash not in self._writing, block_hash.hex()
        slot = self._take_slot(tenant)
        if slot is None:
            self.counters.no_room_blocks += 1
            return None
        self._charge(slot, tenant, origin)
        grant = DiskGrant(slot, self._next_generation)
        self._next_generation += 1
        self._writing[block_hash] = grant
        self._writing_slots[slot] = block_hash
        return grant

    def commit(self, block_hash: BlockHash, grant: DiskGrant, digest: BlockDigest) -> None:
        """The block is whole in its slot, header included: it can be found from now on."""
        self._forget_write(block_hash, grant)
        self._used.insert(grant.slot, block_hash, digest, grant.generation)
        self._policy.on_insert(grant.slot, block_hash)
        if self._listener is not None:
            self._listener.added(DISK_TIER, block_hash)
        self.counters.committed_blocks += 1

    def abort(self, block_hash: BlockHash, grant: DiskGrant) -> None:
        """The block was not written; its slot is free."""
        self._forget_write(block_hash, grant)
        self._give_back(grant.slot)
        self.counters.aborted_blocks += 1

    # --- reading ------------------------------------------------------------------------------------------

    def find(self, block_hash: BlockHash) -> SlotRecord | None:
        """Returns where a committed block is and its digest. Pins nothing and is no hit."""
        return self._used.look_up(block_hash)

    def is_writing(self, block_hash: BlockHash) -> bool:
        """Returns True while the block is on its way to its slot."""
        return block_hash in self._writing

    def hit(self, run: Sequence[BlockHash]) -> None:
        """A reader was given these blocks, which follow each other in one prompt; one that is not here is skipped."""
        slots = [self._used.find(block_hash) for block_hash in run]
        for idx in range(len(run) - 1, -1, -1):
            slot = slots[idx]
            if slot is not None:
                self._policy.on_hit(slot, run[idx], parent=slots[idx - 1] if idx else None)

    def pin(self, slot: int) -> None:
        """A read of this used slot begins: it is not given to another block before ``unpin``. No hit."""
        assert self._used.hash_at(slot) is not None, f"slot {slot} holds no block"
        self._pins[slot] += 1

    def unpin(self, slot: int) -> None:
        """The read is over."""
        assert self._pins[slot] > 0, f"slot {slot} is not pinned"
        self._pins[slot] -= 1

    # --- leaving ------------------------------------------------------------------------------------------

    def quarantine(self, slot: int, generation: int) -> bool:
        """The block in this life of the slot is damaged: it is gone, and the slot is kept out of use. False: over."""
        if not self._is_life(slot, generation):
            return False
        self._remove(slot)
        self._quarantined.add(slot)
        self.counters.damaged_blocks += 1
        return True

    def release_quarantined(self) -> tuple[int, ...]:
        """Puts the quarantined slots that nobody reads back into use; returns them."""
        slots = tuple(sorted(slot for slot in self._quarantined if not self._pins[slot]))
        for slot in slots:
            self._quarantined.discard(slot)
            self._give_back(slot)
        return slots

    def make_room(self, tenant: TenantId, num_bytes: int, *, keep: Collection[int] = ()) -> tuple[int, ...]:
        """Drops the tenant's own blocks, first victims first, until its quota has so many bytes left. Returns slots.

        Drops nothing for what cannot be had: when the other tiers leave less than ``num_bytes`` of the quota, only so
        much is made free. Slots in ``keep`` stay.
        """
        left = self._book.left_bytes(tenant)
        if left is None:
            return ()
        wanted = min(num_bytes, left + self._book.used_bytes(tenant, DISK_TIER))
        num_victims = -(-(wanted - left) // self._block_bytes)
        if num_victims <= 0:
            return ()
        victims = self._victims(of=self._tenants.find(tenant))
        dropped = tuple(islice((slot for slot in victims if slot not in keep), num_victims))
        for victim in dropped:
            self._remove(victim)
            self._give_back(victim)
            self.counters.evicted_blocks += 1
        return dropped

    # --- looking ------------------------------------------------------------------------------------------

    def __contains__(self, block_hash: BlockHash) -> bool:
        """Returns True when the block is committed."""
        return block_hash in self._used

    @property
    def num_slots(self) -> int:
        """Slots of the file, whatever is in them."""
        return self._total

    @property
    def num_free(self) -> int:
        """Slots that hold nothing and wait for nothing."""
        return len(self._free)

    def state_of(self, slot: int) -> SlotState:
        """Returns the state of one slot in [0, num_slots)."""
        if slot in self._writing_slots:
            return SlotState.WRITING
        if slot in self._quarantined:
            return SlotState.QUARANTINED
        return SlotState.FREE if self._used.hash_at(slot) is None else SlotState.USED

    def record_at(self, slot: int) -> SlotRecord | None:
        """Returns what is in one slot, if a committed block is."""
        return self._used.read(slot)

    def block_at(self, slot: int) -> DiskBlock | None:
        """Returns the committed block in a slot."""
        record = self._used.read(slot)
        if record is None:
            return None
        return DiskBlock(
            slot, record.generation, record.block_hash, record.digest, self.tenant_of(slot), self.origin_of(slot)
        )

    def blocks(self) -> Iterator[DiskBlock]:
        """Yields the committed blocks in the order of their slots."""
        for slot in self._used.slots():
            block = self.block_at(slot)
            assert block is not None, slot
            yield block

    def tenant_of(self, slot: int) -> TenantId:
        """Returns whom a slot that is not free is charged to."""
        return self._tenants.name(self._tenant[slot])

    def origin_of(self, slot: int) -> bytes:
        """Returns the digest of namespace and fingerprint of the block in a slot."""
        return bytes(self._origins[slot * ORIGIN_BYTES : (slot + 1) * ORIGIN_BYTES])

    def counts(self) -> SlotCounts:
        """Returns how many slots are in which state."""
        return SlotCounts(
            free=len(self._free),
            used=len(self._used),
            writing=len(self._writing),
            quarantined=len(self._quarantined),
            total=self._total,
            pinned=sum(1 for pins in self._pins if pins),
        )

    def check_invariants(self) -> None:
        """Raises: AssertionError when the books do not agree with each other."""
        books = (self._free, self._used.slots(), self._writing_slots, self._quarantined)
        everywhere = sorted(slot for book in books for slot in book)
        assert everywhere == list(range(self._total)), f"slots lost or held twice: {everywhere}"
        assert not any(self._pins[slot] for slot in self._free), "a pinned slot is free"
        assert not any(self._pins[slot] for slot in self._writing_slots), "a pinned slot is written"
        assert {grant.slot: name for name, grant in self._writing.items()} == self._writing_slots, "writes"
        assert not any(block_hash in self._used for block_hash in self._writing), "visible while it is written"
        assert sorted(self._policy.victims()) == sorted(self._used.slots()), "the policy lost or invented a slot"
        self._used.check_invariants()
        self._book.check_invariants()
        free = set(self._free)
        charged = Counter(self.tenant_of(slot) for slot in range(self._total) if slot not in free)
        usage = {tenant: tiers.get(DISK_TIER, 0) for tenant, tiers in self._book.usage().items()}
        usage = {tenant: num_bytes for tenant, num_bytes in usage.items() if num_bytes}
        assert usage == {tenant: num * self._block_bytes for tenant, num in charged.items()}, (usage, charged)

    # --- inside -------------------------------------------------------------------------------------------

    def _is_life(self, slot: int, generation: int) -> bool:
        record = self._used.read(slot)
        return record is not None and record.generation == generation

    def _take_slot(self, tenant: TenantId) -> int | None:
        has_quota = self._book.has_room(tenant, self._block_bytes)
        if has_quota and self._free:
            return self._free.pop()
        victim = next(self._victims(of=None if has_quota else self._tenants.find(tenant)), None)
        if victim is None:
            return None
        self._remove(victim)
        self._refund(victim)
        self.counters.evicted_blocks += 1
        if not self._book.has_room(tenant, self._block_bytes):
            # The quota was lowered below what the tenant uses: what left makes no room yet.
            self._free.append(victim)
            return None
        return victim

    def _victims(self, *, of: int | None) -> Iterator[int]:
        """Yields who should leave, within bounds; ``of``: among the blocks of this tenant number."""
        for slot in islice(self._policy.victims(), QUOTA_VICTIMS_SEEN_MAX):
            if self._pins[slot] == 0 and (of is None or self._tenant[slot] == of):
                yield slot

    def _charge(self, slot: int, tenant: TenantId, origin: bytes) -> None:
        assert len(origin) == ORIGIN_BYTES, len(origin)
        self._book.charge(tenant, DISK_TIER, self._block_bytes)
        self._tenant[slot] = self._tenants.take(tenant)
        self._origins[slot * ORIGIN_BYTES : (slot + 1) * ORIGIN_BYTES] = origin

    def _refund(self, slot: int) -> None:
        number = self._tenant[slot]
        self._book.refund(self._tenants.name(number), DISK_TIER, self._block_bytes)
        self._tenants.give_back(number)

    def _give_back(self, slot: int) -> None:
        self._refund(slot)
        self._free.append(slot)

    def _remove(self, slot: int) -> None:
        block_hash = self._used.hash_at(slot)
        assert block_hash is not None, slot
        self._policy.on_remove(slot, block_hash)
        self._used.remove(slot)
        if self._listener is not None:
            self._listener.removed(DISK_TIER, block_hash)

    def _forget_write(self, block_hash: BlockHash, grant: DiskGrant) -> None:
        assert self._writing.get(block_hash) == grant, (block_hash.hex(), grant)
        del self._writing[block_hash], self._writing_slots[grant.slot]
