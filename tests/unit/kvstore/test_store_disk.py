"""A store node with a disk tier: down when evicted, up when asked for, verified at its own hop, back after it."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest
from store_process import block_hash_of, content
from store_site import BLOCK_BYTES, DEADLINE_S, Site, blocks, blocks_in, load, looking, until, verified

from kvstore.core.ids import TenantId
from kvstore.core.tiering import Demotion
from kvstore.errors import BadInput, EnvironmentProblem, PeerLost
from kvstore.store.client import PutResult, StoreClient
from kvstore.store.disk import file as disk_file
from kvstore.store.disk.file import FILE_NAME, DiskFile
from kvstore.store.disk.layout import Superblock, file_bytes, slots_start, stride_bytes
from kvstore.store.host import DiskPlan, StoreHost

HOST_BLOCKS = 4
DISK_BLOCKS = 64
PROMPT = tuple(range(1, 41))
"""A prefix ten times as long as the slab."""


def make_plan(folder: Path, num_blocks: int = DISK_BLOCKS) -> DiskPlan:
    return DiskPlan(folder, file_bytes(BLOCK_BYTES, num_blocks))


def disk_of(host: StoreHost) -> dict[str, Any]:
    (tier,) = [tier for tier in host.status()["tiers"] if tier["name"] == "disk"]
    return tier


async def settled(client: StoreClient, used: int) -> None:
    """Waits until the disk holds so many blocks."""
    await until(client.stat, lambda stat: stat.tiers[-1].used_blocks == used)


async def put_all(client: StoreClient, numbers: tuple[int, ...], **more: Any) -> None:
    """Stores a prompt in parts that fit the slab, and waits until all of it is on the disk."""
    for start in range(0, len(numbers), HOST_BLOCKS):
        part = numbers[start : start + HOST_BLOCKS]
        assert (await client.put_blocks(blocks(*part), **more)).stored == len(part)
        await settled(client, start + len(part))


def damage(folder: Path, slot: int) -> None:
    with (folder / FILE_NAME).open("r+b") as file:
        place = slots_start(DISK_BLOCKS) + slot * stride_bytes(BLOCK_BYTES) + 77
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1]))


async def slot_on_disk(client: StoreClient, number: int) -> int:
    listed = await blocks_in(client, "disk")
    return next(block.slot for block in listed if block.block_hash == block_hash_of(number))


async def test_a_prefix_larger_than_the_slab_comes_back_from_the_disk(site: Site, tmp_path: Path) -> None:
    """Evicted all the time, nothing is lost: every block is right, and the answer says where it came from."""
    host = site.start_host(HOST_BLOCKS, disk=make_plan(tmp_path / "disk"))
    client = await site.client()
    await put_all(client, PROMPT)
    result, got = await load(client, *PROMPT)
    assert got == [content(number, BLOCK_BYTES) for number in PROMPT]
    assert result.num_loaded == len(PROMPT) and result.num_from_disk >= len(PROMPT) - HOST_BLOCKS
    assert client.counters.disk_blocks == result.num_from_disk and client.counters.corrupt_blocks == 0
    stat = host.status()
    assert [tier["name"] for tier in stat["tiers"]] == ["host", "disk"]
    assert disk_of(host)["used_blocks"] == len(PROMPT) and disk_of(host)["state"] == "on"
    assert stat["quarantined"] == stat["writing"] == 0
    await until(client.stat, lambda stat: stat.pinned == 0 and stat.leases == 0)


async def test_a_prompt_larger_than_the_slab_is_stored_in_one_put(site: Site, tmp_path: Path) -> None:
    """It passes through the slab part by part; the numbers add up to the blocks given."""
    site.start_host(HOST_BLOCKS, disk=make_plan(tmp_path / "disk"))
    client = await site.client()
    assert await client.put_blocks(blocks(*PROMPT)) == PutResult(stored=len(PROMPT))
    await settled(client, len(PROMPT))
    assert (await load(client, *PROMPT))[0].num_loaded == len(PROMPT)
    assert await client.put_blocks(blocks(*PROMPT[-2:], 900)) == PutResult(stored=1, present=2)


async def test_more_blocks_than_the_queue_takes_go_down_bit_by_bit(site: Site, tmp_path: Path) -> None:
    """One commit of a hundred blocks: half of the queue is kept for evictions, the rest waits."""
    site.start_host(200, disk=make_plan(tmp_path / "disk", 400))
    client = await site.client()
    assert (await client.put_blocks(blocks(*range(1, 151)))).stored == 150
    await settled(client, 150)
    assert await client.usage() == {"": {"host": 150 * BLOCK_BYTES, "disk": 150 * BLOCK_BYTES}}


async def test_blocks_survive_the_node(site: Site, tmp_path: Path) -> None:
    """A new life of the node finds what its predecessor had on the disk, another client loads it."""
    first = site.start_host(HOST_BLOCKS, disk=make_plan(tmp_path / "disk"))
    client = await site.client()
    await put_all(client, PROMPT)
    await client.close()
    await asyncio.to_thread(first.close)
    second = site.start_host(HOST_BLOCKS, disk=make_plan(tmp_path / "disk"))
    assert disk_of(second)["counters"]["recovered_blocks"] == len(PROMPT)
    result, got = await load(await site.client(), *PROMPT, 999)
    assert got == [content(number, BLOCK_BYTES) for number in PROMPT]
    assert (result.num_loaded, result.num_from_disk) == (len(PROMPT), len(PROMPT))


async def test_a_clean_end_takes_the_slab_down(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was only above when the node was told to stop is on the disk for the next life."""
    monkeypatch.setattr("kvstore.store.lower_edge.TierEdge.write_early", lambda *args, **more: Demotion.LATER)
    first = site.start_host(disk=make_plan(tmp_path / "disk"))
    client = await site.client()
    assert (await client.put_blocks(blocks(1, 2, 3))).stored == 3
    assert disk_of(first)["used_blocks"] == 0
    await client.close()
    await asyncio.to_thread(first.close)
    second = site.start_host(disk=make_plan(tmp_path / "disk"))
    assert disk_of(second)["used_blocks"] == 3
    assert (await load(await site.client(), 1, 2, 3))[0].num_from_disk == 3


