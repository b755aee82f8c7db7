"""Reads blocks of the slab of this host without asking its node: look up, copy, verify the copy, look again.

Owns nothing; works on the mapping of one slab. Why no lock, pin or order of stores is needed is argued in
``kvstore.core.slot_table``: the digest of the copy is the proof. What is lost without a pin is certainty that a block
which was seen will still be there when it is copied: then the copy is a miss.

Whether a block exists is a hint at any time, here as at the node.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from kvstore.core.ids import BLOCK_HASH_BYTES, BlockHash
from kvstore.core.slot_table import RECORD_BYTES, SlotRecord
from kvstore.digest import verify
from kvstore.store.copying import copy_block, zero_block
from kvstore.store.slab import Slab

BATCH_MIN = 128
"""Fewer hashes than this are looked up faster one by one."""
_HASH_WORDS = BLOCK_HASH_BYTES // 8


class CopyResult(Enum):
    """What became of one block."""

    COPIED = "copied"
    MISS = "miss"
    """Not there, or given to another block while it was copied."""
    CORRUPT = "corrupt"
    """There before and after, with bytes that do not have its digest."""


class Copied(NamedTuple):
    """``record`` says which life of which slot was read; None for a miss."""

    result: CopyResult
    record: SlotRecord | None


_MISSED = Copied(CopyResult.MISS, None)


class SharedReader:
    """Look-ups and verified copies for one process. Safe to use from any thread."""

    def __init__(self, slab: Slab) -> None:
        self._slab = slab
        self._table = slab.table
        self._buckets = np.frombuffer(slab.table.buckets, dtype=np.uint32)
        self._records = np.frombuffer(slab.table.records, dtype=np.uint64).reshape(-1, RECORD_BYTES // 8)
        self._mask = np.uint64(len(self._buckets) - 1)

    def exists(self, block_hash: BlockHash) -> bool:
        """Returns True when the block is committed in the slab."""
        return self._table.find(block_hash) is not None

    def exist(self, hashes: Sequence[BlockHash]) -> list[bool]:
        """Returns for each hash whether its block is committed in the slab."""
        if len(hashes) < BATCH_MIN:
            return [self._table.find(block_hash) is not None for block_hash in hashes]
        present: list[bool] = self._find(hashes).tolist()
        return present

    def prefix_blocks(self, hashes: Sequence[BlockHash]) -> int:
        """Returns how many of ``hashes`` are there from the first one on without a gap."""
        if not hashes or not self.exists(hashes[0]):
            return 0
        present = self.exist(hashes)
        return present.index(False) if False in present else len(present)

    def copy(self, block_hash: BlockHash, destination: Any) -> Copied:
        """Copies one block into a writable buffer of ``block_bytes`` and verifies the copy.

        Modifies: ``destination``; it is zeroed when the copy does not count, because damaged bytes can be a NaN, which
        no later mask would hide.
        """
        record = self._table.look_up(block_hash)
        if record is None:
            return _MISSED
        copy_block(destination, self._slab.slot(record.slot))
        if verify(destination, record.digest):
            return Copied(CopyResult.COPIED, record)
        zero_block(destination)
        return Copied(CopyResult.CORRUPT, record) if self._table.read(record.slot) == record else _MISSED

    def _find(self, hashes: Sequence[BlockHash]) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Walks all probe sequences at once, one step of each per round."""
        keys = np.frombuffer(b"".join(hashes), dtype=np.uint64).reshape(-1, _HASH_WORDS)
        found = np.zeros(len(keys), dtype=np.bool_)
        left = np.arange(len(keys))
        places = keys[:, -1] & self._mask
        for _ in range(len(self._buckets)):
            entries = self._buckets[places]
            taken = np.flatnonzero(entries)
            left, places, entries = left[taken], places[taken], entries[taken]
            if not len(left):
                break
            same = (self._records[entries - 1, :_HASH_WORDS] == keys[left]).all(axis=1)
            found[left[same]] = True
            left, places = left[~same], (places[~same] + np.uint64(1)) & self._mask
        return found
