"""The device tier: complete blocks in a worker's own pool, found in place by the next request with the same prefix.

Shared by the sides of one worker. Which blocks are kept is the pool's matter (``kvstore.core.block_pool``); this adds
the bytes: a block is looked at before it is used again, and one that has not the digest it was made with is dropped,
counted and never used. Belongs to the link loop. It never waits and never copies from another process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvstore.core.block_pool import BlockPool, CachedBlock, Reservation
from kvstore.core.identity import prefix_hashes
from kvstore.core.ids import AttemptId, BlockDigest, BlockHash
from kvstore.core.messages import GenerationSpec
from kvstore.digest import block_digest
from workers.engine_loop import AttemptKey
from workers.kv_pool import KvPool

logger = logging.getLogger(__name__)


class DeviceCache:
    """The cached blocks of one pool, with their bytes."""

    def __init__(
        self,
        pool: BlockPool,
        memory: KvPool,
        fingerprint_digest: bytes,
        *,
        is_sound: Callable[[memoryview], bool] | None = None,
    ) -> None:
        """``is_sound``: looks at the bytes of a block whose digest is right; one it refuses counts as damaged."""
        self._is_sound = is_sound
        self._pool = pool
        self._memory = memory
        self._fingerprint_digest = fingerprint_digest
        self._block_tokens = memory.layout.block_tokens
        self._holds: dict[tuple[str, int], tuple[CachedBlock, ...]] = {}
        # Damaged bytes can be a NaN, which no mask would hide from whoever gets the slot next.
        pool.on_dropped(memory.zero_block)
        self._counters = {"device_hit_blocks": 0, "device_corrupt_blocks": 0, "device_shared_blocks": 0}

    @property
    def counters(self) -> dict[str, int]:
        """What happened since the worker began; each only grows."""
        return {**self._counters, "device_evicted_blocks": self._pool.num_evicted}

    def hashes(self, spec: GenerationSpec, output_token_ids: Sequence[int] = ()) -> list[BlockHash]:
        """Returns the names of the full blocks of a prompt and what was generated after it."""
        tokens = (*spec.prompt_token_ids, *output_token_ids)
        return prefix_hashes(self._fingerprint_digest, spec.tenant_salt, tokens, self._block_tokens)

    def match(self, hashes: Sequence[BlockHash]) -> tuple[CachedBlock, ...]:
        """Returns the longest cached prefix whose blocks are what they should be. Nothing is held by that."""
        matched = self._pool.match(hashes)
        for index, block in enumerate(matched):
            if not self.is_right(block):
                matched = matched[:index]
                break
        self._counters["device_hit_blocks"] += len(matched)
        return matched

    def find(self, block_hash: BlockHash) -> CachedBlock | None:
        """Returns one block if it is here and what it should be."""
        found = self.match((block_hash,))
        return found[0] if found else None

    def is_right(self, block: CachedBlock) -> bool:
        """Compares a cached block's bytes with its digest; drops it when they differ or cannot be KV."""
        view = self._memory.block_bytes_view(block.slot)
        if block_digest(view) == block.digest and (self._is_sound is None or self._is_sound(view)):
            return True
        self._counters["device_corrupt_blocks"] += 1
        logger.error("device_block_corrupt hash=%s slot=%d", block.block_hash.hex(), block.slot)
        self._pool.drop(block.block_hash)
        return False

    def hold(self, holder: str, epoch: int, blocks: Sequence[CachedBlock]) -> None:
        """Blocks that are here do not leave until ``let_go``, whoever else lets them go. Takes no slot."""
        hashes = [block.block_hash for block in blocks]
        held = self._pool.allocate(AttemptId(holder), epoch, num_blocks=len(hashes), cached=hashes)
        assert isinstance(held, Reservation), (holder, epoch, held)
        self._holds[holder, epoch] = held.cached

    def held(self, holder: str, epoch: int) -> tuple[CachedBlock, ...]:
        """Returns what ``holder`` holds."""
        return self._holds.get((holder, epoch), ())

    def let_go(self, holder: str, epoch: int) -> None:
        """Ends a ``hold``. Safe without one."""
        if self._holds.pop((holder, epoch), None) is not None:
            # No peer knows these holds, so that nothing is quarantined and the time does not matter.
            self._pool.release(AttemptId(holder), epoch, now_ns=0)

    def share(self, key: AttemptKey, index: int, block_hash: BlockHash, digest: BlockDigest | None = None) -> bool:
        """A block of an attempt is complete: keeps it for others. ``digest`` is made from its bytes if not known.

        Returns False when the attempt is gone or the pool has this block elsewhere.
        """
        if digest is None:
            slots = self._pool.blocks_of(AttemptId(key[0]), key[1])
            if index >= len(slots):
                return False
            digest = block_digest(self._memory.block_bytes_view(slots[index]))
        shared = self._pool.share(AttemptId(key[0]), key[1], index=index, block_hash=block_hash, digest=digest)
        self._counters["device_shared_blocks"] += shared
        return shared
