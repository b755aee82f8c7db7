"""The decode side of a worker: reserve blocks, receive them, decode, publish.

Owns the decode attempts of this worker and everything they hold: blocks, lease, place in the engine. Runs on the
link loop only; engine and transport report back by calls posted to that loop.

Life of an attempt: waiting -> reserved -> receiving -> decoding -> gone. It leaves by its last token, a cancel, the
end of its reservation or lease, a fault, or the end of the worker; each way frees its blocks exactly once, and blocks
that a transfer may still write go to quarantine instead.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from kvstore.core.block_pool import BlockPool, CachedBlock, Reservation
from kvstore.core.ids import AttemptId, BlockDigest, Incarnation
from kvstore.core.messages import (
    AttemptFault,
    BlocksLanded,
    BlocksPosted,
    Cancel,
    CancelAck,
    Credit,
    FaultReason,
    HandOff,
    HandOffDone,
    LandedResult,
    PostedBlock,
    PrefillAbandoned,
    RefusalCode,
    Refused,
    Resend,
    Reserve,
    Reserved,
    StreamDelta,
    Ticket,
)
from kvstore.store.client import StoreClient
from kvstore.transport.base import SETTLED, BlockReceive, TransferResult, Transport
from workers.answer_blocks import AnswerBlocks
from workers.core.hand_off import HandOffState, HandOffTracker, Refusal
from workers.core.waiting_line import WaitingLine
from workers.decode_attempt import DecodeAttempt
from workers.device_cache import DeviceCache
from workers.engine_loop import AttemptKey, EngineLoop, NewToken, end_reason
from workers.growth import Growth
from workers.ingress_link import IngressLink
from workers.kv_link import KvPeer
from workers.kv_pool import KvPool
from workers.layout_proof import LayoutProof, describe
from workers.loans import Loans
from workers.settlements import Settlements
from workers.spec import WorkerSpec

logger = logging.getLogger(__name__)

SEEN_ATTEMPTS_MAX = 4096
_WIRE: dict[TransferResult, LandedResult] = {
    TransferResult.OK: "OK",
    TransferResult.CORRUPT: "CORRUPT",
    TransferResult.EXPIRED: "EXPIRED",
    TransferResult.TIMEOUT: "TIMEOUT",
    TransferResult.PEER_LOST: "PEER_LOST",
}


class DecodeSide:
    """All decode attempts of one worker."""

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        pool: BlockPool,
        memory: KvPool,
        device: DeviceCache,
        transport: Transport,
        engine: EngineLoop,
        clock_ns: Callable[[], int],
        post: Callable[..., None],
        store: StoreClient | None = None,
        proof: LayoutProof | None = None,
    ) -> None:
        self._spec = spec
        self._proof = proof
        self._pool = pool
        self._memory = memory
        self._device = device
        self._transport = transport
        self._engine = engine
        self._clock_ns = clock_ns
        self._post = post
        self._attempts: dict[AttemptKey, DecodeAttempt] = {}
        self._waiting: WaitingLine[tuple[IngressLink, Reserve]] = WaitingLine(spec.max_waiting)
        self._seen: OrderedDict[AttemptKey, None] = OrderedDict()
        self._receiving: dict[AttemptKey, int] = {}
        """Blocks per attempt whose transfer has not come to its end; their slots are fenced until it has."""
        self._settlements = Settlements(transport)
        self._loans = Loans(pool=pool, device=device)
        self._scratch = bytearray(memory.layout.block_bytes)
        self.kv_address: tuple[str, int] = ("", 0)
        self.counters = dict.fromkeys(
            (
                "tokens_published",
                "tokens_discarded",
                "tokens_resent",
                "blocks_landed",
                "blocks_corrupt",
                "blocks_failed",
                "reservations_expired",
                "leases_expired",
                "stale_messages",
                "preemptions",
                "resumed_device_tokens",
                "resumed_loaded_tokens",
                "resumed_computed_tokens",
                "held_blocks",
                "held_blocks_lost",
                "answer_blocks_stored",
            ),
            0,
        )
        self._num_arrived = 0
        self._growth = Growth(
            self._attempts,
            pool=pool,
            memory=memory,
            device=device,
            engine=engine,
            post=post,
            on_freed=self._admit_waiting,
            on_fault=self.on_engine_fault,
            counters=self.counters,
            store=store,
        )
        self._answers = AnswerBlocks(
            pool=pool,
            memory=memory,
            device=device,
            store=store,
            counters=self.counters,
            on_freed=self._admit_waiting,
        )

    # --- what the worker may ask --------------------------------------------------------------------------

    def load(self) -> tuple[int, int]:
        """Returns (attempts that hold blocks, attempts that wait for blocks, preempted ones included)."""
        num_away = self._growth.num_away
        return len(self._attempts) - num_away, len(self._waiting) + num_away

    def fenced(self) -> dict[str, int]:
        """Returns the counts of destination blocks whose transfer did not come to its end in time."""
        settlements = self._settlements
        return {
            "destination_blocks_fenced": settlements.num_open,
            "destination_blocks_given_up": settlements.num_given_up,
            "destination_blocks_settled": settlements.num_settled,
        }

    def lend_blocks(self, key: AttemptKey) -> tuple[int, ...] | None:
        """Returns the slots of an attempt that holds blocks here, or None, to a prefill of this worker.

        However the attempt ends, they are nobody else's until ``take_back_blocks``.
        """
        attempt = self._attempts.get(key)
        return None if attempt is None else self._loans.lend(attempt)

    def take_back_blocks(self, key: AttemptKey, digests: Sequence[BlockDigest]) -> None:
        """The engine has left them. An attempt that was not handed over by then never will be: it ends.

        ``digests``: of the first blocks, which are final; they are kept for others.
        """
        lent = self._loans.take_back(key)
        if lent is None:
            return
        attempt, then = lent
        if not attempt.decoding:
            self._loans.keep(attempt, digests)
        if then is not None:
            then()
        elif not attempt.decoding:
            self._stop(attempt)

    def kept_blocks(self, key: AttemptKey) -> tuple[CachedBlock, ...]:
        """Returns the full blocks that a prefill of this worker computed; they stay until ``blocks_copied``."""
        return self._loans.kept(key)

    def blocks_copied(self, key: AttemptKey) -> None:
        """The store has its copy of them, or will have none."""
        self._loans.copied(key)
        self._admit_waiting()

    def held(self, key: AttemptKey) -> tuple[CachedBlock, ...]:
        """Returns the blocks of an attempt's prompt that were here before it."""
        attempt = self._attempts.get(key)
        return attempt.held if attempt is not None else ()

    # --- from the ingress ---------------------------------------------------------------------------------

    def on_reserve(self, link: IngressLink, request: Reserve) -> None:
        """Reserves now, lets the attempt wait for blocks, or refuses it."""
        key = (request.attempt_id, request.epoch)
        if key in self._seen:
            self._refuse(link, request, "duplicate", "this attempt was seen before")
            return
        self._remember(key)
        num_blocks = self._growth.blocks_in_all(_num_tokens(request))
        if num_blocks > self._spec.pool_blocks:
            self._refuse(
                link, request, "never_fits", f"needs {num_blocks} blocks, the pool has {self._spec.pool_blocks}"
            )
            return
        link.begin(key)
        if len(self._waiting) == 0 and self._try_reserve((link, request)):
            return
        deadline_ns = self._clock_ns() + request.reservation_ms * 1_000_000
        if not self._waiting.join(key, (link, request), deadline_ns=deadline_ns):
            link.end(key)
            self._refuse(link, request, "no_capacity", f"{len(self._waiting)} attempts wait already")
            return
        self._admit_waiting()

    def on_cancel(self, link: IngressLink, cancel: Cancel) -> None:
        """Stops an attempt wherever it is; answers once the engine has dropped it. An unknown one is acknowledged."""
        key = (cancel.attempt_id, cancel.epoch)
        if self._waiting.leave(key) is not None:
            link.end(key)
        attempt = self._attempts.get(key)
        if attempt is None:
            link.send(CancelAck(attempt_id=key[0], epoch=key[1], num_generated=0))
            return
        self._stop(attempt, then=lambda num: link.send(CancelAck(attempt_id=key[0], epoch=key[1], num_generated=num)))

    def on_credit(self, credit: Credit) -> None:
        """The ingress takes more tokens of a stream."""
        attempt = self._attempts.get((credit.attempt_id, credit.epoch))
        if attempt is not None:
            attempt.max_index = max(attempt.max_index, credit.max_index)
            self._growth.on_credit()
        self._engine.set_credit((credit.attempt_id, credit.epoch), credit.max_index)

    def on_reconnected(self, link: IngressLink) -> None:
        """A connection took the place of a lost one: what was lost with it comes before anything new."""
        for attempt in self._attempts.values():
            if attempt.link is link and attempt.decoding:
                attempt.awaits_resend = True

    def on_resend(self, link: IngressLink, ask: Resend) -> None:
        """The link is back: sends again what its old connection may have swallowed."""
        key = (ask.attempt_id, ask.epoch)
        attempt = self._attempts.get(key)
        if attempt is None:
            if key not in self._waiting:
                # Its last tokens, or the order that would have begun it, are gone: better said than waited for.
                self._remember(key)
                message = "the attempt is not held here any more"
                link.send(AttemptFault(attempt_id=key[0], epoch=key[1], reason="network_cut", message=message))
        elif not attempt.decoding:
            link.send(self._reserved(attempt))
        else:
            again = [delta for delta in attempt.sent if delta.first_index >= ask.next_index]
            if again and again[0].first_index > ask.next_index:
                self._fault(attempt, "network_cut", f"tokens from {ask.next_index} on are not kept any more")
                return
            attempt.awaits_resend = False
            for _ in again:
                attempt.sent.pop()
            self.counters["tokens_resent"] += len(again)
            if again:
                self._publish(link, again)
            self._release_if_done(attempt)

    def on_lease_expired(self, keys: Sequence[AttemptKey]) -> None:
        """The ingress did not renew: these attempts stop and publish nothing more."""
        for key in keys:
            waiting = self._waiting.leave(key)
            if waiting is not None:
                waiting[0].end(key)
            attempt = self._attempts.get(key)
            self.counters["leases_expired"] += waiting is not None or attempt is not None
            if attempt is not None:
                logger.warning("lease_expired attempt_id=%s epoch=%d", *key)
                self._fault(attempt, "lease_expired", "the ingress did not renew the lease")

    # --- from prefill -------------------------------------------------------------------------------------

    def on_blocks_posted(self, peer: KvPeer, message: BlocksPosted) -> None:
        """Receives the posted blocks; results come back per block."""
        attempt = self._current(peer, message.attempt_id, message.epoch)
        if attempt is None:
            self._drain(peer, message)
            return
        attempt.peer = peer
        posted = attempt.tracker.on_posted(message.blocks)
        if isinstance(posted, Refusal):
            self._fault(attempt, "transfer_failed", posted.why)
            return
        bound = self._pool.bind_peer(AttemptId(attempt.key[0]), attempt.key[1], Incarnation(peer.incarnation))
        assert bound, f"{attempt.key} belongs to another peer"
        receives = [
            BlockReceive(block.tag, self._memory.block_bytes_view(attempt.slots[block.index]), block.digest)
            for block in posted
        ]
        self._receiving[attempt.key] = self._receiving.get(attempt.key, 0) + len(posted)
        future = self._transport.receive(peer.incarnation, receives, deadline_s=self._spec.transfer_deadline_ms / 1000)
        key = attempt.key
        future.add_done_callback(lambda done: self._post(self._on_received, key, peer, posted, done))

    def _drain(self, peer: KvPeer, message: BlocksPosted) -> None:
        """Takes blocks that nobody wants any more, so that their sender's memory is free again, and drops them."""
        receives = [BlockReceive(block.tag, memoryview(self._scratch), None) for block in message.blocks]
        self._transport.receive(peer.incarnation, receives, deadline_s=self._spec.transfer_deadline_ms / 1000)
        peer.send(
            BlocksLanded(
                attempt_id=message.attempt_id,
                epoch=message.epoch,
                results=tuple((block.index, "EXPIRED") for block in message.blocks),
            )
        )

    def on_hand_off(self, peer: KvPeer, message: HandOff) -> None:
        """Prefill is done; decode starts as soon as the last block has landed."""
        attempt = self._current(peer, message.attempt_id, message.epoch)
        if attempt is None:
            peer.send(
                HandOffDone(
                    attempt_id=message.attempt_id, epoch=message.epoch, accepted=False, message="no such reservation"
                )
            )
            return
        attempt.peer = peer
        self._advance(attempt, attempt.tracker.on_hand_off(message))

    def on_prefill_abandoned(self, message: PrefillAbandoned) -> None:
        """Prefill gave up; it has told the ingress why. The blocks go back."""
        attempt = self._attempts.get((message.attempt_id, message.epoch))
        if attempt is not None and not attempt.decoding:
            self._stop(attempt)

    def local_hand_off(self, message: HandOff, digests: Sequence[BlockDigest]) -> bool:
        """A combined worker computed the prompt in this attempt's own blocks. Returns False if it is gone.

        ``digests``: of the blocks of the prompt, in order.
        """
        attempt = self._attempts.get((message.attempt_id, message.epoch))
        if attempt is None or self._lost_block(attempt) is not None:
            return False
        # Before it decodes: a short answer may end at once, and its blocks with it.
        self._loans.keep(attempt, digests)
        self._begin_decode(attempt, message)
        return True

    # --- from the engine ----------------------------------------------------------------------------------

    def on_tokens(self, tokens: list[NewToken]) -> None:
        """Publishes one decode step: one frame per ingress, each stream only under a valid lease."""
        frames: dict[IngressLink, list[StreamDelta]] = {}
        ended: list[DecodeAttempt] = []
        running: list[DecodeAttempt] = []
        for token in tokens:
            attempt = self._attempts.get(token.key)
            if attempt is None:
                self.counters["tokens_discarded"] += 1
                continue
            attempt.num_generated = token.index + 1
            attempt.generated.append(token.token_id)
            frames.setdefault(attempt.link, []).append(attempt.delta(token))
            if token.end is not None:
                attempt.ended = attempt.is_whole = True
                self._growth.left(attempt)
                ended.append(attempt)
            else:
                running.append(attempt)
        for link, deltas in frames.items():
            self._publish(link, deltas)
        for attempt in ended:
            self._release_if_done(attempt)
        for attempt in running:
            if self._attempts.get(attempt.key) is attempt:
                self._growth.on_token(attempt)

    def on_engine_fault(self, keys: list[AttemptKey], error: Exception) -> None:
        """The engine failed under these attempts."""
        for key in keys:
            attempt = self._attempts.get(key)
            if attempt is not None:
                self._fault(attempt, "engine_fault", f"{type(error).__name__}: {error}"[:500])

    # --- time and peers -----------------------------------------------------------------------------------

    def on_tick(self) -> None:
        """Renews the reservations that their ingress still wants, ends those whose time is over."""
        now_ns = self._clock_ns()
        self._settlements.look()
        for held in self._attempts.values():
            # Prefill may queue and compute for long; as long as the ingress holds on to the attempt, so do its blocks.
            if not held.decoding and held.key not in self._loans and held.link.may_publish(held.key):
                deadline_ns = now_ns + held.request.reservation_ms * 1_000_000
                self._pool.renew(AttemptId(held.key[0]), held.key[1], deadline_ns=deadline_ns)
        for link, request in self._waiting.expire(now_ns):
            self.counters["reservations_expired"] += 1
            link.end((request.attempt_id, request.epoch))
            self._refuse(link, request, "no_capacity", "no blocks became free in time")
        for key in self._pool.expire(now_ns):
            if key not in self._receiving:
                # No transfer is under way, so none will end and say that the slots are safe.
                self._pool.writer_done(*key)
            attempt = self._attempts.get(key)
            if attempt is not None and not attempt.decoding:
                self.counters["reservations_expired"] += 1
                self._fault(attempt, "transfer_failed", "the hand-off did not come within the reservation")

    def on_peer_lost(self, peer: KvPeer) -> None:
        """A KV link ended. That alone proves nothing; reservations and leases bound the wait."""
        logger.info("kv_peer_link_lost incarnation=%s", peer.incarnation)

    def peer_gone(self, incarnation: str) -> None:
        """A peer is proved dead: attempts that wait for its blocks fail now."""
        for attempt in [
            a
            for a in self._attempts.values()
            if a.peer is not None and a.peer.incarnation == incarnation and not a.decoding
        ]:
            self._fault(attempt, "transfer_failed", "the prefill worker died")
        self._pool.peer_dead(Incarnation(incarnation))
        self._settlements.look()
        self._admit_waiting()

    def link_removed(self, link: IngressLink) -> None:
        """An ingress is proved gone: nobody is left to publish to."""
        for attempt in [a for a in self._attempts.values() if a.link is link]:
            self._stop(attempt)

    def close(self) -> None:
        """Tells every ingress that its streams end here."""
        for attempt in tuple(self._attempts.values()):
            self._fault(attempt, "shutdown", "the worker is stopping")
        self._answers.close()

    # --- inside -------------------------------------------------------------------------------------------

    def _try_reserve(self, entry: tuple[IngressLink, Reserve]) -> bool:
        link, request = entry
        num_blocks = self._growth.blocks_at_first(_num_tokens(request))
        # At least one token is computed and its block travels, so that a hand-off is always waited for.
        num_held_max = (len(request.spec.prompt_token_ids) - 1) // self._spec.block_tokens
        hashes = self._device.hashes(request.spec)
        if len(self._attempts) >= self._spec.max_num_seqs or not self._growth.may_admit(
            num_blocks, hashes[:num_held_max]
        ):
            return False
        held = self._device.match(hashes[:num_held_max])
        if not self._growth.may_admit(num_blocks, [block.block_hash for block in held]):
            return False
        attempt = self._reserve(link, request, num_blocks, held)
        attempt.hashes = hashes
        self.counters["held_blocks"] += len(held)
        # Where the link is down, the ingress asks again when it is back; if it never is, the lease runs out.
        link.send(self._reserved(attempt))
        return True

    def _reserved(self, attempt: DecodeAttempt) -> Reserved:
        held = attempt.held
        ticket = Ticket(
            attempt_id=attempt.key[0],
            epoch=attempt.key[1],
            worker_id=self._spec.worker_id,
            incarnation=self._spec.incarnation,
            kv_host=self.kv_address[0],
            kv_port=self.kv_address[1],
            blocks=attempt.tracker.blocks,
            num_held_blocks=len(held),
            held_hash=held[-1].block_hash if held else b"",
        )
        return Reserved(attempt_id=attempt.key[0], epoch=attempt.key[1], ticket=ticket)

    def _reserve(
        self, link: IngressLink, request: Reserve, num_blocks: int, held: tuple[CachedBlock, ...]
    ) -> DecodeAttempt:
        """Takes the prompt's blocks, which prefill writes, and room for the next token; the stream grows from there.

        Blocks of the prompt that are here already are held, so that they stay until the attempt ends.
        """
        attempt_id, epoch = AttemptId(request.attempt_id), request.epoch
        deadline_ns = self._clock_ns() + request.reservation_ms * 1_000_000
        num_prompt_blocks = -(-len(request.spec.prompt_token_ids) // self._spec.block_tokens)
        cached = [block.block_hash for block in held]
        prompt = self._pool.reserve(
            attempt_id, epoch, num_blocks=num_prompt_blocks, deadline_ns=deadline_ns, cached=cached
        )
        rest = self._pool.extend(attempt_id, epoch, num_blocks=num_blocks - num_prompt_blocks)
        assert isinstance(prompt, Reservation) and isinstance(rest, Reservation), (prompt, rest)
        slots = (*prompt.slots, *rest.slots)
        self._num_arrived += 1
        attempt = DecodeAttempt(
            request,
            link,
            slots,
            HandOffTracker(prompt.blocks, num_held=len(held)),
            arrival=self._num_arrived,
            max_index=self._spec.max_stream_backlog_tokens,
            held=held,
        )
        self._attempts[attempt.key] = attempt
        self._growth.joined(attempt)
        return attempt

    def _admit_waiting(self) -> None:
        self._growth.serve()
        self._waiting.admit(self._try_reserve)

    def _current(self, peer: KvPeer, attempt_id: str, epoch: int) -> DecodeAttempt | None:
        attempt = self._attempts.get((attempt_id, epoch))
        if attempt is None or attempt.decoding or (attempt.peer is not None and attempt.peer is not peer):
            self.counters["stale_messages"] += 1
            return None
        return attempt

    def _on_received(
        self, key: AttemptKey, peer: KvPeer, posted: list[PostedBlock], done: Future[list[TransferResult]]
    ) -> None:
        results = [self._checked(key, block, result) for block, result in zip(posted, done.result(), strict=True)]
        peer.send(
            BlocksLanded(
                attempt_id=key[0],
                epoch=key[1],
                results=tuple((block.index, _WIRE[result]) for block, result in zip(posted, results, strict=True)),
            )
        )
        for result in results:
            self._count(result)
        given_up = [block.tag for block, result in zip(posted, results, strict=True) if result not in SETTLED]
        if given_up:
            self._settlements.watch(peer.incarnation, given_up, lambda num_settled: self._settle(key, num_settled))
        self._settle(key, len(results) - len(given_up))
        attempt = self._attempts.get(key)
        if attempt is None:
            return
        state = attempt.tracker.state
        for block, result in zip(posted, results, strict=True):
            if result is TransferResult.OK:
                destination = attempt.tracker.destination(block.index)
                landed = self._pool.landed(
                    AttemptId(key[0]), key[1], slot=destination.slot, generation=destination.generation
                )
                assert landed, f"{key} block {block.index}: its slot is not reserved any more"
                if block.index < len(attempt.hashes):
                    self._device.share(key, block.index, attempt.hashes[block.index], BlockDigest(block.digest))
                state = attempt.tracker.on_landed(block.index)
            else:
                if result is TransferResult.CORRUPT:
                    # Damaged bytes can be NaN, and a masked NaN still poisons an attention tile.
                    self._memory.zero_block(attempt.slots[block.index])
                state = attempt.tracker.on_failed(block.index, result.name)
        self._advance(attempt, state)

    def _checked(self, key: AttemptKey, block: PostedBlock, result: TransferResult) -> TransferResult:
        """In debug mode (``kv.verify: full``) a block of the right digest whose content cannot be KV is corrupt."""
        attempt = self._attempts.get(key)
        if self._proof is None or attempt is None or result is not TransferResult.OK:
            return result
        report = self._proof.check_landed(self._memory.bytes_view[attempt.slots[block.index]], block.num_tokens)
        if report.is_clean:
            return result
        logger.error("layout_violation attempt_id=%s epoch=%d index=%d %s", *key, block.index, describe(report))
        return TransferResult.CORRUPT

    def _settle(self, key: AttemptKey, num_settled: int) -> None:
        """Transfers came to their end; with the last one, nobody outside can touch the attempt's slots any more."""
        left = self._receiving.pop(key, 0) - num_settled
        if left > 0:
            self._receiving[key] = left
        elif self._pool.writer_done(AttemptId(key[0]), key[1]):
            self._admit_waiting()

    def _count(self, result: TransferResult) -> None:
        name = {TransferResult.OK: "blocks_landed", TransferResult.CORRUPT: "blocks_corrupt"}
        self.counters[name.get(result, "blocks_failed")] += 1

    def _advance(self, attempt: DecodeAttempt, state: HandOffState) -> None:
        if state is HandOffState.FAILED:
            assert attempt.tracker.failure is not None
            self._fault(attempt, "transfer_failed", attempt.tracker.failure)
        elif state is HandOffState.COMPLETE and not attempt.decoding:
            assert attempt.tracker.hand_off is not None and attempt.peer is not None
            lost = self._lost_block(attempt)
            if lost is not None:
                self._fault(attempt, "transfer_failed", f"block {lost} was held for this attempt and is gone")
                return
            self._begin_decode(attempt, attempt.tracker.hand_off)
            attempt.peer.send(HandOffDone(attempt_id=attempt.key[0], epoch=attempt.key[1], accepted=True))

    def _lost_block(self, attempt: DecodeAttempt) -> int | None:
        """Returns which of its held blocks an attempt cannot use any more: it was dropped, its bytes are wrong."""
        lost = next((i for i, block in enumerate(attempt.held) if not self._pool.is_intact(block)), None)
        self.counters["held_blocks_lost"] += lost is not None
        return lost

    def _begin_decode(self, attempt: DecodeAttempt, hand_off: HandOff) -> None:
        """Publishes the token that prefill sampled, then lets the engine go on from it."""
        attempt.decoding = True
        self._pool.renew(AttemptId(attempt.key[0]), attempt.key[1], deadline_ns=None)
        spec = attempt.request.spec
        end = end_reason(spec, hand_off.first_token_id, 1)
        if end is None:
            attempt.num_generated = 1
            self._growth.begin(attempt, [hand_off.first_token_id])
        self.on_tokens([NewToken(attempt.key, 0, hand_off.first_token_id, hand_off.logprobs, end)])

    def _publish(self, link: IngressLink, deltas: list[StreamDelta]) -> None:
        """Sends one frame with the streams whose lease is valid; the others stop."""
        valid = [delta for delta in deltas if link.may_publish((delta.attempt_id, delta.epoch))]
        if len(valid) < len(deltas):
            self._hold_or_stop(link, [delta for delta in deltas if delta not in valid])
        if not valid:
            return
        due = []
        for delta in valid:
            attempt = self._attempts[delta.attempt_id, delta.epoch]
            attempt.sent.append(delta)
            if not attempt.awaits_resend:
                due.append((attempt, delta))
        if not due:
            return
        if link.publish([delta for _, delta in due]):
            self.counters["tokens_published"] += sum(len(delta.token_ids) for _, delta in due)
        else:
            # The link may be back before the lease runs out, which ends the attempt otherwise.
            for attempt, _ in due:
                attempt.awaits_resend = True

    def _hold_or_stop(self, link: IngressLink, deltas: list[StreamDelta]) -> None:
        """A stream that was never granted waits for its first grant; one whose lease ran out stops."""
        for delta in deltas:
            key = (delta.attempt_id, delta.epoch)
            attempt = self._attempts.get(key)
            if attempt is None:
                continue
            if link.was_granted(key):
                self.on_lease_expired([key])
            else:
                attempt.pending.append(delta)

    def on_lease_granted(self, link: IngressLink) -> None:
        """Publishes what waited for a first grant."""
        for attempt in [a for a in self._attempts.values() if a.link is link and a.pending]:
            deltas, attempt.pending = attempt.pending, []
            self._publish(link, deltas)
            self._release_if_done(attempt)

    def _stop(self, attempt: DecodeAttempt, then: Callable[[int], object] | None = None) -> None:
        """Takes an attempt out of the engine, then frees its blocks. ``then`` gets the tokens computed so far."""
        del self._attempts[attempt.key]

        def stopped(num_computed: int) -> None:
            self._give_back(attempt)
            if then is not None:
                then(max(num_computed, attempt.num_generated))

        if attempt.decoding:
            attempt.is_whole = attempt.is_whole or (attempt.is_sound and self._growth.has_all_blocks(attempt))
            self._growth.stop(attempt, stopped)
        elif attempt.key in self._loans:
            self._loans.end_later(attempt.key, lambda: stopped(0))
        else:
            stopped(0)

    def _fault(self, attempt: DecodeAttempt, reason: FaultReason, message: str) -> None:
        """Ends an attempt by a fault and says so to its ingress and to prefill."""
        logger.warning("attempt_fault attempt_id=%s epoch=%d reason=%s %s", *attempt.key, reason, message)
        attempt.is_sound = reason != "engine_fault"
        attempt.link.send(
            AttemptFault(attempt_id=attempt.key[0], epoch=attempt.key[1], reason=reason, message=message[:500])
        )
        if attempt.peer is not None and not attempt.decoding:
            attempt.peer.send(
                HandOffDone(attempt_id=attempt.key[0], epoch=attempt.key[1], accepted=False, message=message[:500])
            )
        self._stop(attempt)

    def _release_if_done(self, attempt: DecodeAttempt) -> None:
        """Ends an attempt whose last token is out; the engine has dropped it by itself."""
        if (
            attempt.ended
            and not attempt.pending
            and not attempt.awaits_resend
            and self._attempts.pop(attempt.key, None) is not None
        ):
            self._give_back(attempt)

    def _give_back(self, attempt: DecodeAttempt) -> None:
        """Frees an attempt's blocks; those that a transfer may still write are quarantined."""
        attempt.link.end(attempt.key)
        self._growth.left(attempt)
        self._answers.keep(attempt)
        self._pool.release(
            AttemptId(attempt.key[0]),
            attempt.key[1],
            now_ns=self._clock_ns(),
            writer_may_still_write=attempt.key in self._receiving,
        )
        self._admit_waiting()

    def _refuse(self, link: IngressLink, request: Reserve, code: RefusalCode, message: str) -> None:
        link.send(Refused(attempt_id=request.attempt_id, epoch=request.epoch, code=code, message=message))

    def _remember(self, key: AttemptKey) -> None:
        self._seen[key] = None
        if len(self._seen) > SEEN_ATTEMPTS_MAX:
            self._seen.popitem(last=False)


def _num_tokens(request: Reserve) -> tuple[int, int]:
    """Returns (prompt tokens, most tokens to generate)."""
    return len(request.spec.prompt_token_ids), request.spec.max_tokens
