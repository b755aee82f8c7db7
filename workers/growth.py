"""Blocks of running streams at a decode worker: they grow as they decode, and yield when the pool runs short.

An attempt begins with the blocks of its prompt and of the next token; it gets another one before its last is full.
When there is none, a stream is preempted (``workers.core.preemption`` says which): it is taken out of the engine
between two steps, its full blocks go to the store, and its slots are free. Later it gets slots again, loads what the
store still has, computes the rest from its own tokens, and decodes on from its last token. What was published stays;
nothing is generated twice. Any worker would continue with the same tokens, because results do not depend on how the
blocks came to be.

Owns these movements. Runs on the link loop; leases, frames and the end of attempts are the decode side's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from kvstore.core.block_pool import BlockPool, Reservation
from kvstore.core.ids import AttemptId, BlockHash
from kvstore.core.quota import tenant_of
from kvstore.digest import block_digest
from kvstore.store.client import PutBlock, StoreClient
from workers.core.preemption import Holding, PreemptionOrder
from workers.core.sequence import num_blocks_for
from workers.decode_attempt import DecodeAttempt
from workers.device_cache import DeviceCache
from workers.engine_loop import AttemptKey, DecodeSequence, EngineLoop, PrefillJob
from workers.kv_pool import KvPool

logger = logging.getLogger(__name__)

LOAD_DEADLINE_S = 1.0


class Growth:
    """The blocks of all streams of one worker. ``attempts`` is the decode side's own table, read only."""

    def __init__(
        self,
        attempts: dict[AttemptKey, DecodeAttempt],
        *,
        pool: BlockPool,
        memory: KvPool,
        device: DeviceCache,
        engine: EngineLoop,
        post: Callable[..., None],
        on_freed: Callable[[], None],
        on_fault: Callable[[list[AttemptKey], Exception], None],
        counters: dict[str, int],
        store: StoreClient | None = None,
    ) -> None:
        self._attempts = attempts
        self._pool = pool
        self._memory = memory
        self._device = device
        self._engine = engine
        self._post = post
        self._on_freed = on_freed
        self._on_fault = on_fault
        self._store = store
        self._block_tokens = memory.layout.block_tokens
        self._order = PreemptionOrder()
        self._short: dict[AttemptKey, None] = {}
        """Streams that stand still for want of a block."""
        self._counters = counters
        self._moves: dict[AttemptKey, asyncio.Task[None]] = {}

    # --- how many -----------------------------------------------------------------------------------------

    def blocks_in_all(self, attempt_tokens: tuple[int, int]) -> int:
        """Returns the blocks of (prompt tokens, most tokens to generate); the last token needs no place."""
        return num_blocks_for(sum(attempt_tokens) - 1, self._block_tokens)

    def blocks_at_first(self, attempt_tokens: tuple[int, int]) -> int:
        """Returns with how many blocks such an attempt begins."""
        return min(num_blocks_for(attempt_tokens[0] + 1, self._block_tokens), self.blocks_in_all(attempt_tokens))

    def may_admit(self, num_blocks: int, hashes: Sequence[BlockHash] = ()) -> bool:
        """Whether a new attempt may take so many blocks now, without pushing those that are here.

        ``hashes``: the blocks among them that it shares with whoever has them.
        """
        if self._short or self._order.next_return(self._is_idle) is not None:
            return False
        return self._has_room(num_blocks, hashes)

    def _has_room(self, num_blocks: int, hashes: Sequence[BlockHash]) -> bool:
        num_taken = self._pool.num_taken(num_blocks, hashes)
        return self._pool.counts().available >= num_taken + self._order.margin_blocks()

    def has_all_blocks(self, attempt: DecodeAttempt) -> bool:
        """Whether the attempt's blocks hold all its tokens but the last: it runs, or is just on its way out."""
        return self._order.state(attempt.key) in (Holding.RUNNING, Holding.LEAVING)

    @property
    def num_away(self) -> int:
        """Streams that were preempted and hold no blocks."""
        return sum(self._order.state(key) is Holding.AWAY for key in self._attempts)

    # --- life of an attempt -------------------------------------------------------------------------------

    def joined(self, attempt: DecodeAttempt) -> None:
        """It has its first blocks."""
        self._order.join(attempt.key)

    def begin(self, attempt: DecodeAttempt, output_token_ids: list[int]) -> None:
        """It decodes from here on; its last known token is the last of ``output_token_ids``."""
        self._order.move(attempt.key, Holding.RUNNING)
        self._add_sequence(attempt, output_token_ids)
        self._grow(attempt)

    def on_token(self, attempt: DecodeAttempt) -> None:
        """It has one token more: gets the next block before the last one is full."""
        if self._order.state(attempt.key) is Holding.RUNNING:
            self._grow(attempt)

    def on_credit(self) -> None:
        """A stream that was idle may go on, and with it come back."""
        self.serve()

    def stop(self, attempt: DecodeAttempt, then: Callable[[int], object]) -> None:
        """Takes it out wherever it is, then calls ``then(tokens computed)``: nothing touches its blocks any more."""
        key = attempt.key
        self.left(attempt)

        def out() -> None:
            self._engine.remove(key, lambda num: self._post(then, num))

        if (move := self._moves.get(key)) is not None:
            move.cancel()
            move.add_done_callback(lambda _: out())
        else:
            out()

    def left(self, attempt: DecodeAttempt) -> None:
        """It has ended."""
        self._order.leave(attempt.key)
        self._short.pop(attempt.key, None)

    # --- giving and taking --------------------------------------------------------------------------------

    def serve(self) -> None:
        """Gives free blocks to streams that stand still, then to those that are away, oldest first."""
        for key in sorted(self._short, key=self._age):
            self._grow(self._attempts[key])
            if key in self._short:
                return
        while (returning := self._order.next_return(self._is_idle)) is not None:
            if not self._bring_back(self._attempts[returning]):
                return

    def _age(self, key: AttemptKey) -> int:
        return self._attempts[key].arrival

    def _is_idle(self, key: AttemptKey) -> bool:
        attempt = self._attempts[key]
        return attempt.num_generated >= attempt.max_index

    def _grow(self, attempt: DecodeAttempt) -> None:
        """Gives a stream its next block in time; preempts for it when it stands still without."""
        num_known = attempt.num_prompt_tokens + attempt.num_generated
        num_held = len(attempt.slots)
        in_all = self.blocks_in_all((attempt.num_prompt_tokens, attempt.request.spec.max_tokens))
        wanted = min(num_blocks_for(num_known + self._block_tokens, self._block_tokens), in_all)
        if wanted > num_held and not self._extend(attempt, wanted - num_held) and wanted - num_held > 1:
            self._extend(attempt, 1)
        if num_blocks_for(num_known, self._block_tokens) <= len(attempt.slots):
            self._short.pop(attempt.key, None)
            return
        self._short[attempt.key] = None
        victim = self._order.victim(attempt.key, self._is_idle)
        if victim is not None:
            self._preempt(self._attempts[victim])

    def _extend(self, attempt: DecodeAttempt, num_blocks: int) -> bool:
        given = self._pool.extend(AttemptId(attempt.key[0]), attempt.key[1], num_blocks=num_blocks)
        if not isinstance(given, Reservation):
            return False
        attempt.slots += tuple(block.slot for block in given.blocks)
        self._engine.extend(attempt.key, attempt.slots)
        return True

    # --- out and back -------------------------------------------------------------------------------------

    def _preempt(self, attempt: DecodeAttempt) -> None:
        self._counters["preemptions"] += 1
        logger.info("preempted attempt_id=%s epoch=%d num_blocks=%d", *attempt.key, len(attempt.slots))
        self._order.move(attempt.key, Holding.LEAVING)
        self._short.pop(attempt.key, None)
        self._engine.pause(attempt.key, lambda sequence: self._post(self._on_paused, attempt, sequence))

    def _on_paused(self, attempt: DecodeAttempt, sequence: DecodeSequence | None) -> None:
        # Without a sequence it had just ended by itself: its last token is on its way through this loop, or was.
        if sequence is not None and self._order.state(attempt.key) is Holding.LEAVING:
            attempt.output_token_ids = sequence.output_token_ids
            self._move(attempt, self._move_out(attempt))

    def _move(self, attempt: DecodeAttempt, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._moves[attempt.key] = task

        def done(finished: asyncio.Task[None]) -> None:
            if self._moves.get(attempt.key) is finished:
                del self._moves[attempt.key]
            if not finished.cancelled() and (error := finished.exception()) is not None:
                logger.error("move_failed attempt_id=%s epoch=%d", *attempt.key, exc_info=error)
                if self._order.state(attempt.key) is not None:
                    self._on_fault([attempt.key], Exception(f"{type(error).__name__}: {error}"))

        task.add_done_callback(done)

    async def _move_out(self, attempt: DecodeAttempt) -> None:
        hashes = self._hashes(attempt)
        views = [self._memory.block_bytes_view(attempt.slots[index]) for index in range(len(hashes))]
        blocks = [PutBlock(item, view, block_digest(view)) for item, view in zip(hashes, views, strict=True)]
        if self._store is not None and blocks:
            await self._store.put_blocks(blocks, tenant=tenant_of(attempt.request.spec.tenant_salt))
        # What nobody needs at once is found here again when the stream comes back.
        for index, block in enumerate(blocks):
            self._device.share(attempt.key, index, block.block_hash, block.digest)
        self._pool.vacate(AttemptId(attempt.key[0]), attempt.key[1])
        attempt.slots = ()
        self._order.move(attempt.key, Holding.AWAY)
        # Not from inside this task: it still counts as a move of its attempt.
        self._post(self._on_freed)

    def _bring_back(self, attempt: DecodeAttempt) -> bool:
        """Gives a stream that is away its slots again. Returns False when there are too few."""
        num_tokens = attempt.num_prompt_tokens + attempt.num_generated
        in_all = self.blocks_in_all((attempt.num_prompt_tokens, attempt.request.spec.max_tokens))
        num_blocks = min(num_blocks_for(num_tokens + 1, self._block_tokens), in_all)
        hashes = self._hashes(attempt)
        if not self._has_room(num_blocks, hashes):
            return False
        cached = [block.block_hash for block in self._device.match(hashes)]
        given = self._pool.extend(AttemptId(attempt.key[0]), attempt.key[1], num_blocks=num_blocks, cached=cached)
        if not isinstance(given, Reservation):
            return False
        attempt.slots = given.slots
        self._order.move(attempt.key, Holding.RETURNING)
        self._move(attempt, self._move_in(attempt, hashes, len(cached)))
        return True

    async def _move_in(self, attempt: DecodeAttempt, hashes: Sequence[BlockHash], num_cached: int) -> None:
        tokens = _computed_tokens(attempt)
        num_blocks = num_cached
        if self._store is not None and num_cached < len(hashes):
            loaded = await self._store.load_blocks(
                hashes[num_cached:],
                lambda index: self._memory.block_bytes_view(attempt.slots[num_cached + index]),
                deadline_s=LOAD_DEADLINE_S,
                tenant=tenant_of(attempt.request.spec.tenant_salt),
            )
            num_blocks += loaded.num_loaded
        num_loaded = num_blocks * self._block_tokens
        self._counters["resumed_device_tokens"] += num_cached * self._block_tokens
        self._counters["resumed_loaded_tokens"] += num_loaded - num_cached * self._block_tokens
        self._counters["resumed_computed_tokens"] += len(tokens) - num_loaded
        if num_loaded == len(tokens):
            self._post(self._on_returned, attempt)
            return
        self._engine.submit_prefill(
            PrefillJob(
                key=attempt.key,
                spec=attempt.request.spec,
                block_table=attempt.slots,
                num_computed_tokens=num_loaded,
                resumed_output=tuple(attempt.output_token_ids),
                on_chunk=lambda _: None,
                on_done=lambda _, token_id, logprobs: self._post(self._on_returned, attempt),
                on_fault=lambda _, error: self._post(self._on_fault, [attempt.key], error),
            )
        )

    def _on_returned(self, attempt: DecodeAttempt) -> None:
        if self._order.state(attempt.key) is Holding.RETURNING:
            self._order.move(attempt.key, Holding.RUNNING)
            self._add_sequence(attempt, attempt.output_token_ids)
            self._grow(attempt)
            self.serve()

    def _add_sequence(self, attempt: DecodeAttempt, output_token_ids: list[int]) -> None:
        self._engine.add_sequence(
            DecodeSequence(
                key=attempt.key,
                spec=attempt.request.spec,
                block_table=attempt.slots,
                output_token_ids=output_token_ids,
                max_index=attempt.max_index,
            )
        )

    def _hashes(self, attempt: DecodeAttempt) -> list[BlockHash]:
        """Returns the names of the full blocks of a paused stream."""
        return self._device.hashes(attempt.request.spec, attempt.output_token_ids[:-1])


def _computed_tokens(attempt: DecodeAttempt) -> Sequence[int]:
    """Returns the tokens whose KV a paused stream has: all but the last."""
    return (*attempt.request.spec.prompt_token_ids, *attempt.output_token_ids[:-1])
