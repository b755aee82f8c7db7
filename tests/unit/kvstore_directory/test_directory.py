"""The directory against a naive model, over a line that loses messages; and its limits."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.core import announcer as announcer_module
from kvstore.core import directory as directory_module
from kvstore.core.announcer import Announcer
from kvstore.core.directory import Directory, Heard, Place, TierChange
from kvstore.core.ids import BlockHash

LEASE_NS = 1_000
NODES = ("a", "b", "c")
TIERS = ("host", "disk")


def h(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


def change(*numbers: int, tier: str = "host", removed: tuple[int, ...] = ()) -> TierChange:
    return TierChange(tier, tuple(map(h, numbers)), tuple(map(h, removed)))


def in_sync(directory: Directory, node: str, incarnation: str, *numbers: int, now_ns: int = 0) -> None:
    """Joins a node that has these blocks."""
    assert directory.join(node, incarnation, sequence=0, now_ns=now_ns) is Heard.RESYNC
    snapshot = {"sequence": 0, "part": 0, "is_last": True, "changes": (change(*numbers),), "now_ns": now_ns}
    assert directory.snapshot(node, incarnation, **snapshot) is Heard.OK  # type: ignore[arg-type]


class FakeNode:
    """A node and what the model directory should know of it."""

    def __init__(self, name: str, incarnation: str) -> None:
        self.name, self.incarnation = name, incarnation
        self.announcer = Announcer()
        self.has: dict[str, set[BlockHash]] = {tier: set() for tier in TIERS}
        self.known: dict[str, set[BlockHash]] | None = None
        """What the directory was told; None: it does not know this node."""
        self.heard_sequence: int | None = None
        self.deadline_ns = 0

    def is_in_sync(self) -> bool:
        return self.known is not None and self.heard_sequence == self.announcer.sequence and not len(self.announcer)


class DirectoryMachine(RuleBasedStateMachine):
    """Nodes change, announce, lose announcements, die, come back; the directory restarts; time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = 0
        self.lives = 0
        self.directory = Directory(lease_ns=LEASE_NS)
        self.nodes = {name: self.make_node(name) for name in NODES}
        self.replaced: list[FakeNode] = []

    def make_node(self, name: str) -> FakeNode:
        self.lives += 1
        return FakeNode(name, f"life-{self.lives}")

    @rule(name=st.sampled_from(NODES), tier=st.sampled_from(TIERS), number=st.integers(0, 6))
    def block_comes_or_goes(self, name: str, tier: str, number: int) -> None:
        node = self.nodes[name]
        if h(number) in node.has[tier]:
            node.has[tier].remove(h(number))
            node.announcer.removed(tier, h(number))
        else:
            node.has[tier].add(h(number))
            node.announcer.added(tier, h(number))

    @rule(name=st.sampled_from(NODES))
    def node_joins(self, name: str) -> None:
        node = self.nodes[name]
        heard = self.directory.join(name, node.incarnation, sequence=node.announcer.sequence, now_ns=self.now_ns)
        node.deadline_ns = self.now_ns + LEASE_NS
        expected = node.known is not None and node.heard_sequence == node.announcer.sequence
        assert heard is (Heard.OK if expected else Heard.RESYNC)
        if node.known is None:
            node.known = {tier: set() for tier in TIERS}
        if not expected:
            node.heard_sequence = None

    @rule(name=st.sampled_from(NODES), lost=st.booleans(), twice=st.booleans())
    def node_announces(self, name: str, lost: bool, twice: bool) -> None:
        node = self.nodes[name]
        announcement = node.announcer.take(max_changes=2)
        if announcement is None or lost:
            return
        for is_repeated in (False, True)[: 1 + twice]:
            heard = self.directory.announce(
                name, node.incarnation, sequence=announcement.sequence, changes=announcement.changes,
                now_ns=self.now_ns,
            )  # fmt: skip
            if node.known is None:
                assert heard is Heard.UNKNOWN
                return
            node.deadline_ns = self.now_ns + LEASE_NS
            if node.heard_sequence is None:
                assert heard is Heard.WAITING
            elif is_repeated:
                assert heard is Heard.OK
            elif announcement.sequence != node.heard_sequence + 1:
                assert heard is Heard.RESYNC
                node.heard_sequence = None
            else:
                assert heard is Heard.OK
                node.heard_sequence = announcement.sequence
                for tier, added, removed in announcement.changes:
                    node.known[tier] = (node.known[tier] - set(removed)) | set(added)

    @rule(name=st.sampled_from(NODES), num_sent=st.integers(1, 9))
    def node_sends_a_snapshot(self, name: str, num_sent: int) -> None:
        """All of its parts, or only the first ones."""
        node = self.nodes[name]
        parts = list(node.announcer.snapshot({tier: sorted(node.has[tier]) for tier in TIERS}))
        for sent in parts[:num_sent]:
            heard = self.directory.snapshot(
                name, node.incarnation, sequence=sent.sequence, part=sent.part, is_last=sent.is_last,
                changes=sent.changes, now_ns=self.now_ns,
            )  # fmt: skip
            if node.known is None:
                assert heard is Heard.UNKNOWN
                return
            assert heard is Heard.OK
            node.deadline_ns = self.now_ns + LEASE_NS
            if sent.part == 0:
                node.known = {tier: set() for tier in TIERS}
                node.heard_sequence = None
            for tier, added, _ in sent.changes:
                node.known[tier] |= set(added)
            if sent.is_last:
                node.heard_sequence = sent.sequence
                assert node.known == node.has

    @rule(name=st.sampled_from(NODES))
    def node_restarts(self, name: str) -> None:
        if self.nodes[name].known is not None:
            self.replaced.append(self.nodes[name])
        self.nodes[name] = self.make_node(name)
        self.node_joins(name)

    @precondition(lambda self: self.replaced)
    @rule(data=st.data())
    def a_replaced_life_wakes_up(self, data: st.DataObject) -> None:
        old = data.draw(st.sampled_from(self.replaced))
        assert self.directory.join(old.name, old.incarnation, sequence=0, now_ns=self.now_ns) is Heard.REFUSED
        told = self.directory.announce(old.name, old.incarnation, sequence=1, changes=(change(1),), now_ns=self.now_ns)
        assert told is Heard.REFUSED
        assert self.directory.renew(old.name, old.incarnation, now_ns=self.now_ns) is Heard.REFUSED
        assert not self.directory.leave(old.name, old.incarnation)

    @rule(name=st.sampled_from(NODES), step_ns=st.integers(0, LEASE_NS))
    def time_passes(self, name: str, step_ns: int) -> None:
        node = self.nodes[name]
        if node.known is not None:
            assert self.directory.renew(name, node.incarnation, now_ns=self.now_ns) in (Heard.OK, Heard.RESYNC)
            node.deadline_ns = self.now_ns + LEASE_NS
        self.now_ns += step_ns
        late = {
            other.name for other in self.nodes.values() if other.known is not None and other.deadline_ns <= self.now_ns
        }
        assert set(self.directory.expire(self.now_ns)) == late
        for other in late:
            self.nodes[other].known = self.nodes[other].heard_sequence = None

    @rule(steps=st.integers(1, 5))
    def sweep(self, steps: int) -> None:
        self.directory.sweep(steps)

    @rule()
    def directory_restarts(self) -> None:
        self.directory = Directory(lease_ns=LEASE_NS)
        self.replaced.clear()
        for node in self.nodes.values():
            node.known = node.heard_sequence = None

    @rule(numbers=st.lists(st.integers(0, 7), max_size=8), without=st.sampled_from(["", *NODES]))
    def match(self, numbers: list[int], without: str) -> None:
        expected = []
        for number in numbers:
            where = {
                Place(node.name, node.incarnation, tier)
                for node in self.nodes.values()
                for tier, blocks in (node.known or {}).items()
                if h(number) in blocks and node.name != without
            }
            if not where:
                break
            expected.append(where)
        assert list(map(set, self.directory.match(list(map(h, numbers)), without=without))) == expected

    @invariant()
    def books_agree(self) -> None:
        self.directory.check_invariants()
        alive = {name: node.incarnation for name, node in self.nodes.items() if node.known is not None}
        assert self.directory.nodes() == alive
        for node in self.nodes.values():
            if node.is_in_sync():
                assert node.known == node.has

    def teardown(self) -> None:
        """Once everything is swept, only what living nodes announced is left."""
        while self.directory.sweep(1):
            pass
        known = [blocks for node in self.nodes.values() for blocks in (node.known or {}).values()]
        assert len(self.directory) == len(set().union(*known))


