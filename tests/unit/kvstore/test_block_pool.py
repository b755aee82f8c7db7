"""The block pool: who holds which slot, and which slots nobody may have yet."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.core.block_pool import (
    MAX_RETIRED_ATTEMPTS,
    BlockPool,
    NeverFits,
    NoCapacityResult,
    PoolCounts,
    QuarantineReason,
    Reservation,
    SlotState,
    StaleAttempt,
)
from kvstore.core.ids import AttemptId, Incarnation

A, B, C = AttemptId("att-a"), AttemptId("att-b"), AttemptId("att-c")
PEER, OTHER_PEER = Incarnation("p" * 32), Incarnation("q" * 32)


def reserved(pool: BlockPool, attempt_id: AttemptId, num_blocks: int, **changes: object) -> Reservation:
    """Reserves at epoch 1 with no deadline and returns the reservation, which must succeed."""
    arguments = {"num_blocks": num_blocks, "deadline_ns": None, **changes}
    result = pool.reserve(attempt_id, 1, **arguments)  # type: ignore[arg-type]
    assert isinstance(result, Reservation), result
    return result


def numbers(counts: PoolCounts) -> tuple[int, int, int, int]:
    return counts.free, counts.reserved, counts.owned, counts.quarantined


def test_reserve_gives_slots_in_order_with_fresh_generations_and_tags() -> None:
    """Exact slots, generations and tags of two reservations; the slot free longest goes first."""
    pool = BlockPool(4)
    assert [(b.slot, b.generation, b.tag) for b in reserved(pool, A, 2).blocks] == [(0, 1, 1), (1, 1, 2)]
    assert pool.release(A, 1, now_ns=0)
    assert [(b.slot, b.generation, b.tag) for b in reserved(pool, B, 3).blocks] == [
        (2, 1, 3),
        (3, 1, 4),
        (0, 2, 5),
    ]
    assert numbers(pool.counts()) == (1, 3, 0, 0)


def test_too_much_for_now_and_too_much_for_ever_are_told_apart() -> None:
    """NoCapacityResult says what is free and quarantined; NeverFits says the size of the pool. Nothing is taken."""
    pool = BlockPool(4)
    reserved(pool, A, 3)
    assert pool.reserve(B, 1, num_blocks=2, deadline_ns=None) == NoCapacityResult(2, num_free=1, num_quarantined=0)
    assert pool.reserve(B, 1, num_blocks=5, deadline_ns=None) == NeverFits(5, num_total=4)
    assert pool.extend(A, 1, num_blocks=2) == NeverFits(5, num_total=4)
    assert numbers(pool.counts()) == (1, 3, 0, 0)
    assert reserved(pool, B, 1).blocks[0].slot == 3


def test_landed_needs_the_attempt_the_epoch_and_the_generation() -> None:
    """Any stale part leaves the slot reserved."""
    pool = BlockPool(2)
    block = reserved(pool, A, 1).blocks[0]
    reserved(pool, B, 1)
    assert not pool.landed(A, 2, slot=block.slot, generation=block.generation)
    assert not pool.landed(C, 1, slot=block.slot, generation=block.generation)
    assert not pool.landed(B, 1, slot=block.slot, generation=block.generation)
    assert not pool.landed(A, 1, slot=block.slot, generation=block.generation + 1)
    assert not pool.landed(A, 1, slot=7, generation=1)
    assert pool.state_of(block.slot) is SlotState.RESERVED
    assert pool.landed(A, 1, slot=block.slot, generation=block.generation)
    assert pool.state_of(block.slot) is SlotState.OWNED
    assert not pool.landed(A, 1, slot=block.slot, generation=block.generation)


def test_a_finished_attempt_cannot_reserve_again() -> None:
    """A late duplicate of a reservation is stale; a later epoch of the same attempt is not."""
    pool = BlockPool(2)
    reserved(pool, A, 1)
    assert pool.reserve(A, 1, num_blocks=1, deadline_ns=None) == StaleAttempt(A, 1)
    assert pool.release(A, 1, now_ns=0)
    assert not pool.release(A, 1, now_ns=0)
    assert pool.reserve(A, 1, num_blocks=1, deadline_ns=None) == StaleAttempt(A, 1)
    assert pool.allocate(A, 0, num_blocks=1) == StaleAttempt(A, 0)
    assert isinstance(pool.allocate(A, 2, num_blocks=1), Reservation)


def test_finished_attempts_are_remembered_within_a_bound() -> None:
    """The memory of finished attempts does not grow for ever."""
    pool = BlockPool(1)
    for number in range(MAX_RETIRED_ATTEMPTS + 10):
        attempt_id = AttemptId(f"att-{number}")
        reserved(pool, attempt_id, 1)
        pool.release(attempt_id, 1, now_ns=0)
    pool.check_invariants()


def test_a_slot_the_writer_may_still_write_is_not_given_out() -> None:
    """What has landed is free at once; what has not waits for the writer's end."""
    pool = BlockPool(3)
    blocks = reserved(pool, A, 2, writer=PEER).blocks
    assert pool.landed(A, 1, slot=blocks[0].slot, generation=blocks[0].generation)
    assert pool.release(A, 1, now_ns=77, writer_may_still_write=True)
    assert numbers(pool.counts()) == (2, 0, 0, 1)
    (entry,) = pool.quarantined()
    assert (entry.slot, entry.reason, entry.peers, entry.since_ns) == (
        1,
        QuarantineReason.RELEASED_WHILE_WRITTEN,
        {PEER},
        77,
    )
    assert pool.reserve(B, 1, num_blocks=3, deadline_ns=None) == NoCapacityResult(3, num_free=2, num_quarantined=1)
    assert pool.writer_done(B, 1) == 0
    assert pool.writer_done(A, 1) == 1
    assert numbers(pool.counts()) == (3, 0, 0, 0)


