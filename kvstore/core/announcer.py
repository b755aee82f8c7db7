"""What a node still has to tell the directory about its blocks. A pure core.

Owns the changes since the latest announcement, at most ``MAX_PENDING``, and the number of that announcement. A block
that came and went in between is told once, as it is now. Too many changes to keep, or a directory that lost some, end
in a snapshot: everything the node has, in parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvstore.core.directory import TierChange
from kvstore.core.ids import BlockHash

MAX_PENDING = 1 << 17
MAX_HASHES_PER_PART = 1 << 15


@dataclass(frozen=True, slots=True)
class Announcement:
    """Changes with the next number of the node's sequence."""

    sequence: int
    changes: tuple[TierChange, ...]


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """A part of everything the node had after announcement ``sequence``."""

    sequence: int
    part: int
    is_last: bool
    changes: tuple[TierChange, ...]


class Announcer:
    """Collects changes by tier. Belongs to one thread."""

    def __init__(self, *, needs_snapshot: bool = False) -> None:
        """``needs_snapshot``: nothing was announced yet; until a snapshot is taken no change is kept."""
        self.sequence = 0
        """Number of the latest announcement."""
        self.needs_snapshot = needs_snapshot
        """Changes were lost, here or at the directory: a snapshot is due."""
        self._pending: dict[tuple[str, BlockHash], bool] = {}

    def added(self, tier: str, block_hash: BlockHash) -> None:
        """A block can be read in this tier now."""
        self._note(tier, block_hash, True)

    def removed(self, tier: str, block_hash: BlockHash) -> None:
        """A block has left this tier."""
        self._note(tier, block_hash, False)

    def __len__(self) -> int:
        """Returns how many changes wait."""
        return len(self._pending)

    def take(self, max_changes: int = MAX_HASHES_PER_PART) -> Announcement | None:
        """Returns the next announcement; None when there is nothing to tell, or only a snapshot would tell it."""
        if not self._pending or self.needs_snapshot:
            return None
        tiers: dict[str, tuple[list[BlockHash], list[BlockHash]]] = {}
        for tier, block_hash in list(self._pending)[:max_changes]:
            gone_and_here = tiers.setdefault(tier, ([], []))
            gone_and_here[self._pending.pop((tier, block_hash))].append(block_hash)
        self.sequence += 1
        changes = tuple(TierChange(tier, tuple(here), tuple(gone)) for tier, (gone, here) in tiers.items())
        return Announcement(self.sequence, changes)

    def snapshot(self, blocks: Mapping[str, Sequence[BlockHash]]) -> Iterator[SnapshotPart]:
        """Returns the parts of ``blocks``, tier -> everything in it at this moment. Nothing waits afterwards."""
        self._pending.clear()
        self.needs_snapshot = False
        pieces = [
            TierChange(tier, tuple(hashes[start : start + MAX_HASHES_PER_PART]), ())
            for tier, hashes in blocks.items()
            for start in range(0, len(hashes), MAX_HASHES_PER_PART)
        ]
        sequence, last = self.sequence, max(0, len(pieces) - 1)
        return (SnapshotPart(sequence, part, part == last, tuple(pieces[part : part + 1])) for part in range(last + 1))

    def _note(self, tier: str, block_hash: BlockHash, is_here: bool) -> None:
        if self.needs_snapshot:
            return
        self._pending[tier, block_hash] = is_here
        if len(self._pending) > MAX_PENDING:
            self._pending.clear()
            self.needs_snapshot = True
