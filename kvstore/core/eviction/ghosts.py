"""Hashes of blocks that have left: bounded, oldest forgotten first. Costs about 200 bytes per ghost."""

from __future__ import annotations

from collections import OrderedDict

from kvstore.core.ids import BlockHash


class GhostList:
    """A set of at most ``max_ghosts`` hashes in the order in which they came."""

    def __init__(self, max_ghosts: int) -> None:
        assert max_ghosts >= 0, max_ghosts
        self._max = max_ghosts
        self._hashes: OrderedDict[BlockHash, None] = OrderedDict()

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._hashes

    def __len__(self) -> int:
        return len(self._hashes)

    def add(self, block_hash: BlockHash) -> None:
        """Makes the hash the newest ghost; forgets the oldest when there are too many."""
        self._hashes[block_hash] = None
        self._hashes.move_to_end(block_hash)
        if len(self._hashes) > self._max:
            self._hashes.popitem(last=False)

    def discard(self, block_hash: BlockHash) -> bool:
        """Forgets the hash. Returns whether it was a ghost."""
        if block_hash not in self._hashes:
            return False
        del self._hashes[block_hash]
        return True

    def forget_oldest(self) -> None:
        """Forgets one ghost; there must be one."""
        self._hashes.popitem(last=False)
