"""All policies: one contract by random events, S3-FIFO and ARC against naive models, ours by what it promises."""

from __future__ import annotations

from collections import OrderedDict, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.hitrate_replay import Prompt, ReplayTier, block_hash_of, replay, replay_optimum
from kvstore.core.eviction import POLICIES, KopirPolicy, LruPolicy, make_policy
from kvstore.core.eviction.reuse import AGE_EDGES, NUM_AGES, ReuseStudy, worth_by_age
from kvstore.core.ids import BlockDigest, BlockHash
from kvstore.core.slab_index import HolderId, ReserveStatus, SlabIndex

NUM_SLOTS = 6
PROMPTS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 5)), max_size=40)


def chain(branch: int, turn: int, num_blocks: int) -> Prompt:
    """A prompt whose blocks after the first depend on the branch, and whose last one depends on the turn."""
    inner = [block_hash_of(1000 * branch + depth) for depth in range(num_blocks - 1)]
    return [*inner, block_hash_of(500_000 + 100 * branch + 10 * num_blocks + turn)]


def ids(first: int, num_blocks: int) -> Prompt:
    return [block_hash_of(first + depth) for depth in range(num_blocks)]


def hit_rate(name: str, prompts: list[Prompt], num_slots: int) -> float:
    hits = (
        replay_optimum(prompts, num_slots)
        if name == "belady"
        else replay(prompts, num_slots, make_policy(name, num_slots))
    )
    return sum(hits) / sum(map(len, prompts))


@pytest.mark.parametrize("name", POLICIES)
@given(PROMPTS)
@settings(deadline=None, max_examples=30)
def test_victims_name_every_slot_once_and_the_same_events_give_the_same_victims(
    name: str, prompts: list[tuple[int, int, int]]
) -> None:
    """After every prompt the victims are exactly the slots in use, and asking changes nothing."""
    first, second = make_policy(name, NUM_SLOTS), make_policy(name, NUM_SLOTS)
    tiers = ReplayTier(NUM_SLOTS, first), ReplayTier(NUM_SLOTS, second)
    for prompt in prompts:
        assert tiers[0].serve(chain(*prompt)) == tiers[1].serve(chain(*prompt))
        assert list(first.victims()) == list(first.victims()) == list(second.victims())
        assert sorted(first.victims()) == list(range(len(tiers[0])))
        if isinstance(first, KopirPolicy):
            first.check_invariants()


@pytest.mark.parametrize("name", POLICIES)
@given(PROMPTS)
@settings(deadline=None, max_examples=30)
def test_the_replay_is_what_the_slab_index_does(name: str, prompts: list[tuple[int, int, int]]) -> None:
    """Hits of the replay are those of match, reserve and commit; a pinned block is never evicted, the books agree."""
    tier = ReplayTier(NUM_SLOTS, make_policy(name, NUM_SLOTS))
    index = SlabIndex(NUM_SLOTS, policy=make_policy(name, NUM_SLOTS))
    for key in prompts:
        assert tier.serve(chain(*key)) == serve(index, chain(*key))
        index.check_invariants()


def serve(index: SlabIndex, prompt: Prompt) -> int:
    """One prompt as a worker does it: what matches is held, what follows is stored as the end of the prompt."""
    me = HolderId("me")
    found = index.match(prompt, reader=me, now_ns=0, deadline_ns=1000)
    num_hits = len(found.blocks)
    if num_hits < len(prompt):
        rest, parent = prompt[num_hits:], prompt[num_hits - 1] if num_hits else None
        outcomes = index.reserve(rest, writer=me, deadline_ns=1000, parent=parent)
        for block_hash, outcome in reversed(list(zip(rest, outcomes, strict=True))):
            if outcome.status is ReserveStatus.GRANTED:
                slot, generation = outcome.slot, outcome.generation
                digest = BlockDigest(bytes(16))
                assert index.commit(block_hash, slot=slot, generation=generation, digest=digest, writer=me)
    assert all(block_hash in index for block_hash in prompt[:num_hits])
    if found.lease_id is not None:
        index.release(found.lease_id, reader=me)
    return num_hits


