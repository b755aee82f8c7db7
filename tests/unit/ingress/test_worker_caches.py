"""Workers tell an ingress what their pools have: snapshots, changes, lost connections, deaths."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec

from cluster.ingress.worker_caches import WorkerCaches
from kvstore.core.ids import BlockHash
from kvstore.core.messages import CacheAsk, CacheChanged, CacheSnapshot, ToIngress, encode
from workers.cache_news import TELL_DELAY_S, CacheNews

FINGERPRINT = b"f" * 32
H = [BlockHash(bytes([number]) * 32) for number in range(8)]


class Link:
    """Both ends of one link: what the worker sends, the ingress reads; it can be down or lose a message."""

    def __init__(self, caches: WorkerCaches, name: str = "prefill-0", life: int = 1) -> None:
        self.caches = caches
        self.worker_id, self.incarnation = name, f"{name}#{life}"
        self.connected = asyncio.Event()
        self.connected.set()
        self.is_up = True
        self.loses = 0
        self.asked = 0

    def send(self, message: Any) -> bool:
        if isinstance(message, CacheAsk):
            self.asked += 1
            return True
        if not self.is_up:
            return False
        if self.loses:
            self.loses -= 1
            return True
        decoded = msgspec.msgpack.decode(encode(message), type=ToIngress)
        assert isinstance(decoded, CacheSnapshot | CacheChanged)
        self.caches.on_news(self, decoded)  # type: ignore[arg-type]
        return True


def make_site(*, blocks: list[BlockHash] | None = None) -> SimpleNamespace:
    caches = WorkerCaches()
    cached = [] if blocks is None else blocks
    news = CacheNews(FINGERPRINT, lambda: cached)
    return SimpleNamespace(caches=caches, news=news, link=Link(caches), cached=cached)


async def test_a_snapshot_then_changes() -> None:
    """Known at once; a block that leaves shortens the prefix."""
    site = make_site(blocks=H[:2])
    site.news.begin(site.link)
    assert site.caches.fingerprint == FINGERPRINT
    assert site.caches.prefixes(H) == {"prefill-0#1": 2}
    site.news.added(H[2])
    site.news.removed(H[1])
    await asyncio.sleep(5 * TELL_DELAY_S)
    assert site.caches.prefixes(H) == {"prefill-0#1": 1}
    site.news.added(H[1])
    site.news.tell()
    assert site.caches.prefixes(H) == {"prefill-0#1": 3}


async def test_what_could_not_be_sent_is_told_by_a_snapshot() -> None:
    """A link that is down loses nothing but time."""
    site = make_site()
    site.news.begin(site.link)
    site.link.is_up = False
    site.cached += H[:3]
    site.news.added(H[0])
    site.news.tell()
    assert site.caches.prefixes(H) == {}
    site.link.is_up = True
    site.news.tell()
    assert site.caches.prefixes(H) == {"prefill-0#1": 3}


async def test_a_missed_number_is_asked_for() -> None:
    """The ingress asks for a snapshot, and gets everything."""
    site = make_site()
    site.news.begin(site.link)
    site.link.loses = 1
    site.cached += H[:2]
    site.news.added(H[0])
    site.news.tell()
    site.news.added(H[1])
    site.news.tell()
    assert site.link.asked == 1
    site.news.begin(site.link)
    assert site.caches.prefixes(H) == {"prefill-0#1": 2}


async def test_each_worker_has_a_prefix_of_its_own_and_the_dead_have_none() -> None:
    """A later life of the same name starts from nothing."""
    site = make_site(blocks=H[:4])
    site.news.begin(site.link)
    other = Link(site.caches, "prefill-1")
    CacheNews(FINGERPRINT, lambda: [H[0], H[2]]).begin(other)  # type: ignore[arg-type]
    assert site.caches.prefixes(H) == {"prefill-0#1": 4, "prefill-1#1": 1}
    site.caches.gone("prefill-0#1")
    assert site.caches.prefixes(H) == {"prefill-1#1": 1}
    CacheNews(FINGERPRINT, lambda: H[:1]).begin(Link(site.caches, "prefill-0", 2))  # type: ignore[arg-type]
    assert site.caches.prefixes(H) == {"prefill-0#2": 1, "prefill-1#1": 1}
    site.caches.sweep()
    assert len(site.caches) == 2


async def test_f18_the_index_is_bounded_by_the_pools_and_forgets_removed_workers() -> None:
    """2,000 prompts through a pool of 64 blocks, then 20 lives that come and go: never more entries than slots."""
    caches = WorkerCaches()
    pool: list[BlockHash] = []
    news = CacheNews(FINGERPRINT, lambda: list(pool))
    news.begin(Link(caches))  # type: ignore[arg-type]
    most = 0
    for number in range(2000):
        for part in range(8):
            if len(pool) == 64:
                news.removed(pool.pop(0))
            pool.append(BlockHash(f"{number}:{part}".encode().ljust(32, b".")))
            news.added(pool[-1])
        news.tell()
        most = max(most, len(caches))
    assert most <= 64 and len(caches) == 64
    for life in range(1, 21):
        caches.gone(f"prefill-0#{life}")
        CacheNews(FINGERPRINT, lambda: pool[:3]).begin(Link(caches, life=life + 1))  # type: ignore[arg-type]
        caches.sweep()
        assert caches.prefixes(pool) == {f"prefill-0#{life + 1}": 3}
        assert len(caches) == 3
    caches.gone("prefill-0#21")
    caches.sweep()
    assert len(caches) == 0 and caches.fingerprint is None and caches.prefixes(pool) == {}
