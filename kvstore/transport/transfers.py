"""The book of transfers: what was asked for, what has ended, what may still touch memory.

Shared by every backend. A backend hands over request objects (anything with ``completed``) and says how a completed
one ended; the book verifies digests, keeps deadlines, resolves futures and remembers what is not settled.

Life cycle of a transfer: admitted (outstanding) -> posted in a batch -> verdict | given up -> settled. Given up means
reported as TIMEOUT or PEER_LOST while its memory may still be touched; the book then holds that memory until the
request completes (settled, unless it broke and the backend says that this proves nothing) or the peer is proved dead
(settled by ``settle_peer``).

``admit``, ``retract``, ``outstanding`` and ``stats`` may be called on any thread, the rest only on the backend's own.
The book never moves a byte and never reads a clock.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

import numpy as np

from kvstore.digest import block_digest
from kvstore.errors import BadInput
from kvstore.transport.base import SETTLED, TAG_MAX, Results, TransferResult

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_BATCH_BLOCKS = 1 << 16
SCAN_BLOCKS = 4
"""Oldest open transfers of a batch that one step looks at and verifies. They complete in the order in which they were
posted, nearly; one that overtakes is looked at once those before it are through, and at the deadline at the latest.
Small, so that a step is short: other peers wait for it."""


class Direction(Enum):
    SEND = "sent"
    RECEIVE = "received"


class RequestEnd(Enum):
    """How a completed request ended."""

    DONE = "done"
    DAMAGED = "damaged"
    """Over, and nobody touches the memory any more, but the bytes are not those that were asked for."""
    BROKEN = "broken"
    """Given up by the backend. See ``Batch.is_settled_by_end`` for whether its memory may still be touched."""


@dataclass(slots=True)
class Batch:
    """Transfers that were asked for together and report together; one entry per block in every list."""

    peer: str
    direction: Direction
    tags: list[int]
    digests: list[bytes | None]
    deadline: float
    future: Future[Results]
    buffers: list[Any] = field(default_factory=list)
    requests: list[Any] = field(default_factory=list)
    results: list[TransferResult | None] = field(default_factory=list)
    open_idx: list[int] = field(default_factory=list)
    """Indices without a result, ascending."""
    is_settled_by_end: bool = False
    """True when nobody touches the memory of a completed request any more, also of one that broke."""
    broken: list[_GivenUp] = field(default_factory=list)
    """Those that ended as BROKEN, kept until the batch has reported."""
    is_passive: bool = False
    """True when the other side moves these bytes without help."""


@dataclass(slots=True)
class _GivenUp:
    """A transfer that has its result but may still touch memory; keeps that memory referenced."""

    peer: str
    direction: Direction
    tag: int
    request: Any
    buffer: Any
    is_settled_by_end: bool


class TransferBook:
    """See the module. ``name`` prefixes the counters; ``ended`` tells how a completed request ended.

    ``digest`` returns the digest of a request's destination, for a backend that has made it already.
    """

    def __init__(
        self,
        name: str,
        ended: Callable[[Any], RequestEnd],
        *,
        digest: Callable[[Any, np.ndarray], bytes] = lambda request, buffer: block_digest(buffer),
    ) -> None:
        self.on_settled: Callable[[list[int]], None] | None = None
        self.on_broken: Callable[[str], None] = lambda peer: None
        """Called with a peer whose request broke."""
        self._name = name
        self._ended = ended
        self._digest = digest
        self._batches: list[Batch] = []
        self._given_up: list[_GivenUp] = []
        self._unproved: dict[str, list[_GivenUp]] = {}
        self._lock = threading.Lock()
        self._outstanding: dict[str, set[tuple[Direction, int]]] = {}
        self._stats = dict.fromkeys(
            (
                f"{name}_sent_blocks",
                f"{name}_sent_bytes",
                f"{name}_received_blocks",
                f"{name}_received_bytes",
                f"{name}_corrupt_blocks",
                f"{name}_timeouts",
                f"{name}_lost_blocks",
                f"{name}_late_blocks",
                f"{name}_peers_lost",
            ),
            0,
        )

    # --- any thread -------------------------------------------------------------------------------------------

    def admit(self, peer: str, direction: Direction, tags: Sequence[int]) -> None:
        """Marks tags outstanding. Raises: BadInput for a tag out of range, given twice or outstanding already."""
        if len(tags) > MAX_BATCH_BLOCKS:
            raise BadInput("blocks", len(tags), f"at most {MAX_BATCH_BLOCKS} at a time")
        keys = {(direction, tag) for tag in tags}
        if len(keys) != len(tags):
            raise BadInput("tag", list(tags), "a tag is given once")
        for tag in tags:
            if not 0 <= tag <= TAG_MAX:
                raise BadInput("tag", tag, f"must lie in [0, {TAG_MAX}]")
        with self._lock:
            known = self._outstanding.setdefault(peer, set())
            twice = known & keys
            if twice:
                raise BadInput("tag", sorted(tag for _direction, tag in twice), "is in flight already")
            known |= keys

    def outstanding(self, peer: str) -> frozenset[int]:
        """Returns the tags of transfers with ``peer`` that are not settled."""
        with self._lock:
            return frozenset(tag for _direction, tag in self._outstanding.get(peer, ()))

    def stats(self) -> dict[str, int]:
        with self._lock:
            return dict(self._stats)

    def count(self, name: str, amount: int = 1) -> None:
        """Adds to the counter ``<book name>_<name>``."""
        with self._lock:
            self._stats[f"{self._name}_{name}"] += amount

    def retract(self, peer: str, direction: Direction, tags: Sequence[int]) -> None:
        """Forgets admitted tags that were never posted, so that nobody can touch their memory."""
        self._forget(peer, [(direction, tag) for tag in tags])

    # --- the backend's thread ---------------------------------------------------------------------------------

    @property
    def num_batches(self) -> int:
        return len(self._batches)

    @property
    def num_given_up(self) -> int:
        return len(self._given_up)

    def batches(self) -> Sequence[Batch]:
        return self._batches

    def next_deadline(self) -> float | None:
        """Returns the earliest deadline of a batch, on the clock of ``collect``."""
        return min((batch.deadline for batch in self._batches), default=None)

    def begin(self, batch: Batch) -> None:
        """Takes a batch whose admitted transfers were posted; those without a request are PEER_LOST and settled."""
        num_posted = len(batch.requests)
        batch.results = [None] * num_posted + [TransferResult.PEER_LOST] * (len(batch.tags) - num_posted)
        batch.open_idx = list(range(num_posted))
        self.retract(batch.peer, batch.direction, batch.tags[num_posted:])
        self._batches.append(batch)

    def collect(self, now: float) -> bool:
        """Reports what has completed or run out of time by ``now``. Returns True when something ended."""
        moved = False
        broken: set[str] = set()
        for batch in tuple(self._batches):
            moved |= self._collect_batch(batch, broken, is_last_look=False)
            if batch.open_idx and now >= batch.deadline:
                self._collect_batch(batch, broken, is_last_look=True)
                self._give_up(batch, TransferResult.TIMEOUT)
            if not batch.open_idx:
                self._finish(batch)
                moved = True
        moved |= self._collect_given_up()
        for peer in broken:
            self.on_broken(peer)
        return moved

    def give_up_peer(self, peer: str) -> None:
        """Ends every open transfer of ``peer``: with its verdict if it has completed, else with PEER_LOST."""
        for batch in [batch for batch in self._batches if batch.peer == peer]:
            self._collect_batch(batch, set(), is_last_look=True)
            self._give_up(batch, TransferResult.PEER_LOST)
            self._finish(batch)

    def give_up_all(self) -> None:
        """Ends every open transfer with PEER_LOST and looks at none of them, for the end of the backend."""
        for batch in tuple(self._batches):
            self._give_up(batch, TransferResult.PEER_LOST)
            self._finish(batch)

    def settle_peer(self, peer: str) -> None:
        """Settles everything of a peer that is proved dead and whose link is closed. Modifies: ``outstanding``."""
        done = self._unproved.pop(peer, []) + [item for item in self._given_up if item.peer == peer]
        self._given_up = [item for item in self._given_up if item.peer != peer]
        self._settle(done)

    def check_invariants(self) -> None:
        """Everything unreported or given up is outstanding, and nothing else is, once nothing waits to be posted."""
        expected: dict[str, set[tuple[Direction, int]]] = {}
        for batch in self._batches:
            for index in range(len(batch.requests)):
                if batch.results[index] is not TransferResult.PEER_LOST:
                    expected.setdefault(batch.peer, set()).add((batch.direction, batch.tags[index]))
        kept = [self._given_up, *self._unproved.values(), *(batch.broken for batch in self._batches)]
        for item in (item for items in kept for item in items):
            expected.setdefault(item.peer, set()).add((item.direction, item.tag))
        with self._lock:
            assert expected == self._outstanding, f"expected {expected}, outstanding {self._outstanding}"

    def _collect_batch(self, batch: Batch, broken: set[str], *, is_last_look: bool) -> bool:
        """Gives a verdict to those that have completed, oldest first. Modifies: ``open_idx``, ``results``."""
        ended: list[int] = []
        requests = batch.requests
        for index in batch.open_idx if is_last_look else batch.open_idx[:SCAN_BLOCKS]:
            if requests[index].completed:
                ended.append(index)
                batch.results[index] = self._verdict(batch, index, broken)
        for index in ended:
            batch.open_idx.remove(index)
        return bool(ended)

    def _verdict(self, batch: Batch, index: int, broken: set[str]) -> TransferResult:
        """Result of one completed transfer; a receive is verified here, while its bytes are still in the cache."""
        end = self._ended(batch.requests[index])
        if end is RequestEnd.BROKEN:
            broken.add(batch.peer)
            batch.broken.append(self._given_up_of(batch, index))
            return TransferResult.PEER_LOST
        digest = batch.digests[index]
        if end is RequestEnd.DONE and (
            digest is None or self._digest(batch.requests[index], batch.buffers[index]) == digest
        ):
            return TransferResult.OK
        return TransferResult.CORRUPT

    def _give_up(self, batch: Batch, result: TransferResult) -> None:
        for index in batch.open_idx:
            batch.results[index] = result
            self._given_up.append(self._given_up_of(batch, index))
        batch.open_idx = []

    def _finish(self, batch: Batch) -> None:
        """Reports a batch that has all its results, and settles what ended well."""
        results = [result for result in batch.results if result is not None]
        settled = [(batch.direction, tag) for tag, result in zip(batch.tags, results, strict=True) if result in SETTLED]
        num_bytes = sum(
            buffer.nbytes for buffer, result in zip(batch.buffers, results, strict=True) if result in SETTLED
        )
        self._batches.remove(batch)
        self._forget(batch.peer, settled)
        with self._lock:
            self._stats[f"{self._name}_{batch.direction.value}_blocks"] += len(settled)
            self._stats[f"{self._name}_{batch.direction.value}_bytes"] += num_bytes
            self._stats[f"{self._name}_corrupt_blocks"] += results.count(TransferResult.CORRUPT)
            self._stats[f"{self._name}_timeouts"] += results.count(TransferResult.TIMEOUT)
            self._stats[f"{self._name}_lost_blocks"] += results.count(TransferResult.PEER_LOST)
        # Looked at next, so that their settlement is told after their result.
        self._given_up += batch.broken
        batch.broken = []
        batch.future.set_result(results)

    def _collect_given_up(self) -> bool:
        done = [item for item in self._given_up if item.request.completed]
        if not done:
            return False
        self._given_up = [item for item in self._given_up if not item.request.completed]
        settled: list[_GivenUp] = []
        for item in done:
            is_broken = self._ended(item.request) is RequestEnd.BROKEN
            if is_broken and not item.is_settled_by_end:
                # A cancelled request proves nothing about the other side.
                self._unproved.setdefault(item.peer, []).append(item)
                continue
            if not is_broken:
                self.count("late_blocks")
            settled.append(item)
        self._settle(settled)
        return True

    def _settle(self, items: list[_GivenUp]) -> None:
        if not items:
            return
        for item in items:
            self._forget(item.peer, [(item.direction, item.tag)])
        tags = [item.tag for item in items if item.direction is Direction.RECEIVE]
        if tags and self.on_settled is not None:
            try:
                self.on_settled(tags)
            except Exception:
                # The listener's fault must not take the transport down with it.
                logger.exception("on_settled_failed tags=%s", tags)

    def _forget(self, peer: str, keys: list[tuple[Direction, int]]) -> None:
        with self._lock:
            known = self._outstanding.get(peer)
            if known is None:
                return
            known.difference_update(keys)
            if not known:
                del self._outstanding[peer]

    def _given_up_of(self, batch: Batch, index: int) -> _GivenUp:
        return _GivenUp(
            batch.peer,
            batch.direction,
            batch.tags[index],
            batch.requests[index],
            batch.buffers[index],
            batch.is_settled_by_end,
        )


def bytes_of(block: memoryview, *, is_written: bool) -> np.ndarray:
    """Returns the bytes of a block as an array of uint8, without a copy.

    Raises: BadInput for memory that is empty, not contiguous, or read-only though it ``is_written``.
    """
    try:
        array = np.frombuffer(block, np.uint8)
    except (ValueError, BufferError, TypeError) as error:
        raise BadInput("block", block, f"not usable as a block: {error}") from error
    if not array.nbytes:
        raise BadInput("block", block, "a block has at least 1 byte")
    if is_written and not array.flags.writeable:
        raise BadInput("block", block, "the destination of a block must be writable")
    return array


def running(future: Future[T]) -> Future[T]:
    """Returns ``future`` marked as running, so that no caller can cancel what is already on its way."""
    future.set_running_or_notify_cancel()
    return future


def fail(future: Future[Any], error: Exception) -> None:
    """Ends ``future`` with ``error`` unless it has ended."""
    if not future.done():
        future.set_exception(error)
