"""Which node has which block: the directory of a cluster. A pure core, soft state only.

Owns, per node, what that node last announced, and until when it counts as alive. Everything here can be lost: nodes
announce it again, and an entry that is wrong costs a miss, because whoever fetches a block verifies its digest. Never
sees bytes, tokens or clocks.

Life cycle of a node:

    join ──> waiting ──snapshot, all parts──> in sync ──gap in the sequence──> waiting (what is known stays a hint)
    any ──lease over, leave, or join with another incarnation──> gone

An announcement carries what changed since the one before and the next number of its node's sequence. A number that is
missing means that changes were lost: the node is asked for a snapshot, which replaces everything it announced. An
incarnation that was replaced is refused for ever (within ``MAX_REPLACED``): a node that was taken for dead and wakes
up cannot push its successor out.

What a node had is not searched for when it goes: its places are dead at once, and ``sweep`` takes their entries
out in bounded steps. About 160 bytes per indexed block, 120 more for each further place of the same block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from kvstore.core.counters import Counters
from kvstore.core.ids import BlockHash

MAX_NODES = 1024
MAX_TIERS_PER_NODE = 4
MAX_BLOCKS = 1 << 23
MAX_REPLACED = 4096
MAX_SHARED_SETS = 4096


class Place(NamedTuple):
    """Where a block is: a tier of one life of one node."""

    node: str
    incarnation: str
    tier: str


class TierChange(NamedTuple):
    """Blocks that came into a tier and blocks that left it; a block is in one of the two at most."""

    tier: str
    added: Sequence[BlockHash]
    removed: Sequence[BlockHash]


class Heard(Enum):
    """What the directory makes of a message, and what the node should do about it."""

    OK = "ok"
    RESYNC = "resync"
    """Send a snapshot."""
    WAITING = "waiting"
    """A snapshot was asked for and has not come yet; this message was ignored."""
    UNKNOWN = "unknown"
    """This life of the node has not joined, or its lease is over: join."""
    REFUSED = "refused"
    """Another life of the node has taken its place, or there are too many nodes."""


@dataclass(slots=True)
class DirectoryCounters(Counters):
    """What happened since the directory was made; each only grows."""

    joins: int = 0
    announcements: int = 0
    snapshots: int = 0
    gaps: int = 0
    duplicates: int = 0
    expired_nodes: int = 0
    refused_blocks: int = 0
    """Blocks that were not indexed because ``max_blocks`` are."""


@dataclass(slots=True)
class _Node:
    incarnation: str
    deadline_ns: int
    next_sequence: int | None = None
    """None: waits for a snapshot."""
    next_part: int = 0
    asked_ns: int = 0
    places: dict[str, int] = field(default_factory=dict)
    """Tier -> number of its place."""


@dataclass(slots=True)
class _PlaceSlot:
    place: Place
    blocks: set[BlockHash]
    is_live: bool = True


class Directory:
    """Block hash -> places. Belongs to one thread."""

    def __init__(self, *, lease_ns: int, max_blocks: int = MAX_BLOCKS) -> None:
        """A node that is not heard of for ``lease_ns`` is gone."""
        assert lease_ns > 0 and max_blocks > 0, (lease_ns, max_blocks)
        self._lease_ns = lease_ns
        self._max_blocks = max_blocks
        self._nodes: dict[str, _Node] = {}
        self._replaced: OrderedDict[str, None] = OrderedDict()
        self._places: list[_PlaceSlot] = []
        self._unused: list[int] = []
        self._dead: list[int] = []
        """Places whose entries are still to be taken out."""
        self._holders: dict[BlockHash, tuple[int, ...]] = {}
        self._shared_sets: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.counters = DirectoryCounters()

    # --- what nodes say -----------------------------------------------------------------------------------

    def join(self, node: str, incarnation: str, *, sequence: int, now_ns: int) -> Heard:
        """A node connects (again); ``sequence`` is the number of its latest announcement, 0 for none.

        OK: the directory has heard everything up to there, and the node goes on with ``sequence + 1``.
        """
        known = self._nodes.get(node)
        if incarnation in self._replaced or (known is None and len(self._nodes) >= MAX_NODES):
            return Heard.REFUSED
        self.counters.joins += 1
        if known is None or known.incarnation != incarnation:
            if known is not None:
                self._replace(node, known)
            known = self._nodes[node] = _Node(incarnation, 0)
        known.deadline_ns = now_ns + self._lease_ns
        if known.next_sequence == sequence + 1:
            return Heard.OK
        return self._ask(known, now_ns)

    def announce(
        self, node: str, incarnation: str, *, sequence: int, changes: Iterable[TierChange], now_ns: int
    ) -> Heard:
        """Takes what changed at a node. A number that was heard before changes nothing."""
        known, heard = self._find(node, incarnation, now_ns)
        if known is None:
            return heard
        if known.next_sequence is None:
            return Heard.WAITING
        if sequence < known.next_sequence:
            self.counters.duplicates += 1
            return Heard.OK
        if sequence > known.next_sequence:
            self.counters.gaps += 1
            return self._ask(known, now_ns)
        self.counters.announcements += 1
        known.next_sequence += 1
        for change in changes:
            self._change(node, known, change)
        return Heard.OK

    def snapshot(
        self, node: str, incarnation: str, *, sequence: int, part: int, is_last: bool, changes: Iterable[TierChange],
        now_ns: int,
    ) -> Heard:  # fmt: skip
        """Takes part ``part`` (from 0 on) of everything a node had after announcement ``sequence``.

        Part 0 replaces what the node announced before. Blocks of a part can be found at once.
        """
        known, heard = self._find(node, incarnation, now_ns)
        if known is None:
            return heard
        if part == 0:
            self._kill_places(known)
            known.next_sequence, known.next_part = None, 0
        elif known.next_sequence is not None or part != known.next_part:
            self.counters.gaps += 1
            return self._ask(known, now_ns)
        known.asked_ns = now_ns
        known.next_part = part + 1
        for change in changes:
            self._change(node, known, change)
        if is_last:
            known.next_sequence = sequence + 1
            self.counters.snapshots += 1
        return Heard.OK

    def renew(self, node: str, incarnation: str, *, now_ns: int) -> Heard:
        """A node says that it lives. RESYNC again when the snapshot it was asked for does not come."""
        known, heard = self._find(node, incarnation, now_ns)
        if known is None:
            return heard
        if known.next_sequence is None and now_ns - known.asked_ns >= self._lease_ns // 2:
            return self._ask(known, now_ns)
        return Heard.OK

    def leave(self, node: str, incarnation: str) -> bool:
        """A node says that it ends, or is proved dead. False: that life of it is not known."""
        known = self._nodes.get(node)
        if known is None or known.incarnation != incarnation:
            return False
        self._replace(node, known)
        return True

    # --- time ---------------------------------------------------------------------------------------------

    def expire(self, now_ns: int) -> tuple[str, ...]:
        """Forgets nodes whose lease is over (deadline <= now); they may join again. Returns their names."""
        late = tuple(name for name, node in self._nodes.items() if node.deadline_ns <= now_ns)
        for name in late:
            self._kill_places(self._nodes.pop(name))
        self.counters.expired_nodes += len(late)
        return late

    def sweep(self, max_blocks: int) -> bool:
        """Takes at most so many entries of dead places out. True: there are more."""
        while self._dead:
            number = self._dead[-1]
            blocks = self._places[number].blocks
            while blocks and max_blocks:
                self._drop_holder(blocks.pop(), number)
                max_blocks -= 1
            if blocks:
                return True
            self._dead.pop()
            self._unused.append(number)
        return False

    # --- looking ------------------------------------------------------------------------------------------

    def match(self, hashes: Sequence[BlockHash], *, without: str = "") -> tuple[tuple[Place, ...], ...]:
        """Returns the places of each block of the longest prefix of ``hashes`` that can be had without a gap.

        ``without``: a node that does not count, because it is the one that asks.
        """
        usable: dict[tuple[int, ...], tuple[Place, ...]] = {}
        found = []
        holders, places = self._holders, self._places
        for block_hash in hashes:
            held = holders.get(block_hash)
            if held is None:
                break
            where = usable.get(held)
            if where is None:
                live = (places[number] for number in held)
                where = tuple(slot.place for slot in live if slot.is_live and slot.place.node != without)
                usable[held] = where
            if not where:
                break
            found.append(where)
        return tuple(found)

    def __len__(self) -> int:
        """Returns how many blocks are indexed, those of dead places that are still to be swept included."""
        return len(self._holders)

    def nodes(self) -> dict[str, str]:
        """Returns node -> incarnation of the nodes that are alive."""
        return {name: node.incarnation for name, node in self._nodes.items()}

    def num_blocks_of(self, node: str) -> dict[str, int]:
        """Returns tier -> blocks of one node; empty when it is not alive."""
        known = self._nodes.get(node)
        return {} if known is None else {tier: len(self._places[n].blocks) for tier, n in known.places.items()}

    def check_invariants(self) -> None:
        """Raises: AssertionError when the books do not agree with each other."""
        entries = {(block, number) for block, held in self._holders.items() for number in held}
        listed = {(block, number) for number, slot in enumerate(self._places) for block in slot.blocks}
        assert entries == listed, "holders and places disagree"
        assert all(held for held in self._holders.values()), "a block without a place"
        assert len(self._holders) <= self._max_blocks, len(self._holders)
        of_nodes = [number for node in self._nodes.values() for number in node.places.values()]
        assert sorted([*of_nodes, *self._dead, *self._unused]) == list(range(len(self._places))), "places lost"
        assert all(self._places[number].is_live for number in of_nodes), "a dead place of a living node"
        assert not any(self._places[number].is_live for number in self._dead), "a living place is swept"
        assert not any(self._places[number].blocks for number in self._unused), "an unused place has blocks"

    # --- inside -------------------------------------------------------------------------------------------

    def _find(self, node: str, incarnation: str, now_ns: int) -> tuple[_Node | None, Heard]:
        """Returns the node and renews its lease, or what to tell whoever said it."""
        known = self._nodes.get(node)
        if known is not None and known.incarnation == incarnation:
            known.deadline_ns = now_ns + self._lease_ns
            return known, Heard.OK
        is_over = known is not None or incarnation in self._replaced
        return None, Heard.REFUSED if is_over else Heard.UNKNOWN

    def _ask(self, known: _Node, now_ns: int) -> Heard:
        known.next_sequence, known.next_part, known.asked_ns = None, 0, now_ns
        return Heard.RESYNC

    def _replace(self, name: str, known: _Node) -> None:
        self._kill_places(known)
        del self._nodes[name]
        self._replaced[known.incarnation] = None
        while len(self._replaced) > MAX_REPLACED:
            self._replaced.popitem(last=False)

    def _kill_places(self, known: _Node) -> None:
        for number in known.places.values():
            self._places[number].is_live = False
            self._dead.append(number)
        known.places.clear()

    def _change(self, name: str, known: _Node, change: TierChange) -> None:
        number = known.places.get(change.tier)
        if number is None:
            if len(known.places) >= MAX_TIERS_PER_NODE:
                return
            number = known.places[change.tier] = self._take_place(Place(name, known.incarnation, change.tier))
        blocks, holders = self._places[number].blocks, self._holders
        for block_hash in change.removed:
            if block_hash in blocks:
                blocks.remove(block_hash)
                self._drop_holder(block_hash, number)
        alone = self._shared((number,))
        for block_hash in change.added:
            if block_hash in blocks:
                continue
            held = holders.get(block_hash)
            if held is None and len(holders) >= self._max_blocks:
                self.counters.refused_blocks += 1
                continue
            holders[block_hash] = alone if held is None else self._shared(tuple(sorted((*held, number))))
            blocks.add(block_hash)

    def _take_place(self, place: Place) -> int:
        if self._unused:
            number = self._unused.pop()
            self._places[number] = _PlaceSlot(place, set())
            return number
        self._places.append(_PlaceSlot(place, set()))
        return len(self._places) - 1

    def _drop_holder(self, block_hash: BlockHash, number: int) -> None:
        held = self._holders[block_hash]
        if len(held) == 1:
            del self._holders[block_hash]
        else:
            self._holders[block_hash] = self._shared(tuple(one for one in held if one != number))

    def _shared(self, held: tuple[int, ...]) -> tuple[int, ...]:
        """Returns an equal tuple that other blocks share; which blocks share one is not remembered exactly."""
        if len(self._shared_sets) >= MAX_SHARED_SETS:
            self._shared_sets.clear()
        return self._shared_sets.setdefault(held, held)