@pytest.fixture(autouse=True, scope="module")
def _small_parts() -> object:
    """Snapshots of a few blocks have several parts."""
    before = announcer_module.MAX_HASHES_PER_PART
    announcer_module.MAX_HASHES_PER_PART = 2
    yield
    announcer_module.MAX_HASHES_PER_PART = before


TestDirectoryMachine = DirectoryMachine.TestCase
TestDirectoryMachine.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


def test_a_match_is_the_longest_prefix_and_says_where_each_block_is() -> None:
    """Two nodes overlap; the gap ends the match; the asking node does not count."""
    directory = Directory(lease_ns=LEASE_NS)
    in_sync(directory, "a", "a1", 1, 2, 3)
    in_sync(directory, "b", "b1", 2, 3, 5)
    a, b = Place("a", "a1", "host"), Place("b", "b1", "host")
    assert directory.match([h(1), h(2), h(3), h(4), h(5)]) == ((a,), (a, b), (a, b))
    assert directory.match([h(2), h(5)], without="a") == ((b,), (b,))
    assert directory.match([h(1)], without="a") == ()
    assert directory.match([]) == ()


def test_a_gap_keeps_what_is_known_until_the_snapshot_replaces_it() -> None:
    """Announcement 2 is lost; 3 asks for a snapshot, 4 is ignored, the snapshot settles it, 5 goes on."""
    directory = Directory(lease_ns=LEASE_NS)
    in_sync(directory, "a", "a1", 1)

    def told(sequence: int, *changes: TierChange) -> Heard:
        return directory.announce("a", "a1", sequence=sequence, changes=changes, now_ns=0)

    assert told(1, change(2)) is Heard.OK
    assert told(3, change(4)) is Heard.RESYNC
    assert told(4, change(removed=(2,))) is Heard.WAITING
    assert len(directory.match([h(1), h(2)])) == 2
    snapshot = {"sequence": 4, "part": 0, "is_last": True, "changes": (change(1, 3, 4),), "now_ns": 0}
    assert directory.snapshot("a", "a1", **snapshot) is Heard.OK  # type: ignore[arg-type]
    assert told(5, change(5)) is Heard.OK
    assert [len(directory.match([h(number)])) for number in range(1, 6)] == [1, 0, 1, 1, 1]
    assert directory.counters.gaps == 1


