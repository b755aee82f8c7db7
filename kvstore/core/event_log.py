"""What came into the tiers of one store node and what left them, numbered, for whoever follows it. A pure core.

Owns the latest events, at most ``max_events``; older ones are forgotten, and a follower that is behind them starts
again from a snapshot. Numbers count from 1 in the life of a node, without gaps: whoever has every event up to a number
knows what was there.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import NamedTuple, Protocol

from kvstore.core.ids import BlockHash

MAX_EVENTS = 1 << 16


class BlockListener(Protocol):
    """Is told of every block that can be read in a tier, and of every one that cannot any more."""

    def added(self, tier: str, block_hash: BlockHash) -> None:
        """A block can be read in this tier now."""

    def removed(self, tier: str, block_hash: BlockHash) -> None:
        """A block has left this tier."""


class Listeners:
    """Tells several listeners, in order."""

    def __init__(self, *listeners: BlockListener) -> None:
        self._listeners = listeners

    def added(self, tier: str, block_hash: BlockHash) -> None:
        """See ``BlockListener``."""
        for listener in self._listeners:
            listener.added(tier, block_hash)

    def removed(self, tier: str, block_hash: BlockHash) -> None:
        """See ``BlockListener``."""
        for listener in self._listeners:
            listener.removed(tier, block_hash)


class BlockEvent(NamedTuple):
    """One block came (``is_added``) or left."""

    tier: str
    block_hash: BlockHash
    is_added: bool


class EventLog:
    """The latest events of one node. Belongs to one thread."""

    def __init__(self, max_events: int = MAX_EVENTS) -> None:
        assert max_events >= 1, max_events
        self._events: deque[BlockEvent] = deque(maxlen=max_events)
        self.sequence = 0
        """Number of the latest event."""

    def add(self, event: BlockEvent) -> None:
        """Takes the next event."""
        self.sequence += 1
        self._events.append(event)

    def after(self, sequence: int, max_events: int) -> tuple[BlockEvent, ...] | None:
        """Returns at most ``max_events`` events from number ``sequence + 1`` on.

        None: they are forgotten, or that number is of another life.
        """
        num_behind = self.sequence - sequence
        if not 0 <= num_behind <= len(self._events):
            return None
        start = len(self._events) - num_behind
        return tuple(islice(self._events, start, start + max_events))
