"""One connection of a store client to its node, and what it holds through it: read leases and write reservations.

Owns the channel, the calls under way and the mapping of the slab. A session never comes back: when its connection
is lost every call ends with None, every lease and reservation counts as gone, and the client opens another one.

A lease or reservation counts from the moment its ask was *sent*, so it ends here before it ends at the node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

import msgspec

from kvstore.core.ids import BlockDigest, BlockHash, TenantId
from kvstore.core.quota import NOBODY
from kvstore.digest import block_digest, verify
from kvstore.errors import KopirError
from kvstore.net.channel import Channel
from kvstore.store.copying import copy_block
from kvstore.store.messages import (
    MAX_HASHES_PER_MESSAGE,
    MAX_LEASE_MS,
    AbortBlocks,
    BlocksCommitted,
    BlocksReserved,
    BringUp,
    BroughtUp,
    CommitBlocks,
    Match,
    Matched,
    MatchedBlock,
    OthersKnown,
    ReleaseLease,
    ReportCorrupt,
    ReserveBlocks,
    SlotRef,
    Superseded,
    Touched,
    WrittenBlock,
)
from kvstore.store.shared_reader import SharedReader
from kvstore.store.slab import Slab

MAX_CALLS = 1024
TOUCHES_PER_MESSAGE = 512
TOUCH_DELAY_S = 0.02
"""So long may the node's idea of what was used last be behind."""

_Reply = TypeVar("_Reply")


@dataclass(slots=True)
class _Call:
    message: Any
    answer: asyncio.Future[Any]


