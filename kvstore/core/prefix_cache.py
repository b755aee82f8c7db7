"""The complete blocks of one pool by hash: who holds them, and which of them leaves when room is needed.

Part of the block pool (``kvstore.core.block_pool``), which owns slots and attempts; this is the index of those slots
that anybody may share. It never touches bytes and never decides that a slot is free: it says so, the pool acts.

Life of an entry:

    publish ──> held (pinned by attempts, fenced by transfers that may still read it) <──pin── idle ──evict──> gone
                held ──last hold ends──> idle, or gone where nothing is kept
    drop: the hash is forgotten at once; the slot goes when the last hold ends

The policy hears of a block when a use of it *ends*: while it is in use it cannot leave anyway. The pool ends the uses
of one attempt leaf first, so that a parent is never older than its leaf.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvstore.core.eviction import EvictionPolicy
from kvstore.core.ids import BlockDigest, BlockHash


@dataclass(slots=True)
class _Entry:
    block_hash: BlockHash
    digest: BlockDigest
    num_pins: int = 0
    """Attempts that hold the block."""
    num_fences: int = 0
    """Ended attempts whose peer may still read it."""
    is_dropped: bool = False
    in_policy: bool = False


class PrefixCache:
    """Slots of one pool whose blocks are complete. Belongs to one thread."""

    def __init__(self, policy: EvictionPolicy, *, keeps_idle: bool = True) -> None:
        """Without ``keeps_idle`` a block goes with its last hold: it is shared, but not kept."""
        self.on_change: Callable[[BlockHash, bool], None] | None = None
        """Told of every block that can be found from now on (True), or not any more (False)."""
        self.on_dropped: Callable[[int], None] | None = None
        """Told of the slot of a dropped block when its last hold has ended, before it can be given out."""
        self._policy = policy
        self._keeps_idle = keeps_idle
        self._by_hash: dict[BlockHash, int] = {}
        self._entries: dict[int, _Entry] = {}
        self.num_idle = 0
        """Entries that nobody holds."""
        self.num_fenced = 0
        """Entries that no attempt holds, but a transfer may still read."""

    def __contains__(self, slot: int) -> bool:
        return slot in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    # --- looking ------------------------------------------------------------------------------------------

    def slot_of(self, block_hash: BlockHash) -> int | None:
        """Returns where a block is, or None."""
        return self._by_hash.get(block_hash)

    def facts(self, slot: int) -> tuple[BlockHash, BlockDigest] | None:
        """Returns hash and digest of the block in a slot; None when it is not here or was dropped."""
        entry = self._entries.get(slot)
        return None if entry is None or entry.is_dropped else (entry.block_hash, entry.digest)

    def is_idle(self, slot: int) -> bool:
        """Returns True for a block that nobody holds."""
        entry = self._entries[slot]
        return entry.num_pins + entry.num_fences == 0

    def holds(self, slot: int) -> tuple[int, int]:
        """Returns how many attempts hold a block and how many transfers may still read it."""
        entry = self._entries[slot]
        return entry.num_pins, entry.num_fences

    def hashes(self) -> list[BlockHash]:
        """Returns the blocks that are here."""
        return list(self._by_hash)

    # --- blocks come and go -------------------------------------------------------------------------------

    def publish(self, slot: int, block_hash: BlockHash, digest: BlockDigest) -> bool:
        """A slot's block is complete; the one attempt that holds it shares it. False: this block is here already."""
        assert slot not in self._entries, f"slot {slot} is published already"
        if block_hash in self._by_hash:
            return False
        self._by_hash[block_hash] = slot
        self._entries[slot] = _Entry(block_hash, digest, num_pins=1)
        if self.on_change is not None:
            self.on_change(block_hash, True)
        return True

    def drop(self, block_hash: BlockHash) -> int | None:
        """Forgets a block for good. Returns its slot if nobody holds it: it is the pool's again."""
        slot = self._by_hash.get(block_hash)
        if slot is None:
            return None
        self._forget(block_hash)
        entry = self._entries[slot]
        entry.is_dropped = True
        if entry.in_policy:
            entry.in_policy = False
            self._policy.on_remove(slot, block_hash)
        return self._take_out(slot) if self.is_idle(slot) else None

    def victims(self, num_blocks: int) -> list[int]:
        """Takes out ``num_blocks`` blocks that nobody holds, in the policy's order, and returns their slots."""
        chosen: list[int] = []
        for slot in self._policy.victims() if num_blocks else ():
            if self.is_idle(slot):
                chosen.append(slot)
                if len(chosen) == num_blocks:
                    break
        for slot in chosen:
            entry = self._entries[slot]
            self._forget(entry.block_hash)
            self._policy.on_remove(slot, entry.block_hash)
            self._take_out(slot)
        return chosen

    # --- holds --------------------------------------------------------------------------------------------

    def pin(self, slot: int) -> None:
        """An attempt holds the block."""
        self._change(slot, pins=1)

    def unpin(self, slot: int, *, to_fence: bool = False, parent: int | None = None) -> bool:
        """An attempt lets the block go, to a transfer that may still read it if ``to_fence``.

        ``parent``: the slot of the block before it in the attempt, if that is here too. Returns True when nobody
        holds the block and it is not kept, because it was dropped meanwhile or nothing is: the slot is the pool's.
        """
        return self._change(slot, pins=-1, fences=int(to_fence), parent=parent)

    def unfence(self, slot: int) -> bool:
        """A transfer reads the block no more. Returns as ``unpin``."""
        return self._change(slot, fences=-1)

    def _change(self, slot: int, *, pins: int = 0, fences: int = 0, parent: int | None = None) -> bool:
        entry = self._entries[slot]
        self._count(entry, -1)
        entry.num_pins += pins
        entry.num_fences += fences
        assert entry.num_pins >= 0 and entry.num_fences >= 0, (slot, entry)
        self._count(entry, 1)
        if pins + fences >= 0:
            return False
        if entry.is_dropped:
            if self.is_idle(slot):
                self._take_out(slot)
                return True
            return False
        if not self._keeps_idle:
            if self.is_idle(slot):
                self._forget(entry.block_hash)
                self._take_out(slot)
                return True
            return False
        if entry.in_policy:
            self._policy.on_hit(slot, entry.block_hash, parent=parent)
        else:
            entry.in_policy = True
            self._policy.on_insert(slot, entry.block_hash, parent=parent)
        return False

    def _count(self, entry: _Entry, change: int) -> None:
        if entry.num_pins == 0:
            if entry.num_fences == 0:
                self.num_idle += change
            else:
                self.num_fenced += change

    def _forget(self, block_hash: BlockHash) -> None:
        del self._by_hash[block_hash]
        if self.on_change is not None:
            self.on_change(block_hash, False)

    def _take_out(self, slot: int) -> int:
        entry = self._entries.pop(slot)
        self._count(entry, -1)
        if entry.is_dropped and self.on_dropped is not None:
            self.on_dropped(slot)
        return slot

    def check_invariants(self) -> None:
        """Raises: AssertionError when index, entries and counts disagree."""
        known = {entry.block_hash: slot for slot, entry in self._entries.items() if not entry.is_dropped}
        assert known == self._by_hash, "index and entries disagree"
        idle = {slot for slot in self._entries if self.is_idle(slot)}
        assert len(idle) == self.num_idle, (idle, self.num_idle)
        fenced = [slot for slot, entry in self._entries.items() if not entry.num_pins and entry.num_fences]
        assert len(fenced) == self.num_fenced, (fenced, self.num_fenced)
        in_policy = {slot for slot, entry in self._entries.items() if entry.in_policy}
        assert idle <= in_policy, f"nobody holds {sorted(idle - in_policy)} and the policy does not know"
        assert set(self._policy.victims()) == in_policy, "the policy has other slots"
