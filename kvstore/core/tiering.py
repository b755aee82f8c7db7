"""Which blocks move between two tiers of the store: written down, brought up, or let go. A pure core.

An *edge* joins an upper, fast tier (device pool, host slab) to the lower tier below it (host slab, disk). It owns
what it was told about visits (a bounded table), and counts of its verdicts; it never knows bytes, slots or clocks and
moves nothing itself. The tier above tells it every visit, and asks before each move:

* ``write_early`` right after a commit in the upper tier: copy it down now, so that less is lost when the upper tier
  dies with its process? Only while the lower tier has room to spare: such a copy must push nothing out.
* ``demote`` when the upper tier evicts a block: copy it down, or let it go?

A reader's block of the lower tier always gets a slot above. What became of a verdict to write is told by ``wrote``.

The rule for writes: a free slot costs nothing but the write, so it is used; once the lower tier is full, a block
must have been asked for at least ``min_visits_when_full`` times to replace another one. Most blocks are asked for
once and never again: writing those would wear a disk out and push blocks of proven use out of it.

The lower copy stays after a promotion: a block that comes down again then costs no second write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kvstore.core.counters import Counters
from kvstore.core.ids import BlockHash
from kvstore.core.visits import VisitTable

VISIT_ENTRIES_PER_BLOCK = 2
VISIT_ENTRIES_MIN = 1 << 14
VISIT_ENTRIES_MAX = 1 << 24


class Demotion(Enum):
    """What to do with a block that leaves the upper tier, or that was just committed there."""

    WRITE = "write"
    """Copy it down; ask the lower tier's own policy for a slot."""
    KEPT_BELOW = "kept_below"
    """The lower tier has it already: nothing to write."""
    DROP_ONE_HIT = "drop_one_hit"
    """Not asked for often enough to replace another block."""
    DROP_BUSY = "drop_busy"
    """Too many writes wait already; a queue that grows would hold memory and evict nothing sooner."""
    DROP_OFF = "drop_off"
    """The lower tier takes no writes (switched off, read-only, or it has no slots)."""
    LATER = "later"
    """``write_early`` only: not now; ask again when it is evicted."""


@dataclass(frozen=True, slots=True)
class EdgeLimits:
    """How one edge behaves. All counts in blocks."""

    min_visits_when_full: int = 2
    max_pending_writes: int = 64
    early_room_share: float = 0.05
    """``write_early`` needs more than this share of the lower tier's slots to be free."""

    def __post_init__(self) -> None:
        assert self.min_visits_when_full >= 1, self.min_visits_when_full
        assert self.max_pending_writes >= 1, self.max_pending_writes
        assert 0 <= self.early_room_share < 1, self.early_room_share


@dataclass(frozen=True, slots=True)
class LowerTier:
    """What the caller knows of the tier below at the moment it asks. All counts in blocks."""

    total: int
    free: int
    """Slots that hold no block and that no pending write has taken."""
    pending_writes: int = 0
    """Writes accepted and not finished."""
    accepts_writes: bool = True


@dataclass(slots=True)
class EdgeCounters(Counters):
    """Verdicts since the edge was made, and writes the lower tier took; each only grows."""

    written: int = 0
    written_early: int = 0
    kept_below: int = 0
    dropped_one_hit: int = 0
    dropped_busy: int = 0
    dropped_off: int = 0
    not_taken: int = 0
    """Writes that the lower tier had no buffer or no slot for."""


class TierEdge:
    """The verdicts between one tier and the one below it. Belongs to one thread."""

    def __init__(self, upper_blocks: int, lower_blocks: int, *, limits: EdgeLimits | None = None) -> None:
        """Memory: about 10 bytes per entry of the visit table, sized for both tiers' blocks and as many forgotten."""
        assert upper_blocks >= 1, upper_blocks
        assert lower_blocks >= 0, lower_blocks
        self._limits = limits or EdgeLimits()
        entries = (upper_blocks + lower_blocks) * VISIT_ENTRIES_PER_BLOCK
        self._visits = VisitTable(min(max(entries, VISIT_ENTRIES_MIN), VISIT_ENTRIES_MAX))
        self.counters = EdgeCounters()

    def on_visit(self, hashes: Sequence[BlockHash]) -> None:
        """A reader asked for these blocks, wherever they are or are not. Call once per request, before anything."""
        self._visits.visit_all(hashes)

    def num_visits(self, block_hash: BlockHash) -> int:
        """Returns how often the block was asked for as far as this edge remembers."""
        return self._visits.num_visits(block_hash)

    def write_early(self, block_hash: BlockHash, *, lower: LowerTier, is_below: bool) -> Demotion:
        """The block was committed above. Returns WRITE while the lower tier has room to spare, else LATER and such.

        ``is_below``: the lower tier holds the block, or a write of it is pending.
        """
        if is_below:
            return Demotion.KEPT_BELOW
        has_room = lower.free > lower.total * self._limits.early_room_share
        # Half of the queue is kept for evictions, which cannot wait.
        is_idle = lower.pending_writes < self._limits.max_pending_writes / 2
        if not (lower.accepts_writes and has_room and is_idle):
            return Demotion.LATER
        return Demotion.WRITE

    def demote(self, block_hash: BlockHash, *, lower: LowerTier, is_below: bool) -> Demotion:
        """The block is about to leave the upper tier. Returns anything but LATER.

        A block of which a write is pending ``is_below``; its bytes must stay until that write is done.
        """
        verdict = self._demotion(block_hash, lower, is_below)
        match verdict:
            case Demotion.WRITE:
                pass
            case Demotion.KEPT_BELOW:
                self.counters.kept_below += 1
            case Demotion.DROP_ONE_HIT:
                self.counters.dropped_one_hit += 1
            case Demotion.DROP_BUSY:
                self.counters.dropped_busy += 1
            case _:
                self.counters.dropped_off += 1
        return verdict

    def wrote(self, *, is_taken: bool, is_early: bool) -> None:
        """The lower tier took the block that WRITE was said of, or had no room for it."""
        if not is_taken:
            self.counters.not_taken += 1
        elif is_early:
            self.counters.written_early += 1
        else:
            self.counters.written += 1

    def _demotion(self, block_hash: BlockHash, lower: LowerTier, is_below: bool) -> Demotion:
        if is_below:
            return Demotion.KEPT_BELOW
        if not lower.accepts_writes or lower.total < 1:
            return Demotion.DROP_OFF
        if lower.pending_writes >= self._limits.max_pending_writes:
            return Demotion.DROP_BUSY
        if lower.free > 0:
            return Demotion.WRITE
        if self.num_visits(block_hash) >= self._limits.min_visits_when_full:
            return Demotion.WRITE
        return Demotion.DROP_ONE_HIT