class StoreSession:
    """Calls over one connection. Made by ``StoreClient`` after the node's ``Attached``."""

    def __init__(
        self,
        channel: Channel,
        slab: Slab,
        *,
        clock_ns: Callable[[], int],
        on_superseded: Callable[[Superseded], None] = lambda notice: None,
    ) -> None:
        self.slab = slab
        self._on_superseded = on_superseded
        self.reader = SharedReader(slab)
        self.clock_ns = clock_ns
        self.num_others = 0
        """Other nodes that the node could fetch from."""
        self._channel = channel
        self._numbers = count(1)
        self._calls: dict[int, _Call] = {}
        self._touched: list[SlotRef] = []
        self._tails: list[int] = []
        self._num_missed = 0
        self._touch_timer: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        """False once the connection has begun to close."""
        return not self._channel.is_closing

    def abort(self) -> None:
        """Closes the connection at once."""
        self._channel.abort()

    def send(self, message: msgspec.Struct) -> bool:
        """Sends a message that has no answer. False when the connection is gone."""
        try:
            self._channel.send_nowait(message)
        except KopirError:
            self._channel.abort()
            return False
        return True

    def touched(self, blocks: Sequence[SlotRef], *, ends_prompt: bool = False) -> None:
        """Tells the node, together with what else is read soon, which blocks of one prefix were read without asking.

        ``blocks``: parents before leaves. ``ends_prompt``: the last of them is the last of its prompt.
        """
        if ends_prompt and blocks:
            self._tails.append(len(self._touched))
        self._touched += reversed(blocks)
        self._tell_soon()

    def missed(self, num_missed: int) -> None:
        """Tells the node, likewise, how many blocks were found nowhere."""
        self._num_missed += num_missed
        self._tell_soon()

    def _tell_soon(self) -> None:
        if len(self._touched) >= TOUCHES_PER_MESSAGE:
            self._send_touches()
        elif self._touch_timer is None and (self._touched or self._num_missed):
            self._touch_timer = asyncio.get_running_loop().call_later(TOUCH_DELAY_S, self._send_touches)

    def _send_touches(self) -> None:
        if self._touch_timer is not None:
            self._touch_timer.cancel()
            self._touch_timer = None
        blocks, self._touched = self._touched, []
        tails, self._tails = self._tails, []
        num_missed, self._num_missed = self._num_missed, 0
        for start in range(0, max(1, len(blocks)), MAX_HASHES_PER_MESSAGE):
            part = tuple(blocks[start : start + MAX_HASHES_PER_MESSAGE])
            places = tuple(tail - start for tail in tails if start <= tail < start + len(part))
            self.send(Touched(blocks=part, tails=places, num_missed=0 if start else num_missed))

    async def call(
        self, make: Callable[[int], msgspec.Struct], reply: type[_Reply], *, deadline_s: float
    ) -> _Reply | None:
        """Asks and waits. None: the store is gone, too slow or overrun; a late answer is undone when it comes."""
        if len(self._calls) >= MAX_CALLS:
            return None
        n = next(self._numbers)
        message = make(n)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[n] = _Call(message, answer)
        if not self.send(message):
            self._calls.pop(n, None)
            return None
        try:
            async with asyncio.timeout(deadline_s):
                got = await answer
        except TimeoutError:
            self._undo_if_answered(message, answer)
            return None
        except asyncio.CancelledError:
            self._undo_if_answered(message, answer)
            raise
        return got if isinstance(got, reply) else None

    async def read(self) -> None:
        """Takes answers until the connection ends, then ends every call with None. Raises: KopirError at the end."""
        try:
            while True:
                message = await self._channel.recv()
                if isinstance(message, Superseded):
                    self._on_superseded(message)
                    continue
                if isinstance(message, OthersKnown):
                    self.num_others = message.num_others
                    continue
                call = self._calls.pop(message.n, None)
                if call is not None and not call.answer.done():
                    call.answer.set_result(message)
                elif call is not None:
                    self._undo(call.message, message)
        finally:
            self._channel.abort()
            if self._touch_timer is not None:
                self._touch_timer.cancel()
            for call in self._calls.values():
                if not call.answer.done():
                    call.answer.set_result(None)
            self._calls.clear()

    def _undo_if_answered(self, ask: Any, answer: asyncio.Future[Any]) -> None:
        """The answer may have come in the very step in which its caller gave up."""
        if answer.done() and not answer.cancelled():
            self._undo(ask, answer.result())

    def _undo(self, ask: Any, late_answer: Any) -> None:
        """Gives back what an answer granted after its caller had stopped waiting."""
        if isinstance(late_answer, Matched | BroughtUp) and late_answer.lease_id is not None:
            self.send(ReleaseLease(lease_id=late_answer.lease_id))
        elif isinstance(late_answer, BlocksReserved) and isinstance(ask, ReserveBlocks):
            granted = tuple(
                SlotRef(block_hash, block.slot, block.generation)
                for block_hash, block in zip(ask.hashes, late_answer.blocks, strict=True)
                if block.status == "granted"
            )
            self.send(AbortBlocks(blocks=granted))

    async def match(self, hashes: Sequence[BlockHash], *, lease_ms: int, deadline_s: float) -> LeasedPrefix | None:
        """Asks for the longest prefix; None when nothing matched or the store is lost."""
        sent_ns = self.clock_ns()
        answer = await self.call(
            lambda n: Match(n=n, hashes=tuple(hashes), lease_ms=lease_ms), Matched, deadline_s=deadline_s
        )
        return self._leased(hashes, answer, sent_ns + lease_ms * 1_000_000)

    async def bring_up(
        self, hashes: Sequence[BlockHash], *, lease_ms: int, deadline_s: float, ends_prompt: bool
    ) -> tuple[LeasedPrefix | None, bool]:
        """Like ``match``, of blocks that the node fetches from a lower tier first.

        Returns the prefix (None: there is none yet), and True when more would have come after ``deadline_s``.
        """
        sent_ns = self.clock_ns()
        # The node stops a little earlier than we do, so that what it has done by then is not lost with its answer.
        deadline_ms = max(1, min(int(deadline_s * 900), MAX_LEASE_MS))
        answer = await self.call(
            lambda n: BringUp(
                n=n, hashes=tuple(hashes), lease_ms=lease_ms, deadline_ms=deadline_ms, ends_prompt=ends_prompt
            ),
            BroughtUp,
            deadline_s=deadline_s,
        )
        is_late = self.is_open if answer is None else answer.is_late
        return self._leased(hashes, answer, sent_ns + lease_ms * 1_000_000), is_late

    def _leased(
        self, hashes: Sequence[BlockHash], answer: Matched | BroughtUp | None, deadline_ns: int
    ) -> LeasedPrefix | None:
        if answer is None or answer.lease_id is None:
            return None
        lease = LeasedPrefix(self, answer, tuple(hashes[: len(answer.blocks)]), deadline_ns)
        if len(answer.blocks) > len(hashes) or any(b.slot >= self.slab.num_blocks for b in answer.blocks):
            lease.release()
            self.abort()
            return None
        return lease

    async def reserve(
        self,
        hashes: Sequence[BlockHash],
        *,
        lease_ms: int,
        deadline_s: float,
        tenant: TenantId = NOBODY,
        parent: BlockHash | None = None,
    ) -> WriteReservation | None:
        """Asks for writable slots; None when the store is lost. Each reservation must be finished or aborted."""
        sent_ns = self.clock_ns()
        answer = await self.call(
            lambda n: ReserveBlocks(n=n, hashes=tuple(hashes), lease_ms=lease_ms, tenant=tenant, parent=parent),
            BlocksReserved,
            deadline_s=deadline_s,
        )
        if answer is None:
            return None
        if len(answer.blocks) != len(hashes) or any(b.slot >= self.slab.num_blocks for b in answer.blocks):
            self.abort()
            return None
        return WriteReservation(self, answer, tuple(hashes), sent_ns + lease_ms * 1_000_000)


