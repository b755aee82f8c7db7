"""Complete blocks in the pool: shared, kept after their attempts, given away when room is needed and never before."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.core.block_pool import (
    BlockPool,
    NeverFits,
    NoCapacityResult,
    QuarantineReason,
    Reservation,
    SlotState,
    StaleAttempt,
)
from kvstore.core.eviction import POLICIES, make_policy
from kvstore.core.ids import AttemptId, BlockDigest, BlockHash, Incarnation

A, B, C, D = (AttemptId(f"att-{letter}") for letter in "abcd")
PEER, OTHER_PEER = Incarnation("p" * 32), Incarnation("q" * 32)
HASHES = [BlockHash(bytes([number]) * 32) for number in range(1, 9)]


def digest(block_hash: BlockHash) -> BlockDigest:
    return BlockDigest(block_hash[:16])


def take(pool: BlockPool, attempt_id: AttemptId, num_blocks: int, cached: list[BlockHash] | None = None) -> Reservation:
    """Allocates at epoch 1 for a reader PEER; must succeed."""
    result = pool.allocate(attempt_id, 1, num_blocks=num_blocks, reader=PEER, cached=cached or [])
    assert isinstance(result, Reservation), result
    return result


def share(pool: BlockPool, attempt_id: AttemptId, *hashes: BlockHash) -> list[bool]:
    """Shares the first blocks of an attempt under these hashes."""
    return [
        pool.share(attempt_id, 1, index=index, block_hash=item, digest=digest(item))
        for index, item in enumerate(hashes)
    ]


def here(pool: BlockPool) -> list[BlockHash]:
    return [item for item in HASHES if pool.find(item) is not None]


def test_complete_blocks_stay_and_are_shared() -> None:
    """What an attempt shared is found after its end, in the same life of its slot; the incomplete block is gone."""
    pool = BlockPool(6)
    first = take(pool, A, 3)
    assert share(pool, A, *HASHES[:2]) == [True, True]
    assert [block.slot for block in pool.match(HASHES)] == [0, 1]
    counts = pool.counts()
    assert (counts.free, counts.owned, counts.cached) == (3, 3, 0), "while A holds them"
    pool.release(A, 1, now_ns=0)
    counts = pool.counts()
    assert (counts.free, counts.owned, counts.cached, counts.available) == (4, 0, 2, 6)
    again = take(pool, B, 4, HASHES[:2])
    also = take(pool, C, 2, HASHES[:2])
    assert [(block.slot, block.generation) for block in again.cached] == [
        (block.slot, block.generation) for block in first.blocks[:2]
    ]
    assert again.slots == (0, 1, 3, 4) and also.slots == (0, 1)
    assert (pool.counts().owned, pool.counts().cached) == (4, 0), "a shared block counts once"
    pool.release(B, 1, now_ns=0)
    assert (pool.counts().owned, pool.counts().cached) == (2, 0), "C still holds them"
    pool.check_invariants()


def test_room_is_made_leaf_first_and_only_when_needed() -> None:
    """Free slots go first; then the leaf of what was used longest ago; what is held stays."""
    pool = BlockPool(6)
    take(pool, A, 2)
    share(pool, A, HASHES[0], HASHES[1])
    take(pool, B, 2)
    share(pool, B, HASHES[2], HASHES[3])
    pool.release(A, 1, now_ns=0)
    pool.release(B, 1, now_ns=0)
    take(pool, C, 2)
    assert here(pool) == HASHES[:4] and pool.num_evicted == 0
    assert isinstance(pool.extend(C, 1, num_blocks=1), Reservation)
    assert here(pool) == [HASHES[0], HASHES[2], HASHES[3]]
    # A use that ends makes parent and leaf young again.
    take(pool, D, 1, [HASHES[0]])
    assert pool.extend(C, 1, num_blocks=3) == NoCapacityResult(3, num_free=2, num_quarantined=0)
    pool.release(D, 1, now_ns=0)
    assert isinstance(pool.extend(C, 1, num_blocks=2), Reservation)
    assert here(pool) == [HASHES[0]] and pool.num_evicted == 3
    assert pool.extend(C, 1, num_blocks=2) == NeverFits(7, 6)
    pool.check_invariants()


def test_what_is_shared_is_not_given_away_for_itself() -> None:
    """A pool full of idle blocks: an attempt that shares some of them gets the others' room, not their own."""
    pool = BlockPool(4)
    take(pool, A, 4)
    share(pool, A, *HASHES[:4])
    pool.release(A, 1, now_ns=0)
    assert pool.allocate(B, 1, num_blocks=4, cached=HASHES[:1]) is not None
    assert here(pool) == HASHES[:1]
    assert pool.allocate(C, 1, num_blocks=2, cached=HASHES[:1]) == NoCapacityResult(2, 1, 0)
    pool.check_invariants()