def test_a_hot_set_that_moves_is_learned_by_the_slab_too() -> None:
    """2,000 keys, 500 slots: halfway another loop begins, whose blocks are refused until they have been asked for."""
    prompts = [ids(3000 * (turn >= 10) + 10 * part, 10) for turn in range(20) for part in range(100)]
    tier, index = ReplayTier(500, make_policy("kopir", 500)), SlabIndex(500, policy=make_policy("kopir", 500))
    pairs = [(tier.serve(prompt), serve(index, prompt)) for prompt in prompts]
    replayed, served = (sum(column[1000:]) for column in zip(*pairs, strict=True))
    assert served > 0.9 * replayed > 0.3 * 10_000
    assert index.counters.not_admitted_blocks > 0


def test_what_was_refused_is_visited_leaf_first_and_once() -> None:
    """A put without room is a visit of what it wanted, its tail known; a part of a put, or no put at all, is none."""
    seen: list[tuple[int, bool]] = []

    class Spy(LruPolicy):
        def on_refused(self, block_hash: BlockHash, *, is_tail: bool = False) -> None:
            seen.append((block_hash[0], is_tail))

    def fill(**options: bool) -> SlabIndex:
        index = SlabIndex(2, policy=Spy(2), **options)
        index.reserve([name(1)], writer=HolderId("other"), deadline_ns=9)
        return index

    def name(number: int) -> BlockHash:
        return BlockHash(bytes([number]) * 32)

    prompt, me = [name(2), name(3), name(4)], HolderId("me")
    fill().reserve(prompt, writer=me, deadline_ns=9)
    assert seen == [(4, True), (3, False)]
    seen.clear()
    fill().reserve(prompt, writer=me, deadline_ns=9, ends_prompt=False)
    assert seen == [(4, False), (3, False)]
    seen.clear()
    fill().reserve(prompt, writer=me, deadline_ns=9, is_put=False)
    assert seen == []
    above_a_disk = fill(tier_below=True)
    above_a_disk.reserve(prompt, writer=me, deadline_ns=9)
    assert seen == [], "the writer comes again with the rest"
    above_a_disk.reserve(prompt[1:], writer=me, deadline_ns=9, parent=prompt[0])
    assert seen == [(4, True), (3, False)]


def test_a_part_of_a_prompt_has_no_tail() -> None:
    """``match`` and ``touch`` tell the policy of a tail only where the prompt ends."""
    tails: list[bool] = []

    class Spy(LruPolicy):
        def on_hit(self, slot: int, block_hash: BlockHash, *, parent: int | None = None, is_tail: bool = False) -> None:
            tails.append(is_tail)

    index, prompt, me = SlabIndex(4, policy=Spy(4)), ids(1, 2), HolderId("me")
    serve(index, prompt)
    for ends_prompt in (True, False):
        index.match(prompt, reader=me, now_ns=0, deadline_ns=9, ends_prompt=ends_prompt)
        found = index.match(prompt[:1], reader=me, now_ns=0, deadline_ns=9, ends_prompt=False).blocks[0]
        index.touch(prompt[0], slot=found.slot, generation=found.generation, is_tail=ends_prompt)
    assert tails == [True, False, False, True, False, False, False, False]


def test_a_block_that_was_brought_for_a_reader_is_visited_once_by_it() -> None:
    """Up from the disk, then read: one visit, by ``match`` or ``touch``; the next reader is another one."""
    events: list[str] = []

    class Spy(LruPolicy):
        def on_hit(self, slot: int, block_hash: BlockHash, *, parent: int | None = None, is_tail: bool = False) -> None:
            events.append("hit")

    index, me = SlabIndex(2, policy=Spy(2)), HolderId("me")
    for block_hash in ids(1, 2):
        (granted,) = index.reserve([block_hash], writer=me, deadline_ns=9)
        name = {"slot": granted.slot, "generation": granted.generation}
        assert index.commit(block_hash, digest=BlockDigest(bytes(16)), writer=me, for_reader=True, **name)
        for num_hits in (0, 1, 2):
            if block_hash == ids(1, 1)[0]:
                index.match([block_hash], reader=me, now_ns=0, deadline_ns=9)
            else:
                index.touch(block_hash, **name)
            assert events == ["hit"] * num_hits
        events.clear()
    assert index.counters.hit_blocks == 6
    index.check_invariants()


def test_a_block_whose_parent_left_is_not_the_child_of_the_next_one_there() -> None:
    """The slot of a damaged parent is given to a stranger: that is a leaf, and its removal changes no count."""
    policy = KopirPolicy(3)
    root, child, stranger, leaf = ids(0, 4)
    policy.on_insert(0, root)
    policy.on_insert(1, child, parent=0)
    policy.on_remove(0, root)
    policy.check_invariants()
    policy.on_insert(0, stranger)
    policy.check_invariants()
    assert list(policy.victims()) == [1, 0], "a leaf like any other, younger than the child"
    policy.on_insert(2, leaf, parent=0)
    policy.on_remove(1, child)
    policy.check_invariants()
    assert list(policy.victims()) == [2, 0], "it has a child of its own now"
    policy.on_remove(2, leaf)
    policy.check_invariants()


