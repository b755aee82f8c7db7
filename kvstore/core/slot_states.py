"""The states of a slot, in any tier that has slots. Owns nothing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class SlotState(Enum):
    """Where a slot is in its life cycle."""

    FREE = "free"
    WRITING = "writing"
    USED = "used"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class SlotCounts:
    """``free + used + writing + quarantined == total`` at any time; ``pinned`` is a part of used or quarantined."""

    free: int
    used: int
    writing: int
    quarantined: int
    total: int
    pinned: int
