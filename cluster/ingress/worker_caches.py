"""What the pools of workers have, as the workers announce it to this ingress, by block hash.

Owns a ``Directory`` of worker lives and the digest with which each of them names its blocks. Soft state: a link that
comes back brings a snapshot, a life that is gone takes its entries with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.ingress.relay import WorkerLink
from kvstore.core.directory import Directory, Heard, TierChange
from kvstore.core.ids import BlockHash
from kvstore.core.messages import CacheAsk, CacheChanged, CacheSnapshot

TIER = "device"
FOR_EVER_NS = 1 << 62
"""A life ends when it is proved over, not when it is silent: links and leases watch that."""
SWEEP_BLOCKS = 4_096


class WorkerCaches:
    """The cached blocks of every worker that is connected. Belongs to the ingress's loop."""

    def __init__(self) -> None:
        self._directory = Directory(lease_ns=FOR_EVER_NS)
        self._fingerprints: dict[str, bytes] = {}
        """Life -> digest of its fingerprint."""
        self._names: dict[str, str] = {}
        """Life -> name of the worker."""

    def on_news(self, link: WorkerLink, news: CacheSnapshot | CacheChanged) -> None:
        """A worker has told what it has, or what changed."""
        name, life = link.worker_id, link.incarnation
        if isinstance(news, CacheSnapshot):
            if news.part == 0:
                self._directory.join(name, life, sequence=news.sequence, now_ns=0)
                self._fingerprints[life] = news.fingerprint
                self._names[life] = name
            changes = [TierChange(TIER, _hashes(news.hashes), ())]
            heard = self._directory.snapshot(
                name, life, sequence=news.sequence, part=news.part, is_last=news.is_last, changes=changes, now_ns=0
            )
        else:
            changes = [TierChange(TIER, _hashes(news.added), _hashes(news.removed))]
            heard = self._directory.announce(name, life, sequence=news.sequence, changes=changes, now_ns=0)
        if heard is Heard.RESYNC:
            link.send(CacheAsk())

    def gone(self, incarnation: str) -> None:
        """A life is over."""
        name = self._names.pop(incarnation, None)
        self._fingerprints.pop(incarnation, None)
        if name is not None:
            self._directory.leave(name, incarnation)

    def sweep(self) -> None:
        """Takes a bounded number of entries of lives that are gone out."""
        self._directory.sweep(SWEEP_BLOCKS)

    @property
    def fingerprint(self) -> bytes | None:
        """Returns the digest that workers name their blocks with; None before one has told. All of a cluster agree."""
        return next(iter(self._fingerprints.values()), None)

    def prefixes(self, hashes: Sequence[BlockHash]) -> dict[str, int]:
        """Returns life -> how many blocks of the prefix its pool has; lives without any are left out."""
        found: dict[str, int] = {}
        for index, places in enumerate(self._directory.match(hashes)):
            going_on = [place.incarnation for place in places if found.get(place.incarnation, 0) == index]
            if not going_on:
                break
            for life in going_on:
                found[life] = index + 1
        return found

    def __len__(self) -> int:
        """Returns how many blocks are known."""
        return len(self._directory)


def _hashes(raw: Sequence[bytes]) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(block_hash) for block_hash in raw)
