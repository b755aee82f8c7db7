"""The decode worker of a simulation: reserve, receive, decode, publish. Follows ``workers.decode``.

Real cores: block pool, lease holder, hand-off tracker, waiting line. Between the lease check and the sending of a frame
lies an event boundary, so that the process can be stopped just there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cluster.sim.kernel import Life
from cluster.sim.memory import DAMAGED, CopyEnd, answer_content
from cluster.sim.network import Link
from cluster.sim.scenario import MS
from cluster.sim.witness import Key
from cluster.sim.worker import BLOCK_TOKENS, SimWorker
from kvstore.core.block_pool import Reservation
from kvstore.core.ids import AttemptId, Incarnation
from kvstore.core.messages import (
    AttemptFault,
    BlocksPosted,
    Cancel,
    CancelAck,
    Credit,
    Frame,
    HandOff,
    HandOffDone,
    PrefillAbandoned,
    Refused,
    Resend,
    Reserve,
    Reserved,
    StreamDelta,
    Ticket,
)
from workers.core.hand_off import HandOffState, HandOffTracker, Refusal
from workers.core.waiting_line import WaitingLine

if TYPE_CHECKING:
    from cluster.sim.world import World

EMIT_NS_MAX = 3_000_000
RING_TOKENS_MAX = 64
TOKEN_EPOCH = 1_000_000
"""A token id is its epoch times this, plus its index: text of two runs cannot be mistaken for one."""


@dataclass(slots=True)
class _Attempt:
    request: Reserve
    ingress: str
    slots: tuple[int, ...]
    tracker: HandOffTracker
    max_index: int
    expected: list[bytes]
    """What each slot must hold now."""
    peer: Link | None = None
    decoding: bool = False
    num_generated: int = 0
    ended: bool = False
    pending: list[StreamDelta] = field(default_factory=list)
    sent: deque[StreamDelta] = field(default_factory=lambda: deque(maxlen=RING_TOKENS_MAX))
    """The newest tokens that were published, for an ingress that lost some with its link."""

    @property
    def key(self) -> Key:
        return self.request.attempt_id, self.request.epoch


@dataclass(slots=True)
class _Receive:
    key: Key
    sender: str
    index: int | None
    """None: thrown away."""
    slot: int | None
    digest: bytes
    given_up: bool = False


class SimDecode(SimWorker):
    """One life of a decode worker."""

    role = "decode"

    def __init__(self, world: World, life: Life) -> None:
        super().__init__(world, life)
        self._attempts: dict[Key, _Attempt] = {}
        self._waiting: WaitingLine[tuple[str, Reserve]] = WaitingLine(world.scenario.shape.max_waiting)
        self._receives: dict[int, _Receive] = {}
        """By tag: everything that may still write here."""
        self._receiving: dict[Key, int] = {}
        self._turning = False
        self._emit_ns = 0

    @property
    def num_attempts(self) -> int:
        """Attempts that hold or want blocks."""
        return len(self._attempts) + len(self._waiting)

    def could_publish(self, key: Key) -> bool:
        """Returns True if a token of this attempt would pass the lease check now."""
        attempt = self._attempts.get(key)
        return attempt is not None and self.holder(attempt.ingress).may_publish(*key, now_ns=self.now_ns)

    @property
    def is_busy(self) -> bool:
        return bool(self._attempts) or len(self._waiting) > 0

    # --- from the ingress ---------------------------------------------------------------------------------------

    def on_ingress_message(self, ingress: str, message: Any) -> None:
        match message:
            case Reserve():
                self._on_reserve(ingress, message)
            case Cancel():
                self._on_cancel(ingress, message)
            case Credit():
                attempt = self._attempts.get((message.attempt_id, message.epoch))
                if attempt is not None:
                    attempt.max_index = max(attempt.max_index, message.max_index)
                    self._turn()
            case Resend():
                attempt = self._attempts.get((message.attempt_id, message.epoch))
                if attempt is not None:
                    self._on_resend(attempt, message.next_index)

    def _on_resend(self, attempt: _Attempt, next_index: int) -> None:
        again = [delta for delta in attempt.sent if delta.first_index >= next_index]
        if again and again[0].first_index > next_index:
            self._fault(attempt, "network_cut")
            return
        attempt.sent = deque((d for d in attempt.sent if d.first_index < next_index), maxlen=RING_TOKENS_MAX)
        self._publish(attempt.ingress, again)

    def _on_reserve(self, ingress: str, request: Reserve) -> None:
        key = (request.attempt_id, request.epoch)
        if self.has_seen(key):
            self._refuse(ingress, request, "duplicate")
            return
        self.world.tell("on_held", key, self.life.incarnation, ingress)
        if blocks_needed(request) > self.world.scenario.shape.pool_blocks:
            self._refuse(ingress, request, "never_fits")
            return
        self.hold(key, ingress)
        if len(self._waiting) == 0 and self._try_reserve((ingress, request)):
            return
        deadline_ns = self.now_ns + request.reservation_ms * MS
        if not self._waiting.join(key, (ingress, request), deadline_ns=deadline_ns):
            self.let_go(key, ingress)
            self._refuse(ingress, request, "no_capacity")

    def _try_reserve(self, entry: tuple[str, Reserve]) -> bool:
        ingress, request = entry
        shape = self.world.scenario.shape
        num_blocks = blocks_needed(request)
        if len(self._attempts) >= shape.max_num_seqs or self.pool.counts().free < num_blocks:
            return False
        ask = self.world.asks[request.request_id]
        attempt_id, epoch = AttemptId(request.attempt_id), request.epoch
        deadline_ns = self.now_ns + request.reservation_ms * MS if self.world.parts.reservations_expire else None
        prompt = self.pool.reserve(attempt_id, epoch, num_blocks=ask.prompt_blocks, deadline_ns=deadline_ns)
        rest = self.pool.extend(attempt_id, epoch, num_blocks=num_blocks - ask.prompt_blocks)
        assert isinstance(prompt, Reservation) and isinstance(rest, Reservation), (prompt, rest)
        slots = tuple(block.slot for block in (*prompt.blocks, *rest.blocks))
        tracker = self.world.parts.tracker(prompt.blocks)
        expected = [self.world.prompt_content(ask, index) for index in range(ask.prompt_blocks)]
        attempt = _Attempt(request, ingress, slots, tracker, shape.backlog_tokens, expected)
        self._attempts[attempt.key] = attempt
        ticket = Ticket(
            attempt_id=request.attempt_id,
            epoch=epoch,
            worker_id=self.life.name,
            incarnation=self.life.incarnation,
            kv_host="",
            kv_port=0,
            blocks=prompt.blocks,
        )
        if not self.send(ingress, Reserved(attempt_id=request.attempt_id, epoch=epoch, ticket=ticket)):
            self._stop(attempt)
        return True

    def _on_cancel(self, ingress: str, cancel: Cancel) -> None:
        key = (cancel.attempt_id, cancel.epoch)
        if self._waiting.leave(key) is not None:
            self.let_go(key, ingress)
        attempt = self._attempts.get(key)

        def acknowledge(num_generated: int) -> None:
            self.send(ingress, CancelAck(attempt_id=key[0], epoch=key[1], num_generated=num_generated))

        if attempt is None:
            acknowledge(0)
        else:
            self._stop(attempt, acknowledge)

    def on_granted(self, ingress: str) -> None:
        for attempt in [a for a in self._attempts.values() if a.ingress == ingress and a.pending]:
            deltas, attempt.pending = attempt.pending, []
            self._publish(ingress, deltas)
            self._release_if_done(attempt)

    def on_lease_expired(self, keys: list[Key]) -> None:
        for key in keys:
            waiting = self._waiting.leave(key)
            if waiting is not None:
                self.let_go(key, waiting[0])
            attempt = self._attempts.get(key)
            if attempt is not None:
                self._fault(attempt, "lease_expired")

    def on_ingress_gone(self, incarnation: str) -> None:
        for attempt in [a for a in self._attempts.values() if a.ingress == incarnation]:
            self._stop(attempt)

    # --- from prefill ---------------------------------------------------------------------------------------------

    def on_message(self, link: Link, message: Any) -> None:
        match message:
            case BlocksPosted():
                self._on_posted(link, message)
            case HandOff():
                self._on_hand_off(link, message)
            case PrefillAbandoned():
                attempt = self._attempts.get((message.attempt_id, message.epoch))
                if attempt is not None and not attempt.decoding:
                    self._stop(attempt)
            case _:
                super().on_message(link, message)

    def _on_posted(self, link: Link, message: BlocksPosted) -> None:
        key = (message.attempt_id, message.epoch)
        sender = link.peer_of(self).life.incarnation
        attempt = self._current(link, key)
        if attempt is None:
            for block in message.blocks:
                if block.tag not in self._receives:
                    self._receive(_Receive(key, sender, None, None, block.digest), block.tag)
            return
        attempt.peer = link
        posted = attempt.tracker.on_posted(message.blocks)
        attempt.tracker.check_invariants()
        if isinstance(posted, Refusal):
            self._fault(attempt, "transfer_failed")
            return
        bound = self.pool.bind_peer(AttemptId(key[0]), key[1], Incarnation(sender))
        assert bound, key
        self._receiving[key] = self._receiving.get(key, 0) + len(posted)
        for block in posted:
            slot = attempt.slots[block.index]
            self._receive(_Receive(key, sender, block.index, slot, block.digest), block.tag)
        tags = tuple(block.tag for block in posted)
        self.kernel.at(self.timing.transfer_deadline_ms * MS, self.life, self._give_up, tags)

    def _receive(self, receive: _Receive, tag: int) -> None:
        self._receives[tag] = receive
        self.world.copies.post_receive(self.memory, receive.sender, tag, receive.slot, self._on_copied)

    def _give_up(self, tags: tuple[int, ...]) -> None:
        for tag in tags:
            receive = self._receives.get(tag)
            if receive is not None:
                receive.given_up = True
                self._failed(receive, "TIMEOUT")

    def _on_copied(self, tag: int, end: CopyEnd) -> None:
        receive = self._receives.pop(tag, None)
        if receive is None or receive.index is None:
            return
        key = receive.key
        attempt = None if receive.given_up else self._attempts.get(key)
        if attempt is not None and end == "OK":
            assert receive.slot is not None, receive
            content = self.memory.slots[receive.slot]
            if self.world.parts.verify(content, receive.digest):
                block = attempt.tracker.destination(receive.index)
                landed = self.pool.landed(AttemptId(key[0]), key[1], slot=block.slot, generation=block.generation)
                assert landed, f"{key}: slot {block.slot} is not reserved any more"
                state = attempt.tracker.on_landed(receive.index)
                self._settle(key)
                self._advance(attempt, state)
                return
            if content != DAMAGED:
                self.world.tell("on_block_read", "copied", receive.digest, content)
            self._settle(key)
            self._failed(receive, "CORRUPT")
            return
        self._settle(key)
        if attempt is not None:
            self._failed(receive, "PEER_LOST")

    def _failed(self, receive: _Receive, result: str) -> None:
        attempt = self._attempts.get(receive.key)
        if attempt is not None and receive.index is not None:
            self._advance(attempt, attempt.tracker.on_failed(receive.index, result))

    def _settle(self, key: Key) -> None:
        """A transfer came to its end; with the last one nobody outside can touch the attempt's slots any more."""
        left = self._receiving[key] - 1
        if left:
            self._receiving[key] = left
            return
        del self._receiving[key]
        if self.pool.writer_done(AttemptId(key[0]), key[1]):
            self._waiting.admit(self._try_reserve)

    def _on_hand_off(self, link: Link, message: HandOff) -> None:
        attempt = self._current(link, (message.attempt_id, message.epoch))
        if attempt is None:
            link.send(self, HandOffDone(attempt_id=message.attempt_id, epoch=message.epoch, accepted=False))
            return
        attempt.peer = link
        self._advance(attempt, attempt.tracker.on_hand_off(message))

    def _advance(self, attempt: _Attempt, state: HandOffState) -> None:
        attempt.tracker.check_invariants()
        if state is HandOffState.FAILED:
            self._fault(attempt, "transfer_failed")
        elif state is HandOffState.COMPLETE and not attempt.decoding:
            assert attempt.peer is not None, attempt.key
            attempt.decoding = True
            self.pool.renew(AttemptId(attempt.key[0]), attempt.key[1], deadline_ns=None)
            attempt.peer.send(self, HandOffDone(attempt_id=attempt.key[0], epoch=attempt.key[1], accepted=True))
            # The first token was sampled by prefill: it goes out at once.
            self._publish_tokens([self._next_token(attempt)])
            self._turn()

    def _current(self, link: Link, key: Key) -> _Attempt | None:
        attempt = self._attempts.get(key)
        if attempt is None or attempt.decoding or (attempt.peer is not None and attempt.peer is not link):
            return None
        return attempt

    # --- the engine -------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        if not self._turning and any(self._runs(attempt) for attempt in self._attempts.values()):
            self._turning = True
            self.kernel.at(self.timing.step_ns * self.slow_factor, self.life, self._on_step)

    def _runs(self, attempt: _Attempt) -> bool:
        return attempt.decoding and not attempt.ended and attempt.num_generated < attempt.max_index

    def _on_step(self) -> None:
        self._turning = False
        running = [attempt for attempt in self._attempts.values() if self._runs(attempt)]
        self._publish_tokens([self._next_token(attempt) for attempt in running])
        self._turn()

    def _next_token(self, attempt: _Attempt) -> tuple[_Attempt, StreamDelta]:
        """Computes one token over all blocks of an attempt."""
        key, index = attempt.key, attempt.num_generated
        slots = self.memory.slots
        for slot, expected in zip(attempt.slots, attempt.expected, strict=False):
            if slots[slot] != expected:
                self.world.tell("on_block_read", f"{self.life.name} slot {slot}", expected, slots[slot])
        ask = self.world.asks[attempt.request.request_id]
        block = (ask.prompt_blocks * BLOCK_TOKENS + index) // BLOCK_TOKENS
        if block < len(attempt.slots) and block >= len(attempt.expected):
            content = answer_content(ask.number, key[1], block)
            attempt.expected.append(content)
            slots[attempt.slots[block]] = content
        attempt.num_generated += 1
        self.world.tell("on_generated", key)
        end: Any = None
        if index == ask.eos_at:
            end = "stop"
        elif attempt.num_generated >= ask.max_tokens:
            end = "length"
        attempt.ended = end is not None
        delta = StreamDelta(
            request_id=attempt.request.request_id,
            attempt_id=key[0],
            epoch=key[1],
            first_index=index,
            token_ids=(key[1] * TOKEN_EPOCH + index,),
            end=end,
        )
        return attempt, delta

    def _publish_tokens(self, tokens: list[tuple[_Attempt, StreamDelta]]) -> None:
        by_ingress: dict[str, list[StreamDelta]] = {}
        for attempt, delta in tokens:
            by_ingress.setdefault(attempt.ingress, []).append(delta)
        for ingress, deltas in by_ingress.items():
            self._publish(ingress, deltas)
        for attempt, _ in tokens:
            self._release_if_done(attempt)

    def _publish(self, ingress: str, deltas: list[StreamDelta]) -> None:
        holder, now_ns = self.holder(ingress), self.now_ns
        valid = []
        for delta in deltas:
            key = (delta.attempt_id, delta.epoch)
            attempt = self._attempts.get(key)
            if attempt is None:
                continue
            if holder.may_publish(*key, now_ns=now_ns):
                self.world.tell("on_publish_checked", key)
                attempt.sent.append(delta)
                valid.append(delta)
            elif holder.was_granted(*key):
                self._fault(attempt, "lease_expired")
            else:
                attempt.pending.append(delta)
        if valid:
            # Frames keep their order; the process may be stopped between this check and the sending.
            emit_ns = max(self._emit_ns, self.kernel.now_ns + self.world.work.skewed(0, EMIT_NS_MAX))
            self._emit_ns = emit_ns
            self.kernel.at(emit_ns - self.kernel.now_ns, self.life, self._emit, ingress, tuple(valid))

    def _emit(self, ingress: str, deltas: tuple[StreamDelta, ...]) -> None:
        frame = Frame(v=1, worker_id=self.life.name, incarnation=self.life.incarnation, seq=0, streams=deltas)
        if self.send(ingress, frame):
            return
        for delta in deltas:
            attempt = self._attempts.get((delta.attempt_id, delta.epoch))
            if attempt is not None:
                self._fault(attempt, "network_cut")

    # --- ends -------------------------------------------------------------------------------------------------------

    def _release_if_done(self, attempt: _Attempt) -> None:
        if attempt.ended and not attempt.pending and self._attempts.pop(attempt.key, None) is not None:
            self._give_back(attempt)

    def _fault(self, attempt: _Attempt, reason: Any) -> None:
        if attempt.key not in self._attempts:
            return
        attempt_id, epoch = attempt.key
        self.send(attempt.ingress, AttemptFault(attempt_id=attempt_id, epoch=epoch, reason=reason, message=""))
        if attempt.peer is not None and not attempt.decoding:
            attempt.peer.send(self, HandOffDone(attempt_id=attempt_id, epoch=epoch, accepted=False))
        self._stop(attempt)

    def _stop(self, attempt: _Attempt, then: Callable[[int], None] | None = None) -> None:
        """Takes an attempt out; the engine lets go of it a little later, only then are its blocks free."""
        del self._attempts[attempt.key]
        delay_ns = self.world.work.between(0, self.timing.step_ns) if attempt.decoding else 0
        self.kernel.at(delay_ns, self.life, self._stopped, attempt, then)

    def _stopped(self, attempt: _Attempt, then: Callable[[int], None] | None) -> None:
        self._give_back(attempt)
        if then is not None:
            then(attempt.num_generated)

    def _give_back(self, attempt: _Attempt) -> None:
        attempt_id, epoch = attempt.key
        self.let_go(attempt.key, attempt.ingress)
        self.pool.release(
            AttemptId(attempt_id), epoch, now_ns=self.now_ns, writer_may_still_write=attempt.key in self._receiving
        )
        self._waiting.admit(self._try_reserve)

    def on_engine_fault(self) -> None:
        """The engine fails under everything that decodes."""
        for attempt in [a for a in self._attempts.values() if a.decoding]:
            self._fault(attempt, "engine_fault")

    # --- time and peers -----------------------------------------------------------------------------------------------

    def on_beat(self) -> None:
        for ingress, request in self._waiting.expire(self.now_ns):
            self.let_go((request.attempt_id, request.epoch), ingress)
            self._refuse(ingress, request, "no_capacity")
        for key in self.pool.expire(self.now_ns):
            if key not in self._receiving:
                # Nothing is under way to slots that no receive is posted for, and nothing more will be posted.
                self.pool.writer_done(*key)
            attempt = self._attempts.get(key)
            if attempt is not None and not attempt.decoding:
                self._fault(attempt, "transfer_failed")

    def on_link_down(self, link: Link) -> None:
        peer = link.peer_of(self).life
        if peer.name.startswith("p"):
            self.world.copies.cancel_unmatched(peer.incarnation, self.life.incarnation)
        else:
            super().on_link_down(link)

    def on_link_up(self, link: Link) -> None:
        if not link.peer_of(self).life.name.startswith("p"):
            super().on_link_up(link)

    def on_peer_gone(self, incarnation: str) -> None:
        for attempt in list(self._attempts.values()):
            peer = attempt.peer.peer_of(self).life.incarnation if attempt.peer is not None else None
            if peer == incarnation and not attempt.decoding:
                self._fault(attempt, "transfer_failed")
        for tag in [t for t, receive in self._receives.items() if receive.sender == incarnation]:
            receive = self._receives.pop(tag)
            if receive.index is not None:
                self._settle_dead(receive.key)
        self.pool.peer_dead(Incarnation(incarnation))
        self._waiting.admit(self._try_reserve)

    def _settle_dead(self, key: Key) -> None:
        self._receiving[key] -= 1
        if not self._receiving[key]:
            del self._receiving[key]

    def _refuse(self, ingress: str, request: Reserve, code: Any) -> None:
        self.send(ingress, Refused(attempt_id=request.attempt_id, epoch=request.epoch, code=code, message=""))


def blocks_needed(request: Reserve) -> int:
    """Returns the blocks of prompt and answer; the last token needs no place."""
    return -(-(len(request.spec.prompt_token_ids) + request.spec.max_tokens - 1) // BLOCK_TOKENS)
