"""The slab index: nothing visible before its commit, nothing evicted under a reader, nothing reused under a writer."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.core import slab_index
from kvstore.core.eviction import EvictionPolicy, LruPolicy
from kvstore.core.ids import BlockDigest, BlockHash
from kvstore.core.slab_index import (
    NO_MATCH,
    HolderId,
    LeaseId,
    MatchResult,
    ReserveOutcome,
    ReserveStatus,
    SlabIndex,
)
from kvstore.core.slot_states import SlotState

W, V = HolderId("writer"), HolderId("other-writer")
R, Q = HolderId("reader"), HolderId("other-reader")
FAR_NS = 1 << 40

GRANTED, PRESENT = ReserveStatus.GRANTED, ReserveStatus.PRESENT
IN_PROGRESS, NO_ROOM = ReserveStatus.IN_PROGRESS, ReserveStatus.NO_ROOM


def h(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


def d(number: int) -> BlockDigest:
    return BlockDigest(number.to_bytes(16, "big"))


def make_index(num_slots: int) -> SlabIndex:
    return SlabIndex(num_slots, policy=LruPolicy(num_slots))


def reserve(index: SlabIndex, *numbers: int, writer: HolderId = W, deadline_ns: int = FAR_NS) -> list[ReserveOutcome]:
    return list(index.reserve([h(number) for number in numbers], writer=writer, deadline_ns=deadline_ns))


def commit(index: SlabIndex, number: int, outcome: ReserveOutcome, writer: HolderId = W) -> bool:
    return index.commit(h(number), slot=outcome.slot, generation=outcome.generation, digest=d(number), writer=writer)


def put(index: SlabIndex, *numbers: int) -> list[ReserveOutcome]:
    """Reserves and commits a prefix, leaf first, as the store node does."""
    outcomes = reserve(index, *numbers)
    for number, outcome in reversed(list(zip(numbers, outcomes, strict=True))):
        assert commit(index, number, outcome)
    return outcomes


def match(index: SlabIndex, *numbers: int, reader: HolderId = R, deadline_ns: int = FAR_NS) -> MatchResult:
    return index.match([h(number) for number in numbers], reader=reader, now_ns=0, deadline_ns=deadline_ns)


def states(index: SlabIndex) -> tuple[int, int, int, int]:
    index.check_invariants()
    counts = index.counts()
    assert counts.free + counts.used + counts.writing + counts.quarantined == counts.total
    return counts.free, counts.used, counts.writing, counts.quarantined


def test_nothing_is_visible_before_its_commit() -> None:
    """A reserved block is in progress for writers and absent for readers; a committed one has its digest."""
    index = make_index(4)
    first, second = reserve(index, 1, 2)
    assert (first, second) == (ReserveOutcome(GRANTED, 0, 1), ReserveOutcome(GRANTED, 1, 1))
    assert match(index, 1, 2) == NO_MATCH
    assert [outcome.status for outcome in reserve(index, 1, 2, writer=V)] == [IN_PROGRESS, IN_PROGRESS]
    assert commit(index, 1, first)
    found = match(index, 1, 2)
    assert [(block.slot, block.generation, block.digest) for block in found.blocks] == [(0, 1, d(1))]
    assert [outcome.status for outcome in reserve(index, 1, 2, writer=V)] == [PRESENT, IN_PROGRESS]
    assert states(index) == (2, 1, 1, 0)


def test_a_match_is_a_prefix_without_a_gap() -> None:
    """Blocks behind a missing one are not given out."""
    index = make_index(4)
    put(index, 1)
    put(index, 3)
    assert len(match(index, 1, 2, 3).blocks) == 1
    assert match(index, 2, 3) == NO_MATCH
    assert match(index) == NO_MATCH
    assert index.num_leases == 1


def test_a_commit_needs_slot_generation_writer_and_hash() -> None:
    """A commit that is not exactly the reservation's is refused and changes nothing that is visible."""
    index = make_index(2)
    (outcome,) = reserve(index, 1)
    assert not commit(index, 1, outcome, writer=V)
    assert not commit(index, 2, outcome)
    assert not commit(index, 1, ReserveOutcome(GRANTED, outcome.slot, outcome.generation + 1))
    assert not commit(index, 1, ReserveOutcome(GRANTED, 1, 1))
    assert h(1) not in index
    assert index.counters.refused_commits == 4
    assert commit(index, 1, outcome)
    assert not commit(index, 1, outcome)
    assert h(1) in index


