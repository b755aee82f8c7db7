"""How likely a block is asked for again, by how often it was asked for and how long ago: learned online.

A fixed-size sample of all blocks that are asked for, chosen by their hash, is watched whether or not the tier holds
them: what a policy has thrown out must still teach it. For each class of blocks and each age, it is counted how many
were asked for again at that age and how many grew older instead; counts fade, so that what is learned follows the
load. Blocks that are no longer watched count neither way, as in the Kaplan-Meier estimate.

From these hazards follows the worth of a slot: the best rate of hits per visit's time that keeping the block for some
while promises,

    worth(class, age) = max over h of  P(asked for within h) / E[time until asked for, or h].

Source of the index: Gittins, "Bandit processes and dynamic allocation indices", 1979; of hits per slot and time as the
measure: Beckmann, Chen, Cidon, "LHD: Improving Cache Hit Rate by Maximizing Hit Density", NSDI 2018.

Time is the number of visits so far; no clock is read.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from kvstore.core.eviction.slot_lists import SlotLists
from kvstore.core.ids import BlockHash

NUM_AGES = 40
"""Two per factor of two, from ``AGE_MIN`` visits on: the last one begins at 2**24 visits."""
AGE_MIN = 64
SAMPLE_BLOCKS = 1 << 14
WINDOW_BLOCKS_MIN = 1 << 16
WINDOW_PER_SLOT = 8
HALF_LIFE_PER_SLOT = 1.75
HALF_LIFE_MIN = 15_000
"""Visits after which what was seen counts half: a larger tier holds blocks longer, and needs to remember longer."""
PRIOR = 40.0
"""A class is taken to behave like all blocks together until it has more than so many observations at an age."""

AGE_EDGES = (0, *(((2 + k % 2) * AGE_MIN << k // 2) // 2 for k in range(NUM_AGES - 1)), 1 << 62)
"""Age i is [AGE_EDGES[i], AGE_EDGES[i + 1]) visits."""


class AgedLists:
    """Slots by (class, age), growing older by themselves. 18 bytes per slot."""

    def __init__(self, num_slots: int, num_classes: int) -> None:
        self._lists = SlotLists(num_slots, num_classes * NUM_AGES)
        self._since = array("Q", bytes(8 * num_slots))
        self._cell = array("H", bytes(2 * num_slots))
        self._num = array("I", bytes(4 * num_classes * NUM_AGES))
        self._order = list(range(num_classes * NUM_AGES))
        self._rank = list(self._order)
        self._occupied = 0
        """Bit i is set while the cell of rank i has a slot: the first occupied one is the lowest bit."""

    def put(self, slot: int, class_idx: int, *, since: int, now: int) -> None:
        """Puts a slot that is in no list where its age, ``now - since`` visits, belongs."""
        age, age_idx = now - since, 0
        if age >= AGE_MIN:
            octave = (age // AGE_MIN).bit_length() - 1
            age_idx = min(NUM_AGES - 1, 1 + 2 * octave + (age >= AGE_EDGES[2 + 2 * octave]))
        self._since[slot] = since
        self._append(slot, class_idx * NUM_AGES + age_idx)

    def take(self, slot: int) -> int:
        """Takes a slot out of its list; returns the cell it was in."""
        cell = self._cell[slot]
        self._lists.unlink(slot)
        self._num[cell] -= 1
        if not self._num[cell]:
            self._occupied &= ~(1 << self._rank[cell])
        return cell

    def grow_older(self, now: int, outlived: list[float] | None = None) -> None:
        """Moves the slots that reached the next age. Modifies: ``outlived`` counts them by the cell they leave."""
        for cell in list(self.cells()):
            age_idx = cell % NUM_AGES
            if age_idx == NUM_AGES - 1:
                continue
            born_before = now - AGE_EDGES[age_idx + 1]
            slot = self._lists.head(cell)
            while slot is not None and self._since[slot] <= born_before:
                self.take(slot)
                self._append(slot, cell + 1)
                if outlived is not None:
                    outlived[cell] += 1.0
                slot = self._lists.head(cell)

    def rank(self, order: list[int]) -> None:
        """From now on ``cells`` come in this order; ``order`` names every cell once."""
        self._order = order
        self._occupied = 0
        for rank, cell in enumerate(order):
            self._rank[cell] = rank
            if self._num[cell]:
                self._occupied |= 1 << rank

    def cells(self) -> Iterator[int]:
        """Yields the cells ``class * NUM_AGES + age`` that have a slot, the first in rank first."""
        left = self._occupied
        while left:
            lowest = left & -left
            yield self._order[lowest.bit_length() - 1]
            left ^= lowest

    def slots(self, cell: int) -> Iterator[int]:
        """Yields the slots of one cell, the oldest first."""
        return self._lists.slots(cell)

    def _append(self, slot: int, cell: int) -> None:
        self._lists.append(slot, cell)
        self._cell[slot] = cell
        if not self._num[cell]:
            self._occupied |= 1 << self._rank[cell]
        self._num[cell] += 1


class ReuseStudy:
    """Watches a sample of blocks and says what a slot is worth. About 4 MB whatever the tier's size."""

    def __init__(self, num_slots: int, num_classes: int, *, visits_per_round: int) -> None:
        window = max(WINDOW_BLOCKS_MIN, WINDOW_PER_SLOT * num_slots)
        shift = 0
        while SAMPLE_BLOCKS << shift < window:
            shift += 1
        self._sample_mask = (1 << shift) - 1
        self._num_classes = num_classes
        self._aged = AgedLists(SAMPLE_BLOCKS, num_classes)
        self._order = SlotLists(SAMPLE_BLOCKS)
        self._watched: dict[BlockHash, int] = {}
        self._hashes: list[BlockHash] = []
        self._again = [0.0] * (num_classes * NUM_AGES)
        self._outlived = [0.0] * (num_classes * NUM_AGES)
        self.worth = [0.0] * (num_classes * NUM_AGES)
        """Hits per visit's time by cell; 0 where nothing is known."""
        self._next_class = 0
        self._fade = 0.5 ** (visits_per_round / max(HALF_LIFE_MIN, HALF_LIFE_PER_SLOT * num_slots))
        """What is left of a count after a round, in which the worth of each class is computed once."""

    def visit(self, block_hash: BlockHash, class_idx: int, now: int) -> None:
        """A block was asked for, and is of this class from now on. ``now`` in visits."""
        if int.from_bytes(block_hash[-4:], "little") & self._sample_mask:
            return
        entry = self._watched.get(block_hash)
        if entry is not None:
            self._again[self._aged.take(entry)] += 1.0
            self._order.unlink(entry)
        elif len(self._hashes) < SAMPLE_BLOCKS:
            entry = len(self._hashes)
            self._hashes.append(block_hash)
        else:
            entry = self._order.head()
            assert entry is not None
            self._aged.take(entry)
            self._order.unlink(entry)
            del self._watched[self._hashes[entry]]
            self._hashes[entry] = block_hash
        self._watched[block_hash] = entry
        self._order.append(entry)
        self._aged.put(entry, class_idx, since=now, now=now)

    def grow_older(self, now: int) -> None:
        """Counts the watched blocks that reached the next age without being asked for."""
        self._aged.grow_older(now, self._outlived)

    def learn(self) -> None:
        """Computes the worth of one class anew, each class in its turn; counts fade once per round."""
        class_idx = self._next_class
        self._next_class = (class_idx + 1) % self._num_classes
        if class_idx == 0:
            self._again = [count * self._fade for count in self._again]
            self._outlived = [count * self._fade for count in self._outlived]
        start = class_idx * NUM_AGES
        self.worth[start : start + NUM_AGES] = worth_by_age(self._hazards(class_idx))

    def _hazards(self, class_idx: int) -> list[float]:
        hazards = []
        for age_idx in range(NUM_AGES):
            cell = class_idx * NUM_AGES + age_idx
            again = sum(self._again[age_idx::NUM_AGES])
            everybody = again + sum(self._outlived[age_idx::NUM_AGES])
            expected = again / everybody if everybody >= 1 else 0.0
            here = self._again[cell] + self._outlived[cell]
            hazards.append((self._again[cell] + PRIOR * expected) / (here + PRIOR))
        return hazards


def worth_by_age(hazards: list[float]) -> list[float]:
    """Returns hits per visit's time by age. ``hazards[i]``: chance to be asked for at age i, having reached it."""
    worth = []
    for first in range(NUM_AGES):
        survives, hits, time, best = 1.0, 0.0, 0.0, 0.0
        for age_idx in range(first, NUM_AGES - 1):
            width = AGE_EDGES[age_idx + 1] - AGE_EDGES[age_idx]
            # A block of age i is on average half through it, and one that is asked for there is so half way.
            time += survives * (width / 2 if age_idx == first else width) * (1 - hazards[age_idx] / 2)
            hits += survives * hazards[age_idx]
            survives *= 1 - hazards[age_idx]
            best = max(best, hits / time)
        worth.append(best)
    return worth
