"""Which block is in which slot: a hash table in flat memory that other processes may read while it changes.

Owns the layout and the writing of one buffer (zeroed when it is made; shared memory beside a slab, or a
``bytearray``). One process writes; any number read, without a lock and without asking. Pure: it gets the buffer.

Byte layout, numbers in the order of this machine:

    [0, 4 * num_buckets)                   buckets: slot + 1, or 0; num_buckets = smallest power of two >= 2 * num_slots
    [records + slot * 64, + 64)            record of a slot, all zero while no committed block is in it:
                                           hash (32), digest (16), generation (8), check (8)

A block's home bucket is given by the last 8 bytes of its hash; collisions go to the next bucket (linear probing).
Removal shifts later entries back instead of leaving tombstones, so that the table never degrades.

**Why a reader needs no lock.** Python has no memory barriers, a record is longer than what a processor stores at once,
and on weakly ordered machines (aarch64) stores may be seen in another order than on x86, whose stores become visible in
program order. So nothing here depends on order:

* A record proves itself: ``check`` is the CRC-32 of the other 56 bytes (with a mark above it). A record that is half of
  one life and half of another is no record. What passes was written by the node as a whole, and says a thing that stays
  true for ever: "the block of this hash has this digest".
* The reader copies the bytes of the slot and computes the digest of *its copy*. Equal to the record's digest means
  that the copy is the block, whatever happened to the slot before, meanwhile or afterwards.
* The record is read again after the copy. Only when both readings are the same does a wrong digest accuse the
  stored bytes; otherwise the slot was given to another block meanwhile and the copy is a miss.

The order of the writer's stores (record before bucket, bucket before record on removal; a moved entry is in both
places for a moment) only keeps misses rare: a reader that looks while an entry moves may miss a block that is there.
"""

from __future__ import annotations

import struct
import sys
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from kvstore.core.ids import BLOCK_DIGEST_BYTES, BLOCK_HASH_BYTES, BlockDigest, BlockHash

RECORD_BYTES = 64
BUCKET_BYTES = 4
MAX_TABLE_SLOTS = (1 << 31) - 1

_FACTS = struct.Struct(f"={BLOCK_HASH_BYTES}s{BLOCK_DIGEST_BYTES}sQ")
_CHECK = struct.Struct("=Q")
_CHECK_MARK = 1 << 32
"""Above the CRC, so that the check of a record is never zero."""
_EMPTY = bytes(RECORD_BYTES)


class SlotRecord(NamedTuple):
    """What the table says about one slot. Equal records mean the same life of the slot."""

    slot: int
    block_hash: BlockHash
    digest: BlockDigest
    generation: int


def num_buckets_of(num_slots: int) -> int:
    """Returns the number of buckets of a table: at most half of them are ever used."""
    return 1 << (2 * num_slots - 1).bit_length()


def table_bytes(num_slots: int) -> int:
    """Returns the size of the buffer of a table for ``num_slots`` slots: 72 to 80 bytes per slot."""
    return BUCKET_BYTES * num_buckets_of(num_slots) + RECORD_BYTES * num_slots


