"""The prefill side of a worker: look up, load, compute the rest, push, hand over, store.

Owns the prefill jobs of this worker and the blocks they hold. Each job is one task on the link loop; the engine
thread computes and pushes finished blocks while the next chunk runs. Blocks are freed only when decode has
acknowledged them (or nobody can read them any more) and the store has its copy.

A prefill never publishes to a client. It holds a lease like any attempt, so that it stops when its ingress is gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from kvstore.core.block_pool import BlockPool, NoCapacityResult, Reservation
from kvstore.core.ids import AttemptId, Incarnation
from kvstore.core.messages import (
    AttemptFault,
    BlocksLanded,
    BlocksPosted,
    Cancel,
    CancelAck,
    FaultReason,
    HandOff,
    HandOffDone,
    PostedBlock,
    Prefill,
    PrefillAbandoned,
    PrefillDone,
    PrefillStarted,
    RefusalCode,
    Refused,
    TokenLogprobs,
)
from kvstore.core.quota import tenant_of
from kvstore.digest import block_digest
from kvstore.errors import FingerprintMismatch, KopirError
from kvstore.store.client import PutBlock, StoreClient
from kvstore.transport.base import SETTLED, BlockSend, TransferResult, Transport
from workers.core.waiting_line import WaitingLine
from workers.decode import DecodeSide
from workers.device_cache import DeviceCache
from workers.engine_loop import AttemptKey, EngineLoop, PrefillJob
from workers.ingress_link import IngressLink
from workers.kv_link import KvDialer, KvPeer
from workers.kv_pool import KvPool
from workers.prefill_job import ComputeFailed, Job, LinkFailed, PrefillFailed
from workers.settlements import Settlements
from workers.spec import DecodeAddress, WorkerSpec

logger = logging.getLogger(__name__)

SEEN_ATTEMPTS_MAX = 4096
HAND_OFF_DEADLINE_S = 10.0
LOOKUP_DEADLINE_S = 10.0
"""Whatever it is worth, a look-up that takes longer is stuck."""
BLOCKS_DEADLINE_S = 30.0


class PrefillSide:
    """All prefill jobs of one worker."""

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        pool: BlockPool,
        memory: KvPool,
        device: DeviceCache,
        transport: Transport,
        engine: EngineLoop,
        dialer: KvDialer,
        store: StoreClient | None,
        clock_ns: Callable[[], int],
        post: Callable[..., None],
        local_decode: DecodeSide | None = None,
    ) -> None:
        self._spec = spec
        self._pool = pool
        self._memory = memory
        self._device = device
        self._transport = transport
        self._engine = engine
        self._dialer = dialer
        self._store = store
        self._clock_ns = clock_ns
        self._post = post
        self._local_decode = local_decode
        self._jobs: dict[AttemptKey, Job] = {}
        self._line: WaitingLine[tuple[Job, asyncio.Future[None]]] = WaitingLine(spec.max_waiting)
        self._storing: set[asyncio.Task[None]] = set()
        self._settlements = Settlements(transport)
        self._closing = False
        self._seen: OrderedDict[AttemptKey, None] = OrderedDict()
        self.counters = dict.fromkeys(
            (
                "prompt_tokens",
                "cached_tokens",
                "cached_device_tokens",
                "computed_tokens",
                "pushed_blocks",
                "pushed_bytes",
                "held_by_decode_blocks",
                "stored_blocks",
                "abandoned",
            ),
            0,
        )

    def fenced(self) -> dict[str, int]:
        """Returns the counts of source blocks whose push did not come to its end in time."""
        settlements = self._settlements
        return {
            "source_blocks_fenced": settlements.num_open,
            "source_blocks_given_up": settlements.num_given_up,
            "source_blocks_settled": settlements.num_settled,
        }

    def on_tick(self) -> None:
        """Looks after blocks that a slow decode worker may still read."""
        self._settlements.look()

    def load(self) -> tuple[int, int]:
        """Returns (jobs that hold anything, those that only copy to the store included; jobs waiting for blocks)."""
        return len(self._jobs) + len(self._storing) - len(self._line), len(self._line)

    # --- from the ingress ---------------------------------------------------------------------------------

    def on_prefill(self, link: IngressLink, request: Prefill) -> None:
        """Starts a job, or refuses it."""
        key = (request.attempt_id, request.epoch)
        if self._closing:
            return self._refuse(link, request, "draining", "the worker is stopping")
        num_blocks = -(-len(request.spec.prompt_token_ids) // self._spec.block_tokens)
        if key in self._seen:
            return self._refuse(link, request, "duplicate", "this attempt was seen before")
        if num_blocks > self._spec.pool_blocks:
            return self._refuse(
                link, request, "never_fits", f"needs {num_blocks} blocks, the pool has {self._spec.pool_blocks}"
            )
        if len(self._jobs) >= self._spec.max_waiting:
            return self._refuse(link, request, "no_capacity", f"{len(self._jobs)} jobs wait already")
        self._seen[key] = None
        if len(self._seen) > SEEN_ATTEMPTS_MAX:
            self._seen.popitem(last=False)
        job = Job(request, link, self._clock_ns())
        self._jobs[key] = job
        link.begin(key)
        job.task = asyncio.ensure_future(self._run(job))
        job.task.add_done_callback(lambda _: self._ended(job))
        return None

    def has(self, cancel: Cancel) -> bool:
        """True while this attempt is a job here."""
        return (cancel.attempt_id, cancel.epoch) in self._jobs

    def on_cancel(
        self, link: IngressLink, cancel: Cancel, then: Callable[[IngressLink, Cancel], None] | None = None
    ) -> None:
        """Stops a job and acknowledges. An unknown one is acknowledged.

        With ``then``, that is called instead, once nothing of the job runs: it computes in blocks of the decode side.
        """

        def acknowledge() -> None:
            if then is not None:
                then(link, cancel)
            else:
                link.send(CancelAck(attempt_id=cancel.attempt_id, epoch=cancel.epoch, num_generated=0))

        job = self._jobs.get((cancel.attempt_id, cancel.epoch))
        if job is None or job.task is None:
            acknowledge()
            return
        self._cancel(job)
        if then is None:
            # It hands over nothing from here on. The step under way only holds its blocks, and may take long.
            acknowledge()
        else:
            job.task.add_done_callback(lambda _: acknowledge())

    def on_lease_expired(self, keys: Sequence[AttemptKey]) -> None:
        """The ingress did not renew: these jobs stop."""
        for key in keys:
            self._cancel(self._jobs.get(key))

    def link_removed(self, link: IngressLink) -> None:
        """An ingress is proved gone."""
        for job in [job for job in self._jobs.values() if job.link is link]:
            self._cancel(job)

    # --- from decode --------------------------------------------------------------------------------------

    def on_blocks_landed(self, message: BlocksLanded) -> None:
        """Counts only: a failed block ends the hand-off by ``HandOffDone``."""
        self.counters["pushed_blocks"] += sum(1 for _, result in message.results if result == "OK")

    def on_hand_off_done(self, message: HandOffDone) -> None:
        """Decode took the attempt over, or refused it."""
        job = self._jobs.get((message.attempt_id, message.epoch))
        if job is not None and job.handed_off is not None and not job.handed_off.done():
            job.handed_off.set_result(message)

    def on_peer_lost(self, peer: KvPeer) -> None:
        """The KV link of these jobs is down; nobody will acknowledge their hand-off."""
        for job in [job for job in self._jobs.values() if job.peer is peer]:
            if job.handed_off is not None and not job.handed_off.done():
                job.handed_off.set_exception(PrefillFailed("the link to the decode worker ended"))
                # Nobody may be waiting yet, or any more; that is no error of its own.
                job.handed_off.exception()

    def peer_gone(self, incarnation: str) -> None:
        """A decode worker is proved dead: it reads no more from the blocks that were pushed to it."""
        self._dialer.forget(incarnation)
        self._pool.peer_dead(Incarnation(incarnation))
        self._settlements.look()
        self._admit_waiting()

    async def close(self) -> None:
        """Ends every job, then the copies to the store that their ends have begun."""
        self._closing = True
        jobs = tuple(self._jobs.values())
        for job in jobs:
            self._cancel(job)
        await asyncio.gather(*(job.task for job in jobs if job.task is not None), return_exceptions=True)
        storing = tuple(self._storing)
        for task in storing:
            task.cancel()
        await asyncio.gather(*storing, return_exceptions=True)

    # --- one job ------------------------------------------------------------------------------------------

    async def _run(self, job: Job) -> None:
        try:
            await self._prepare(job)
            await self._load_prefix(job)
            token_id, logprobs = await self._compute(job)
            await self._hand_over(job, token_id, logprobs)
        except Exception as error:
            self._fail(job, error)
        except asyncio.CancelledError:
            self._abandon(job, "stopped" if self._closing else "cancelled")
        finally:
            await self._leave_engine(job)
            self._finish(job)

    async def _prepare(self, job: Job) -> None:
        """Finds the decode peer and the blocks to compute in."""
        ticket = job.request.ticket
        loop = asyncio.get_running_loop()
        job.hashes = self._device.hashes(job.request.spec)
        self._check_held(job)
        job.computed = loop.create_future()
        job.handed_off = loop.create_future()
        if ticket.incarnation == self._spec.incarnation:
            assert self._local_decode is not None, "a ticket of ours without a decode side"
            table = self._local_decode.lend_blocks(job.key)
            if table is None:
                raise PrefillFailed("the reservation is gone")
            job.is_borrowing = True
            job.block_table = table
            job.shared = self._local_decode.held(job.key)
            return
        address = DecodeAddress(
            worker_id=ticket.worker_id, incarnation=ticket.incarnation, kv_host=ticket.kv_host, kv_port=ticket.kv_port
        )
        try:
            job.peer = await self._dialer.link(address)
        except FingerprintMismatch as error:
            raise LinkFailed(f"decode refused the link: {error}") from error
        except (KopirError, TimeoutError) as error:
            raise LinkFailed(f"no link to {ticket.worker_id}: {error or type(error).__name__}") from error
        await self._wait_for_blocks(job)

    def _check_held(self, job: Job) -> None:
        """What decode says it has must be the beginning of this very prompt."""
        num_held, ticket = job.num_held_blocks, job.request.ticket
        if num_held * self._spec.block_tokens >= job.num_prompt_tokens or (
            num_held and job.hashes[num_held - 1] != ticket.held_hash
        ):
            raise PrefillFailed(f"the {num_held} blocks that {ticket.worker_id} holds are not of this prompt")

    async def _wait_for_blocks(self, job: Job) -> None:
        if len(self._line) == 0 and self._try_reserve(job):
            return
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        deadline_ns = self._clock_ns() + int(BLOCKS_DEADLINE_S * 1e9)
        if not self._line.join(job.key, (job, ready), deadline_ns=deadline_ns):
            raise PrefillFailed(f"{len(self._line)} prompts wait for blocks already")
        self._admit_waiting()
        try:
            async with asyncio.timeout(BLOCKS_DEADLINE_S):
                await ready
        finally:
            self._line.leave(job.key)

    def _try_reserve(self, job: Job) -> bool:
        assert job.peer is not None
        num_blocks = -(-job.num_prompt_tokens // self._spec.block_tokens)
        # The last token is computed, and its block with it: that one is never shared, because it is written.
        hashes = job.hashes[: (job.num_prompt_tokens - 1) // self._spec.block_tokens]
        if self._pool.counts().available < self._pool.num_taken(num_blocks, hashes):
            return False
        job.shared = self._device.match(hashes)
        allocated = self._pool.allocate(
            AttemptId(job.key[0]),
            job.key[1],
            num_blocks=num_blocks,
            reader=Incarnation(job.peer.incarnation),
            cached=[block.block_hash for block in job.shared],
        )
        if isinstance(allocated, NoCapacityResult):
            job.shared = ()
            return False
        assert isinstance(allocated, Reservation), allocated
        job.block_table = allocated.slots
        if job.num_prompt_tokens % self._spec.block_tokens:
            # The unwritten tail travels too: it must not carry another request's tokens.
            self._memory.zero_block(job.block_table[-1])
        job.holds_blocks = True
        return True

    def _admit_waiting(self) -> None:
        def admit(entry: tuple[Job, asyncio.Future[None]]) -> bool:
            job, ready = entry
            if ready.done():
                return True
            if not self._try_reserve(job):
                return False
            ready.set_result(None)
            return True

        self._line.admit(admit)

    async def _load_prefix(self, job: Job) -> None:
        """Loads what the store has beyond the blocks of the pool, tells the ingress, and pushes all that at once."""
        started_ns = self._clock_ns()
        num_device = len(job.shared) + self._copy_last_block(job)
        job.num_cached_blocks, num_disk = num_device, 0
        if self._store is not None and num_device < len(job.hashes):
            loaded = await self._store.load_blocks(
                job.hashes[num_device:],
                lambda index: self._memory.block_bytes_view(job.block_table[num_device + index]),
                deadline_s=LOOKUP_DEADLINE_S,
                tenant=tenant_of(job.request.spec.tenant_salt),
                block_tokens=self._spec.block_tokens,
            )
            job.num_cached_blocks += loaded.num_loaded
            num_disk = loaded.num_from_disk
        # One token is always computed, because its logits are needed.
        job.cached_tokens = min(job.num_cached_blocks * self._spec.block_tokens, job.num_prompt_tokens - 1)
        block_tokens = self._spec.block_tokens
        by_tier = _by_tier(job.cached_tokens, num_device * block_tokens, num_disk * block_tokens)
        job.started_ns = self._clock_ns()
        job.link.send(
            PrefillStarted(
                attempt_id=job.key[0],
                epoch=job.key[1],
                queued_ns=started_ns - job.accepted_ns,
                cached_tokens=job.cached_tokens,
                cached_by_tier=by_tier,
            )
        )
        self.counters["cached_device_tokens"] += by_tier.get("device", 0)
        self.counters["prompt_tokens"] += job.num_prompt_tokens
        self.counters["cached_tokens"] += job.cached_tokens
        self.counters["computed_tokens"] += job.num_prompt_tokens - job.cached_tokens
        # The last cached block of a fully cached prompt is computed in again: it is pushed when it is final.
        self._push(job, job.cached_tokens // self._spec.block_tokens)

    def _copy_last_block(self, job: Job) -> int:
        """Copies the block of a fully cached prompt's last token, which is computed in again. Returns 0 or 1."""
        is_full = len(job.hashes) * self._spec.block_tokens == job.num_prompt_tokens
        if not is_full or len(job.shared) + 1 != len(job.hashes):
            return 0
        last = self._device.find(job.hashes[-1])
        if last is None:
            return 0
        self._memory.block_bytes_view(job.block_table[len(job.shared)])[:] = self._memory.block_bytes_view(last.slot)
        return 1

    async def _compute(self, job: Job) -> tuple[int, TokenLogprobs | None]:
        assert job.computed is not None
        job.in_engine = True
        self._engine.submit_prefill(
            PrefillJob(
                key=job.key,
                spec=job.request.spec,
                block_table=job.block_table,
                num_computed_tokens=job.cached_tokens,
                on_chunk=lambda done: self._on_chunk(job, done),
                on_done=lambda _, token_id, logprobs: self._post(self._on_computed, job, token_id, logprobs),
                on_fault=lambda _, error: self._post(self._on_compute_fault, job, error),
            )
        )
        result = await job.computed
        job.in_engine = False
        if self._store is not None:
            self._store.cost.computed(job.num_prompt_tokens - job.cached_tokens, job.done_ns - job.engine_started_ns)
        return result

    def _on_chunk(self, job: Job, computed: PrefillJob) -> None:
        """Engine thread: digests and pushes the blocks that this chunk completed."""
        block_tokens = self._spec.block_tokens
        is_last = computed.num_computed_tokens == job.num_prompt_tokens
        stop = (
            -(-computed.num_computed_tokens // block_tokens)
            if is_last
            else (computed.num_computed_tokens // block_tokens)
        )
        job.engine_started_ns = computed.started_ns or 0
        if is_last:
            job.done_ns = self._clock_ns()
        self._push(job, stop)

    def _push(self, job: Job, stop: int) -> None:
        """Makes blocks up to ``stop`` final: digests, and sends them with the digests beside. One thread at a time."""
        blocks = range(job.num_final, stop)
        job.num_final = max(job.num_final, stop)
        if not blocks:
            return
        job.digests += [
            job.shared[index].digest
            if index < len(job.shared)
            else block_digest(self._memory.block_bytes_view(job.block_table[index]))
            for index in blocks
        ]
        missing = range(max(blocks.start, job.num_held_blocks), blocks.stop)
        if job.peer is not None and missing:
            self._send_blocks(job, job.peer, missing)

    def _send_blocks(self, job: Job, peer: KvPeer, blocks: range) -> None:
        posted, sends = [], []
        for index in blocks:
            destination = job.request.ticket.blocks[index - job.num_held_blocks]
            num_tokens = min(self._spec.block_tokens, job.num_prompt_tokens - index * self._spec.block_tokens)
            posted.append(PostedBlock(index, destination.tag, job.digests[index], num_tokens))
            sends.append(BlockSend(destination.tag, self._memory.block_bytes_view(job.block_table[index])))
        future = self._transport.push(peer.incarnation, sends, deadline_s=self._spec.transfer_deadline_ms / 1000)
        job.pushes.append((future, blocks))
        message = BlocksPosted(attempt_id=job.key[0], epoch=job.key[1], blocks=tuple(posted))
        self._post(peer.send, message)

    def _on_computed(self, job: Job, token_id: int, logprobs: TokenLogprobs | None) -> None:
        if job.computed is not None and not job.computed.done():
            job.computed.set_result((token_id, logprobs))

    def _on_compute_fault(self, job: Job, error: Exception) -> None:
        if job.computed is not None and not job.computed.done():
            job.computed.set_exception(ComputeFailed(f"{type(error).__name__}: {error}"[:500]))

    async def _hand_over(self, job: Job, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Gives the attempt to decode and waits until it has every block."""
        message = HandOff(
            attempt_id=job.key[0],
            epoch=job.key[1],
            first_token_id=token_id,
            logprobs=logprobs,
            cached_tokens=job.cached_tokens,
        )
        if job.peer is None:
            assert self._local_decode is not None
            if not self._local_decode.local_hand_off(message, job.digests):
                raise PrefillFailed("the reservation is gone")
        else:
            assert job.handed_off is not None
            if not job.peer.send(message):
                raise PrefillFailed("the link to the decode worker is down")
            async with asyncio.timeout(HAND_OFF_DEADLINE_S):
                done = await job.handed_off
            if not done.accepted:
                raise PrefillFailed(f"decode refused the hand-off: {done.message}")
        pushed_bytes = sum(len(blocks) for _, blocks in job.pushes) * self._memory.layout.block_bytes
        self.counters["pushed_bytes"] += pushed_bytes
        self.counters["held_by_decode_blocks"] += job.num_held_blocks
        job.link.send(
            PrefillDone(
                attempt_id=job.key[0],
                epoch=job.key[1],
                cached_tokens=job.cached_tokens,
                lookup_ns=job.started_ns - job.accepted_ns,
                engine_queue_ns=job.engine_started_ns - job.started_ns,
                compute_ns=job.done_ns - job.engine_started_ns,
                hand_off_ns=self._clock_ns() - job.done_ns,
                pushed_bytes=pushed_bytes,
                held_blocks=job.num_held_blocks,
            )
        )

    # --- the end of a job ---------------------------------------------------------------------------------

    def _fail(self, job: Job, error: Exception) -> None:
        is_known = isinstance(error, KopirError | TimeoutError)
        message = (str(error) if is_known else f"{type(error).__name__}: {error}") or type(error).__name__
        logger.warning("prefill_fault attempt_id=%s epoch=%d %s", *job.key, message, exc_info=not is_known)
        has_peer = job.peer is not None or isinstance(error, LinkFailed)
        is_transfer = has_peer and is_known and not isinstance(error, ComputeFailed)
        reason: FaultReason = "transfer_failed" if is_transfer else "engine_fault"
        job.link.send(AttemptFault(attempt_id=job.key[0], epoch=job.key[1], reason=reason, message=message[:500]))
        self._abandon(job, message)

    def _abandon(self, job: Job, reason: str) -> None:
        self.counters["abandoned"] += 1
        if job.peer is not None and not (job.handed_off is not None and job.handed_off.done()):
            job.peer.send(PrefillAbandoned(attempt_id=job.key[0], epoch=job.key[1], reason=reason[:500]))

    async def _leave_engine(self, job: Job) -> None:
        """Waits until the engine has dropped the job: only then may its blocks be anybody else's."""
        if not job.in_engine:
            return
        left: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def resolve() -> None:
            if not left.done():
                left.set_result(None)

        self._engine.remove(job.key, lambda _: self._post(resolve))
        await asyncio.shield(left)

    def _ended(self, job: Job) -> None:
        """Cleans up behind a task that was cancelled before its first step: none of its code has run."""
        if self._jobs.get(job.key) is job:
            self._finish(job)

    def _finish(self, job: Job) -> None:
        """Hands what was computed to the store, then frees the blocks."""
        job.link.end(job.key)
        self._jobs.pop(job.key, None)
        if job.holds_blocks:
            for index in range(job.num_full):
                self._device.share(job.key, index, job.hashes[index], job.digests[index])
        elif job.is_borrowing and self._local_decode is not None:
            self._local_decode.take_back_blocks(job.key, job.digests)
        task = asyncio.ensure_future(self._store_and_release(job))
        self._storing.add(task)
        task.add_done_callback(self._storing.discard)

    async def _store_and_release(self, job: Job) -> None:
        try:
            await self._store_blocks(job)
            if job.pushes:
                await asyncio.wait([asyncio.wrap_future(push) for push, _ in job.pushes])
        except Exception:
            # The request is answered; what is lost is a copy for later ones.
            logger.exception("store_failed attempt_id=%s epoch=%d", *job.key)
        finally:
            self._release(job)

    async def _store_blocks(self, job: Job) -> None:
        """Stores full blocks whose digest is known; they are held until that is done."""
        if self._store is None:
            return
        slots = dict(zip(job.hashes, job.block_table, strict=False))
        if job.is_borrowing and self._local_decode is not None:
            slots = {block.block_hash: block.slot for block in self._local_decode.kept_blocks(job.key)}
        fresh = range(job.num_cached_blocks, job.num_full)
        blocks = [
            PutBlock(job.hashes[index], self._memory.block_bytes_view(slots[job.hashes[index]]), job.digests[index])
            for index in fresh
            if job.hashes[index] in slots
        ]
        if blocks:
            tenant = tenant_of(job.request.spec.tenant_salt)
            parent = job.hashes[fresh.start - 1] if fresh.start else None
            stored = await self._store.put_blocks(blocks, tenant=tenant, parent=parent)
            self.counters["stored_blocks"] += stored.stored

    def _release(self, job: Job) -> None:
        """Frees the blocks; while a push has not come to its end, they are fenced, unless its reader is dead."""
        if job.is_borrowing and self._local_decode is not None:
            self._local_decode.blocks_copied(job.key)
        if not job.holds_blocks:
            return
        job.holds_blocks = False
        given_up = [
            job.request.ticket.blocks[index - job.num_held_blocks].tag
            for push, blocks in job.pushes
            for index, result in zip(blocks, _results(push, len(blocks)), strict=True)
            if result not in SETTLED
        ]
        self._pool.release(
            AttemptId(job.key[0]), job.key[1], now_ns=self._clock_ns(), reader_may_still_read=bool(given_up)
        )
        if given_up and job.peer is not None:
            self._settlements.watch(job.peer.incarnation, given_up, lambda _: self._settled(job.key))
        self._admit_waiting()

    def _settled(self, key: AttemptKey) -> None:
        """The transport is through with an ended job's blocks: nobody reads them any more."""
        self._pool.writer_done(AttemptId(key[0]), key[1])
        self._admit_waiting()

    def _cancel(self, job: Job | None) -> None:
        # Once only: a second cancel (a revoked lease follows the cancel that revoked it) would break off the wait for
        # the engine, and the blocks would never come back.
        if job is not None and job.task is not None and not job.cancelled:
            job.cancelled = True
            job.task.cancel()

    def _refuse(self, link: IngressLink, request: Prefill, code: RefusalCode, message: str) -> None:
        link.send(Refused(attempt_id=request.attempt_id, epoch=request.epoch, code=code, message=message))


def _results(push: Future[list[TransferResult]], num_blocks: int) -> list[TransferResult]:
    """Returns the results of a push; one without results, or not waited for because the worker stops, is open."""
    if not push.done() or push.cancelled() or push.exception() is not None:
        return [TransferResult.TIMEOUT] * num_blocks
    return push.result()


def _by_tier(cached_tokens: int, device_tokens: int, disk_tokens: int) -> dict[str, int]:
    """Returns tier -> cached tokens; the token that is computed again counts as one of the last tier's."""
    device_tokens = min(device_tokens, cached_tokens)
    disk_tokens = min(disk_tokens, cached_tokens - device_tokens)
    tiers = {"device": device_tokens, "host": cached_tokens - device_tokens - disk_tokens, "disk": disk_tokens}
    return {tier: num_tokens for tier, num_tokens in tiers.items() if num_tokens}
