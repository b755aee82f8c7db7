"""The prefill worker of a simulation: compute, push, hand over. Follows ``workers.prefill``.

Real cores: block pool, lease holder, waiting line. A block is computed in one event, pushed by a copy of two, and freed
only when nobody reads it any more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cluster.sim.decode import TOKEN_EPOCH
from cluster.sim.kernel import Life
from cluster.sim.memory import CopyEnd
from cluster.sim.network import Link
from cluster.sim.scenario import MS
from cluster.sim.witness import Key
from cluster.sim.worker import BLOCK_TOKENS, SimWorker
from kvstore.core.block_pool import NoCapacityResult, Reservation
from kvstore.core.ids import AttemptId, Incarnation
from kvstore.core.messages import (
    AttemptFault,
    BlocksLanded,
    BlocksPosted,
    Cancel,
    CancelAck,
    HandOff,
    HandOffDone,
    PostedBlock,
    Prefill,
    PrefillAbandoned,
    PrefillDone,
    PrefillStarted,
    Refused,
)
from workers.core.waiting_line import WaitingLine

if TYPE_CHECKING:
    from cluster.sim.world import World


@dataclass(slots=True)
class _Job:
    request: Prefill
    ingress: str
    link: Link | None = None
    slots: tuple[int, ...] = ()
    num_computed: int = 0
    posted_hand_off: bool = False
    reading: set[int] = field(default_factory=set)
    """Tags whose copy may still read a slot of this job."""

    @property
    def key(self) -> Key:
        return self.request.attempt_id, self.request.epoch

    @property
    def receiver(self) -> str:
        """The decode incarnation that the ticket names."""
        return self.request.ticket.incarnation


class SimPrefill(SimWorker):
    """One life of a prefill worker."""

    role = "prefill"

    def __init__(self, world: World, life: Life) -> None:
        super().__init__(world, life)
        self._jobs: dict[Key, _Job] = {}
        self._line: WaitingLine[_Job] = WaitingLine(world.scenario.shape.max_waiting)
        self._peers: dict[str, Link] = {}
        self._dialled: set[str] = set()

        self._readers: dict[tuple[str, int], _Job] = {}
        """By (decode incarnation, tag): what a copy may still read here."""

    @property
    def num_attempts(self) -> int:
        """Jobs that hold or want anything."""
        return len(self._jobs)

    @property
    def is_busy(self) -> bool:
        return bool(self._jobs)

    # --- from the ingress ---------------------------------------------------------------------------------------

    def on_ingress_message(self, ingress: str, message: Any) -> None:
        match message:
            case Prefill():
                self._on_prefill(ingress, message)
            case Cancel():
                self._on_cancel(ingress, message)

    def _on_prefill(self, ingress: str, request: Prefill) -> None:
        key = (request.attempt_id, request.epoch)
        if self.has_seen(key):
            return self._refuse(ingress, request, "duplicate")
        shape = self.world.scenario.shape
        if self.world.asks[request.request_id].prompt_blocks > shape.pool_blocks:
            return self._refuse(ingress, request, "never_fits")
        if len(self._jobs) >= shape.max_waiting:
            return self._refuse(ingress, request, "no_capacity")
        job = _Job(request, ingress)
        self._jobs[key] = job
        self.hold(key, ingress)
        link = self._peers.get(job.receiver)
        if link is not None and link.is_open:
            job.link = link
            self._wait_for_blocks(job)
        else:
            self._dial(job.receiver)
        self.kernel.at(self.timing.reservation_ms * MS, self.life, self._give_up, key)
        return None

    def _dial(self, receiver: str) -> None:
        """Opens the link to a decode life, once; the network dials again when it breaks."""
        peer = self.world.living(receiver)
        if peer is not None and receiver not in self._dialled:
            self._dialled.add(receiver)
            self.world.network.dial(self, peer)

    def _on_cancel(self, ingress: str, cancel: Cancel) -> None:
        key = (cancel.attempt_id, cancel.epoch)
        job = self._jobs.get(key)
        delay_ns = 0
        if job is not None:
            self._abandon(job)
            delay_ns = self.world.work.between(0, self.timing.chunk_ns)
        ack = CancelAck(attempt_id=key[0], epoch=key[1], num_generated=0)
        self.kernel.at(delay_ns, self.life, self._acknowledge, ingress, ack)

    def _acknowledge(self, ingress: str, ack: CancelAck) -> None:
        self.send(ingress, ack)

    def on_lease_expired(self, keys: list[Key]) -> None:
        for key in keys:
            job = self._jobs.get(key)
            if job is not None:
                self._abandon(job)

    def on_ingress_gone(self, incarnation: str) -> None:
        for job in [j for j in self._jobs.values() if j.ingress == incarnation]:
            self._abandon(job)

    # --- one job --------------------------------------------------------------------------------------------------

    def _wait_for_blocks(self, job: _Job) -> None:
        if len(self._line) == 0 and self._try_start(job):
            return
        deadline_ns = self.now_ns + self.timing.reservation_ms * MS
        if job.key not in self._line and not self._line.join(job.key, job, deadline_ns=deadline_ns):
            self._fail(job, "transfer_failed")

    def _try_start(self, job: _Job) -> bool:
        if job.link is None or not job.link.is_open:
            self._fail(job, "transfer_failed")
            return True
        ask = self.world.asks[job.request.request_id]
        allocated = self.pool.allocate(
            AttemptId(job.key[0]), job.key[1], num_blocks=ask.prompt_blocks, reader=Incarnation(job.receiver)
        )
        if isinstance(allocated, NoCapacityResult):
            return False
        assert isinstance(allocated, Reservation), allocated
        job.slots = tuple(block.slot for block in allocated.blocks)
        cached_tokens = min(ask.cached_blocks * BLOCK_TOKENS, ask.prompt_blocks * BLOCK_TOKENS - 1)
        self.send(
            job.ingress,
            PrefillStarted(attempt_id=job.key[0], epoch=job.key[1], queued_ns=0, cached_tokens=cached_tokens),
        )
        # The last block is computed again even when all are cached: its logits are needed.
        num_cached = min(ask.cached_blocks, ask.prompt_blocks - 1)
        for index in range(num_cached):
            self._finish_block(job, index)
        self.kernel.at(self._chunk_ns(), self.life, self._on_chunk, job)
        return True

    def _chunk_ns(self) -> int:
        return self.timing.chunk_ns * self.slow_factor

    def _on_chunk(self, job: _Job) -> None:
        if self._jobs.get(job.key) is not job:
            return
        if job.link is None or not job.link.is_open:
            # Nobody would hear of the block, so its send would never meet a receive.
            self._fail(job, "transfer_failed")
            return
        self._finish_block(job, job.num_computed)
        if job.num_computed < len(job.slots):
            self.kernel.at(self._chunk_ns(), self.life, self._on_chunk, job)
            return
        hand_off = HandOff(attempt_id=job.key[0], epoch=job.key[1], first_token_id=job.key[1] * TOKEN_EPOCH)
        if not job.link.send(self, hand_off):
            self._fail(job, "transfer_failed")
            return
        job.posted_hand_off = True
        self.kernel.at(self.timing.hand_off_deadline_ms * MS, self.life, self._give_up, job.key)

    def _finish_block(self, job: _Job, index: int) -> None:
        """A block is complete: it is pushed, its digest beside."""
        ask = self.world.asks[job.request.request_id]
        content = self.world.prompt_content(ask, index)
        self.memory.slots[job.slots[index]] = content
        job.num_computed = index + 1
        tag = job.request.ticket.blocks[index].tag
        job.reading.add(tag)
        self._readers[job.receiver, tag] = job
        receiver = job.receiver

        def done(tag: int, _end: CopyEnd) -> None:
            self._on_read(receiver, tag)

        self.world.copies.post_send(self.memory, receiver, tag, job.slots[index], done)
        if job.link is not None:
            posted = PostedBlock(index, tag, content, BLOCK_TOKENS)
            job.link.send(self, BlocksPosted(attempt_id=job.key[0], epoch=job.key[1], blocks=(posted,)))

    def _on_read(self, receiver: str, tag: int) -> None:
        """Nobody reads this block any more."""
        job = self._readers.pop((receiver, tag), None)
        if job is None:
            return
        job.reading.discard(tag)
        if not job.reading and self._jobs.get(job.key) is not job:
            self.pool.writer_done(AttemptId(job.key[0]), job.key[1])
            self._line.admit(self._admit)

    def _give_up(self, key: Key) -> None:
        job = self._jobs.get(key)
        if job is not None:
            self._fail(job, "transfer_failed")

    # --- from decode ------------------------------------------------------------------------------------------------

    def on_message(self, link: Link, message: Any) -> None:
        if isinstance(message, HandOffDone):
            job = self._jobs.get((message.attempt_id, message.epoch))
            if job is None:
                return
            if not message.accepted:
                self._fail(job, "transfer_failed")
            elif job.posted_hand_off:
                self._send_done(job)
                self._finish(job)
        elif not isinstance(message, BlocksLanded):
            super().on_message(link, message)

    def _send_done(self, job: _Job) -> None:
        done = PrefillDone(
            attempt_id=job.key[0],
            epoch=job.key[1],
            cached_tokens=0,
            lookup_ns=0,
            engine_queue_ns=0,
            compute_ns=0,
            hand_off_ns=0,
            pushed_bytes=0,
        )
        self.send(job.ingress, done)

    def on_link_up(self, link: Link) -> None:
        peer = link.peer_of(self).life
        if not peer.name.startswith("d"):
            super().on_link_up(link)
            return
        self._peers[peer.incarnation] = link
        for job in [j for j in self._jobs.values() if j.receiver == peer.incarnation and j.link is None]:
            job.link = link
            self._wait_for_blocks(job)

    def on_link_down(self, link: Link) -> None:
        peer = link.peer_of(self).life
        if not peer.name.startswith("d"):
            super().on_link_down(link)
            return
        if self._peers.get(peer.incarnation) is link:
            del self._peers[peer.incarnation]
        self.world.copies.cancel_unmatched(self.life.incarnation, peer.incarnation)
        for job in [j for j in self._jobs.values() if j.link is link]:
            self._fail(job, "transfer_failed")

    def on_peer_gone(self, incarnation: str) -> None:
        self._peers.pop(incarnation, None)
        for key in [k for k in self._readers if k[0] == incarnation]:
            job = self._readers.pop(key)
            job.reading.discard(key[1])
        self.pool.peer_dead(Incarnation(incarnation))
        for job in [j for j in self._jobs.values() if j.receiver == incarnation]:
            self._fail(job, "transfer_failed")
        self._line.admit(self._admit)

    # --- ends -------------------------------------------------------------------------------------------------------

    def _fail(self, job: _Job, reason: Any) -> None:
        if self._jobs.get(job.key) is not job:
            # The end of another job let this one out of the line, straight into its own end.
            return
        fault = AttemptFault(attempt_id=job.key[0], epoch=job.key[1], reason=reason, message="")
        self.send(job.ingress, fault)
        self._abandon(job)

    def _abandon(self, job: _Job) -> None:
        if job.link is not None:
            abandoned = PrefillAbandoned(attempt_id=job.key[0], epoch=job.key[1], reason="")
            job.link.send(self, abandoned)
        self._finish(job)

    def _finish(self, job: _Job) -> None:
        """Ends a job; blocks that a copy may still read stay fenced."""
        del self._jobs[job.key]
        self._line.leave(job.key)
        self.let_go(job.key, job.ingress)
        if job.slots:
            self.pool.release(
                AttemptId(job.key[0]), job.key[1], now_ns=self.now_ns, reader_may_still_read=bool(job.reading)
            )
            self._line.admit(self._admit)

    def _admit(self, job: _Job) -> bool:
        return self._jobs.get(job.key) is not job or self._try_start(job)

    def on_beat(self) -> None:
        for job in self._line.expire(self.now_ns):
            if self._jobs.get(job.key) is job:
                self._fail(job, "transfer_failed")

    def _refuse(self, ingress: str, request: Prefill, code: Any) -> None:
        self.send(ingress, Refused(attempt_id=request.attempt_id, epoch=request.epoch, code=code, message=""))