def test_without_a_writer_nothing_can_be_written() -> None:
    """A writer is bound before its first transfer, so an attempt without one leaves no quarantine."""
    pool = BlockPool(2)
    reserved(pool, A, 2)
    assert pool.release(A, 1, now_ns=0, writer_may_still_write=True)
    assert numbers(pool.counts()) == (2, 0, 0, 0)


def test_a_writer_bound_later_counts() -> None:
    """Binding after the reservation has the same effect as naming the writer in it."""
    pool = BlockPool(2)
    reserved(pool, A, 2)
    assert not pool.bind_peer(A, 2, PEER)
    assert pool.bind_peer(A, 1, PEER)
    assert pool.release(A, 1, now_ns=0, writer_may_still_write=True)
    assert numbers(pool.counts()) == (0, 0, 0, 2)
    assert pool.peer_dead(OTHER_PEER) == 0
    assert pool.peer_dead(PEER) == 2


def test_a_source_waits_for_every_reader() -> None:
    """Blocks pushed to two peers are free after the second one is dead."""
    pool = BlockPool(2)
    assert isinstance(pool.allocate(A, 1, num_blocks=2, reader=PEER), Reservation)
    assert pool.bind_peer(A, 1, OTHER_PEER)
    assert pool.release(A, 1, now_ns=0, reader_may_still_read=True)
    assert {entry.reason for entry in pool.quarantined()} == {QuarantineReason.RELEASED_WHILE_READ}
    assert pool.peer_dead(PEER) == 0
    pool.check_invariants()
    assert pool.peer_dead(OTHER_PEER) == 2


def test_a_peer_that_died_before_the_release_leaves_no_quarantine() -> None:
    """Death proved while the attempt is alive is remembered until its release."""
    pool = BlockPool(2)
    reserved(pool, A, 1, writer=PEER)
    assert isinstance(pool.allocate(B, 1, num_blocks=1, reader=PEER), Reservation)
    assert pool.peer_dead(PEER) == 0
    assert pool.release(A, 1, now_ns=0, writer_may_still_write=True)
    assert pool.release(B, 1, now_ns=0, reader_may_still_read=True)
    assert numbers(pool.counts()) == (2, 0, 0, 0)


