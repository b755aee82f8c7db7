"""Replays the prompts of a trace against one tier: what share of their blocks is served as an unbroken prefix hit.

A model of a store with one tier and one reader at a time: match, then reserve and commit the rest, as ``SlabIndex``
does it (a test holds the two together), without bytes. Also the offline optimum, which knows the future.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

from kvstore.core.eviction import EvictionPolicy
from kvstore.core.ids import BLOCK_HASH_BYTES, BlockHash

Prompt = Sequence[BlockHash]
NEVER = 1 << 62


def block_hash_of(hash_id: int) -> BlockHash:
    """Returns a block hash for an id in [0, 2**64) of a trace, spread over all bytes like a real one."""
    # splitmix64: ids of a trace count up, and what samples or hashes by some bytes must not see that.
    mixed = (hash_id * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    mixed ^= mixed >> 31
    return BlockHash(mixed.to_bytes(8, "little") * (BLOCK_HASH_BYTES // 8))


class ReplayTier:
    """Blocks in slots, kept as a policy says."""

    def __init__(self, num_slots: int, policy: EvictionPolicy) -> None:
        assert num_slots >= 1, num_slots
        self._num_slots = num_slots
        self._policy = policy
        self._slot_of: dict[BlockHash, int] = {}
        self._hash_at: list[BlockHash] = []
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._slot_of)

    def holds(self, block_hash: BlockHash) -> bool:
        """Returns True when the block has a slot. No visit."""
        return block_hash in self._slot_of

    def serve(self, prompt: Prompt) -> int:
        """Serves one prompt, root first; returns how many of its blocks were an unbroken prefix hit."""
        num_hits = self._hit(prompt)
        if num_hits < len(prompt):
            self._store(prompt, num_hits)
        return num_hits

    def _hit(self, prompt: Prompt) -> int:
        slots: list[int] = []
        for block_hash in prompt:
            slot = self._slot_of.get(block_hash)
            if slot is None:
                break
            slots.append(slot)
        for idx in range(len(slots) - 1, -1, -1):
            self._policy.on_hit(
                slots[idx],
                prompt[idx],
                parent=slots[idx - 1] if idx else None,
                is_tail=idx == len(prompt) - 1,
            )
        return len(slots)

    def _store(self, prompt: Prompt, start: int) -> None:
        own = {slot for slot in map(self._slot_of.get, prompt) if slot is not None}
        parent = self._slot_of[prompt[start - 1]] if start else None
        granted: list[tuple[int, int, int | None]] = []
        refused: list[int] = []
        for idx in range(start, len(prompt)):
            slot = self._slot_of.get(prompt[idx])
            if slot is None and not refused:
                slot = self._take_slot(prompt[idx], own, is_tail=idx == len(prompt) - 1)
                if slot is not None:
                    self._slot_of[prompt[idx]] = slot
                    own.add(slot)
                    self._hash_at[slot] = prompt[idx]
                    granted.append((idx, slot, parent))
            if slot is None:
                refused.append(idx)
            parent = slot
        for idx in reversed(refused):
            self._policy.on_refused(prompt[idx], is_tail=idx == len(prompt) - 1)
        for idx, slot, above in reversed(granted):
            self._policy.on_insert(slot, prompt[idx], parent=above, is_tail=idx == len(prompt) - 1)

    def _take_slot(self, block_hash: BlockHash, own: set[int], *, is_tail: bool) -> int | None:
        if len(self._hash_at) < self._num_slots:
            self._hash_at.append(block_hash)
            return len(self._hash_at) - 1
        if not self._policy.admits(block_hash, is_tail=is_tail):
            return None
        for slot in self._policy.victims():
            if slot not in own:
                victim = self._hash_at[slot]
                self._policy.on_remove(slot, victim)
                del self._slot_of[victim]
                return slot
        return None


def replay(prompts: Sequence[Prompt], num_slots: int, policy: EvictionPolicy) -> Iterator[int]:
    """Yields for each prompt how many of its blocks were hits."""
    tier = ReplayTier(num_slots, policy)
    for prompt in prompts:
        yield tier.serve(prompt)


def replay_optimum(prompts: Sequence[Prompt], num_slots: int) -> Iterator[int]:
    """Yields the same for Belady's rule: out goes, or stays out, what is needed again last.

    A parent is needed no later than its children, and leaves go first among equals, so what is kept is always whole
    prefixes and no policy can have more hits.
    """
    coming: list[list[int]] = []
    next_use: dict[BlockHash, int] = {}
    for idx in range(len(prompts) - 1, -1, -1):
        coming.append([next_use.get(block_hash, NEVER) for block_hash in prompts[idx]])
        next_use.update(dict.fromkeys(prompts[idx], idx))
    coming.reverse()
    held: dict[BlockHash, tuple[int, int]] = {}
    latest: list[tuple[int, int, BlockHash]] = []
    for prompt, uses in zip(prompts, coming, strict=True):
        num_hits = 0
        while num_hits < len(prompt) and prompt[num_hits] in held:
            num_hits += 1
        for depth, (block_hash, use) in enumerate(zip(prompt, uses, strict=True)):
            # The heap gives the largest (next use, depth) first; entries of blocks that left or moved are stale.
            key = (-use, -depth)
            if use == NEVER:
                held.pop(block_hash, None)
                continue
            if block_hash not in held and len(held) >= num_slots:
                while held.get(latest[0][2]) != latest[0][:2]:
                    heappop(latest)
                if latest[0][:2] >= key:
                    continue
                del held[heappop(latest)[2]]
            held[block_hash] = key
            heappush(latest, (*key, block_hash))
        yield num_hits
