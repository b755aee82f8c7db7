"""Two store nodes and a directory: blocks are found and fetched, and what a death, a cut or damage costs is a miss."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from store_process import block_hash_of, content
from store_site import BLOCK_BYTES, DEADLINE_S, SECRET, Site, blocks, load, until

from kvstore.core.quota import tenant_of
from kvstore.net.host import new_incarnation
from kvstore.store import directory_link, messages, peer_fetch
from kvstore.store.client import LoadResult, StoreClient
from kvstore.store.directory_server import DirectoryHost
from kvstore.store.disk.layout import file_bytes
from kvstore.store.host import DiskPlan, StoreHost
from kvstore.store.inspection import origin_of
from kvstore.store.slab import remove_dead_slabs

LEASE_MS = 400


class Pair:
    """Nodes ``near`` and ``far``, a client of each, and the directory both announce to."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._directories: list[DirectoryHost] = []
        self._address = ("", 0)

    async def start(
        self, *, near_blocks: int = 16, quotas: dict[object, int] | None = None, disk: DiskPlan | None = None
    ) -> None:
        self.start_directory()
        self.far = self.site.start_host(node="far")
        self.far_address = self.site.address
        self.far_client = await self.site.client()
        self.near = self.site.start_host(near_blocks, node="near", quotas=quotas, disk=disk)  # type: ignore[arg-type]
        self.near_client = await self.site.client()
        self.tell_nodes()

    def start_directory(self) -> DirectoryHost:
        directory = DirectoryHost(incarnation=new_incarnation(), secret=SECRET, lease_ms=LEASE_MS)
        self._address = directory.start("127.0.0.1")
        self._directories.append(directory)
        return directory

    @property
    def directory(self) -> DirectoryHost:
        return self._directories[-1]

    def tell_nodes(self) -> None:
        for host in (self.near, self.far):
            host.set_directory(*self._address)

    async def know_each_other(self, **blocks_of: int) -> None:
        """Waits until the directory has so many blocks of each named node, and each client knows of another node."""
        await self.directory_says(
            lambda stat: {name: sum(stat["nodes"].get(f"store-{name}", {}).values()) for name in blocks_of} == blocks_of
        )
        for client in (self.near_client, self.far_client):
            await until(client.stat, lambda stat: stat.counters["other_nodes"] == 1)

    async def directory_says(self, accept: Callable[[dict], bool]) -> None:  # type: ignore[type-arg]
        async with asyncio.timeout(DEADLINE_S):
            while not accept(await asyncio.to_thread(self.directory.status)):
                await asyncio.sleep(0.005)

    async def counters(self, client: StoreClient) -> dict[str, int]:
        stat = await client.stat()
        assert stat is not None
        return stat.counters

    def close(self) -> None:
        for directory in self._directories:
            directory.close()


@pytest.fixture
async def pair(site: Site) -> AsyncIterator[Pair]:
    made = Pair(site)
    try:
        yield made
    finally:
        made.close()


async def test_blocks_of_another_node_are_fetched_once_and_served_here_from_then_on(pair: Pair) -> None:
    """Five blocks there, two of them here too: three are fetched; a second load fetches none."""
    await pair.start()
    await pair.far_client.put_blocks(blocks(1, 2, 3, 4, 5))
    await pair.near_client.put_blocks(blocks(1, 2))
    await pair.know_each_other(far=5, near=2)
    result, contents = await load(pair.near_client, 1, 2, 3, 4, 5, 6)
    assert result == LoadResult(5, 5, "end", num_fetched=3)
    assert contents == [content(number, BLOCK_BYTES) for number in range(1, 6)]
    result, contents = await load(pair.near_client, 1, 2, 3, 4, 5)
    assert result == LoadResult(5, 5, "end", num_fetched=0)
    counters = await pair.counters(pair.near_client)
    assert (counters["fetched_blocks"], counters["wire_corrupt_blocks"], counters["peer_failures"]) == (3, 0, 0)
    assert (await pair.counters(pair.far_client))["given_blocks"] == 3
    await pair.know_each_other(far=5, near=5)


