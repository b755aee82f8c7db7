"""The index of disk slots against a naive model: any order of writes, reads, evictions, damage and restarts."""

from __future__ import annotations

import pytest
from disk_workload import block_hash_of
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.core.disk_slots import DISK_TIER, DiskBlock, DiskGrant, DiskIndex
from kvstore.core.eviction import LruPolicy
from kvstore.core.ids import BlockDigest, TenantId
from kvstore.core.quota import TenantBook
from kvstore.core.slot_states import SlotState

NUM_SLOTS = 5
BLOCK_BYTES = 10
NUMBERS = st.integers(1, 9)
TENANTS = st.sampled_from([TenantId(""), TenantId("a"), TenantId("b")])
QUOTAS = {TenantId("b"): 2 * BLOCK_BYTES}


def digest_of(number: int) -> BlockDigest:
    return BlockDigest(number.to_bytes(16, "big"))


def make_index(**more: object) -> DiskIndex:
    arguments = {"policy": LruPolicy(NUM_SLOTS), "book": TenantBook(QUOTAS), "block_bytes": BLOCK_BYTES, **more}
    return DiskIndex(NUM_SLOTS, **arguments)  # type: ignore[arg-type]


class DiskIndexMachine(RuleBasedStateMachine):
    """The model: plain dicts and a list in the order of use; what may be evicted is the first that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.book = TenantBook(QUOTAS)
        self.index = make_index(book=self.book)
        self.writing: dict[int, tuple[DiskGrant, TenantId]] = {}
        self.used: dict[int, tuple[DiskGrant, TenantId]] = {}
        self.order: list[int] = []
        self.pins: list[int] = []
        self.pinned_slots: dict[int, int] = {}
        self.quarantined: set[int] = set()
        self.gone_tenants: dict[int, TenantId] = {}
        self.last_generation = 0

    def held(self, tenant: TenantId) -> int:
        alive = [t for _, t in (*self.writing.values(), *self.used.values())]
        return [*alive, *self.gone_tenants.values()].count(tenant)

    def num_taken(self) -> int:
        return len(self.writing) + len(self.used) + len(self.gone_tenants)

    @rule(number=NUMBERS, tenant=TENANTS)
    def reserve(self, number: int, tenant: TenantId) -> None:
        if number in self.used or number in self.writing:
            return
        is_at_quota = tenant in QUOTAS and (self.held(tenant) + 1) * BLOCK_BYTES > QUOTAS[tenant]
        candidates = [
            n
            for n in self.order
            if not self.pinned_slots.get(self.used[n][0].slot) and (not is_at_quota or self.used[n][1] == tenant)
        ]
        grant = self.index.reserve(block_hash_of(number), tenant=tenant)
        if not is_at_quota and self.num_taken() < NUM_SLOTS:
            assert grant is not None
        elif candidates:
            victim = candidates[0]
            assert grant is not None and grant.slot == self.used[victim][0].slot
            self.order.remove(victim)
            del self.used[victim]
        else:
            assert grant is None
            return
        assert grant.generation > self.last_generation
        self.last_generation = grant.generation
        self.writing[number] = (grant, tenant)

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), succeeds=st.booleans())
    def finish(self, data: st.DataObject, succeeds: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.writing)))
        grant, tenant = self.writing.pop(number)
        if succeeds:
            self.index.commit(block_hash_of(number), grant, digest_of(number))
            self.used[number] = (grant, tenant)
            self.order.append(number)
        else:
            self.index.abort(block_hash_of(number), grant)

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.used)))
        slot = self.used[number][0].slot
        self.index.pin(slot)
        self.pins.append(slot)
        self.pinned_slots[slot] = self.pinned_slots.get(slot, 0) + 1

    @rule(numbers=st.lists(NUMBERS, unique=True, max_size=3))
    def hit(self, numbers: list[int]) -> None:
        self.index.hit([block_hash_of(number) for number in numbers])
        for number in reversed(numbers):
            if number in self.used:
                self.order.remove(number)
                self.order.append(number)

    @rule(num_blocks=st.integers(1, 3), other_bytes=st.integers(0, 2 * BLOCK_BYTES), keep=st.sets(NUMBERS, max_size=2))
    def make_room(self, num_blocks: int, other_bytes: int, keep: set[int]) -> None:
        """Of a tenant at its quota the oldest go, until there is the room; none go for room that cannot be."""
        tenant = TenantId("b")
        self.book.charge(tenant, "host", other_bytes)
        left = QUOTAS[tenant] - other_bytes - self.held(tenant) * BLOCK_BYTES
        in_vain = max(0, num_blocks * BLOCK_BYTES - (QUOTAS[tenant] - other_bytes))
        slots = {self.used[n][0].slot for n in keep if n in self.used}
        dropped = self.index.make_room(tenant, num_blocks * BLOCK_BYTES, keep=slots)
        for number in list(self.order):
            grant, owner = self.used[number]
            if left >= num_blocks * BLOCK_BYTES - in_vain:
                break
            if owner == tenant and grant.slot not in slots and not self.pinned_slots.get(grant.slot):
                assert grant.slot in dropped
                left += BLOCK_BYTES
                self.order.remove(number)
                del self.used[number]
                dropped = tuple(slot for slot in dropped if slot != grant.slot)
        assert not dropped
        self.book.refund(tenant, "host", other_bytes)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        slot = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        self.index.unpin(slot)
        self.pinned_slots[slot] -= 1

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.used)))
        grant, tenant = self.used.pop(number)
        self.order.remove(number)
        assert not self.index.quarantine(grant.slot, grant.generation + 1), "another life of the slot"
        assert self.index.quarantine(grant.slot, grant.generation)
        self.quarantined.add(grant.slot)
        self.gone_tenants[grant.slot] = tenant

    @rule()
    def release(self) -> None:
        expected = {slot for slot in self.quarantined if not self.pinned_slots.get(slot)}
        assert set(self.index.release_quarantined()) == expected
        for slot in expected:
            self.quarantined.discard(slot)
            del self.gone_tenants[slot]

    @precondition(lambda self: not self.pins)
    @rule()
    def restart(self) -> None:
        """What is committed is what the headers say; everything else is free again."""
        self.book = TenantBook(QUOTAS)
        self.index = make_index(recovered=list(self.index.blocks()), book=self.book)
        self.writing.clear()
        self.quarantined.clear()
        self.gone_tenants.clear()
        self.order.sort(key=lambda number: self.used[number][0].generation)
        self.last_generation = max((grant.generation for grant, _ in self.used.values()), default=0)

    @invariant()
    def agree(self) -> None:
        self.index.check_invariants()
        for number in range(1, 10):
            record = self.index.find(block_hash_of(number))
            assert (record is not None) == (number in self.used)
            if record is not None:
                assert (record.slot, record.generation) == (
                    self.used[number][0].slot,
                    self.used[number][0].generation,
                )
                assert record.digest == digest_of(number)
            assert self.index.is_writing(block_hash_of(number)) == (number in self.writing)
        counts = self.index.counts()
        assert counts.used == len(self.used) and counts.writing == len(self.writing)
        assert counts.quarantined == len(self.gone_tenants)
        assert counts.free == NUM_SLOTS - self.num_taken()


DiskIndexMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestDiskIndex = DiskIndexMachine.TestCase


def test_of_two_copies_of_a_block_the_younger_one_is_taken() -> None:
    """A header that a power cut kept alive although its block was written elsewhere later is stale, its slot free."""
    old = DiskBlock(0, 1, block_hash_of(1), digest_of(1), TenantId(""))
    young = DiskBlock(3, 7, block_hash_of(1), digest_of(1), TenantId(""))
    recovered = make_index(recovered=[young, old])
    found = recovered.find(block_hash_of(1))
    assert found is not None and (found.slot, found.generation) == (3, 7)
    assert recovered.state_of(0) is SlotState.FREE
    assert recovered.counters.stale_blocks == 1
    recovered.check_invariants()


@pytest.mark.parametrize("num_blocks", [0, 3, NUM_SLOTS])
def test_recovered_blocks_are_charged_to_their_tenants(num_blocks: int) -> None:
    """After a restart a tenant's quota counts what it had on the disk."""
    index = make_index()
    for number in range(1, num_blocks + 1):
        grant = index.reserve(block_hash_of(number), tenant=TenantId("a"))
        assert grant is not None
        index.commit(block_hash_of(number), grant, digest_of(number))
    book = TenantBook()
    make_index(recovered=list(index.blocks()), book=book).check_invariants()
    assert book.usage() == ({TenantId("a"): {DISK_TIER: num_blocks * BLOCK_BYTES}} if num_blocks else {})