def test_a_snapshot_that_does_not_come_is_asked_for_again() -> None:
    """Half a lease later, by the node's own sign of life; not before."""
    directory = Directory(lease_ns=LEASE_NS)
    assert directory.join("a", "a1", sequence=7, now_ns=0) is Heard.RESYNC
    assert directory.renew("a", "a1", now_ns=LEASE_NS // 2 - 1) is Heard.OK
    assert directory.renew("a", "a1", now_ns=LEASE_NS // 2) is Heard.RESYNC
    assert directory.renew("a", "a1", now_ns=LEASE_NS // 2 + 1) is Heard.OK


def test_a_part_that_is_missing_asks_for_the_snapshot_again() -> None:
    """Part 2 after part 0."""
    directory = Directory(lease_ns=LEASE_NS)
    directory.join("a", "a1", sequence=0, now_ns=0)
    parts = [(0, Heard.OK), (2, Heard.RESYNC), (1, Heard.RESYNC), (0, Heard.OK), (1, Heard.OK)]
    for part, expected in parts:
        heard = directory.snapshot(
            "a", "a1", sequence=0, part=part, is_last=False, changes=(change(part),), now_ns=0
        )  # fmt: skip
        assert heard is expected, part


def test_a_dead_node_is_no_place_at_the_end_of_its_lease_and_swept_in_steps() -> None:
    """Its blocks cannot be matched any more at once; its entries leave a few at a time."""
    directory = Directory(lease_ns=LEASE_NS)
    in_sync(directory, "a", "a1", *range(10))
    in_sync(directory, "b", "b1", 0, now_ns=500)
    assert directory.expire(LEASE_NS - 1) == ()
    assert directory.expire(LEASE_NS) == ("a",)
    assert directory.match([h(0), h(1)]) == ((Place("b", "b1", "host"),),)
    sizes = []
    while directory.sweep(4):
        sizes.append(len(directory))
        directory.check_invariants()
    assert len(sizes) == 2 and len(directory) == 1


def test_limits_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many nodes, tiers, blocks: refused and counted, and a hint less."""
    monkeypatch.setattr(directory_module, "MAX_NODES", 1)
    directory = Directory(lease_ns=LEASE_NS, max_blocks=3)
    in_sync(directory, "a", "a1", 1, 2, 3, 4)
    assert directory.join("b", "b1", sequence=0, now_ns=0) is Heard.REFUSED
    assert len(directory) == 3 and directory.counters.refused_blocks == 1
    tiers = [change(1, tier=f"tier-{number}") for number in range(directory_module.MAX_TIERS_PER_NODE)]
    assert directory.announce("a", "a1", sequence=1, changes=tiers, now_ns=0) is Heard.OK
    assert len(directory.num_blocks_of("a")) == directory_module.MAX_TIERS_PER_NODE
    directory.check_invariants()


def test_an_announcer_with_too_much_to_tell_tells_everything_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes are bounded; a snapshot takes their place."""
    monkeypatch.setattr(announcer_module, "MAX_PENDING", 3)
    announcer = Announcer()
    for number in range(3):
        announcer.added("host", h(number))
    announcer.removed("host", h(1))
    announcement = announcer.take()
    assert announcement is not None and announcement.sequence == 1
    assert announcement.changes == (TierChange("host", (h(0), h(2)), (h(1),)),)
    for number in range(4):
        announcer.added("host", h(number))
    assert announcer.needs_snapshot and announcer.take() is None
    (part,) = announcer.snapshot({"host": [h(0)]})
    assert (part.sequence, part.part, part.is_last) == (1, 0, True)
    assert not announcer.needs_snapshot and len(announcer) == 0