class LeasedPrefix:
    """A matched prefix, pinned until ``release`` or the end of its lease. Use as a context manager."""

    def __init__(
        self, session: StoreSession, matched: Matched | BroughtUp, hashes: tuple[BlockHash, ...], deadline_ns: int
    ) -> None:
        self._session = session
        self._lease_id: int | None = matched.lease_id
        self._blocks: tuple[MatchedBlock, ...] = matched.blocks
        self._from_disk = matched.from_disk if isinstance(matched, BroughtUp) else ()
        self._hashes = hashes
        self._deadline_ns = deadline_ns

    def __len__(self) -> int:
        """Returns how many blocks matched."""
        return len(self._blocks)

    def __enter__(self) -> LeasedPrefix:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def view(self, index: int) -> memoryview:
        """Returns a read-only view of block ``index`` inside the slab. Its bytes are the block's only while
        ``stands()`` is true *after* they were used."""
        return self._session.slab.slot(self._blocks[index].slot).toreadonly()

    def is_from_disk(self, index: int) -> bool:
        """Returns True when block ``index`` came up from the disk for this lease."""
        return index < len(self._from_disk) and self._from_disk[index]

    def digest(self, index: int) -> BlockDigest:
        """Returns the digest that the bytes of block ``index`` must have."""
        return BlockDigest(self._blocks[index].digest)

    def verify(self, index: int, buffer: Any) -> bool:
        """Returns True when ``buffer`` (the view, or better a copy of it) has the digest of block ``index``."""
        return verify(buffer, self._blocks[index].digest)

    def stands(self) -> bool:
        """Returns True while nobody can have reused the slots: lease not over, connection not lost."""
        standing = self._lease_id is not None and self._session.is_open
        return standing and self._session.clock_ns() < self._deadline_ns

    def report_corrupt(self, index: int) -> None:
        """Tells the node that block ``index`` does not have its digest; it is removed there."""
        block = self._blocks[index]
        self._session.send(ReportCorrupt(block=SlotRef(self._hashes[index], block.slot, block.generation)))

    def release(self) -> None:
        """Ends the lease; safe to call twice."""
        if self._lease_id is not None:
            self._session.send(ReleaseLease(lease_id=self._lease_id))
            self._lease_id = None


class WriteReservation:
    """Writable slots of one ``reserve``. It must end by ``commit`` or ``abort``; as context manager it aborts."""

    def __init__(
        self, session: StoreSession, reserved: BlocksReserved, hashes: tuple[BlockHash, ...], deadline_ns: int
    ) -> None:
        self._session = session
        self._deadline_ns = deadline_ns
        self._on_finish: Callable[[], None] = lambda: None
        self.statuses = tuple(block.status for block in reserved.blocks)
        """For each hash of the ask: ``granted``, ``present``, ``in_progress``, ``no_room`` or ``over_quota``."""
        self._open: dict[int, SlotRef] = {
            index: SlotRef(block_hash, block.slot, block.generation)
            for index, (block_hash, block) in enumerate(zip(hashes, reserved.blocks, strict=True))
            if block.status == "granted"
        }
        self._written: dict[int, WrittenBlock] = {}
        self._commits: list[asyncio.Future[BlocksCommitted | None]] = []
        """Commits under way; at most one per part."""

    def __enter__(self) -> WriteReservation:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.abort()

    @property
    def session(self) -> StoreSession:
        """The connection this reservation came over."""
        return self._session

    def when_finished(self, callback: Callable[[], None]) -> None:
        """``callback`` runs once, when this process will not write into the slots any more."""
        self._on_finish = callback

    def stands(self) -> bool:
        """Returns True while the slots may be written: reservation not over, connection not lost."""
        return self._session.is_open and self._session.clock_ns() < self._deadline_ns

    def view(self, index: int) -> memoryview:
        """Returns the writable view of granted block ``index``. Raises: KeyError if it was not granted."""
        return self._session.slab.slot(self._open[index].slot)

    def written(self, index: int, digest: BlockDigest) -> None:
        """Notes that block ``index`` is completely written and has this digest."""
        ref = self._open.pop(index)
        self._written[index] = WrittenBlock(ref.block_hash, ref.slot, ref.generation, digest)

    def write(self, index: int, source: Any, digest: BlockDigest | None = None) -> bool:
        """Copies one block into its slot and notes its digest (computed from ``source`` unless given).

        Returns False, writing nothing, when the reservation does not stand any more.
        """
        if not self.stands():
            return False
        copy_block(self.view(index), source)
        self.written(index, block_digest(source) if digest is None else digest)
        return True

    def begin_commit(self, *, deadline_s: float) -> None:
        """Makes what is written so far visible, without waiting for it: ``commit`` does. Call it leaf first."""
        blocks = tuple(self._written[index] for index in sorted(self._written))
        self._written.clear()
        if blocks:
            call = self._session.call(
                lambda n: CommitBlocks(n=n, blocks=blocks), BlocksCommitted, deadline_s=deadline_s
            )
            self._commits.append(asyncio.ensure_future(call))

    async def commit(self, *, deadline_s: float) -> int:
        """Makes the written blocks visible, gives the others up. Returns how many are visible now."""
        self.begin_commit(deadline_s=deadline_s)
        self.abort()
        answers = await asyncio.gather(*self._commits)
        return sum(sum(answer.committed) for answer in answers if answer is not None)

    def abort(self) -> None:
        """Gives up what is not committed; this process will not write into the slots any more. Safe to call twice."""
        given_up = (
            *self._open.values(),
            *(SlotRef(b.block_hash, b.slot, b.generation) for b in self._written.values()),
        )
        self._open.clear()
        self._written.clear()
        if given_up:
            self._session.send(AbortBlocks(blocks=given_up))
        callback, self._on_finish = self._on_finish, lambda: None
        callback()