class NaiveS3Fifo:
    """The algorithm of the paper, on keys."""

    def __init__(self, size: int) -> None:
        self.size, self.target = size, max(1, size // 10)
        self.small: deque[int] = deque()
        self.main: deque[int] = deque()
        self.ghosts: OrderedDict[int, None] = OrderedDict()
        self.freq: dict[int, int] = {}

    def ask(self, key: int) -> bool:
        if key in self.freq:
            self.freq[key] = min(3, self.freq[key] + 1)
            return True
        if len(self.freq) == self.size:
            self.evict()
        self.freq[key] = 0
        if key in self.ghosts:
            del self.ghosts[key]
            self.main.append(key)
        else:
            self.small.append(key)
        return False

    def evict(self) -> None:
        while True:
            if self.small and (len(self.small) >= self.target or not self.main):
                key = self.small.popleft()
                if self.freq[key] > 1:
                    self.freq[key] = 0
                    self.main.append(key)
                    continue
                self.ghosts[key] = None
                if len(self.ghosts) > self.size - self.target:
                    self.ghosts.popitem(last=False)
            else:
                key = self.main.popleft()
                if self.freq[key]:
                    self.freq[key] -= 1
                    self.main.append(key)
                    continue
            del self.freq[key]
            return


class NaiveArc:
    """ARC by lists; the target moves when a ghost returns, after the victim was chosen."""

    def __init__(self, size: int) -> None:
        self.size, self.p = size, 0.0
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []

    def ask(self, key: int) -> bool:
        if key in self.t1 + self.t2:
            (self.t1 if key in self.t1 else self.t2).remove(key)
            self.t2.append(key)
            return True
        if len(self.t1) + len(self.t2) == self.size:
            from_t1 = self.t1 and (len(self.t1) > int(self.p) or not self.t2)
            source, ghosts = (self.t1, self.b1) if from_t1 else (self.t2, self.b2)
            ghosts.append(source.pop(0))
            self.trim()
        if key in self.b1:
            self.p = min(self.size, self.p + max(1.0, len(self.b2) / len(self.b1)))
            self.b1.remove(key)
            self.t2.append(key)
        elif key in self.b2:
            self.p = max(0.0, self.p - max(1.0, len(self.b1) / len(self.b2)))
            self.b2.remove(key)
            self.t2.append(key)
        else:
            self.t1.append(key)
            self.trim()
        return False

    def trim(self) -> None:
        while self.b1 and len(self.t1) + len(self.b1) > self.size:
            self.b1.pop(0)
        while self.b2 and len(self.t1 + self.t2 + self.b1 + self.b2) > 2 * self.size:
            self.b2.pop(0)


@pytest.mark.parametrize(("name", "model"), [("s3fifo", NaiveS3Fifo), ("arc", NaiveArc)])
@given(st.lists(st.integers(0, 25), max_size=200))
@settings(deadline=None, max_examples=30)
def test_s3fifo_and_arc_do_what_naive_models_do(
    name: str, model: type[NaiveS3Fifo | NaiveArc], keys: list[int]
) -> None:
    """On single blocks every hit and miss is the model's."""
    tier, naive = ReplayTier(12, make_policy(name, 12)), model(12)
    for key in keys:
        assert bool(tier.serve([block_hash_of(key)])) == naive.ask(key)


@given(PROMPTS)
@settings(deadline=None, max_examples=30)
def test_ours_never_evicts_a_parent_before_its_child(prompts: list[tuple[int, int, int]]) -> None:
    """What is kept is always whole prefixes: a block that is held is found."""
    tier = ReplayTier(NUM_SLOTS, make_policy("kopir", NUM_SLOTS))
    for key in prompts:
        tier.serve(chain(*key))
        for branch in range(4):
            line = [block_hash_of(1000 * branch + depth) for depth in range(4)]
            held = [tier.holds(block_hash) for block_hash in line]
            assert held == sorted(held, reverse=True), held


@given(PROMPTS, st.integers(1, 8))
@settings(deadline=None, max_examples=30)
def test_no_policy_beats_the_optimum(prompts: list[tuple[int, int, int]], num_slots: int) -> None:
    """The offline optimum is one."""
    asked = [chain(*key) for key in prompts]
    best = sum(replay_optimum(asked, num_slots))
    for name in POLICIES:
        assert sum(replay(asked, num_slots, make_policy(name, num_slots))) <= best


def test_the_study_learns_when_blocks_return() -> None:
    """Blocks of class 0 return after 1,000 visits, those of class 1 never: worth says so at each age."""
    study, now = ReuseStudy(1000, 2, visits_per_round=1000), 0
    for _ in range(40):
        for number in range(500):
            now += 1
            study.visit(block_hash_of(number), 0, now)
            now += 1
            study.visit(block_hash_of(1_000_000 + now), 1, now)
            if now % 64 < 2:
                study.grow_older(now)
        study.learn()
        study.learn()
    at_900 = next(i for i in range(NUM_AGES) if AGE_EDGES[i] <= 900 < AGE_EDGES[i + 1])
    assert study.worth[at_900] > 3 * study.worth[0] > 0
    assert study.worth[0] > 3 * study.worth[NUM_AGES]
    assert study.worth[at_900 + 3] < study.worth[at_900] / 3


def test_a_larger_tier_remembers_longer() -> None:
    """After the load changes, a small tier has unlearned what a large one still reckons with."""
    small, large = (ReuseStudy(num_slots, 1, visits_per_round=1000) for num_slots in (1_000, 100_000))
    for study in (small, large):
        for now in range(1, 40_001):
            # Every block returns after 500 visits at first, later none does.
            study.visit(block_hash_of(now % 500 if now <= 10_000 else now), 0, now)
            if now % 64 == 0:
                study.grow_older(now)
            if now % 1000 == 0:
                study.learn()
    assert 0 < small.worth[0] < large.worth[0] / 2


def test_worth_of_equal_hazards_falls_with_the_width_of_the_age() -> None:
    """One age with a chance of a hit: worth is highest just there and 0 behind it."""
    hazards = [0.0] * NUM_AGES
    hazards[10] = 0.5
    worth = worth_by_age(hazards)
    assert max(worth) == worth[10] > worth[9] > worth[0] > 0
    assert worth[11:] == [0.0] * (NUM_AGES - 11)


def loop(num_blocks: int, num_rounds: int) -> list[Prompt]:
    return [ids(10 * part, 10) for _ in range(num_rounds) for part in range(num_blocks // 10)]


def test_in_a_loop_too_long_for_the_tier_ours_keeps_a_part() -> None:
    """LRU has not one hit; ours comes close to the optimum's half."""
    prompts = loop(2000, 40)
    assert hit_rate("lru", prompts, 1000) == 0
    assert hit_rate("kopir", prompts, 1000) > 0.8 * hit_rate("belady", prompts, 1000)


def test_a_scan_does_not_push_out_what_is_used() -> None:
    """A hot set beside prompts that never return: ours stays near the optimum, LRU falls far below."""
    prompts: list[Prompt] = []
    for number in range(3000):
        prompts.append(ids(1_000_000 + 20 * number, 20))
        prompts.append(ids(100 * (number % 40), 10))
    ours, best, lru = (hit_rate(name, prompts, 500) for name in ("kopir", "belady", "lru"))
    assert ours > 0.9 * best
    assert lru < 0.5 * ours


@pytest.mark.parametrize("name", ["kopir", "lru"])
def test_alternating_agents_share_their_ancestor(name: str) -> None:
    """F68: a main agent and a sub-agent alternate over 256 common tokens; 16-token blocks, 1,200 / 150 of their own."""
    shared, main, sub = ids(0, 16), ids(100, 75), ids(300, 9)
    roomy = ReplayTier(16 + 75 + 9 + 20, make_policy(name, 120))
    for visit in range(10):
        tail = ids(10_000 + 10 * visit, 1)
        for prompt in ([*shared, *main, *tail], [*shared, *sub, *tail]):
            num_hits = roomy.serve(prompt)
            assert visit == 0 or num_hits >= 0.9 * len(prompt)
    tight = ReplayTier(16 + 75, make_policy(name, 91))
    for visit, prompt in enumerate(([*shared, *sub], [*shared, *main], [*shared, *sub], [*shared, *main])):
        assert visit == 0 or tight.serve(prompt) * 16 >= 240
        if visit == 0:
            tight.serve(prompt)
