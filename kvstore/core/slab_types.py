"""The vocabulary of the slab index: states, outcomes, leases and counts. Owns nothing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NewType

from kvstore.core.counters import Counters
from kvstore.core.ids import BlockDigest, BlockHash, TenantId

HolderId = NewType("HolderId", str)
"""One connection of one process life (incarnation): holder of read leases and write reservations."""

LeaseId = NewType("LeaseId", int)
"""A read lease; never reused in the life of an index."""


class ReserveStatus(Enum):
    """What became of one hash of a ``reserve``."""

    GRANTED = "granted"
    PRESENT = "present"
    IN_PROGRESS = "in_progress"
    NO_ROOM = "no_room"
    OVER_QUOTA = "over_quota"
    """The tenant uses all it may, and has no block that could leave for this one."""


@dataclass(frozen=True, slots=True)
class ReserveOutcome:
    """Answer for one hash. ``slot`` and ``generation`` mean something only when ``status`` is GRANTED."""

    status: ReserveStatus
    slot: int = 0
    generation: int = 0


@dataclass(frozen=True, slots=True)
class LeasedBlock:
    """One block of a match: where it is, which life of the slot, and the digest its bytes must have."""

    slot: int
    generation: int
    digest: BlockDigest


@dataclass(frozen=True, slots=True)
class MatchResult:
    """The longest usable prefix, pinned under one lease; no blocks, no lease."""

    lease_id: LeaseId | None
    blocks: tuple[LeasedBlock, ...]


NO_MATCH = MatchResult(None, ())


@dataclass(frozen=True, slots=True)
class EvictedBlock:
    """A block that left for another one. Its bytes are in the slot until somebody is told to write there."""

    slot: int
    block_hash: BlockHash
    digest: BlockDigest
    tenant: TenantId


@dataclass(frozen=True, slots=True)
class ReadLease:
    """One standing read lease, for auditors."""

    lease_id: LeaseId
    reader: HolderId
    granted_ns: int
    deadline_ns: int
    slots: tuple[int, ...]


@dataclass(slots=True)
class SlabCounters(Counters):
    """What happened since the index was made; each only grows."""

    hit_blocks: int = 0
    missed_blocks: int = 0
    committed_blocks: int = 0
    evicted_blocks: int = 0
    aborted_blocks: int = 0
    corrupt_blocks: int = 0
    refused_commits: int = 0
    no_room_blocks: int = 0
    not_admitted_blocks: int = 0
    """A part of ``no_room_blocks``: everything here was worth more. The blocks after such a one are not in it."""
    over_quota_blocks: int = 0
    expired_write_blocks: int = 0
    expired_leases: int = 0
    refused_leases: int = 0