def test_an_expired_reservation_is_quarantined_only_if_it_has_a_writer() -> None:
    """At its deadline, not before; renewed and completely landed attempts do not expire."""
    pool = BlockPool(5)
    reserved(pool, A, 1, deadline_ns=10, writer=PEER)
    reserved(pool, B, 1, deadline_ns=10)
    landed = reserved(pool, C, 1, deadline_ns=10).blocks[0]
    assert pool.landed(C, 1, slot=landed.slot, generation=landed.generation)
    renewed = AttemptId("att-renewed")
    reserved(pool, renewed, 1, deadline_ns=10)
    assert pool.renew(renewed, 1, deadline_ns=20)
    assert pool.next_deadline_ns() == 10
    assert pool.expire(9) == ()
    assert pool.expire(10) == ((A, 1), (B, 1))
    assert numbers(pool.counts()) == (2, 1, 1, 1)
    assert pool.quarantined()[0].reason is QuarantineReason.EXPIRED_WHILE_WRITTEN
    assert pool.renew(renewed, 1, deadline_ns=None)
    assert pool.next_deadline_ns() is None
    assert pool.expire(1 << 60) == ()


def test_too_much_quarantine_is_reported() -> None:
    """The flag is raised beyond the limit, not at it."""
    pool = BlockPool(4, quarantine_limit_blocks=1)
    for attempt_id, expected in ((A, False), (B, True)):
        reserved(pool, attempt_id, 1, writer=PEER)
        pool.release(attempt_id, 1, now_ns=0, writer_may_still_write=True)
        assert pool.counts().quarantine_over_limit is expected


def test_extended_slots_are_owned_and_come_after_the_others() -> None:
    """The block table of an attempt keeps its order; only the reserved part can be quarantined as written."""
    pool = BlockPool(4)
    reserved(pool, A, 2, writer=PEER)
    assert isinstance(pool.extend(A, 1, num_blocks=1), Reservation)
    assert pool.blocks_of(A, 1) == (0, 1, 2)
    assert pool.blocks_of(A, 2) == ()
    assert numbers(pool.counts()) == (1, 2, 1, 0)
    pool.release(A, 1, now_ns=0, writer_may_still_write=True)
    assert numbers(pool.counts()) == (2, 0, 0, 2)


# --- against a naive model ----------------------------------------------------------------------------------

NUM_BLOCKS = 7
ATTEMPTS = st.sampled_from([AttemptId(f"att-{i}") for i in range(4)])
EPOCHS = st.integers(1, 3)
PEERS = st.sampled_from([Incarnation(letter * 32) for letter in "xyz"])


@dataclass
class ModelAttempt:
    epoch: int
    deadline_ns: int | None
    peers: set[str]
    ever_bound: bool
    slots: dict[int, str] = field(default_factory=dict)


