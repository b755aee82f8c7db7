"""Blocks of finished answers: kept in the pool and given to the store, so that the next turn of a talk finds them.

An answer's KV was computed token by token; a later prompt that repeats the conversation would compute the same bits
from the same tokens. So its complete blocks get the names that prompt will ask for. Owns the copies to the store that
are under way, and holds on their blocks until each is done. Runs on the link loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvstore.core.block_pool import BlockPool, CachedBlock
from kvstore.core.quota import tenant_of
from kvstore.store.client import PutBlock, StoreClient
from workers.decode_attempt import DecodeAttempt
from workers.device_cache import DeviceCache
from workers.kv_pool import KvPool

logger = logging.getLogger(__name__)

STORING_ANSWERS_MAX = 64
"""Copies under way at a time; what ends beyond that stays in the pool only."""


class AnswerBlocks:
    """What becomes of the blocks of answers when their attempts end."""

    def __init__(
        self,
        *,
        pool: BlockPool,
        memory: KvPool,
        device: DeviceCache,
        store: StoreClient | None,
        counters: dict[str, int],
        on_freed: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._memory = memory
        self._device = device
        self._store = store
        self._counters = counters
        self._on_freed = on_freed
        self._copies: set[asyncio.Task[None]] = set()

    def keep(self, attempt: DecodeAttempt) -> None:
        """Call just before an attempt's blocks are released. The last token has no KV; an incomplete block is lost."""
        if not attempt.is_whole or not attempt.generated:
            return
        hashes = self._device.hashes(attempt.request.spec, attempt.generated[:-1])[: len(attempt.slots)]
        fresh = range(len(attempt.hashes), len(hashes))
        for index in fresh:
            self._device.share(attempt.key, index, hashes[index])
        blocks = [block for index in fresh if (block := self._pool.find(hashes[index])) is not None]
        if attempt.ended and blocks and self._store is not None and self._store.is_connected:
            self._copy(attempt, blocks)

    def close(self) -> None:
        """Ends copies under way."""
        for task in self._copies:
            task.cancel()

    def _copy(self, attempt: DecodeAttempt, blocks: list[CachedBlock]) -> None:
        if len(self._copies) >= STORING_ANSWERS_MAX:
            return
        holder, epoch = f"answer:{attempt.key[1]}:{attempt.key[0]}", attempt.key[1]
        self._device.hold(holder, epoch, blocks)
        task = asyncio.ensure_future(self._store_blocks(attempt, blocks))
        self._copies.add(task)

        def done(finished: asyncio.Task[None]) -> None:
            self._copies.discard(finished)
            self._device.let_go(holder, epoch)
            if not finished.cancelled() and (error := finished.exception()) is not None:
                logger.error("answer_not_stored attempt_id=%s epoch=%d", *attempt.key, exc_info=error)
            self._on_freed()

        task.add_done_callback(done)

    async def _store_blocks(self, attempt: DecodeAttempt, blocks: list[CachedBlock]) -> None:
        assert self._store is not None
        puts = [PutBlock(block.block_hash, self._memory.block_bytes_view(block.slot), block.digest) for block in blocks]
        result = await self._store.put_blocks(puts, tenant=tenant_of(attempt.request.spec.tenant_salt))
        self._counters["answer_blocks_stored"] += result.stored