async def test_a_block_larger_than_a_piece_comes_in_pieces(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """5,000 bytes in pieces of 999."""
    monkeypatch.setattr(peer_fetch, "PIECE_BYTES_MAX", 999)
    await pair.start()
    await pair.far_client.put_blocks(blocks(1, 2))
    await pair.know_each_other(far=2)
    assert (await load(pair.near_client, 1, 2))[1] == [content(1, BLOCK_BYTES), content(2, BLOCK_BYTES)]


async def test_a_block_that_left_is_not_announced_any_more(pair: Pair) -> None:
    """16 slots: the first block is evicted by the seventeenth, and the directory forgets it."""
    await pair.start()
    for number in range(17):
        await pair.far_client.put_blocks(blocks(number))
    await pair.know_each_other(far=16)
    assert (await load(pair.near_client, 0))[0] == LoadResult(0, 0, "end")
    assert (await load(pair.near_client, 16))[0].num_fetched == 1


async def test_fetched_blocks_count_for_the_tenant_that_wanted_them(pair: Pair) -> None:
    """A quota of two blocks ends the fetch after two."""
    tenant = tenant_of(b"salt")
    await pair.start(quotas={tenant: 2 * BLOCK_BYTES})
    await pair.far_client.put_blocks(blocks(1, 2, 3))
    await pair.know_each_other(far=3)
    buffers = [bytearray(BLOCK_BYTES) for _ in range(3)]
    hashes = list(map(block_hash_of, (1, 2, 3)))
    result = await pair.near_client.load_blocks(hashes, buffers.__getitem__, deadline_s=DEADLINE_S, tenant=tenant)
    assert result.num_loaded == 2
    stat = await pair.near_client.stat()
    assert stat is not None and stat.tenants == {tenant: {"host": 2 * BLOCK_BYTES}}


async def test_a_fetched_block_goes_down_to_the_disk_as_its_namespace_s(pair: Pair, tmp_path: Path) -> None:
    """A slab of two blocks above a disk: what was fetched leaves for the disk and comes up again, with its origin."""
    await pair.start(near_blocks=2, disk=DiskPlan(tmp_path / "disk", file_bytes(BLOCK_BYTES, 8)))
    await pair.far_client.put_blocks(blocks(1, 2))
    await pair.know_each_other(far=2)
    assert (await load(pair.near_client, 1, 2))[0] == LoadResult(2, 2, "end", num_fetched=2)
    pair.far.close()
    await until(pair.near_client.stat, lambda stat: stat.counters["other_nodes"] == 0)
    assert (await pair.near_client.put_blocks(blocks(3, 4))).stored == 2
    result, contents = await load(pair.near_client, 1, 2)
    assert (result.num_loaded, result.num_from_disk, result.num_fetched) == (2, 2, 0)
    edge = pair.near._node._edge  # type: ignore[union-attr]
    assert edge is not None
    records = [edge.disk.index.find(block_hash_of(number)) for number in (1, 2)]
    assert [edge.disk.index.origin_of(record.slot) for record in records if record] == [origin_of("default", {})] * 2
    assert contents == [content(1, BLOCK_BYTES), content(2, BLOCK_BYTES)]


async def test_a_directory_that_restarts_is_told_everything_again(pair: Pair) -> None:
    """It dies, loads go on without it; its successor knows all blocks, old and new."""
    await pair.start()
    await pair.far_client.put_blocks(blocks(1))
    await pair.know_each_other(far=1)
    pair.directory.close()
    await until(pair.near_client.stat, lambda stat: stat.counters["other_nodes"] == 0)
    await pair.far_client.put_blocks(blocks(2))
    assert (await load(pair.near_client, 1, 2))[0] == LoadResult(0, 0, "end")
    pair.start_directory()
    pair.tell_nodes()
    await pair.know_each_other(far=2)
    assert (await load(pair.near_client, 1, 2))[0] == LoadResult(2, 2, "end", num_fetched=2)


async def test_a_dead_node_is_a_miss_and_leaves_the_directory_within_its_lease(pair: Pair) -> None:
    """The far node is a process that is killed: the fetch ends early, and one lease later nobody looks there."""
    await pair.start()
    pair.far.close()
    await pair.directory_says(lambda stat: "store-far" not in stat["nodes"])
    node = await pair.site.node()
    node_client = await pair.site.client()
    await node_client.put_blocks(blocks(1))
    await node.ask(f"directory {pair._address[0]} {pair._address[1]}")
    await pair.directory_says(lambda stat: stat["nodes"].get("store-test") == {"host": 1})
    await until(pair.near_client.stat, lambda stat: stat.counters["other_nodes"] == 1)
    await node.kill()
    assert (await load(pair.near_client, 1))[0].num_loaded == 0
    await pair.directory_says(lambda stat: list(stat["nodes"]) == ["store-near"])
    await pair.directory_says(lambda stat: stat["blocks"] == 0)
    assert len(remove_dead_slabs(pair.site.shm_dir)) == 1


# --- damage, each hop on its own (C3) -----------------------------------------------------------------------


async def test_damage_on_the_wire_is_counted_there_and_costs_that_block_only(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit of the second block flips under way: one block is loaded, nothing wrong is committed anywhere."""
    await pair.start()
    await pair.far_client.put_blocks(blocks(1, 2, 3))
    await pair.know_each_other(far=3)
    whole = messages.BlockPiece

    def damaged(**fields: object) -> messages.BlockPiece:
        if fields["index"] == 1:
            data = bytearray(fields["data"])  # type: ignore[call-overload]
            data[100] ^= 4
            fields["data"] = bytes(data)
        return whole(**fields)  # type: ignore[arg-type]

    monkeypatch.setattr(peer_fetch, "BlockPiece", _Constructor(whole, damaged))
    assert (await load(pair.near_client, 1, 2, 3))[0] == LoadResult(1, 1, "end", num_fetched=1)
    near, far = await pair.counters(pair.near_client), await pair.counters(pair.far_client)
    assert (near["wire_corrupt_blocks"], near["corrupt_blocks"], far["corrupt_blocks"]) == (1, 0, 0)
    monkeypatch.setattr(peer_fetch, "BlockPiece", whole)
    assert (await load(pair.near_client, 1, 2, 3))[0].num_loaded == 3


async def test_damage_in_the_givers_slab_is_counted_at_its_slab(pair: Pair) -> None:
    """The giver looks before it sends: its own counter moves, the wire's does not, and the block is gone there."""
    await pair.start()
    await pair.far_client.put_blocks(blocks(1, 2, 3))
    await pair.know_each_other(far=3)
    damage(pair.far, 2)
    assert (await load(pair.near_client, 1, 2, 3))[0] == LoadResult(1, 1, "end", num_fetched=1)
    near, far = await pair.counters(pair.near_client), await pair.counters(pair.far_client)
    assert (near["wire_corrupt_blocks"], near["corrupt_blocks"], far["corrupt_blocks"]) == (0, 0, 1)
    await pair.know_each_other(far=2)


async def test_damage_in_the_own_slab_is_counted_at_the_own_slab(pair: Pair) -> None:
    """After it was fetched and verified; the other node's block is as good as before and is fetched again."""
    await pair.start()
    await pair.far_client.put_blocks(blocks(1, 2))
    await pair.know_each_other(far=2)
    assert (await load(pair.near_client, 1, 2))[0].num_loaded == 2
    damage(pair.near, 2)
    assert (await load(pair.near_client, 1, 2))[0] == LoadResult(1, 2, "corrupt")
    await until(pair.near_client.stat, lambda stat: stat.counters["corrupt_blocks"] == 1)
    near, far = await pair.counters(pair.near_client), await pair.counters(pair.far_client)
    assert (near["wire_corrupt_blocks"], far["corrupt_blocks"]) == (0, 0)
    assert (await load(pair.near_client, 1, 2))[0] == LoadResult(2, 2, "end", num_fetched=1)


async def test_a_block_that_another_fetch_is_bringing_is_waited_for(pair: Pair) -> None:
    """Two loads of one prefix at once: each block is fetched once, and both have all of them."""
    await pair.start()
    await pair.far_client.put_blocks(blocks(1, 2, 3, 4, 5))
    await pair.know_each_other(far=5)
    other = pair.site.make_client()
    other.start(*pair.site.address)
    assert await other.wait_connected(DEADLINE_S)
    await until(other.stat, lambda stat: other._session is not None and other._session.num_others == 1)
    results = await asyncio.gather(load(pair.near_client, 1, 2, 3, 4, 5), load(other, 1, 2, 3, 4, 5))
    assert [result.num_loaded for result, _ in results] == [5, 5]
    counters = await pair.counters(pair.near_client)
    assert (counters["fetches"], counters["fetched_blocks"], counters["peer_failures"]) == (2, 5, 0)


async def test_a_node_that_is_refused_dials_ever_more_slowly(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A successor has its name: the pause grows up to its bound although each connection as such succeeds."""
    monkeypatch.setattr(directory_link, "BACKOFF_S_MIN", 0.001)
    monkeypatch.setattr(directory_link, "BACKOFF_S_MAX", 0.05)
    await pair.start()
    await pair.know_each_other(near=0)
    successor = pair.site.start_host(node="far")
    link = pair.far._node._link  # type: ignore[union-attr]
    successor.set_directory(*pair._address)
    async with asyncio.timeout(DEADLINE_S):
        while link._backoff_s < 0.05:
            await asyncio.sleep(0.001)
    assert link.losses >= 5
    await until(pair.near_client.stat, lambda stat: stat.counters["other_nodes"] == 1)


async def test_a_silent_node_costs_the_deadline_once_and_is_then_left_alone(pair: Pair) -> None:
    """The other end accepts and never answers."""
    await pair.start()
    async with silence() as address:
        await pair.far_client.put_blocks(blocks(1))
        await pair.know_each_other(far=1)
        pair.far._node._link._mine = address  # type: ignore[union-attr]
        pair.directory.close()
        pair.start_directory()
        pair.tell_nodes()
        await pair.know_each_other(far=1)
        buffers = [bytearray(BLOCK_BYTES)]
        hashes = [block_hash_of(1)]
        result = await pair.near_client.load_blocks(hashes, buffers.__getitem__, deadline_s=0.4)
        assert result == LoadResult(0, 0, "end")
        counters = await pair.counters(pair.near_client)
        assert (counters["peer_failures"], counters["fetches"]) == (1, 1)
        await pair.near_client.load_blocks(hashes, buffers.__getitem__, deadline_s=DEADLINE_S)
        counters = await pair.counters(pair.near_client)
        assert (counters["peer_failures"], counters["fetches"]) == (1, 2)
    stat = await pair.near_client.stat()
    assert stat is not None and (stat.writing, stat.quarantined) == (0, 0)


@asynccontextmanager
async def silence() -> AsyncIterator[tuple[str, int]]:
    """A server that reads and says nothing."""

    writers: list[asyncio.StreamWriter] = []

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with suppress(ConnectionError):
            await reader.read()

    server = await asyncio.start_server(swallow, "127.0.0.1", 0)
    try:
        async with server:
            yield server.sockets[0].getsockname()[:2]
    finally:
        # A server that closes leaves its connections alone.
        for writer in writers:
            writer.close()
        for writer in writers:
            with suppress(ConnectionError):
                await writer.wait_closed()


class _Constructor:
    """Makes messages by another function, and is their type in ``isinstance``."""

    def __init__(self, kind: type, make: Callable[..., object]) -> None:
        self._kind, self._make = kind, make

    def __call__(self, **fields: object) -> object:
        return self._make(**fields)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, self._kind)


def damage(host: StoreHost, number: int) -> None:
    """Flips one bit of a block in a node's slab."""
    slab = host._slab
    assert slab is not None
    slot = slab.table.find(block_hash_of(number))
    assert slot is not None
    slab.slot(slot)[7] ^= 1