class SlotTable:
    """The table over one buffer. ``insert`` and ``remove`` belong to the one process that owns the slab."""

    def __init__(self, num_slots: int, buffer: memoryview | None = None) -> None:
        """``buffer``: ``table_bytes(num_slots)`` zeroed bytes, or another process's table; None: own memory."""
        assert 1 <= num_slots <= MAX_TABLE_SLOTS, num_slots
        memory = memoryview(bytearray(table_bytes(num_slots))) if buffer is None else buffer
        assert memory.nbytes == table_bytes(num_slots), (memory.nbytes, table_bytes(num_slots))
        self.num_slots = num_slots
        self._mask = num_buckets_of(num_slots) - 1
        bucket_bytes = BUCKET_BYTES * (self._mask + 1)
        self._buckets = memory[:bucket_bytes].cast("I")
        self._records = memory[bucket_bytes:]
        self._num_used = 0

    @property
    def buckets(self) -> memoryview:
        """The buckets, for readers that walk them in bulk."""
        return self._buckets

    @property
    def records(self) -> memoryview:
        """The records, for readers that compare them in bulk."""
        return self._records

    def close(self) -> None:
        """Drops the views of the buffer. Raises: BufferError while somebody else holds one."""
        self._buckets.release()
        self._records.release()

    # --- looking: any process -----------------------------------------------------------------------------

    def find(self, block_hash: BlockHash) -> int | None:
        """Returns the slot of a block, or None. In a reader's process only ``read`` proves what it says."""
        buckets, records, mask = self._buckets, self._records, self._mask
        bucket = int.from_bytes(block_hash[-8:], sys.byteorder) & mask
        # Another process may be moving entries: the walk is bounded by the table, not by an empty bucket.
        for _ in range(mask + 1):
            entry = buckets[bucket]
            if entry == 0:
                return None
            start = (entry - 1) * RECORD_BYTES
            if bytes(records[start : start + BLOCK_HASH_BYTES]) == block_hash:
                return entry - 1
            bucket = (bucket + 1) & mask
        return None

    def look_up(self, block_hash: BlockHash) -> SlotRecord | None:
        """Returns the whole, proved record of a block, or None. Never waits and asks nobody."""
        slot = self.find(block_hash)
        if slot is None:
            return None
        record = self.read(slot)
        return record if record is not None and record.block_hash == block_hash else None

    def read(self, slot: int) -> SlotRecord | None:
        """Returns the record of a slot in [0, num_slots), or None: empty, or being changed just now."""
        start = slot * RECORD_BYTES
        raw = bytes(self._records[start : start + RECORD_BYTES])
        facts = raw[: _FACTS.size]
        if _CHECK.unpack_from(raw, _FACTS.size)[0] != zlib.crc32(facts) | _CHECK_MARK:
            return None
        block_hash, digest, generation = _FACTS.unpack(facts)
        return SlotRecord(slot, BlockHash(block_hash), BlockDigest(digest), generation)

    # --- the owner ----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Returns how many blocks the owner has inserted."""
        return self._num_used

    def __contains__(self, block_hash: BlockHash) -> bool:
        return self.find(block_hash) is not None

    def hash_at(self, slot: int) -> BlockHash | None:
        """Returns which block is in a slot; None when none is."""
        start = slot * RECORD_BYTES
        if self._records[start + _FACTS.size : start + RECORD_BYTES] == _EMPTY[_FACTS.size :]:
            return None
        return BlockHash(bytes(self._records[start : start + BLOCK_HASH_BYTES]))

    def digest_at(self, slot: int) -> BlockDigest:
        """Returns the digest of the block in a used slot."""
        start = slot * RECORD_BYTES + BLOCK_HASH_BYTES
        return BlockDigest(bytes(self._records[start : start + BLOCK_DIGEST_BYTES]))

    def slots(self) -> Iterator[int]:
        """Yields the used slots, in no particular order."""
        for entry in self._buckets:
            if entry:
                yield entry - 1

    def insert(self, slot: int, block_hash: BlockHash, digest: BlockDigest, generation: int) -> None:
        """Makes a block visible in an empty slot. The block is in no other slot."""
        assert self.hash_at(slot) is None, f"slot {slot} is used"
        facts = _FACTS.pack(block_hash, digest, generation)
        start = slot * RECORD_BYTES
        self._records[start : start + RECORD_BYTES] = facts + _CHECK.pack(zlib.crc32(facts) | _CHECK_MARK)
        bucket = self._home(block_hash)
        while self._buckets[bucket]:
            bucket = (bucket + 1) & self._mask
        self._buckets[bucket] = slot + 1
        self._num_used += 1

    def remove(self, slot: int) -> None:
        """Empties a used slot."""
        hole = self._bucket_of(slot)
        bucket = hole
        while True:
            bucket = (bucket + 1) & self._mask
            entry = self._buckets[bucket]
            if entry == 0:
                break
            home = self._home(self._hash_in(entry - 1))
            # An entry may move back into the hole unless its home lies behind the hole, in (hole, bucket].
            if (bucket - home) & self._mask >= (bucket - hole) & self._mask:
                self._buckets[hole] = entry
                hole = bucket
        self._buckets[hole] = 0
        self._records[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES] = _EMPTY
        self._num_used -= 1

    def check_invariants(self) -> None:
        """Raises: AssertionError when buckets and records do not agree."""
        used = [slot for slot in range(self.num_slots) if self.hash_at(slot) is not None]
        assert sorted(self.slots()) == used, "buckets and records disagree"
        assert len(used) == self._num_used, (len(used), self._num_used)
        for slot in used:
            record = self.read(slot)
            assert record is not None, f"record of slot {slot} does not prove itself"
            assert self.find(record.block_hash) == slot, f"slot {slot} cannot be found"

    def _home(self, block_hash: BlockHash) -> int:
        return int.from_bytes(block_hash[-8:], sys.byteorder) & self._mask

    def _hash_in(self, slot: int) -> BlockHash:
        return BlockHash(bytes(self._records[slot * RECORD_BYTES : slot * RECORD_BYTES + BLOCK_HASH_BYTES]))

    def _bucket_of(self, slot: int) -> int:
        bucket = self._home(self._hash_in(slot))
        while self._buckets[bucket] != slot + 1:
            assert self._buckets[bucket], f"slot {slot} is not in the table"
            bucket = (bucket + 1) & self._mask
        return bucket