def test_an_incomplete_block_is_its_attempts_alone() -> None:
    """A destination that has not landed cannot be shared, and a stale attempt shares nothing."""
    pool = BlockPool(3)
    reservation = pool.reserve(A, 1, num_blocks=1, deadline_ns=None)
    assert isinstance(reservation, Reservation)
    try:
        pool.share(A, 1, index=0, block_hash=HASHES[0], digest=digest(HASHES[0]))
    except AssertionError as error:
        assert "not complete" in str(error)
    else:
        raise AssertionError("a reserved slot was shared")
    assert not pool.share(A, 2, index=0, block_hash=HASHES[0], digest=digest(HASHES[0]))
    assert not here(pool)


def test_the_same_block_twice_is_kept_once() -> None:
    """Two attempts compute the same block: the second stays its own and is free at its end."""
    pool = BlockPool(4)
    take(pool, A, 1)
    take(pool, B, 1)
    assert share(pool, A, HASHES[0]) == [True] and share(pool, B, HASHES[0]) == [False]
    assert share(pool, A, HASHES[0]) == [True], "told twice"
    pool.release(A, 1, now_ns=0)
    pool.release(B, 1, now_ns=0)
    assert (pool.counts().free, pool.counts().cached) == (3, 1)


def test_a_block_that_a_peer_may_still_read_is_shared_but_not_given_away() -> None:
    """Its reader was too slow: hits go on, its slot is fenced until every reader is done."""
    pool = BlockPool(3)
    take(pool, A, 2)
    share(pool, A, HASHES[0])
    pool.release(A, 1, now_ns=5, reader_may_still_read=True)
    assert {entry.reason for entry in pool.quarantined()} == {QuarantineReason.RELEASED_WHILE_READ}
    assert (pool.counts().quarantined, pool.counts().cached) == (2, 0)
    assert isinstance(pool.allocate(B, 1, num_blocks=1, reader=OTHER_PEER, cached=HASHES[:1]), Reservation)
    assert (pool.counts().quarantined, pool.counts().owned) == (1, 1)
    pool.release(B, 1, now_ns=6, reader_may_still_read=True)
    assert pool.allocate(C, 1, num_blocks=2) == NoCapacityResult(2, num_free=1, num_quarantined=2)
    assert pool.writer_done(A, 1) == 1, "the incomplete one; the shared one waits for B's reader"
    assert pool.peer_dead(OTHER_PEER) == 1
    assert (pool.counts().free, pool.counts().cached) == (2, 1)
    assert here(pool) == HASHES[:1]
    pool.check_invariants()


def test_a_dropped_block_is_given_to_nobody_and_its_holders_can_see_it() -> None:
    """A pinned block that turns out wrong: no hit, ``is_intact`` is false, and the slot goes with its last holder."""
    pool = BlockPool(2)
    take(pool, A, 1)
    share(pool, A, HASHES[0])
    (block,) = pool.match(HASHES)
    assert pool.is_intact(block)
    assert pool.drop(HASHES[0]) and not pool.drop(HASHES[0])
    assert not pool.is_intact(block) and not here(pool)
    assert pool.state_of(block.slot) is SlotState.CACHED
    pool.release(A, 1, now_ns=0)
    assert (pool.counts().free, pool.counts().cached) == (2, 0)
    take(pool, B, 1)
    share(pool, B, HASHES[0])
    pool.release(B, 1, now_ns=0)
    assert pool.drop(HASHES[0])
    assert pool.counts().free == 2
    pool.check_invariants()


def test_flush_and_vacate() -> None:
    """Flush frees what nobody holds; vacate leaves the complete blocks behind as cached."""
    pool = BlockPool(5)
    take(pool, A, 3)
    share(pool, A, *HASHES[:2])
    assert pool.vacate(A, 1) == 3
    assert (pool.counts().free, pool.counts().cached) == (3, 2)
    back = pool.extend(A, 1, num_blocks=3, cached=HASHES[:2])
    assert isinstance(back, Reservation) and len(back.cached) == 2
    assert pool.flush() == 0 and not here(pool)
    pool.release(A, 1, now_ns=0)
    assert pool.counts().free == 5
    pool.check_invariants()