class PoolMachine(RuleBasedStateMachine):
    """Random operations; the model keeps plain sets and looks everything up by brute force."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.now_ns = 0
        self.attempts: dict[str, ModelAttempt] = {}
        self.retired: dict[str, int] = {}
        self.quarantine: dict[int, tuple[str, int, set[str]]] = {}
        self.generations: dict[int, int] = dict.fromkeys(range(NUM_BLOCKS), 0)
        self.tags: set[int] = set()

    def free(self) -> set[int]:
        held = {slot for attempt in self.attempts.values() for slot in attempt.slots}
        return set(range(NUM_BLOCKS)) - held - set(self.quarantine)

    def current(self, attempt_id: str, epoch: int) -> ModelAttempt | None:
        attempt = self.attempts.get(attempt_id)
        return attempt if attempt is not None and attempt.epoch == epoch else None

    def take(self, result: object, attempt: ModelAttempt, num_blocks: int, state: str) -> None:
        """Checks the answer to a request for slots against what the model would say, and books it."""
        if len(attempt.slots) + num_blocks > NUM_BLOCKS:
            assert isinstance(result, NeverFits)
        elif num_blocks > len(self.free()):
            assert result == NoCapacityResult(num_blocks, len(self.free()), len(self.quarantine))
        else:
            assert isinstance(result, Reservation)
            assert len(result.blocks) == num_blocks
            for block in result.blocks:
                assert block.slot in self.free()
                assert block.generation > self.generations[block.slot]
                assert block.tag > max(self.tags, default=0)
                self.generations[block.slot] = block.generation
                self.tags.add(block.tag)
                attempt.slots[block.slot] = state

    @rule(
        attempt_id=ATTEMPTS,
        epoch=EPOCHS,
        num_blocks=st.integers(0, NUM_BLOCKS + 1),
        wait=st.none() | st.integers(0, 5),
        peer=st.none() | PEERS,
        is_local=st.booleans(),
    )
    def begin(self, attempt_id, epoch, num_blocks, wait, peer, is_local) -> None:  # type: ignore[no-untyped-def]
        deadline_ns = None if wait is None or is_local else self.now_ns + wait
        if is_local:
            result = self.pool.allocate(attempt_id, epoch, num_blocks=num_blocks, reader=peer)
        else:
            result = self.pool.reserve(attempt_id, epoch, num_blocks=num_blocks, deadline_ns=deadline_ns, writer=peer)
        if attempt_id in self.attempts or epoch <= self.retired.get(attempt_id, 0):
            assert result == StaleAttempt(attempt_id, epoch)
            return
        attempt = ModelAttempt(epoch, deadline_ns, {peer} - {None}, peer is not None)
        self.take(result, attempt, num_blocks, "owned" if is_local else "reserved")
        if isinstance(result, Reservation):
            self.attempts[attempt_id] = attempt

    @rule(attempt_id=ATTEMPTS, epoch=EPOCHS, num_blocks=st.integers(0, 4))
    def extend(self, attempt_id, epoch, num_blocks) -> None:  # type: ignore[no-untyped-def]
        attempt = self.current(attempt_id, epoch)
        result = self.pool.extend(attempt_id, epoch, num_blocks=num_blocks)
        if attempt is None:
            assert result == StaleAttempt(attempt_id, epoch)
        else:
            self.take(result, attempt, num_blocks, "owned")

    @rule(attempt_id=ATTEMPTS, epoch=EPOCHS, peer=PEERS)
    def bind(self, attempt_id, epoch, peer) -> None:  # type: ignore[no-untyped-def]
        attempt = self.current(attempt_id, epoch)
        assert self.pool.bind_peer(attempt_id, epoch, peer) is (attempt is not None)
        if attempt is not None:
            attempt.peers.add(peer)
            attempt.ever_bound = True

    @rule(attempt_id=ATTEMPTS, epoch=EPOCHS, wait=st.none() | st.integers(0, 5))
    def renew(self, attempt_id, epoch, wait) -> None:  # type: ignore[no-untyped-def]
        deadline_ns = None if wait is None else self.now_ns + wait
        attempt = self.current(attempt_id, epoch)
        assert self.pool.renew(attempt_id, epoch, deadline_ns=deadline_ns) is (attempt is not None)
        if attempt is not None:
            attempt.deadline_ns = deadline_ns

    @rule(attempt_id=ATTEMPTS, epoch=EPOCHS, slot=st.integers(0, NUM_BLOCKS - 1), age=st.integers(0, 1))
    def land(self, attempt_id, epoch, slot, age) -> None:  # type: ignore[no-untyped-def]
        attempt = self.current(attempt_id, epoch)
        generation = self.generations[slot] - age
        expected = attempt is not None and attempt.slots.get(slot) == "reserved" and age == 0
        assert self.pool.landed(attempt_id, epoch, slot=slot, generation=generation) is expected
        if expected:
            attempt.slots[slot] = "owned"

    @rule(attempt_id=ATTEMPTS, epoch=EPOCHS, written=st.booleans(), read=st.booleans())
    def release(self, attempt_id, epoch, written, read) -> None:  # type: ignore[no-untyped-def]
        attempt = self.current(attempt_id, epoch)
        read = read and (attempt is None or attempt.ever_bound)
        result = self.pool.release(
            attempt_id, epoch, now_ns=self.now_ns, writer_may_still_write=written, reader_may_still_read=read
        )
        assert result is (attempt is not None)
        if attempt is not None:
            self.end(attempt_id, {"reserved"} if written else set(), {"owned"} if read else set())

    def end(self, attempt_id: str, *fenced: set[str]) -> None:
        attempt = self.attempts.pop(attempt_id)
        self.retired[attempt_id] = attempt.epoch
        for slot, state in attempt.slots.items():
            if attempt.peers and state in set().union(*fenced):
                self.quarantine[slot] = (attempt_id, attempt.epoch, set(attempt.peers))

    @rule(wait=st.integers(0, 3))
    def expire(self, wait) -> None:  # type: ignore[no-untyped-def]
        self.now_ns += wait
        expected = {
            (attempt_id, attempt.epoch)
            for attempt_id, attempt in self.attempts.items()
            if attempt.deadline_ns is not None
            and attempt.deadline_ns <= self.now_ns
            and "reserved" in attempt.slots.values()
        }
        assert set(self.pool.expire(self.now_ns)) == expected
        for attempt_id, _ in expected:
            self.end(attempt_id, {"reserved"})

    @rule(attempt_id=ATTEMPTS, epoch=EPOCHS)
    def writer_done(self, attempt_id, epoch) -> None:  # type: ignore[no-untyped-def]
        leaving = [slot for slot, entry in self.quarantine.items() if entry[:2] == (attempt_id, epoch)]
        assert self.pool.writer_done(attempt_id, epoch) == len(leaving)
        for slot in leaving:
            del self.quarantine[slot]

    @rule(peer=PEERS)
    def peer_dead(self, peer) -> None:  # type: ignore[no-untyped-def]
        for attempt in self.attempts.values():
            attempt.peers.discard(peer)
        for _, _, peers in self.quarantine.values():
            peers.discard(peer)
        leaving = [slot for slot, (_, _, peers) in self.quarantine.items() if not peers]
        assert self.pool.peer_dead(peer) == len(leaving)
        for slot in leaving:
            del self.quarantine[slot]

    @precondition(lambda self: self.quarantine)
    @rule()
    def a_quarantined_slot_is_never_given_out(self) -> None:
        """Takes everything that is free at once: none of it may be quarantined."""
        taker = AttemptId("att-taker")
        result = self.pool.allocate(taker, self.retired.get(taker, 0) + 1, num_blocks=len(self.free()))
        assert isinstance(result, Reservation)
        assert not {block.slot for block in result.blocks} & set(self.quarantine)
        attempt = ModelAttempt(self.retired.get(taker, 0) + 1, None, set(), False)
        self.take(result, attempt, len(result.blocks), "owned")
        self.attempts[taker] = attempt
        assert self.pool.release(taker, attempt.epoch, now_ns=self.now_ns)
        self.end(taker)

    @invariant()
    def books_agree(self) -> None:
        self.pool.check_invariants()
        states = [state for attempt in self.attempts.values() for state in attempt.slots.values()]
        assert numbers(self.pool.counts()) == (
            len(self.free()),
            states.count("reserved"),
            states.count("owned"),
            len(self.quarantine),
        )
        for attempt_id, attempt in self.attempts.items():
            assert self.pool.blocks_of(AttemptId(attempt_id), attempt.epoch) == tuple(attempt.slots)
        assert {entry.slot: set(entry.peers) for entry in self.pool.quarantined()} == {
            slot: peers for slot, (_, _, peers) in self.quarantine.items()
        }


PoolMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestPoolAgainstModel = PoolMachine.TestCase


def test_a_vacated_attempt_goes_on_without_slots() -> None:
    """Preemption: all slots are free, the attempt stays, and gets new lives of slots later."""
    pool = BlockPool(4)
    first = pool.reserve(A, 1, num_blocks=2, deadline_ns=None)
    assert isinstance(first, Reservation)
    for block in first.blocks:
        assert pool.landed(A, 1, slot=block.slot, generation=block.generation)
    assert pool.vacate(A, 1) == 2
    pool.check_invariants()
    assert pool.counts().free == 4
    assert not pool.is_current(first.blocks[0].slot, first.blocks[0].generation)
    again = pool.extend(A, 1, num_blocks=3)
    assert isinstance(again, Reservation)
    assert pool.blocks_of(A, 1) == tuple(block.slot for block in again.blocks)
    assert pool.release(A, 1, now_ns=0)
    pool.check_invariants()
    assert pool.vacate(A, 1) == 0, "stale"


def test_slots_that_have_not_landed_cannot_be_vacated() -> None:
    """A peer may still write there."""
    pool = BlockPool(4)
    pool.reserve(A, 1, num_blocks=2, deadline_ns=None)
    with pytest.raises(AssertionError, match="have not landed"):
        pool.vacate(A, 1)