async def test_damage_on_the_disk_is_a_miss_and_moves_the_disks_own_counter(site: Site, tmp_path: Path) -> None:
    """The load stops before the damaged block; neither slab nor client count it; the block is gone for everybody."""
    folder = tmp_path / "disk"
    host = site.start_host(HOST_BLOCKS, disk=make_plan(folder))
    client = await site.client()
    await put_all(client, PROMPT)
    damage(folder, await slot_on_disk(client, 8))
    for _ in range(2):
        result, got = await load(client, *PROMPT)
        assert got == [content(number, BLOCK_BYTES) for number in range(1, 8)], result
    assert disk_of(host)["counters"]["damaged_blocks"] == 1 and disk_of(host)["quarantined_blocks"] == 1
    assert host.status()["counters"]["corrupt_blocks"] == client.counters.corrupt_blocks == 0
    assert block_hash_of(8) not in [block.block_hash for block in await blocks_in(client, "disk")]
    assert (await client.put_blocks(blocks(8))).stored == 1
    await settled(client, len(PROMPT))
    assert (await load(client, *PROMPT))[0].num_loaded == len(PROMPT)


async def test_sharers_of_a_damaged_block_all_stop_before_it(site: Site, tmp_path: Path) -> None:
    """Four readers of one prefix at once: nobody takes the half that another one is still fetching for whole."""
    folder = tmp_path / "disk"
    site.start_host(16, disk=make_plan(folder))
    writer = await site.client()
    numbers = tuple(range(1, 17))
    for start in range(0, 16, HOST_BLOCKS):
        await writer.put_blocks(blocks(*numbers[start : start + HOST_BLOCKS]))
        await settled(writer, start + HOST_BLOCKS)
    await writer.put_blocks(blocks(*range(100, 116)))
    damage(folder, await slot_on_disk(writer, 9))
    readers = [await site.client() for _ in range(4)]
    results = await asyncio.gather(*(load(reader, *numbers) for reader in readers))
    for result, got in results:
        assert result.num_loaded <= 8
        assert got == [content(number, BLOCK_BYTES) for number in numbers[: result.num_loaded]]
    assert max(result.num_loaded for result, _ in results) == 8