def test_a_hash_named_twice_gets_one_slot() -> None:
    """The second mention is in progress."""
    index = make_index(4)
    assert [outcome.status for outcome in reserve(index, 1, 1)] == [GRANTED, IN_PROGRESS]
    assert states(index) == (3, 0, 1, 0)


def test_the_least_recently_used_leaf_leaves_first() -> None:
    """Order of departure: the untouched prefix leaf first, then its parents; a hit makes a prefix young again."""
    index = make_index(4)
    put(index, 1, 2)
    put(index, 11, 12)
    found = match(index, 1, 2)
    assert found.lease_id is not None
    index.release(found.lease_id, reader=R)
    gone = []
    for number in (21, 22, 23):
        put(index, number)
        gone.append(next(n for n in (12, 11, 2, 1) if h(n) not in index and n not in gone))
    assert gone == [12, 11, 2]
    assert index.counters.evicted_blocks == 3


def test_a_pinned_block_is_never_evicted() -> None:
    """A full slab of pinned blocks has no room; the release of the lease makes room again."""
    index = make_index(2)
    put(index, 1, 2)
    found = match(index, 1, 2)
    assert [outcome.status for outcome in reserve(index, 3)] == [NO_ROOM]
    assert index.counters.no_room_blocks == 1
    assert found.lease_id is not None
    assert not index.release(found.lease_id, reader=Q)
    assert index.release(found.lease_id, reader=R)
    assert not index.release(found.lease_id, reader=R)
    assert reserve(index, 3) == [ReserveOutcome(GRANTED, 1, 2)]


def test_two_leases_pin_until_both_are_gone() -> None:
    """A lease ends by its own deadline, or with its reader."""
    index = make_index(1)
    put(index, 1)
    match(index, 1, deadline_ns=10)
    match(index, 1, reader=Q, deadline_ns=20)
    assert index.next_deadline_ns() == 10
    index.expire(10)
    assert index.counters.expired_leases == 1
    assert [outcome.status for outcome in reserve(index, 2)] == [NO_ROOM]
    assert index.reader_lost(Q) == 1
    assert [outcome.status for outcome in reserve(index, 2)] == [GRANTED]


def test_a_put_does_not_evict_its_own_prefix() -> None:
    """Room for the tail is never made by dropping the parents that the same call named."""
    index = make_index(3)
    put(index, 1, 2, 3)
    assert [outcome.status for outcome in reserve(index, 1, 2, 3, 4)] == [PRESENT, PRESENT, PRESENT, NO_ROOM]
    assert h(1) in index


def test_after_the_first_refusal_no_later_block_is_granted() -> None:
    """A block whose parent got no room could never be matched, so it takes no room."""
    index = make_index(2)
    put(index, 1)
    match(index, 1)
    assert [outcome.status for outcome in reserve(index, 5, 6, 7)] == [GRANTED, NO_ROOM, NO_ROOM]


def test_an_expired_writable_slot_waits_for_its_writer() -> None:
    """F54: the hash is writable again at once, but elsewhere; the old slot waits for the writer's death."""
    index = make_index(2)
    (old,) = reserve(index, 1, deadline_ns=10)
    index.expire(9)
    assert [outcome.status for outcome in reserve(index, 1, writer=V)] == [IN_PROGRESS]
    index.expire(10)
    assert states(index) == (1, 0, 0, 1)
    (new,) = reserve(index, 1, writer=V)
    assert (new.status, new.slot) == (GRANTED, 1)
    assert commit(index, 1, new, writer=V)
    assert [outcome.status for outcome in reserve(index, 2, 3, writer=V)] == [GRANTED, NO_ROOM]
    assert index.state_of(old.slot) is SlotState.QUARANTINED
    assert index.writer_dead(V) == 1
    assert index.writer_dead(W) == 1
    assert states(index) == (2, 0, 0, 0)


