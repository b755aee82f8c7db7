"""What a block pool says: states of a slot, answers to requests for slots, counts.

Owns nothing. See ``kvstore.core.block_pool``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvstore.core.ids import AttemptId, BlockDigest, BlockHash, Incarnation
from kvstore.core.messages import DestinationBlock


class SlotState(Enum):
    """Where a slot is in its life cycle."""

    FREE = "free"
    RESERVED = "reserved"
    OWNED = "owned"
    CACHED = "cached"
    QUARANTINED = "quarantined"


class QuarantineReason(Enum):
    """Why a slot may not be given out yet."""

    RELEASED_WHILE_WRITTEN = "released_while_written"
    RELEASED_WHILE_READ = "released_while_read"
    EXPIRED_WHILE_WRITTEN = "expired_while_written"


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """A complete block that the pool keeps under its hash: where it is, which life of the slot, what it must hold."""

    slot: int
    generation: int
    block_hash: BlockHash
    digest: BlockDigest


@dataclass(frozen=True, slots=True)
class Reservation:
    """Slots given to an attempt, in block order: those it shares come first, then those that are new to it.

    ``blocks`` are the new ones, each with its generation and its never reused tag.
    """

    blocks: tuple[DestinationBlock, ...]
    cached: tuple[CachedBlock, ...] = ()

    @property
    def slots(self) -> tuple[int, ...]:
        """The block table of what was given."""
        return (*(block.slot for block in self.cached), *(block.slot for block in self.blocks))


@dataclass(frozen=True, slots=True)
class NoCapacityResult:
    """Not now: fewer slots can be given than asked for; the same call may succeed later. Nothing was taken.

    ``num_free`` counts cached blocks that nobody holds as well.
    """

    num_blocks: int
    num_free: int
    num_quarantined: int


@dataclass(frozen=True, slots=True)
class NeverFits:
    """Not ever: the pool has fewer slots than asked for. Nothing was taken."""

    num_blocks: int
    num_total: int


@dataclass(frozen=True, slots=True)
class StaleAttempt:
    """The (attempt, epoch) is unknown, finished, superseded or already there. Nothing was changed."""

    attempt_id: AttemptId
    epoch: int


@dataclass(frozen=True, slots=True)
class QuarantinedSlot:
    """One slot under quarantine: which life of it, why, and whose deaths would end it."""

    slot: int
    generation: int
    attempt_id: AttemptId
    epoch: int
    reason: QuarantineReason
    peers: frozenset[Incarnation]
    since_ns: int


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """``free + reserved + owned + cached + quarantined == total`` at any time.

    A shared block counts once: as owned while an attempt holds it, as quarantined while only a peer may still read
    it, as cached when nobody does.
    """

    free: int
    reserved: int
    owned: int
    cached: int
    """Complete blocks that nobody holds: kept for the next hit, given away as soon as the room is needed."""
    quarantined: int
    total: int
    attempts: int
    quarantine_over_limit: bool
    """More slots are quarantined than the pool's limit: the peers concerned must be cut off for good."""

    @property
    def available(self) -> int:
        """Slots that can be given out now."""
        return self.free + self.cached
