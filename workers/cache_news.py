"""What a worker tells its ingresses about the blocks in its own pool, so that they can route to them.

Owns one ``Announcer`` per ingress link. A link that is new, or whose connection broke, gets a snapshot; then what came
and went, with numbers. Belongs to the link loop. News is a hint: whoever routes by it is wrong at the cost of a miss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvstore.core.announcer import Announcer
from kvstore.core.ids import BlockHash
from kvstore.core.messages import CacheChanged, CacheSnapshot
from workers.ingress_link import IngressLink

TIER = "device"
TELL_DELAY_S = 0.01
"""So long changes are gathered before they are told."""


class CacheNews:
    """The news of one worker; ``blocks`` returns the hashes of every block that is cached now."""

    def __init__(self, fingerprint_digest: bytes, blocks: Callable[[], Sequence[BlockHash]]) -> None:
        self._fingerprint_digest = fingerprint_digest
        self._blocks = blocks
        self._announcers: dict[IngressLink, Announcer] = {}
        self._is_due = False

    def begin(self, link: IngressLink) -> None:
        """A link is new or was connected again: its ingress gets a snapshot, once it is connected."""
        self._announcers.setdefault(link, Announcer()).needs_snapshot = True
        self.tell()

    def end(self, link: IngressLink) -> None:
        """An ingress is forgotten."""
        self._announcers.pop(link, None)

    def added(self, block_hash: BlockHash) -> None:
        """A block can be found in the pool now."""
        for announcer in self._announcers.values():
            announcer.added(TIER, block_hash)
        self._tell_soon()

    def removed(self, block_hash: BlockHash) -> None:
        """A block has left the pool."""
        for announcer in self._announcers.values():
            announcer.removed(TIER, block_hash)
        self._tell_soon()

    def tell(self) -> None:
        """Sends what waits to everybody who is connected. What cannot be sent now is told by a snapshot later."""
        self._is_due = False
        for link, announcer in self._announcers.items():
            if link.connected.is_set() and not self._tell(link, announcer):
                announcer.needs_snapshot = True

    def _tell(self, link: IngressLink, announcer: Announcer) -> bool:
        if announcer.needs_snapshot:
            for part in announcer.snapshot({TIER: self._blocks()}):
                hashes = tuple(block_hash for change in part.changes for block_hash in change.added)
                whole = CacheSnapshot(
                    sequence=part.sequence,
                    part=part.part,
                    is_last=part.is_last,
                    fingerprint=self._fingerprint_digest,
                    hashes=hashes,
                )
                if not link.send(whole):
                    return False
        while (news := announcer.take()) is not None:
            (change,) = news.changes
            changed = CacheChanged(sequence=news.sequence, added=tuple(change.added), removed=tuple(change.removed))
            if not link.send(changed):
                return False
        return True

    def _tell_soon(self) -> None:
        if not self._is_due and self._announcers:
            self._is_due = True
            asyncio.get_running_loop().call_later(TELL_DELAY_S, self.tell)
