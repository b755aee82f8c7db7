"""Loads of one store client: blocks from the slab of this host, then from its disk, then from other nodes.

Owns the counts of loads and what is known of their cost. Copies bytes out of the mapped slab into the caller's memory
and verifies each copy; asks the node for what the slab does not have. Works on a session that it is given and holds
nothing between two loads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvstore.core.counters import Counters
from kvstore.core.ids import BlockHash, TenantId
from kvstore.core.load_cost import LoadCost, LoadPlan
from kvstore.store.copying import copy_block, zero_block
from kvstore.store.messages import (
    FETCH_MS_MAX,
    MAX_HASHES_PER_MESSAGE,
    FetchMissing,
    MissingFetched,
    ReportCorrupt,
    SlotRef,
)
from kvstore.store.session import LeasedPrefix, StoreSession
from kvstore.store.shared_reader import CopyResult

logger = logging.getLogger(__name__)

BRING_UP_BLOCKS = 32
"""Blocks of one ask for a lower tier: the next ones come up while these are copied."""
FETCH_MARGIN_S = 0.1
"""So much longer than the node's own deadline its answer is waited for."""
BYTES_PER_LOOP_STEP = 2 << 20
"""After so many copied bytes other tasks of the loop have their turn."""


LoadStop = Literal["end", "corrupt", "evicted", "lease_over", "deadline"]
"""``end``: everything that matched was loaded. ``evicted``: a block left before it was copied."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """``num_loaded`` blocks are copied and verified, from the first one on without a gap."""

    num_loaded: int
    num_matched: int
    stopped_by: LoadStop
    num_from_disk: int = 0
    """How many of the loaded blocks were brought up from the disk for this load."""
    num_fetched: int = 0
    """Of the loaded blocks: so many were brought from another node for this load."""


_Brought = tuple[LeasedPrefix | None, bool]


@dataclass(frozen=True, slots=True)
class _Limit:
    """How long one load may wait for one tier. ``plan`` None: nobody knows what its blocks are worth."""

    tier: str
    num_blocks: int
    block_tokens: int
    plan: LoadPlan | None
    began_ns: int
    end_ns: int


@dataclass(slots=True)
class ClientCounters(Counters):
    """What happened since the client was made; each only grows."""

    loaded_blocks: int = 0
    stored_blocks: int = 0
    corrupt_blocks: int = 0
    lease_over: int = 0
    evicted_meanwhile: int = 0
    load_deadlines: int = 0
    loads_skipped: int = 0
    """Tiers that were not asked, because computing would be sooner."""
    disk_blocks: int = 0
    """Loaded blocks that came up from the disk."""
    connections: int = 0
    losses: int = 0


class Loader:
    """Loads over one session after the other. Belongs to its client's loop."""

    def __init__(
        self,
        *,
        block_bytes: int,
        lease_ms: int,
        clock_ns: Callable[[], int],
        is_sound: Callable[[Any], bool] | None,
        counters: ClientCounters,
    ) -> None:
        self._block_bytes = block_bytes
        self._lease_ms = lease_ms
        self._clock_ns = clock_ns
        self._is_sound = is_sound
        self.counters = counters
        self.cost = LoadCost()

    async def load(
        self,
        session: StoreSession,
        hashes: Sequence[BlockHash],
        into: Callable[[int], Any],
        *,
        has_lower_tier: bool,
        deadline_s: float,
        tenant: TenantId,
        block_tokens: int | None,
    ) -> LoadResult:
        """See ``StoreClient.load_blocks``."""
        end_ns = self._clock_ns() + int(deadline_s * 1e9)
        result = await self._load_slab(session, hashes, into, end_ns=end_ns)
        if has_lower_tier and _goes_on(result, hashes):
            limit = self._limit("disk", len(hashes) - result.num_loaded, block_tokens, end_ns=end_ns)
            if limit is not None:
                result = await self._load_rest(session, hashes, into, start=result.num_loaded, end_ns=limit.end_ns)
                self._learn(limit, result.num_from_disk, is_late=result.stopped_by == "deadline")
        if session.num_others and _goes_on(result, hashes):
            limit = self._limit("others", len(hashes) - result.num_loaded, block_tokens, end_ns=end_ns)
            if limit is not None:
                result = await self._load_from_others(session, hashes, into, result, limit, tenant=tenant)
        session.missed(len(hashes) - result.num_loaded)
        return result

    def is_turn_of_others(self, num_copied: int) -> bool:
        """Returns True every few megabytes, asked after each copied block."""
        return num_copied % max(1, BYTES_PER_LOOP_STEP // self._block_bytes) == 0

    async def let_others_run(self, num_copied: int) -> None:
        """Called after each copied block: every few megabytes other tasks of the loop have their turn."""
        if self.is_turn_of_others(num_copied):
            await asyncio.sleep(0)

    def _limit(self, tier: str, num_blocks: int, block_tokens: int | None, *, end_ns: int) -> _Limit | None:
        """Returns how long ``tier`` may be waited for; None: not at all, what it may have is computed sooner."""
        now_ns = self._clock_ns()
        if block_tokens is None:
            return _Limit(tier, num_blocks, 0, None, now_ns, end_ns)
        plan = self.cost.plan(tier, num_bytes=num_blocks * self._block_bytes, num_tokens=num_blocks * block_tokens)
        if not plan.starts:
            self.cost.skipped(tier)
            self.counters.loads_skipped += 1
            return None
        return _Limit(tier, num_blocks, block_tokens, plan, now_ns, min(end_ns, now_ns + plan.deadline_ns))

    def _learn(self, limit: _Limit, num_loaded: int, *, is_late: bool) -> None:
        """Tells the cost model what became of a load; a miss in time says nothing."""
        if limit.plan is None:
            return
        took_ns, num_tokens = self._clock_ns() - limit.began_ns, num_loaded * limit.block_tokens
        if is_late:
            num_bytes = limit.num_blocks * self._block_bytes
            self.cost.abandoned(limit.tier, limit.plan, num_bytes=num_bytes, num_tokens=num_tokens, took_ns=took_ns)
        elif num_loaded:
            num_bytes = num_loaded * self._block_bytes
            self.cost.loaded(limit.tier, num_bytes=num_bytes, num_tokens=num_tokens, took_ns=took_ns)

    async def _load_slab(
        self, session: StoreSession, hashes: Sequence[BlockHash], into: Callable[[int], Any], *, end_ns: int
    ) -> LoadResult:
        """Loads what the slab of this host has."""
        num_matched = session.reader.prefix_blocks(hashes)
        copied: list[SlotRef] = []
        stopped_by: LoadStop = "lease_over"
        try:
            stopped_by = await self._copy_prefix(session, hashes[:num_matched], into, copied, end_ns=end_ns)
        finally:
            session.touched(copied, ends_prompt=len(copied) == len(hashes))
        return LoadResult(len(copied), num_matched, stopped_by)

    async def _copy_prefix(
        self,
        session: StoreSession,
        hashes: Sequence[BlockHash],
        into: Callable[[int], Any],
        copied: list[SlotRef],
        *,
        end_ns: int,
    ) -> LoadStop:
        """Copies blocks out of the slab. Returns why it stopped. Modifies: ``copied``, also when it is cancelled."""
        for index, block_hash in enumerate(hashes):
            if index and self._clock_ns() >= end_ns:
                self.counters.load_deadlines += 1
                return "deadline"
            stop, ref = self._copy_shared(session, block_hash, into(index))
            if ref is None:
                return stop
            copied.append(ref)
            await self.let_others_run(len(copied))
        return "end"

    async def _load_from_others(
        self,
        session: StoreSession,
        hashes: Sequence[BlockHash],
        into: Callable[[int], Any],
        here: LoadResult,
        limit: _Limit,
        *,
        tenant: TenantId,
    ) -> LoadResult:
        """Goes on after what is ``here``: has the node fetch the rest, and copies what came."""
        start, end_ns = here.num_loaded, limit.end_ns
        # The other half is for the copies.
        deadline_s = (end_ns - limit.began_ns) / 2e9
        if deadline_s <= 0:
            return here
        ask_ms = min(FETCH_MS_MAX, max(1, int(deadline_s * 1000)))
        wanted = tuple(hashes[start : start + MAX_HASHES_PER_MESSAGE])
        is_all = start + len(wanted) == len(hashes)
        fetched = await session.call(
            lambda n: FetchMissing(n=n, hashes=wanted, deadline_ms=ask_ms, ends_prompt=is_all, tenant=tenant),
            MissingFetched,
            deadline_s=deadline_s + FETCH_MARGIN_S,
        )
        rest = hashes[start : start + session.reader.prefix_blocks(hashes[start:])]
        copied: list[SlotRef] = []
        try:
            stop = await self._copy_prefix(session, rest, lambda n: into(start + n), copied, end_ns=end_ns)
        finally:
            session.touched(copied, ends_prompt=start + len(copied) == len(hashes))
        is_late = session.is_open if fetched is None else fetched.is_late
        self._learn(limit, len(copied), is_late=is_late or stop == "deadline")
        num_loaded = start + len(copied)
        return LoadResult(num_loaded, start + len(rest), stop, here.num_from_disk, len(copied))

    async def _load_rest(
        self, session: StoreSession, hashes: Sequence[BlockHash], into: Callable[[int], Any], *, start: int, end_ns: int
    ) -> LoadResult:
        """Loads what follows the first ``start`` blocks through the node, one window ahead of the copies."""

        def ask(position: int) -> asyncio.Task[_Brought]:
            window = hashes[position : position + BRING_UP_BLOCKS]
            left_s = max(0.001, (end_ns - self._clock_ns()) / 1e9)
            ends_prompt = position + len(window) == len(hashes)
            return asyncio.ensure_future(
                session.bring_up(window, lease_ms=self._lease_ms, deadline_s=left_s, ends_prompt=ends_prompt)
            )

        position, num_from_disk = start, 0
        stop: LoadStop | None = None
        ahead, is_early = ask(position), False
        try:
            while stop is None:
                prefix, is_late = await ahead
                is_over = is_late or self._clock_ns() >= end_ns
                if prefix is None and is_early and not is_over:
                    # It was asked while the blocks before it still took up the slab.
                    ahead, is_early = ask(position), False
                    continue
                if prefix is None:
                    stop = "deadline" if is_over else "end"
                    break
                window_end = position + len(prefix)
                is_early = len(prefix) == BRING_UP_BLOCKS and window_end < len(hashes) and not is_over
                if is_early:
                    ahead = ask(window_end)
                with prefix:
                    for index in range(len(prefix)):
                        stop = self._load_one(prefix, index, into(position))
                        if stop is not None:
                            break
                        num_from_disk += prefix.is_from_disk(index)
                        position += 1
                        await self.let_others_run(position)
                if stop is None and position == len(hashes):
                    stop = "end"
                elif stop is None and is_over:
                    stop = "deadline"
                elif stop is None and not is_early:
                    # A slab smaller than the window gave a part: now there is room for more.
                    ahead = ask(position)
        finally:
            _forget(ahead)
        self.counters.loaded_blocks += position - start
        self.counters.disk_blocks += num_from_disk
        self.counters.load_deadlines += stop == "deadline"
        return LoadResult(position, position, stop, num_from_disk)

    def _copy_shared(
        self, session: StoreSession, block_hash: BlockHash, destination: Any
    ) -> tuple[LoadStop, SlotRef | None]:
        """Copies one block; returns what was copied, or why nothing was."""
        result, record = session.reader.copy(block_hash, destination)
        if record is None:
            self.counters.evicted_meanwhile += 1
            return "evicted", None
        ref = SlotRef(block_hash, record.slot, record.generation)
        if result is CopyResult.COPIED and (self._is_sound is None or self._is_sound(destination)):
            self.counters.loaded_blocks += 1
            return "end", ref
        if result is CopyResult.COPIED:
            zero_block(destination)
        self.counters.corrupt_blocks += 1
        session.send(ReportCorrupt(block=ref))
        logger.error("store_block_corrupt hash=%s slot=%d", block_hash.hex(), record.slot)
        return "corrupt", None

    async def load_leased(self, prefix: LeasedPrefix, into: Callable[[int], Any], *, deadline_s: float) -> LoadResult:
        """See ``StoreClient.load_leased``."""
        end_ns = self._clock_ns() + int(deadline_s * 1e9)
        for index in range(len(prefix)):
            if index and self._clock_ns() >= end_ns:
                self.counters.load_deadlines += 1
                return LoadResult(index, len(prefix), "deadline")
            stopped_by = self._load_one(prefix, index, into(index))
            if stopped_by is not None:
                return LoadResult(index, len(prefix), stopped_by)
            self.counters.loaded_blocks += 1
            await self.let_others_run(index)
        return LoadResult(len(prefix), len(prefix), "end")

    def _load_one(self, prefix: LeasedPrefix, index: int, destination: Any) -> LoadStop | None:
        copy_block(destination, prefix.view(index))
        # The copy is what will be used, so the copy is what is verified; and the lease is looked at afterwards,
        # because a slot that was reused during the copy proves nothing about the block in it.
        is_right = prefix.verify(index, destination)
        if not prefix.stands():
            self.counters.lease_over += 1
            zero_block(destination)
            return "lease_over"
        if not is_right or (self._is_sound is not None and not self._is_sound(destination)):
            self.counters.corrupt_blocks += 1
            # Damaged bytes can be a NaN, which no later mask would hide.
            zero_block(destination)
            prefix.report_corrupt(index)
            logger.error("store_block_corrupt index=%d", index)
            return "corrupt"
        return None


def _goes_on(result: LoadResult, hashes: Sequence[BlockHash]) -> bool:
    """Returns True when another tier may have what follows."""
    return result.stopped_by in ("end", "evicted") and result.num_loaded < len(hashes)


def _forget(ask: asyncio.Task[_Brought]) -> None:
    """Nobody waits for this ask any more: what it was given goes back, now or when the answer comes."""
    if not ask.cancel() and not ask.cancelled() and ask.exception() is None:
        prefix, _ = ask.result()
        if prefix is not None:
            prefix.release()