@pytest.mark.parametrize("how", ["commit", "abort"])
def test_a_late_word_of_the_writer_is_an_acknowledgement(how: str) -> None:
    """A writer that commits or aborts late has stopped writing: the block stays invisible, the slot is free."""
    index = make_index(1)
    (old,) = reserve(index, 1, deadline_ns=10)
    index.expire(10)
    assert [outcome.status for outcome in reserve(index, 1, writer=V)] == [NO_ROOM]
    if how == "commit":
        assert not commit(index, 1, old, writer=V)
        assert states(index) == (0, 0, 0, 1)
        assert not commit(index, 1, old)
    else:
        assert not index.abort(h(1), slot=old.slot, generation=old.generation, writer=V)
        assert index.abort(h(1), slot=old.slot, generation=old.generation, writer=W)
    assert h(1) not in index
    assert states(index) == (1, 0, 0, 0)
    assert reserve(index, 1, writer=V) == [ReserveOutcome(GRANTED, 0, 2)]


def test_a_lost_connection_proves_nothing_about_the_writer() -> None:
    """``writer_lost`` quarantines, ``writer_dead`` frees."""
    index = make_index(2)
    reserve(index, 1)
    assert index.writer_lost(W) == 1
    assert states(index) == (1, 0, 0, 1)
    assert index.has_unfinished_writes(W) and not index.has_unfinished_writes(V)
    assert index.writer_dead(W) == 1
    assert not index.has_unfinished_writes(W)


def test_a_corrupt_block_is_gone_at_once_and_its_slot_when_its_readers_are() -> None:
    """It is never matched again; the slot is not reused under another reader; a second report is stale."""
    index = make_index(1)
    (outcome,) = put(index, 1)
    found = match(index, 1)
    assert not index.report_corrupt(h(1), slot=outcome.slot, generation=outcome.generation + 1)
    assert index.report_corrupt(h(1), slot=outcome.slot, generation=outcome.generation)
    assert match(index, 1) == NO_MATCH
    assert states(index) == (0, 0, 0, 1)
    assert [o.status for o in reserve(index, 1)] == [NO_ROOM]
    assert not index.report_corrupt(h(1), slot=outcome.slot, generation=outcome.generation)
    assert index.counters.corrupt_blocks == 1
    assert found.lease_id is not None
    index.release(found.lease_id, reader=R)
    assert states(index) == (1, 0, 0, 0)


def test_look_ups_that_are_never_fetched_do_not_fill_the_slab() -> None:
    """F14: 200 rounds of matching and never releasing keep their hit rate, because leases end by themselves."""
    index = make_index(8)
    for round_number in range(200):
        now_ns = round_number * 100
        index.expire(now_ns)
        numbers = tuple(range(round_number * 4, round_number * 4 + 4))
        put(index, *numbers)
        assert len(match(index, *numbers, deadline_ns=now_ns + 50).blocks) == 4, round_number
    states(index)


