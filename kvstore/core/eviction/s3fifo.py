"""S3-FIFO: a small queue for newcomers, a main queue, a ghost queue.

Source: Yang, Zhang, Qiu, Yue, Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023. As there: the
small queue has a tenth of the slots, hits only count up to three, a newcomer hit more than once moves to main when its
turn comes, main gives second chances, and what left the small queue goes straight to main if it returns soon.

The paper's queues move blocks while they search for a victim. Here the search is a question that changes nothing,
so the moves are made when the victim is removed: exactly those that the search passed over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from kvstore.core.eviction.ghosts import GhostList
from kvstore.core.eviction.slot_lists import SlotLists
from kvstore.core.ids import BlockHash

SMALL_SHARE = 0.1
MAX_HITS = 3
HITS_TO_MAIN = 2
"""A newcomer with so many hits is kept. The paper's ``freq > 1``."""

_SMALL, _MAIN = 0, 1


class S3FifoPolicy:
    """Two FIFO queues of slots and one of hashes. Events O(1), finding a victim O(1) amortised."""

    def __init__(self, num_slots: int) -> None:
        self._queues = SlotLists(num_slots, 2)
        self._num = [0, 0]
        self._small_target = max(1, int(num_slots * SMALL_SHARE))
        self._hits = bytearray(num_slots)
        self._where = bytearray(num_slots)
        self._ghosts = GhostList(num_slots - self._small_target)

    def on_insert(self, slot: int, block_hash: BlockHash, *, parent: int | None = None, is_tail: bool = False) -> None:
        """Newcomers queue in small; those that were there lately queue in main."""
        self._hits[slot] = 0
        self._put(slot, _MAIN if self._ghosts.discard(block_hash) else _SMALL)

    def on_hit(self, slot: int, block_hash: BlockHash, *, parent: int | None = None, is_tail: bool = False) -> None:
        """Counts; nothing moves."""
        self._hits[slot] = min(self._hits[slot] + 1, MAX_HITS)

    def on_refused(self, block_hash: BlockHash, *, is_tail: bool = False) -> None:
        """Nothing to remember."""

    def on_remove(self, slot: int, block_hash: BlockHash) -> None:
        """Forgets the slot, after the moves of the search that ends at it."""
        self._search_up_to(slot)
        if self._where[slot] == _SMALL:
            self._ghosts.add(block_hash)
        self._take(slot)

    def admits(self, block_hash: BlockHash, *, is_tail: bool = False) -> bool:
        """Always: the small queue is the admission."""
        return True

    def victims(self) -> Iterator[int]:
        """Yields slots in the order in which repeated searches would find them, were none inserted meanwhile."""
        queues = (deque(), deque())  # type: tuple[deque[tuple[int, int]], deque[tuple[int, int]]]
        sources = (self._queues.slots(_SMALL), self._queues.slots(_MAIN))
        left = list(self._num)

        def next_of(queue: int) -> tuple[int, int]:
            # What was put back stands behind all that was there from the start.
            slot = next(sources[queue], None)
            return queues[queue].popleft() if slot is None else (slot, self._hits[slot])

        while left[_SMALL] or left[_MAIN]:
            from_small = left[_SMALL] and (left[_SMALL] >= self._small_target or not left[_MAIN])
            queue = _SMALL if from_small else _MAIN
            slot, hits = next_of(queue)
            left[queue] -= 1
            if queue == _SMALL and hits >= HITS_TO_MAIN:
                queues[_MAIN].append((slot, 0))
                left[_MAIN] += 1
            elif queue == _MAIN and hits:
                queues[_MAIN].append((slot, hits - 1))
                left[_MAIN] += 1
            else:
                yield slot

    def _search_up_to(self, victim: int) -> None:
        """Makes the moves of one search, if that search would find ``victim``; none where it left out of turn."""
        moves: list[tuple[int, int]] = []
        num, hits = list(self._num), self._hits
        small, main = self._queues.slots(_SMALL), self._queues.slots(_MAIN)
        again: deque[tuple[int, int]] = deque()
        while num[_SMALL] or num[_MAIN]:
            if num[_SMALL] and (num[_SMALL] >= self._small_target or not num[_MAIN]):
                slot = next(small)
                num[_SMALL] -= 1
                if hits[slot] < HITS_TO_MAIN:
                    break
                moves.append((slot, 0))
                again.append((slot, 0))
                num[_MAIN] += 1
                continue
            head = next(main, None)
            slot, count = again.popleft() if head is None else (head, hits[head])
            if not count:
                break
            moves.append((slot, count - 1))
            again.append((slot, count - 1))
        if slot != victim:
            return
        for moved, count in moves:
            self._take(moved)
            self._put(moved, _MAIN)
            hits[moved] = count

    def _put(self, slot: int, queue: int) -> None:
        self._where[slot] = queue
        self._num[queue] += 1
        self._queues.append(slot, queue)

    def _take(self, slot: int) -> None:
        self._num[self._where[slot]] -= 1
        self._queues.unlink(slot)
