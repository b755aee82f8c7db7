"""The events of a store node as its clients get them: asked for by number, waited for within bounds.

Owns the ``EventLog`` and the waking of who waits for its next event. Followers pull: nothing queues up for one that is
slow, and one that comes back goes on where it was. Belongs to the node's loop.
"""

from __future__ import annotations

import asyncio

from kvstore.core.event_log import BlockEvent, EventLog
from kvstore.core.ids import BlockHash
from kvstore.store.messages import MAX_EVENTS_LISTED, BlockEventInfo, EventList, EventsAsk


class EventFeed:
    """A ``BlockListener`` that answers ``EventsAsk``."""

    def __init__(self) -> None:
        self._log = EventLog()
        self._news = asyncio.Event()

    def added(self, tier: str, block_hash: BlockHash) -> None:
        """See ``BlockListener``."""
        self._note(BlockEvent(tier, block_hash, True))

    def removed(self, tier: str, block_hash: BlockHash) -> None:
        """See ``BlockListener``."""
        self._note(BlockEvent(tier, block_hash, False))

    def _note(self, event: BlockEvent) -> None:
        self._log.add(event)
        self._news.set()

    def now(self, n: int) -> EventList:
        """Returns the number of the latest event, and none of them."""
        return EventList(n=n, sequence=self._log.sequence, has_gap=True)

    async def answer(self, ask: EventsAsk) -> EventList:
        """Returns the events after ``ask.after``; waits for the first one, at most ``ask.wait_ms``."""
        if ask.after is None:
            return self.now(ask.n)
        try:
            async with asyncio.timeout(ask.wait_ms / 1000):
                while self._log.after(ask.after, 1) == ():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            pass
        found = self._log.after(ask.after, MAX_EVENTS_LISTED)
        if found is None:
            return self.now(ask.n)
        events = tuple(BlockEventInfo(event.tier, event.block_hash, event.is_added) for event in found)  # type: ignore[arg-type]
        return EventList(n=ask.n, sequence=ask.after + len(events), events=events)