def test_the_number_of_leases_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One lease too many is a miss, not an error, and is counted."""
    monkeypatch.setattr(slab_index, "MAX_READ_LEASES", 1)
    index = make_index(1)
    put(index, 1)
    assert match(index, 1) != NO_MATCH
    assert match(index, 1) == NO_MATCH
    assert index.counters.refused_leases == 1


# --- against a naive model ----------------------------------------------------------------------------------

NUM_SLOTS = 5
PREFIXES = st.lists(st.integers(1, 9), max_size=5)
HOLDERS = st.sampled_from([HolderId("a"), HolderId("b"), HolderId("c")])


class _AdmitsNothing(LruPolicy):
    """What a policy does that finds every newcomer worth less than what is here."""

    def admits(self, block_hash: BlockHash, *, is_tail: bool = False) -> bool:
        return False


def test_a_newcomer_that_is_not_admitted_gets_no_slot_of_a_full_tier() -> None:
    policy: EvictionPolicy = _AdmitsNothing(2)
    index = SlabIndex(2, policy=policy)
    put(index, 1, 2)
    assert [outcome.status for outcome in reserve(index, 3)] == [NO_ROOM]
    assert (index.counters.not_admitted_blocks, index.counters.evicted_blocks) == (1, 0)
    assert index.take_evicted() == ()


def test_above_another_tier_every_block_is_admitted_and_what_leaves_is_noted() -> None:
    """A block that this tier refuses would never reach the tier below."""
    index = SlabIndex(2, policy=_AdmitsNothing(2), tier_below=True)
    put(index, 1, 2)
    assert [outcome.status for outcome in reserve(index, 3, 4)] == [GRANTED, GRANTED]
    assert index.counters.not_admitted_blocks == 0
    assert {block.block_hash for block in index.take_evicted()} == {h(1), h(2)}
    assert index.take_evicted() == ()


@dataclass
class ModelWrite:
    number: int
    writer: str
    slot: int
    generation: int
    deadline_ns: int
    is_open: bool = True


class IndexMachine(RuleBasedStateMachine):
    """Random operations. The model knows what each slot may be and searches it by brute force."""

    def __init__(self) -> None:
        super().__init__()
        self.index = make_index(NUM_SLOTS)
        self.now_ns = 0
        self.visible: dict[int, tuple[int, int]] = {}
        """Block number -> (slot, generation)."""
        self.writes: list[ModelWrite] = []
        """Under way and abandoned; every entry fences its slot."""
        self.finished: list[ModelWrite] = []
        self.leases: dict[int, tuple[str, int, list[int]]] = {}
        self.condemned: set[int] = set()

    def pinned(self) -> set[int]:
        return {slot for _, _, slots in self.leases.values() for slot in slots}

    def settle(self) -> None:
        self.condemned &= self.pinned()

    @rule(numbers=PREFIXES, writer=HOLDERS, wait=st.integers(0, 4))
    def reserve(self, numbers: list[int], writer: HolderId, wait: int) -> None:
        before = dict(self.visible)
        outcomes = reserve(self.index, *numbers, writer=writer, deadline_ns=self.now_ns + wait)
        assert len(outcomes) == len(numbers)
        fenced = {write.slot for write in self.writes} | self.condemned
        granted: set[int] = set()
        for number, outcome in zip(numbers, outcomes, strict=True):
            if number in before:
                assert outcome.status is PRESENT
            elif number in {write.number for write in self.writes if write.is_open}:
                assert outcome.status is IN_PROGRESS
            elif outcome.status is GRANTED:
                assert outcome.slot not in fenced | self.pinned() | granted
                granted.add(outcome.slot)
                self.writes.append(ModelWrite(number, writer, outcome.slot, outcome.generation, self.now_ns + wait))
            else:
                assert outcome.status is NO_ROOM
                kept = {slot for n, (slot, _) in before.items() if n in numbers}
                assert fenced | self.pinned() | granted | kept == set(range(NUM_SLOTS))
        # Whatever lost its slot was evicted: it was neither pinned nor part of this very prefix.
        for number, (slot, _) in before.items():
            if slot in granted:
                assert number not in numbers
                del self.visible[number]

    @rule(data=st.data(), as_writer=st.none() | HOLDERS, age=st.sampled_from([0, 0, 0, 1]), is_commit=st.booleans())
    def finish(self, data: st.DataObject, as_writer: HolderId | None, age: int, is_commit: bool) -> None:
        candidates = self.writes + self.finished[-3:]
        if not candidates:
            return
        write = data.draw(st.sampled_from(candidates))
        writer = HolderId(as_writer or write.writer)
        generation = write.generation - age
        is_own = write in self.writes and writer == write.writer and age == 0
        becomes_visible = is_own and write.is_open and is_commit
        if is_commit:
            result = self.index.commit(
                h(write.number), slot=write.slot, generation=generation, digest=d(write.number), writer=writer
            )
            assert result is becomes_visible
        else:
            result = self.index.abort(h(write.number), slot=write.slot, generation=generation, writer=writer)
            assert result is is_own
        if is_own:
            self.writes.remove(write)
            self.finished.append(write)
        if becomes_visible:
            assert write.number not in self.visible
            self.visible[write.number] = (write.slot, write.generation)

    @rule(numbers=PREFIXES, reader=HOLDERS, wait=st.integers(0, 4))
    def match(self, numbers: list[int], reader: HolderId, wait: int) -> None:
        found = match(self.index, *numbers, reader=reader, deadline_ns=self.now_ns + wait)
        expected = []
        for number in numbers:
            if number not in self.visible:
                break
            expected.append((*self.visible[number], d(number)))
        assert [(block.slot, block.generation, block.digest) for block in found.blocks] == expected
        assert (found.lease_id is None) is (not expected)
        if found.lease_id is not None:
            assert found.lease_id > max(self.leases, default=0)
            self.leases[found.lease_id] = (reader, self.now_ns + wait, [block.slot for block in found.blocks])

    @rule(lease_id=st.integers(1, 12), reader=HOLDERS)
    def release(self, lease_id: int, reader: HolderId) -> None:
        is_own = lease_id in self.leases and self.leases[lease_id][0] == reader
        assert self.index.release(LeaseId(lease_id), reader=reader) is is_own
        if is_own:
            del self.leases[lease_id]
        self.settle()

    @rule(reader=HOLDERS)
    def reader_lost(self, reader: HolderId) -> None:
        ending = [lease_id for lease_id, lease in self.leases.items() if lease[0] == reader]
        assert self.index.reader_lost(reader) == len(ending)
        for lease_id in ending:
            del self.leases[lease_id]
        self.settle()

    @rule(writer=HOLDERS)
    def writer_lost(self, writer: HolderId) -> None:
        ending = [write for write in self.writes if write.writer == writer and write.is_open]
        assert self.index.writer_lost(writer) == len(ending)
        for write in ending:
            write.is_open = False

    @rule(writer=HOLDERS)
    def writer_dead(self, writer: HolderId) -> None:
        ending = [write for write in self.writes if write.writer == writer]
        assert self.index.writer_dead(writer) == len(ending)
        for write in ending:
            self.writes.remove(write)
            self.finished.append(write)

    @rule(number=st.integers(1, 9), age=st.sampled_from([0, 0, 1]))
    def report_corrupt(self, number: int, age: int) -> None:
        slot, generation = self.visible.get(number, (0, 0))
        is_current = number in self.visible and age == 0
        assert self.index.report_corrupt(h(number), slot=slot, generation=generation - age) is is_current
        if is_current:
            del self.visible[number]
            if slot in self.pinned():
                self.condemned.add(slot)

    @rule(wait=st.integers(0, 3))
    def expire(self, wait: int) -> None:
        self.now_ns += wait
        self.index.expire(self.now_ns)
        self.leases = {key: lease for key, lease in self.leases.items() if lease[1] > self.now_ns}
        for write in self.writes:
            write.is_open = write.is_open and write.deadline_ns > self.now_ns
        self.settle()

    @invariant()
    def books_agree(self) -> None:
        open_writes = sum(write.is_open for write in self.writes)
        quarantined = len(self.writes) - open_writes + len(self.condemned)
        free = NUM_SLOTS - len(self.visible) - open_writes - quarantined
        assert states(self.index) == (free, len(self.visible), open_writes, quarantined)
        assert {number for number in range(1, 10) if h(number) in self.index} == set(self.visible)
        assert {lease.lease_id: list(lease.slots) for lease in self.index.leases()} == {
            lease_id: slots for lease_id, (_, _, slots) in self.leases.items()
        }


IndexMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestIndexAgainstModel = IndexMachine.TestCase
