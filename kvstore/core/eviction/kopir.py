"""Our own policy: it keeps what promises most hits for the slots' time, and never a child without its parent.

What it knows of a block: how often it was asked for (also before it left: the visit table is the ghost list), how long
ago, whether it was the tail of its prompt, and whether children of it are here. What it learns (``ReuseStudy``): how
likely such blocks are asked for again at each age. So the share that is protected, and from whom, adapts itself:
where nearly everything returns soon it is like LRU; in a loop or a scan too long for the tier it keeps a part and
lets the rest pass; blocks that were asked for once make room for those of proven use.

* A block with children here is not evictable: without it they could never be matched again. Leaves go first.
* Among leaves the one in the (class, age) of least worth goes first; of equal worth, the oldest.
* A newcomer is admitted when its class is worth as much as what would leave for it.

The cost to recompute is the same for every block of a tier (equal tokens), so it cancels out of the comparison.

About 48 bytes per slot, ghosts included. An event is O(1); ageing touches each block once per age, the worth of
one class is computed every ``LEARN_EVERY`` visits; finding a victim is O(1).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from kvstore.core.eviction.reuse import NUM_AGES, AgedLists, ReuseStudy
from kvstore.core.eviction.slot_lists import SlotLists
from kvstore.core.ids import BlockHash
from kvstore.core.visits import VisitTable

VISITS_MAX = 6
"""Blocks asked for more often are one class."""
NUM_CLASSES = 2 * VISITS_MAX
GHOSTS_PER_SLOT = 2
GHOSTS_MIN = 1 << 18
GHOSTS_MAX = 1 << 24
AGE_EVERY = 64
LEARN_EVERY = 192
NOBODY = -1


class KopirPolicy:
    """Worth by class and age, leaves first, with admission."""

    def __init__(self, num_slots: int) -> None:
        self._aged = AgedLists(num_slots, NUM_CLASSES)
        self._parents = SlotLists(num_slots)
        """Slots with children, which are in no cell."""
        self._class = bytearray(num_slots)
        self._last = array("Q", bytes(8 * num_slots))
        self._present = bytearray(num_slots)
        self._parent = array("i", [NOBODY]) * num_slots
        self._parent_life = array("I", bytes(4 * num_slots))
        """Which life of the parent's slot a link is to; after that the slot holds a stranger."""
        self._life = array("I", bytes(4 * num_slots))
        self._num_children = array("I", bytes(4 * num_slots))
        self._visits = VisitTable(min(max(GHOSTS_MIN, GHOSTS_PER_SLOT * num_slots), GHOSTS_MAX))
        self._study = ReuseStudy(num_slots, NUM_CLASSES, visits_per_round=LEARN_EVERY * NUM_CLASSES)
        self._now = 0
        self._rank_cells()

    def on_insert(self, slot: int, block_hash: BlockHash, *, parent: int | None = None, is_tail: bool = False) -> None:
        """The block begins a life here, with the visits it had before."""
        assert not self._present[slot], f"slot {slot} inserted twice"
        self._class[slot] = self._visit(block_hash, is_tail)
        self._last[slot] = self._now
        self._present[slot] = 1
        self._link(slot, parent)
        self._file(slot)

    def on_hit(self, slot: int, block_hash: BlockHash, *, parent: int | None = None, is_tail: bool = False) -> None:
        """The block is young again, and of a better class."""
        assert self._present[slot], f"slot {slot} hit before it was inserted"
        self._unfile(slot)
        self._class[slot] = self._visit(block_hash, is_tail)
        self._last[slot] = self._now
        if parent is not None and parent != self._living_parent(slot):
            self._unlink(slot)
            self._link(slot, parent)
        self._file(slot)

    def on_refused(self, block_hash: BlockHash, *, is_tail: bool = False) -> None:
        """Counts the visit: the block may be worth a slot next time."""
        self._visit(block_hash, is_tail)

    def on_remove(self, slot: int, block_hash: BlockHash) -> None:
        """Forgets the slot; its parent may be a leaf now. The visits of the block stay known."""
        assert self._present[slot], f"slot {slot} removed twice"
        self._unfile(slot)
        self._present[slot] = 0
        self._unlink(slot)
        # Children that stay here are nobody's now. Their links are not looked for: they are to a life that is over.
        self._num_children[slot] = 0
        self._life[slot] = (self._life[slot] + 1) & 0xFFFFFFFF

    def admits(self, block_hash: BlockHash, *, is_tail: bool = False) -> bool:
        """A block is worth a slot when no block here is worth less, with all that is known of it."""
        least = next(self._aged.cells(), None)
        if least is None:
            return True
        newcomer = class_of(self._visits.num_visits(block_hash) + 1, is_tail)
        worth = self._study.worth
        return worth[newcomer * NUM_AGES] >= worth[least]

    def victims(self) -> Iterator[int]:
        """Yields leaves in order of worth, then blocks with children, those visited longest ago first."""
        for cell in self._aged.cells():
            yield from self._aged.slots(cell)
        yield from self._parents.slots()

    def check_invariants(self) -> None:
        """Raises: AssertionError when counts of children or lists disagree with what is present."""
        children = [0] * len(self._parent)
        for slot, parent in enumerate(self._parent):
            assert self._present[slot] or parent == NOBODY, f"slot {slot} is gone and has a parent"
            if parent != NOBODY and self._living_parent(slot) == parent:
                children[parent] += 1
        assert children == list(self._num_children), (children, list(self._num_children))
        present = [slot for slot, is_present in enumerate(self._present) if is_present]
        assert sorted(self.victims()) == present, "lists"
        assert all(children[slot] for slot in self._parents.slots()), "a leaf is held as a parent"

    def _visit(self, block_hash: BlockHash, is_tail: bool) -> int:
        """Notes a visit; returns the class of the block after it."""
        before = self._visits.visit(block_hash)
        class_idx = class_of(1 if before is None else before.num_visits + 1, is_tail)
        self._now += 1
        self._study.visit(block_hash, class_idx, self._now)
        if self._now % AGE_EVERY == 0:
            self._study.grow_older(self._now)
            self._aged.grow_older(self._now)
            if self._now % LEARN_EVERY == 0:
                self._study.learn()
                self._rank_cells()
        return class_idx

    def _rank_cells(self) -> None:
        # Where nothing tells them apart, older goes first: before anything is learned this is LRU.
        worth = self._study.worth
        self._aged.rank(sorted(range(len(worth)), key=lambda cell: (worth[cell], -(cell % NUM_AGES))))

    def _file(self, slot: int) -> None:
        if self._num_children[slot]:
            self._parents.append(slot)
        else:
            self._aged.put(slot, self._class[slot], since=self._last[slot], now=self._now)

    def _unfile(self, slot: int) -> None:
        if self._num_children[slot]:
            self._parents.unlink(slot)
        else:
            self._aged.take(slot)

    def _link(self, slot: int, parent: int | None) -> None:
        if parent is None:
            return
        assert parent != slot, slot
        if self._present[parent] and not self._num_children[parent]:
            self._aged.take(parent)
            self._parents.append(parent)
        self._parent[slot], self._parent_life[slot] = parent, self._life[parent]
        self._num_children[parent] += 1

    def _living_parent(self, slot: int) -> int:
        """Returns the parent's slot, or NOBODY when the parent has left it."""
        parent = self._parent[slot]
        return parent if parent != NOBODY and self._parent_life[slot] == self._life[parent] else NOBODY

    def _unlink(self, slot: int) -> None:
        parent = self._living_parent(slot)
        self._parent[slot] = NOBODY
        if parent == NOBODY:
            return
        self._num_children[parent] -= 1
        if self._present[parent] and not self._num_children[parent]:
            self._parents.unlink(parent)
            self._file(parent)


def class_of(num_visits: int, is_tail: bool) -> int:
    """Returns the class in [0, NUM_CLASSES) of a block that was asked for so often, counting the latest time."""
    return 2 * (min(num_visits, VISITS_MAX) - 1) + is_tail