def test_without_keeping_a_block_is_shared_and_goes_with_its_last_holder() -> None:
    """``keeps_cached=False``: found while somebody holds it, or may still read it, and no longer."""
    pool = BlockPool(4, keeps_cached=False)
    take(pool, A, 2)
    share(pool, A, HASHES[0])
    take(pool, B, 2, HASHES[:1])
    pool.release(A, 1, now_ns=0)
    assert here(pool) == HASHES[:1]
    pool.release(B, 1, now_ns=0, reader_may_still_read=True)
    assert here(pool) == HASHES[:1] and pool.counts().quarantined == 2
    assert pool.writer_done(B, 1) == 2
    assert not here(pool) and pool.counts().free == 4
    pool.check_invariants()


# --- against a naive model ----------------------------------------------------------------------------------

NUM_BLOCKS = 6
ATTEMPTS = st.sampled_from([A, B, C, D])
EPOCHS = st.integers(1, 3)
PEERS = st.sampled_from([PEER, OTHER_PEER])


@dataclass
class Life:
    """One life of a slot: who touches it, and under which hash it is known. The model never looks at a slot's state."""

    slot: int
    is_reserved: bool = False
    block_hash: BlockHash | None = None
    holders: list[str] = field(default_factory=list)
    fences: dict[tuple[str, int], set[str]] = field(default_factory=dict)
    is_complete: bool = False

    @property
    def is_free(self) -> bool:
        return not self.holders and not self.fences and self.block_hash is None

    @property
    def is_idle(self) -> bool:
        return not self.holders and not self.fences and self.block_hash is not None


@dataclass
class ModelAttempt:
    epoch: int
    peers: set[str]
    was_bound: bool
    deadline_ns: int | None
    table: list[Life] = field(default_factory=list)