async def test_a_full_file_system_is_no_error(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The node starts without the tier, says so once, and serves from the slab."""

    def full(path: Path, block_bytes: int, num_slots: int) -> Superblock:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk_file, "_create", full)
    host = site.start_host(disk=make_plan(tmp_path / "disk"))
    client = await site.client()
    assert (await client.put_blocks(blocks(1, 2))).stored == 2
    assert (await load(client, 1, 2, 3))[0].num_loaded == 2
    tier = disk_of(host)
    assert (tier["state"], tier["blocks"], tier["why"]) == ("off", 0, "open: No space left on device")
    assert sum(record.message.startswith("store_disk_off") for record in caplog.records) == 1


async def test_a_disk_that_fails_while_it_works_costs_nothing_but_itself(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EIO in the middle: stores and loads go on from the slab."""

    def broken(self: DiskFile, batch: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(DiskFile, "write", broken)
    host = site.start_host(HOST_BLOCKS, disk=make_plan(tmp_path / "disk"))
    client = await site.client()
    for start in range(1, 41, HOST_BLOCKS):
        numbers = range(start, start + HOST_BLOCKS)
        assert (await client.put_blocks(blocks(*numbers))).stored == HOST_BLOCKS
        assert (await load(client, *numbers))[0].num_loaded == HOST_BLOCKS
    assert disk_of(host)["state"] == "off" and disk_of(host)["counters"]["switched_off"] == 1


async def test_a_slow_disk_costs_a_load_its_deadline_and_no_more(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not up in time is a miss now, and a hit for whoever asks after it has come."""
    import threading

    gate, real_read = threading.Event(), DiskFile.read

    def slow(self: DiskFile, slot: int, into: Any) -> None:
        assert gate.wait(DEADLINE_S)
        real_read(self, slot, into)

    site.start_host(HOST_BLOCKS, disk=make_plan(tmp_path / "disk"))
    client = await site.client()
    await put_all(client, (1, 2, 3, 4))
    await client.put_blocks(blocks(*range(50, 54)))
    await settled(client, 8)
    monkeypatch.setattr(DiskFile, "read", slow)
    buffers = [bytearray(BLOCK_BYTES) for _ in range(4)]
    hashes = [block_hash_of(number) for number in range(1, 5)]
    result = await client.load_blocks(hashes, buffers.__getitem__, deadline_s=0.05)
    assert result.num_loaded == 0 and not any(map(any, buffers))
    gate.set()
    await until(client.stat, lambda stat: stat.writing == 0)
    assert (await load(client, 1, 2, 3, 4))[0].num_loaded == 4


async def test_a_slow_disk_is_left_alone_once_it_was_slower_than_computing(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load that came late is no miss: soon nobody asks the disk any more. One that hung half way keeps its half."""
    import threading

    gate, reads, real_read = threading.Event(), [], DiskFile.read

    def slow(self: DiskFile, slot: int, into: Any) -> None:
        reads.append(slot)
        if len(reads) > 2:
            assert gate.wait(DEADLINE_S)
        real_read(self, slot, into)

    site.start_host(HOST_BLOCKS, disk=make_plan(tmp_path / "disk"))
    client = await site.client()
    await put_all(client, (1, 2, 3, 4))
    await put_all_above(client, 50)
    monkeypatch.setattr(DiskFile, "read", slow)
    client.cost.computed(1000, 1_000_000_000)
    buffers = [bytearray(BLOCK_BYTES) for _ in range(4)]
    hashes = [block_hash_of(number) for number in range(1, 5)]
    for num_loaded, stop in ((2, "deadline"), (2, "deadline"), (2, "end")):
        result = await client.load_blocks(hashes, buffers.__getitem__, deadline_s=DEADLINE_S, block_tokens=16)
        assert (result.num_loaded, result.stopped_by) == (num_loaded, stop)
        assert buffers[:2] == [content(1, BLOCK_BYTES), content(2, BLOCK_BYTES)] and not any(map(any, buffers[2:]))
    assert (len(reads), client.counters.loads_skipped, client.counters.load_deadlines) == (4, 1, 2)
    gate.set()
    await until(client.stat, lambda stat: stat.writing == 0)


async def test_a_second_node_cannot_have_the_same_folder(site: Site, tmp_path: Path) -> None:
    """Refused at the start, in words that say what to do."""
    site.start_host(disk=make_plan(tmp_path / "disk"))
    with pytest.raises(EnvironmentProblem, match=r"kv\.disk_path: .* is in use by another store node"):
        site.start_host(disk=make_plan(tmp_path / "disk"))


async def test_a_disk_too_small_for_one_block_is_bad_input(site: Site, tmp_path: Path) -> None:
    """Named by its field, before anything runs."""
    with pytest.raises(BadInput, match=r"kv\.disk_bytes: one block needs 5000 bytes"):
        site.start_host(disk=DiskPlan(tmp_path / "disk", 4096))


async def test_a_tenants_quota_counts_both_tiers_and_its_oldest_disk_blocks_make_room(
    site: Site, tmp_path: Path
) -> None:
    """Hard over all tiers, yet a tenant at its quota still stores and still reads what it has on the disk."""
    tenant = TenantId("a")
    quota = 12 * BLOCK_BYTES
    host = site.start_host(HOST_BLOCKS, disk=make_plan(tmp_path / "disk"), quotas={tenant: quota})
    client = await site.client()
    for start in range(1, 25, HOST_BLOCKS):
        result = await client.put_blocks(blocks(*range(start, start + HOST_BLOCKS)), tenant=tenant)
        assert result == PutResult(stored=HOST_BLOCKS)
        assert sum(host.status()["tenants"]["a"].values()) <= quota
    await until(client.stat, lambda stat: stat.tiers[-1].used_blocks >= HOST_BLOCKS)
    listed = await blocks_in(client, "disk")
    assert listed and all(block.tenant == "a" for block in listed)
    (await client.put_blocks(blocks(*range(200, 204))))
    # Every one that is still there, the oldest too: what is asked for is not what leaves to make room for it.
    num_loaded = 0
    for block in listed:
        if block.block_hash in {other.block_hash for other in await blocks_in(client, "disk")}:
            number = int.from_bytes(block.block_hash, "big")
            _, got = await load(client, number)
            assert got == [content(number, BLOCK_BYTES)]
            num_loaded += 1
        assert sum(host.status()["tenants"]["a"].values()) <= quota
    assert num_loaded


async def test_verify_and_gc_find_damage_in_both_tiers(site: Site, tmp_path: Path) -> None:
    """``verify`` re-reads every digest and removes what is damaged; ``gc`` puts the slot back into use."""
    folder = tmp_path / "disk"
    host = site.start_host(HOST_BLOCKS, disk=make_plan(folder))
    client = await site.client()
    await put_all(client, tuple(range(1, 13)))
    damage(folder, await slot_on_disk(client, 5))
    (slab,) = tmp_path.glob("kopir-slab-*")
    assert len(await blocks_in(client, "host")) == HOST_BLOCKS
    data = slab.read_bytes()
    place = data.index(content(12, BLOCK_BYTES))
    with slab.open("r+b") as file:
        file.seek(place + 100)
        file.write(b"\xff\xff")
    on_disk = await verified(client, "disk")
    assert (on_disk.num_checked, on_disk.num_skipped) == (12, 0)
    assert [ref.block_hash for ref in on_disk.damaged] == [block_hash_of(5)]
    on_host = await verified(client, "host")
    assert on_host.num_checked == HOST_BLOCKS
    assert [ref.block_hash for ref in on_host.damaged] == [block_hash_of(12)]
    assert host.status()["counters"]["corrupt_blocks"] == 1 and disk_of(host)["counters"]["damaged_blocks"] == 1
    async with looking(client) as looker:
        assert (await looker.collect_garbage()).released_slots == 1
    assert disk_of(host)["quarantined_blocks"] == 0


async def test_a_put_of_what_is_there_costs_a_tenant_none_of_its_disk_blocks(site: Site, tmp_path: Path) -> None:
    """Only new blocks need room: a tenant at its quota that stores its prompt again keeps the older ones below."""
    tenant = TenantId("a")
    quotas = {tenant: 10 * BLOCK_BYTES}
    host = site.start_host(8, disk=make_plan(tmp_path / "disk"), quotas=quotas)
    client = await site.client()
    assert (await client.put_blocks(blocks(1, 2, 3, 4), tenant=tenant)).stored == 4
    await settled(client, 4)
    assert (await client.put_blocks(blocks(5, 6, 7, 8), tenant=tenant)).stored == 4
    stat = await until(client.stat, lambda stat: stat.tiers[-1].used_blocks == 2)
    again = await client.put_blocks(blocks(*range(1, 9)), tenant=tenant)
    assert again.present == 8
    assert disk_of(host)["used_blocks"] == 2 and host.status()["tenants"] == stat.tenants
    assert (await client.put_blocks(blocks(20), tenant=tenant)).stored == 1
    await settled(client, 2)
    assert host.status()["tenants"] == stat.tenants


async def test_the_disk_gives_up_leaves_before_roots(site: Site, tmp_path: Path) -> None:
    """Stored, read and brought up: of one prompt the first block is the last to leave the disk."""
    host = site.start_host(HOST_BLOCKS, disk=make_plan(tmp_path / "disk"))
    client = await site.client()
    await put_all(client, (1, 2, 3, 4))
    index = host._node._edge.disk.index  # type: ignore[union-attr]

    def leaving() -> list[int]:
        records = map(index.record_at, index._policy.victims())
        return [int.from_bytes(record.block_hash, "big") for record in records if record is not None]

    assert leaving() == [4, 3, 2, 1]
    await put_all_above(client, 50)
    assert (await load(client, 1, 2, 3, 4))[0].num_from_disk == 4
    assert [number for number in leaving() if number < 50] == [4, 3, 2, 1]


async def put_all_above(client: StoreClient, first: int) -> None:
    """Fills the slab with other blocks, one prompt each, and waits until they are on the disk too."""
    stat = await client.stat()
    assert stat is not None
    for number in range(first, first + HOST_BLOCKS):
        assert (await client.put_blocks(blocks(number))).stored == 1
    await settled(client, stat.tiers[-1].used_blocks + HOST_BLOCKS)


async def test_every_block_that_was_found_nowhere_is_a_miss_once(site: Site, tmp_path: Path) -> None:
    """With a disk too: 100 blocks asked for, 4 there, 96 missed; a repeated ask counts again."""
    host = site.start_host(HOST_BLOCKS, disk=make_plan(tmp_path / "disk"))
    client = await site.client()
    await put_all(client, (1, 2, 3, 4))
    await put_all_above(client, 50)
    for asked in (1, 2):
        assert (await load(client, 1, 2, 3, 4, *range(1000, 1096)))[0].num_loaded == 4
        await until(client.stat, lambda stat, asked=asked: stat.counters["missed_blocks"] >= 96 * asked)  # type: ignore[misc]
        counters = host.status()["counters"]
        assert (counters["hit_blocks"], counters["missed_blocks"]) == (4 * asked, 96 * asked)


async def test_a_write_that_the_disk_did_not_take_is_not_counted_as_one(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No buffer below: neither the early copy nor the one at the eviction was written."""
    monkeypatch.setattr("kvstore.store.lower_edge.DiskTier.offer", lambda *args: False)
    host = site.start_host(HOST_BLOCKS, disk=make_plan(tmp_path / "disk"))
    client = await site.client()
    assert (await client.put_blocks(blocks(1, 2, 3, 4))).stored == 4
    assert (await client.put_blocks(blocks(5, 6, 7, 8))).stored == 4
    counters = disk_of(host)["counters"]
    assert (counters["written"], counters["written_early"], counters["written_blocks"]) == (0, 0, 0)
    assert counters["not_taken"] == 8 + 4


async def test_verifying_is_no_hit(site: Site, tmp_path: Path) -> None:
    """An operator's look at every block leaves the order in which they leave as it was."""
    host = site.start_host(HOST_BLOCKS, disk=make_plan(tmp_path / "disk"))
    client = await site.client()
    await put_all(client, tuple(range(1, 13)))
    policy = host._node._edge.disk.index._policy  # type: ignore[union-attr]
    before = list(policy.victims())
    assert (await verified(client, "disk")).num_checked == 12
    assert list(policy.victims()) == before


async def test_a_call_beyond_the_bound_is_answered_in_kind(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many slow calls: what was to be verified is all skipped, what was to come up did not."""
    monkeypatch.setattr("kvstore.store.node.MAX_SLOW_CALLS", 0)
    site.start_host(HOST_BLOCKS, disk=make_plan(tmp_path / "disk"))
    client = await site.client()
    await put_all(client, (1, 2, 3, 4))
    skipped = await verified(client, "disk")
    assert (skipped.num_checked, skipped.num_skipped, skipped.next_slot) == (0, DISK_BLOCKS, None)
    await put_all_above(client, 50)
    assert (await load(client, 1, 2))[0].num_loaded == 0


async def test_a_call_that_fails_ends_its_connection_and_is_one_event(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The client is not left to its deadline, and nobody else notices."""

    async def broken(*args: object, **more: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr("kvstore.store.node.verify_blocks", broken)
    site.start_host(HOST_BLOCKS, disk=make_plan(tmp_path / "disk"))
    client, other = await site.client(), await site.client()
    with pytest.raises(PeerLost):
        await verified(client, "disk")
    assert [record.message for record in caplog.records if record.message.startswith("store_call_failed")]
    assert (await other.put_blocks(blocks(1))).stored == 1
