"""Blocks over a link to a process of this host whose memory can be read: the sender says where, the receiver copies.

The sender of a block offers it: tag, address, size. The receiver reads it once it is both offered and wanted, in
pieces that are folded into the digest while they are in the cache, and says so; then the source may be used again.
Offers and reports travel in messages of one size over the link's endpoint, many at a time.

Nobody but the receiver moves a byte. A receive that has ended in any way is touched by nobody; a source is held until
the receiver reports or is dead.

Message, ``MESSAGE_BYTES``, little endian: kind (4 bytes: 0 offers, 1 reports), count (4 bytes), then
per offer tag, address and size, per report the tag, 8 bytes each.

Life cycle: made when the link is ready -> ``send``, ``receive``, ``step`` ... -> ``end``.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xxhash

from kvstore.errors import PeerLost
from kvstore.transport.peer_memory import SEGMENTS_MAX, PeerMemory, Segment, address_of
from kvstore.transport.transfers import RequestEnd
from kvstore.transport.ucx_device import UcxDevice
from kvstore.transport.ucx_mailbox import Mailbox, Outbox

READ_PIECE_BYTES = 512 << 10
"""Read by one call, of one large block or of several small ones; fits into a second-level cache beside its source."""
STEP_BYTES = 8 << 20
"""Read in one step before others have their turn; a block is always read whole."""
STEP_BLOCKS = 256
MAX_REPORTS_WAITING = 255
"""Reports wait for company until so many are due or nothing is left to read: each message may wake its receiver."""
MAX_OFFERS = 1 << 18
"""Offers that nobody wants yet; a peer that makes more is cut off."""
_OFFERS, _REPORTS = 0, 1
OFFERS_PER_MESSAGE, WORDS_PER_OFFER = 85, 3
REPORTS_PER_MESSAGE = OFFERS_PER_MESSAGE * WORDS_PER_OFFER
MESSAGE_BYTES = 8 + 8 * REPORTS_PER_MESSAGE


class DirectRequest:
    """A block under way. ``end`` means something once it has ``completed``."""

    __slots__ = ("completed", "end")

    def __init__(self) -> None:
        self.completed = False
        self.end = RequestEnd.BROKEN


class DirectReceive(DirectRequest):
    """A block to read into ``buffer`` (uint8, one dimension)."""

    __slots__ = ("_digest", "buffer", "is_verified", "tag")

    def __init__(self, tag: int, buffer: np.ndarray, *, is_verified: bool) -> None:
        super().__init__()
        self.tag = tag
        self.buffer = buffer
        self.is_verified = is_verified
        self._digest = b""

    def fold(self) -> None:
        """Makes the digest of what has landed in one piece. Modifies: ``digest``."""
        if self.is_verified:
            self._digest = xxhash.xxh3_128_digest(self.buffer.data)

    def read_in_pieces(self, memory: PeerMemory, source: int) -> None:
        """Copies a large block from ``source`` of the peer. Modifies: ``buffer``, ``digest``. Raises: PeerLost."""
        buffer, into, num_bytes = self.buffer, address_of(self.buffer), self.buffer.nbytes
        hasher = xxhash.xxh3_128() if self.is_verified else None
        for start in range(0, num_bytes, READ_PIECE_BYTES):
            end = min(start + READ_PIECE_BYTES, num_bytes)
            memory.copy(into + start, source + start, end - start)
            if hasher is not None:
                hasher.update(buffer[start:end].data)
        if hasher is not None:
            self._digest = hasher.digest()

    def digest(self) -> bytes:
        """Returns the 16 bytes of xxh3-128 of what landed; it must be completed and verified."""
        assert self.completed and self.is_verified, (self.completed, self.is_verified)
        return self._digest


_Ready = tuple[DirectReceive, int, int]
"""A block that is offered and wanted, with its address in the peer and the offered size."""


class LinkReads:
    """The blocks of one link. All calls on the transport's thread; ``step`` and the making raise PeerLost."""

    def __init__(self, device: UcxDevice, endpoint: Any, memory: PeerMemory, mail: Mailbox, *, my_tag: int) -> None:
        self._memory = memory
        self._out = Outbox(device, endpoint, my_tag, MESSAGE_BYTES)
        self._mail = mail
        self._sends: dict[int, DirectRequest] = {}
        """Offered, by tag."""
        self._wanted: dict[int, DirectReceive] = {}
        self._offers: dict[int, tuple[int, int]] = {}
        """Address and size by tag, of blocks that nobody wants yet."""
        self._ready: deque[_Ready] = deque()
        self._reports: list[int] = []
        mail.attach(endpoint)

    @property
    def has_work(self) -> bool:
        """True when a block can be read now."""
        return bool(self._ready)

    def send(self, tags: Sequence[int], buffers: Sequence[np.ndarray]) -> list[DirectRequest]:
        """Offers blocks. A request completes when the peer has read its block, or broken when the link is broken."""
        requests = [DirectRequest() for _ in tags]
        self._sends.update(zip(tags, requests, strict=True))
        for start in range(0, len(requests), OFFERS_PER_MESSAGE):
            part = slice(start, start + OFFERS_PER_MESSAGE)
            words = [
                word for tag, buffer in zip(tags[part], buffers[part], strict=True) for word in _offer(tag, buffer)
            ]
            try:
                self._send(_OFFERS, len(words) // WORDS_PER_OFFER, words)
            except PeerLost:
                # Not an error of this call: what was offered before can still be read, so every block has its request.
                self._break_sends()
                break
        return requests

    def receive(self, receives: Sequence[DirectReceive]) -> None:
        """Wants blocks. They complete in ``step``."""
        for receive in receives:
            offer = self._offers.pop(receive.tag, None)
            if offer is None:
                self._wanted[receive.tag] = receive
            else:
                self._ready.append((receive, *offer))

    def step(self) -> bool:
        """Takes messages, reads blocks and reports them. Returns True when something moved."""
        moved = self._take_messages()
        taken: list[_Ready] = []
        num_bytes = 0
        while self._ready and num_bytes < STEP_BYTES and len(taken) < STEP_BLOCKS:
            taken.append(item := self._ready.popleft())
            num_bytes += item[2]
        if taken:
            self._read(taken)
        if self._reports and (not self._ready or len(self._reports) >= MAX_REPORTS_WAITING):
            reports, self._reports = self._reports, []
            for start in range(0, len(reports), REPORTS_PER_MESSAGE):
                part = reports[start : start + REPORTS_PER_MESSAGE]
                self._send(_REPORTS, len(part), part)
        return moved or bool(taken)

    def _read(self, taken: list[_Ready]) -> None:
        """Reads blocks that are offered and wanted, many small ones by one call. Raises: PeerLost."""
        # Known to ``end`` again, should the reading fail.
        self._wanted.update((receive.tag, receive) for receive, _, _ in taken)
        fitting = [item for item in taken if item[2] == item[0].buffer.nbytes]
        for receives, segments in _runs(fitting):
            if receives[0].buffer.nbytes > READ_PIECE_BYTES:
                receives[0].read_in_pieces(self._memory, segments[0][1])
                continue
            if len(segments) == 1:
                self._memory.copy(*segments[0])
            else:
                self._memory.copy_all(segments)
            for receive in receives:
                receive.fold()
        # Asked once for all of them, after the last copy: what lives now lived all the while.
        self._memory.check_alive()
        for receive, _, size in taken:
            del self._wanted[receive.tag]
            receive.end = RequestEnd.DONE if size == receive.buffer.nbytes else RequestEnd.DAMAGED
            receive.completed = True
            self._reports.append(receive.tag)

    def end(self) -> None:
        """Ends every block that has not ended: broken. Memory of posted messages stays with this object."""
        for receive in (*self._wanted.values(), *(receive for receive, _, _ in self._ready)):
            receive.completed = True
        self._break_sends()
        self._wanted.clear()
        self._ready.clear()
        self._offers.clear()
        self._memory.close()

    def _break_sends(self) -> None:
        for request in self._sends.values():
            request.completed = True
        self._sends.clear()

    def _take_messages(self) -> bool:
        came = False
        while (message := self._mail.take()) is not None:
            came = True
            kind, count = np.frombuffer(message, "<u4", 2).tolist()
            words = np.frombuffer(message, "<u8", offset=8).tolist()
            if kind == _REPORTS and count <= REPORTS_PER_MESSAGE:
                self._on_reports(words[:count])
            elif kind == _OFFERS and count <= OFFERS_PER_MESSAGE:
                self._on_offers(words[: count * WORDS_PER_OFFER])
            else:
                raise PeerLost(f"a message of unknown kind {kind} or of {count} entries")
        return came

    def _on_reports(self, tags: list[int]) -> None:
        for tag in tags:
            request = self._sends.pop(tag, None)
            if request is not None:
                request.end, request.completed = RequestEnd.DONE, True

    def _on_offers(self, words: list[int]) -> None:
        for tag, address, size in zip(words[0::3], words[1::3], words[2::3], strict=True):
            receive = self._wanted.pop(tag, None)
            if receive is not None:
                self._ready.append((receive, address, size))
            elif len(self._offers) < MAX_OFFERS:
                self._offers[tag] = (address, size)
            else:
                raise PeerLost(f"more than {MAX_OFFERS} blocks that nobody wants")

    def _send(self, kind: int, count: int, words: list[int]) -> None:
        self._out.send(struct.pack(f"<2I{len(words)}Q", kind, count, *words))


def _runs(ready: Sequence[_Ready]) -> Iterator[tuple[list[DirectReceive], list[Segment]]]:
    """Returns what to read by one call each: blocks of together at most ``READ_PIECE_BYTES``, or a larger one alone.

    Blocks that lie side by side at both ends become one segment.
    """
    receives: list[DirectReceive] = []
    segments: list[Segment] = []
    num_bytes = 0
    for receive, source, size in ready:
        if receives and (num_bytes + size > READ_PIECE_BYTES or len(segments) == SEGMENTS_MAX):
            yield receives, segments
            receives, segments, num_bytes = [], [], 0
        into = address_of(receive.buffer)
        if segments and segments[-1][0] + segments[-1][2] == into and segments[-1][1] + segments[-1][2] == source:
            segments[-1] = (*segments[-1][:2], segments[-1][2] + size)
        else:
            segments.append((into, source, size))
        receives.append(receive)
        num_bytes += size
    if receives:
        yield receives, segments


def _offer(tag: int, buffer: np.ndarray) -> tuple[int, int, int]:
    return tag, address_of(buffer), buffer.nbytes