class SharingMachine(RuleBasedStateMachine):
    """Random operations; the model keeps lives of slots with lists of who touches them."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = 0
        self.attempts: dict[str, ModelAttempt] = {}
        self.retired: dict[str, int] = {}
        self.lives: dict[int, Life] = {}
        self.tags: set[int] = set()

    @initialize(name=st.sampled_from(sorted(POLICIES)))
    def make(self, name) -> None:  # type: ignore[no-untyped-def]
        """Which block leaves is the policy's matter; that it may leave is the pool's, whatever the policy."""
        self.pool = BlockPool(NUM_BLOCKS, policy=make_policy(name, NUM_BLOCKS))
        self.heard: set[BlockHash] = set()
        self.pool.on_cached(self.hear)

    def hear(self, block_hash: BlockHash, is_here: bool) -> None:
        assert (block_hash in self.heard) is not is_here, "told twice"
        (self.heard.add if is_here else self.heard.remove)(block_hash)

    # --- the model ----------------------------------------------------------------------------------------

    def current(self, attempt_id: str, epoch: int) -> ModelAttempt | None:
        attempt = self.attempts.get(attempt_id)
        return attempt if attempt is not None and attempt.epoch == epoch else None

    def known(self) -> dict[BlockHash, Life]:
        return {life.block_hash: life for life in self.lives.values() if life.block_hash is not None}

    def sweep(self) -> None:
        self.lives = {slot: life for slot, life in self.lives.items() if not life.is_free}

    def num_available(self) -> int:
        return NUM_BLOCKS - sum(not life.is_idle for life in self.lives.values())

    def matched(self, start: int, length: int, attempt: ModelAttempt | None) -> list[BlockHash]:
        """A run of hashes that are all known, none of them held by the attempt already."""
        mine = {life.block_hash for life in attempt.table} if attempt is not None else set()
        run = []
        for item in HASHES[start : start + length]:
            if item not in self.known() or item in mine:
                break
            run.append(item)
        return run

    def check_given(
        self, result: object, attempt: ModelAttempt, attempt_id: str, num_new: int, cached, reserved
    ) -> None:  # type: ignore[no-untyped-def]
        num_blocks = num_new + len(cached)
        num_idle = sum(self.known()[item].is_idle for item in cached)
        if len(attempt.table) + num_blocks > NUM_BLOCKS:
            assert isinstance(result, NeverFits)
            return
        if num_new > self.num_available() - num_idle:
            assert isinstance(result, NoCapacityResult)
            return
        assert isinstance(result, Reservation), result
        assert [block.block_hash for block in result.cached] == cached
        for block in result.cached:
            life = self.known()[block.block_hash]
            assert life.slot == block.slot and block.digest == digest(block.block_hash)
            life.holders.append(attempt_id)
            attempt.table.append(life)
        num_untouched = NUM_BLOCKS - len(self.lives)
        evicted = {block.slot for block in result.blocks} & set(self.lives)
        assert all(self.lives[slot].is_idle for slot in evicted), "a slot in use was given out"
        assert len(evicted) == max(0, num_new - num_untouched), "a cached block left although there was room"
        assert len(result.blocks) == num_new
        for block in result.blocks:
            assert block.tag not in self.tags
            self.tags.add(block.tag)
            life = self.lives[block.slot] = Life(block.slot, reserved, holders=[attempt_id])
            attempt.table.append(life)

    def end(self, attempt_id: str, *, fence_reserved: bool, fence_owned: bool) -> None:
        attempt = self.attempts.pop(attempt_id)
        self.retired[attempt_id] = attempt.epoch
        for life in attempt.table:
            life.holders.remove(attempt_id)
            if attempt.peers and (fence_reserved if life.is_reserved else fence_owned):
                life.fences[attempt_id, attempt.epoch] = set(attempt.peers)
        self.sweep()

    # --- operations ---------------------------------------------------------------------------------------

    @rule(
        attempt_id=ATTEMPTS,
        epoch=EPOCHS,
        num_new=st.integers(0, 4),
        run=st.tuples(st.integers(0, 7), st.integers(0, 3)),
        peer=st.none() | PEERS,
        wait=st.none() | st.integers(0, 4),
        is_local=st.booleans(),
    )
    def begin(self, attempt_id, epoch, num_new, run, peer, wait, is_local) -> None:  # type: ignore[no-untyped-def]
        cached = self.matched(*run, None)
        deadline_ns = None if wait is None or is_local else self.now_ns + wait
        num_blocks = num_new + len(cached)
        if is_local:
            result = self.pool.allocate(attempt_id, epoch, num_blocks=num_blocks, reader=peer, cached=cached)
        else:
            result = self.pool.reserve(
                attempt_id, epoch, num_blocks=num_blocks, deadline_ns=deadline_ns, writer=peer, cached=cached
            )
        if attempt_id in self.attempts or epoch <= self.retired.get(attempt_id, 0):
            assert result == StaleAttempt(attempt_id, epoch)
            return
        attempt = ModelAttempt(epoch, {peer} - {None}, peer is not None, deadline_ns)
        self.check_given(result, attempt, attempt_id, num_new, cached, not is_local)
        if isinstance(result, Reservation):
            self.attempts[attempt_id] = attempt

    @rule(
        attempt_id=ATTEMPTS,
        epoch=EPOCHS,
        num_new=st.integers(0, 3),
        run=st.tuples(st.integers(0, 7), st.integers(0, 3)),
    )
    def extend(self, attempt_id, epoch, num_new, run) -> None:  # type: ignore[no-untyped-def]
        attempt = self.current(attempt_id, epoch)
        cached = self.matched(*run, attempt)
        result = self.pool.extend(attempt_id, epoch, num_blocks=num_new + len(cached), cached=cached)
        if attempt is None:
            assert result == StaleAttempt(attempt_id, epoch)
        else:
            self.check_given(result, attempt, attempt_id, num_new, cached, False)

    @rule(attempt_id=ATTEMPTS, place=st.integers(0, 5))
    def land(self, attempt_id, place) -> None:  # type: ignore[no-untyped-def]
        attempt = self.attempts.get(attempt_id)
        if attempt is None or place >= len(attempt.table) or not attempt.table[place].is_reserved:
            return
        life = attempt.table[place]
        generation = self.pool._generation[life.slot]
        assert not self.pool.landed(attempt_id, attempt.epoch, slot=life.slot, generation=generation - 1)
        assert self.pool.landed(attempt_id, attempt.epoch, slot=life.slot, generation=generation)
        life.is_reserved = False

    @rule(attempt_id=ATTEMPTS, epoch=EPOCHS, place=st.integers(0, 5), block_hash=st.sampled_from(HASHES))
    def share(self, attempt_id, epoch, place, block_hash) -> None:  # type: ignore[no-untyped-def]
        attempt = self.current(attempt_id, epoch)
        if attempt is not None and (place >= len(attempt.table) or attempt.table[place].is_reserved):
            return
        if attempt is not None and attempt.table[place].is_complete:
            if attempt.table[place].block_hash not in (None, block_hash):
                return
            expected = attempt.table[place].block_hash == block_hash
        else:
            expected = attempt is not None and block_hash not in self.known()
        told = self.pool.share(attempt_id, epoch, index=place, block_hash=block_hash, digest=digest(block_hash))
        assert told is expected
        if expected and attempt is not None:
            attempt.table[place].block_hash = block_hash
            attempt.table[place].is_complete = True

    @rule(attempt_id=ATTEMPTS, epoch=EPOCHS, written=st.booleans(), read=st.booleans())
    def release(self, attempt_id, epoch, written, read) -> None:  # type: ignore[no-untyped-def]
        attempt = self.current(attempt_id, epoch)
        read = read and (attempt is None or attempt.was_bound)
        result = self.pool.release(
            attempt_id, epoch, now_ns=self.now_ns, writer_may_still_write=written, reader_may_still_read=read
        )
        assert result is (attempt is not None)
        if attempt is not None:
            self.end(attempt_id, fence_reserved=written, fence_owned=read)

    @rule(attempt_id=ATTEMPTS, epoch=EPOCHS, peer=PEERS)
    def bind(self, attempt_id, epoch, peer) -> None:  # type: ignore[no-untyped-def]
        attempt = self.current(attempt_id, epoch)
        assert self.pool.bind_peer(attempt_id, epoch, peer) is (attempt is not None)
        if attempt is not None:
            attempt.peers.add(peer)
            attempt.was_bound = True

    @rule(attempt_id=ATTEMPTS)
    def vacate(self, attempt_id) -> None:  # type: ignore[no-untyped-def]
        attempt = self.attempts.get(attempt_id)
        if attempt is None or any(life.is_reserved for life in attempt.table):
            return
        assert self.pool.vacate(attempt_id, attempt.epoch) == len(attempt.table)
        for life in attempt.table:
            life.holders.remove(attempt_id)
        attempt.table = []
        self.sweep()

    @rule(wait=st.integers(0, 3))
    def expire(self, wait) -> None:  # type: ignore[no-untyped-def]
        self.now_ns += wait
        expected = {
            (attempt_id, attempt.epoch)
            for attempt_id, attempt in self.attempts.items()
            if attempt.deadline_ns is not None
            and attempt.deadline_ns <= self.now_ns
            and any(life.is_reserved for life in attempt.table)
        }
        assert set(self.pool.expire(self.now_ns)) == expected
        for attempt_id, _ in expected:
            self.end(attempt_id, fence_reserved=True, fence_owned=False)

    @rule(block_hash=st.sampled_from(HASHES))
    def drop(self, block_hash) -> None:  # type: ignore[no-untyped-def]
        life = self.known().get(block_hash)
        assert self.pool.drop(block_hash) is (life is not None)
        if life is not None:
            life.block_hash = None
            self.sweep()

    @rule()
    def flush(self) -> None:
        idle = [life for life in self.lives.values() if life.is_idle]
        assert self.pool.flush() == len(idle)
        for life in self.lives.values():
            life.block_hash = None
        self.sweep()

    @rule(attempt_id=ATTEMPTS, epoch=EPOCHS)
    def writer_done(self, attempt_id, epoch) -> None:  # type: ignore[no-untyped-def]
        before = self.num_available()
        num_freed = self.pool.writer_done(attempt_id, epoch)
        for life in self.lives.values():
            life.fences.pop((attempt_id, epoch), None)
        self.sweep()
        assert num_freed == self.num_available() - before

    @rule(peer=PEERS)
    def peer_dead(self, peer) -> None:  # type: ignore[no-untyped-def]
        before = self.num_available()
        num_freed = self.pool.peer_dead(peer)
        for attempt in self.attempts.values():
            attempt.peers.discard(peer)
        for life in self.lives.values():
            for peers in life.fences.values():
                peers.discard(peer)
            life.fences = {key: peers for key, peers in life.fences.items() if peers}
        self.sweep()
        assert num_freed == self.num_available() - before

    # --- always -------------------------------------------------------------------------------------------

    @invariant()
    def books_agree(self) -> None:
        self.pool.check_invariants()
        lives = self.lives.values()
        held = [life for life in lives if life.holders]
        counts = self.pool.counts()
        assert counts.free == NUM_BLOCKS - len(self.lives)
        assert counts.reserved == sum(life.is_reserved for life in held)
        assert counts.owned == sum(not life.is_reserved for life in held)
        assert counts.cached == sum(life.is_idle for life in lives)
        assert counts.quarantined == sum(bool(life.fences) and not life.holders for life in lives)
        assert counts.free + counts.reserved + counts.owned + counts.cached + counts.quarantined == counts.total
        for attempt_id, attempt in self.attempts.items():
            assert self.pool.blocks_of(AttemptId(attempt_id), attempt.epoch) == tuple(
                life.slot for life in attempt.table
            )
        assert self.heard == set(self.pool.cached_hashes()) == set(self.known())
        found = {item: self.pool.find(item) for item in HASHES}
        assert {item: block.slot for item, block in found.items() if block is not None} == {
            item: life.slot for item, life in self.known().items()
        }


SharingMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestSharingAgainstModel = SharingMachine.TestCase
