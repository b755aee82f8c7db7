"""Transfers that were given up, until the transport says that nobody touches their memory any more.

A transfer that ran out of time, or whose peer was lost, may still read or write its blocks when the peer wakes up.
Their slots stay fenced (``kvstore.core.block_pool``) until the transport reports the transfer complete, or the peer is
proved dead and its link closed: whichever comes first. This asks the transport, at every tick, and says so once.

Owns the list of such transfers: never more than there are blocks in the pools of both sides. Runs on the link loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvstore.transport.base import Transport


@dataclass(slots=True)
class _Open:
    peer: str
    tags: frozenset[int]
    then: Callable[[int], None]


class Settlements:
    """What one side of a worker waits for. ``num_given_up`` and ``num_settled`` count blocks and only grow."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._open: list[_Open] = []
        self.num_given_up = 0
        self.num_settled = 0

    def watch(self, peer: str, tags: Iterable[int], then: Callable[[int], None]) -> None:
        """Calls ``then(number of tags)`` once none of these transfers with ``peer`` is in flight any more."""
        entry = _Open(peer, frozenset(tags), then)
        self.num_given_up += len(entry.tags)
        self._open.append(entry)

    @property
    def num_open(self) -> int:
        """Blocks that somebody may still touch."""
        return sum(len(entry.tags) for entry in self._open)

    def look(self) -> None:
        """Asks the transport; to be called at every tick and when a peer is gone."""
        if not self._open:
            return
        in_flight = {peer: self._transport.outstanding(peer) for peer in {entry.peer for entry in self._open}}
        settled = [entry for entry in self._open if entry.tags.isdisjoint(in_flight[entry.peer])]
        self._open = [entry for entry in self._open if not entry.tags.isdisjoint(in_flight[entry.peer])]
        for entry in settled:
            self.num_settled += len(entry.tags)
            entry.then(len(entry.tags))
