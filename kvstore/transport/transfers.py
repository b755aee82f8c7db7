"""The book of transfers: what was asked for, what has ended, what may still touch memory.

Shared by every backend. A backend hands over request objects (anything with ``completed``) and says how a completed
one ended; the book verifies digests, keeps deadlines, resolves futures and remembers what is not settled.

Life cycle of a transfer: admitted (outstanding) -> posted in a batch -> verdict | given up -> settled. Given up means
reported as TIMEOUT or PEER_LOST while its memory may still be touched; the book then holds that memory until the
request completes (settled, unless it broke and the backend says that this proves nothing) or the peer is proved dead
(settled by ``settle_peer``).

``admit``, ``refuse``, ``outstanding``, ``count`` and ``stats`` may be called on any thread, the rest only on the
backend's own. The book never moves a byte and never reads a clock.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from itertools import compress
from typing import Any, TypeVar

import numpy as np

from kvstore.digest import block_digest
from kvstore.errors import BadInput
from kvstore.transport.base import TAG_MAX, Results, TransferResult

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_BATCH_BLOCKS = 1 << 16
SCAN_BLOCKS = 4
"""Open transfers of a batch that a step looks at though they have not completed. They complete in the order in which
they were posted, nearly; one that overtakes more is looked at once those before it are through, and at the deadline at
the latest."""
SCAN_BYTES = 4 << 20
"""Completed blocks of a batch that one step gives verdicts to: it may have to read them, and other peers wait."""


class Direction(IntEnum):
    """An integer, because it is part of a key that is made for every block."""

    SEND = 0
    RECEIVE = 1


VERBS = ("sent", "received")
"""Of the counters, by direction."""


class RequestEnd(Enum):
    """How a completed request ended."""

    DONE = "done"
    DAMAGED = "damaged"
    """Over, and nobody touches the memory any more, but the bytes are not those that were asked for."""
    BROKEN = "broken"
    """Given up by the backend. See ``Batch.is_settled_by_end`` for whether its memory may still be touched."""


@dataclass(slots=True, eq=False)
class Batch:
    """Transfers that were asked for together and report together; one entry per block in every list."""

    peer: str
    direction: Direction
    tags: list[int]
    digests: list[bytes | None]
    deadline: float
    buffers: list[Any]
    future: Future[Results] = field(default_factory=lambda: PromisedFuture())
    keys: list[int] = field(default_factory=list)
    """What the transfers are called in the book; given by ``admit``."""
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
    key: int
    request: Any
    buffer: Any
    is_settled_by_end: bool


FAILURE_COUNTERS = (
    (TransferResult.CORRUPT, "corrupt_blocks"),
    (TransferResult.TIMEOUT, "timeouts"),
    (TransferResult.PEER_LOST, "lost_blocks"),
)


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
        self._outstanding: dict[str, set[int]] = {}
        """Keys by peer, see ``_key``."""
        self._blocks_names = [f"{name}_{verb}_blocks" for verb in VERBS]
        self._bytes_names = [f"{name}_{verb}_bytes" for verb in VERBS]
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

    def admit(self, batch: Batch) -> None:
        """Marks the tags outstanding. Raises: BadInput for a tag out of range, given twice or outstanding already.

        Modifies: ``batch.keys``.
        """
        tags = batch.tags
        if len(tags) > MAX_BATCH_BLOCKS:
            raise BadInput("blocks", len(tags), f"at most {MAX_BATCH_BLOCKS} at a time")
        if tags and not 0 <= min(tags) <= max(tags) <= TAG_MAX:
            raise BadInput("tag", tags, f"must lie in [0, {TAG_MAX}]")
        direction = batch.direction
        batch.keys = [_key(direction, tag) for tag in tags]
        keys = set(batch.keys)
        if len(keys) != len(tags):
            raise BadInput("tag", tags, "a tag is given once")
        with self._lock:
            known = self._outstanding.setdefault(batch.peer, set())
            if not known.isdisjoint(keys):
                raise BadInput("tag", sorted(_tag(key) for key in known & keys), "is in flight already")
            known |= keys

    def outstanding(self, peer: str) -> frozenset[int]:
        """Returns the tags of transfers with ``peer`` that are not settled."""
        with self._lock:
            return frozenset(map(_tag, self._outstanding.get(peer, ())))

    def stats(self) -> dict[str, int]:
        with self._lock:
            return dict(self._stats)

    def count(self, name: str, amount: int = 1) -> None:
        """Adds to the counter ``<book name>_<name>``."""
        with self._lock:
            self._stats[f"{self._name}_{name}"] += amount

    def refuse(self, batch: Batch) -> None:
        """Ends an admitted batch of which nothing was posted: PEER_LOST, and settled, for nobody knows its memory."""
        self._forget(batch.peer, batch.keys)
        self.count("lost_blocks", len(batch.tags))
        batch.future.set_result([TransferResult.PEER_LOST] * len(batch.tags))

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
        if num_posted < len(batch.keys):
            self._forget(batch.peer, batch.keys[num_posted:])
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
        expected: dict[str, set[int]] = {}
        for batch in self._batches:
            for index in range(len(batch.requests)):
                if batch.results[index] is not TransferResult.PEER_LOST:
                    expected.setdefault(batch.peer, set()).add(batch.keys[index])
        kept = [self._given_up, *self._unproved.values(), *(batch.broken for batch in self._batches)]
        for item in (item for items in kept for item in items):
            expected.setdefault(item.peer, set()).add(item.key)
        with self._lock:
            assert expected == self._outstanding, f"expected {expected}, outstanding {self._outstanding}"

    def _collect_batch(self, batch: Batch, broken: set[str], *, is_last_look: bool) -> bool:
        """Gives a verdict to those that have completed, oldest first. Modifies: ``open_idx``, ``results``."""
        open_idx = batch.open_idx
        ended = self._look(batch, broken, is_last_look=is_last_look)
        if open_idx[: len(ended)] == ended:
            del open_idx[: len(ended)]
        else:
            for index in ended:
                open_idx.remove(index)
        return bool(ended)

    def _look(self, batch: Batch, broken: set[str], *, is_last_look: bool) -> list[int]:
        """Returns those that have a verdict now; a last look is at all of them."""
        requests = batch.requests
        ended: list[int] = []
        num_waiting = num_bytes = 0
        for index in batch.open_idx:
            if requests[index].completed:
                batch.results[index] = self._verdict(batch, index, broken)
                ended.append(index)
                num_bytes += batch.buffers[index].nbytes
            else:
                num_waiting += 1
            if (num_waiting == SCAN_BLOCKS or num_bytes >= SCAN_BYTES) and not is_last_look:
                break
        return ended

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
        is_settled = [result is TransferResult.OK or result is TransferResult.CORRUPT for result in results]
        self._batches.remove(batch)
        self._forget(batch.peer, batch.keys if all(is_settled) else compress(batch.keys, is_settled))
        with self._lock:
            stats = self._stats
            stats[self._blocks_names[batch.direction]] += sum(is_settled)
            stats[self._bytes_names[batch.direction]] += sum(
                buffer.nbytes for buffer in compress(batch.buffers, is_settled)
            )
            if results.count(TransferResult.OK) < len(results):
                for result, name in FAILURE_COUNTERS:
                    stats[f"{self._name}_{name}"] += results.count(result)
        # Looked at next, so that their settlement is told after their result.
        self._given_up += batch.broken
        batch.broken = []
        batch.future.set_result(results)

    def _collect_given_up(self) -> bool:
        if not self._given_up:
            return False
        done: list[_GivenUp] = []
        still_open: list[_GivenUp] = []
        for item in self._given_up:
            (done if item.request.completed else still_open).append(item)
        if not done:
            return False
        self._given_up = still_open
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
            self._forget(item.peer, (item.key,))
        tags = [_tag(item.key) for item in items if item.key & 1 == Direction.RECEIVE]
        if tags and self.on_settled is not None:
            try:
                self.on_settled(tags)
            except Exception:
                # The listener's fault must not take the transport down with it.
                logger.exception("on_settled_failed tags=%s", tags)

    def _forget(self, peer: str, keys: Iterable[int]) -> None:
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
            batch.keys[index],
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


class PromisedFuture(Future[T]):
    """A future that its holder cannot cancel: what it stands for is on its way already."""

    def cancel(self) -> bool:
        return False


def fail(future: Future[Any], error: Exception) -> None:
    """Ends ``future`` with ``error`` unless it has ended."""
    if not future.done():
        future.set_exception(error)


def _key(direction: Direction, tag: int) -> int:
    """Returns the name of a transfer among those of a peer: both sides of a pair may use the same tags."""
    return tag << 1 | direction


def _tag(key: int) -> int:
    return key >> 1
