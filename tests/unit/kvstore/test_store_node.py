"""Store node and clients with real processes: what a death, a stop or a cut connection may and may not do."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time

import pytest
from store_process import block_hash_of, content, make_peer
from store_site import BLOCK_BYTES, DEADLINE_S, Site, blocks, load, until
from test_identity import make_fingerprint

from kvstore.core.identity import prefix_hashes
from kvstore.core.ids import BlockHash
from kvstore.net.handshake import PeerInfo
from kvstore.store import loading as loading_module
from kvstore.store.client import LoadResult, PutBlock, PutResult, StoreClient
from kvstore.store.node import boottime_ns

# --- the ordinary case --------------------------------------------------------------------------------------


async def test_what_was_put_is_loaded_byte_for_byte(site: Site) -> None:
    """Put, put again, load, load more than there is; the node's books agree."""
    site.start_host()
    client = await site.client()
    assert await client.put_blocks(blocks(1, 2, 3)) == PutResult(stored=3)
    assert await client.put_blocks(blocks(1, 2, 3, 4)) == PutResult(stored=1, present=3)
    result, contents = await load(client, 1, 2, 3, 4, 5)
    assert result == LoadResult(4, 4, "end")
    assert contents == [content(number, BLOCK_BYTES) for number in (1, 2, 3, 4)]
    assert await load(client, 5, 1) == (LoadResult(0, 0, "end"), [])
    stat = await client.stat()
    assert stat is not None
    assert (stat.free, stat.used, stat.writing, stat.quarantined, stat.pinned, stat.leases) == (12, 4, 0, 0, 0, 0)
    assert client.counters.to_dict() | {"loaded_blocks": 4, "stored_blocks": 4} == client.counters.to_dict()


async def test_a_store_that_is_much_too_small_costs_hits_and_nothing_else(site: Site) -> None:
    """Two slots, prefixes of five blocks: what is loaded is right, and no call fails."""
    site.start_host(num_blocks=2)
    client = await site.client()
    for round_number in range(10):
        numbers = tuple(range(10 * round_number, 10 * round_number + 5))
        assert await client.put_blocks(blocks(*numbers)) == PutResult(stored=2, no_room=3)
        result, contents = await load(client, *numbers)
        assert result == LoadResult(2, 2, "end")
        assert contents == [content(number, BLOCK_BYTES) for number in numbers[:2]]


async def test_an_adapter_and_a_salt_of_the_same_name_do_not_share_blocks(site: Site) -> None:
    """F12: the second of each pair misses completely, the control hits completely."""
    site.start_host(num_blocks=64)
    client = await site.client()
    tokens = list(range(128))

    def hashes(adapters: tuple[str, ...], salt: bytes | None) -> list[BlockHash]:
        return prefix_hashes(make_fingerprint(adapters=adapters).digest(), salt, tokens, 16)

    pairs = [
        (hashes(("X",), None), hashes((), b"X")),
        (hashes(("ab",), b"c"), hashes(("a",), b"bc")),
        (hashes((), b""), hashes((), None)),
    ]
    for first, second in pairs:
        contents = [content(index, BLOCK_BYTES) for index in range(8)]
        assert (await client.put_blocks(list(zip(first, contents, strict=True)))).stored == 8
        buffers = [bytearray(BLOCK_BYTES) for _ in range(8)]
        assert (await client.load_blocks(second, buffers.__getitem__)).num_loaded == 0
        assert (await client.load_blocks(first, buffers.__getitem__)).num_loaded == 8


# --- deaths -------------------------------------------------------------------------------------------------


async def test_a_worker_hits_what_a_dead_worker_stored(site: Site) -> None:
    """A puts and is killed; B, started later, loads the same bytes."""
    site.start_host()
    first = await site.worker()
    assert await first.ask("put 1 2 3") == "stored 3"
    await first.kill()
    second = await site.worker()
    assert await second.ask("load 1 2 3 4") == "loaded 3 right"


async def test_a_writer_killed_before_its_commit_leaves_nothing_behind(site: Site) -> None:
    """F54: its blocks were never visible, its slots are free, its keys are writable and hit afterwards."""
    site.start_host(num_blocks=2)
    client = await site.client()
    writer = await site.worker()
    assert await writer.ask("reserve 1 2") == "reserved granted granted"
    assert await client.put_blocks(blocks(1, 2)) == PutResult(in_progress=2)
    await writer.kill()
    await until(client.stat, lambda stat: stat.free == 2)
    assert await client.put_blocks(blocks(1, 2)) == PutResult(stored=2)
    assert (await load(client, 1, 2))[0] == LoadResult(2, 2, "end")


async def test_a_reader_killed_with_a_lease_pins_nothing(site: Site) -> None:
    """The lease of a dead reader ends with it and not at its deadline of a minute."""
    site.start_host(num_blocks=2)
    client = await site.client()
    await client.put_blocks(blocks(1, 2))
    reader = await site.worker()
    assert await reader.ask("match 1 2") == "matched 2"
    await until(client.stat, lambda stat: stat.pinned == 2)
    assert await client.put_blocks(blocks(3)) == PutResult(no_room=1)
    await reader.kill()
    await until(client.stat, lambda stat: stat.pinned == 0 and stat.leases == 0)
    assert await client.put_blocks(blocks(3)) == PutResult(stored=1)


async def test_a_stopped_writer_that_wakes_up_late_damages_nothing(site: Site) -> None:
    """It writes first and asks afterwards: its slot was not given out, its commit is refused, then the slot is free."""
    site.start_host(num_blocks=2)
    client = await site.client()
    writer = await site.worker(lease_ms=50)
    assert await writer.ask("reserve 1") == "reserved granted"
    os.kill(writer.process.pid, signal.SIGSTOP)
    await until(client.stat, lambda stat: stat.quarantined == 1)
    assert await client.put_blocks(blocks(1, 2)) == PutResult(stored=1, no_room=1)
    os.kill(writer.process.pid, signal.SIGCONT)
    assert await writer.ask("commit") == "committed 0"
    assert await load(client, 1) == (LoadResult(1, 1, "end"), [content(1, BLOCK_BYTES)])
    stat = await until(client.stat, lambda stat: stat.quarantined == 0)
    assert (stat.free, stat.used) == (1, 1)
    assert stat.counters["refused_commits"] == 1


async def test_f01_a_reader_that_was_stopped_beyond_its_lease_takes_nothing_for_its_blocks(site: Site) -> None:
    """Its slots were given to other blocks meanwhile: no byte of them counts, and it can read and write as before."""
    site.start_host(num_blocks=4)
    client = await site.client()
    await client.put_blocks(blocks(1, 2, 3, 4))
    reader = await site.worker(lease_ms=300)
    assert await reader.ask("match 1 2 3 4") == "matched 4"
    os.kill(reader.process.pid, signal.SIGSTOP)
    assert (await client.put_blocks(blocks(*range(10, 14)))).stored == 0, "leased blocks stay"
    stat = await until(client.stat, lambda stat: stat.leases == 0)
    assert stat.counters["expired_leases"] == 1 and stat.pinned == 0
    # One prompt each: the policy has seen them before, or it would keep what it has.
    for number in range(10, 14):
        for _ in range(3):
            await client.put_blocks(blocks(number))
    await until(client.stat, lambda stat: stat.used == 4)
    assert client.exist([block_hash_of(number) for number in (1, 2, 3, 4)]) == [False] * 4
    os.kill(reader.process.pid, signal.SIGCONT)
    assert await reader.ask("copy 1 2 3 4") == "copied 0 lease_over right"
    assert await reader.ask("load 1 2 3 4") == "loaded 0 right"
    assert await reader.ask("load 13") == "loaded 1 right"
    stat = await until(client.stat, lambda stat: True)
    assert (stat.leases, stat.pinned, stat.quarantined, stat.counters["corrupt_blocks"]) == (0, 0, 0, 0)


@pytest.mark.parametrize("num_blocks", [1, 16])
async def test_f07_one_block_and_sixteen_whose_lease_ended_in_mid_fetch_are_given_back(
    site: Site, num_blocks: int
) -> None:
    """The reader is stopped beyond its lease, others churn the slab; both say "lease over" and no byte counts."""
    site.start_host(num_blocks=16)
    client = await site.client()
    wanted = range(1, 1 + num_blocks)
    names = " ".join(map(str, wanted))
    await client.put_blocks(blocks(*wanted))
    reader = await site.worker(lease_ms=300)
    assert await reader.ask(f"match {names}") == f"matched {num_blocks}"
    os.kill(reader.process.pid, signal.SIGSTOP)
    stat = await until(client.stat, lambda stat: stat.leases == 0)
    assert stat.counters["expired_leases"] == 1
    for number in range(40, 80):
        for _ in range(3):
            await client.put_blocks(blocks(number))
    assert client.exist([block_hash_of(number) for number in wanted]) == [False] * num_blocks
    os.kill(reader.process.pid, signal.SIGCONT)
    assert await reader.ask(f"copy {names}") == "copied 0 lease_over right"
    assert await reader.ask(f"load {names}") == "loaded 0 right"
    stat = await until(client.stat, lambda stat: True)
    assert (stat.leases, stat.pinned, stat.quarantined, stat.counters["corrupt_blocks"]) == (0, 0, 0, 0)


async def test_f14_look_ups_that_are_never_fetched_leave_the_slab_as_good_as_before(site: Site) -> None:
    """64 blocks; every prompt is matched twice and never read. "Send, flush, resend" hits in each of 200 rounds."""
    site.start_host(num_blocks=64)
    client, looker = await site.client(), await site.client(lease_ms=20)
    for number in range(1, 21):
        prompt = range(100 * number, 100 * number + 16)
        assert (await client.put_blocks(blocks(*prompt))).lost == 0
        for _ in range(2):
            await looker.match([block_hash_of(one) for one in prompt])
    last = tuple(range(9000, 9008))

    async def store(prompt: tuple[int, ...]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while (await client.put_blocks(blocks(*prompt))).no_room:
                pass

    for number in range(200):
        prompt = tuple(range(10_000 + 8 * number, 10_008 + 8 * number))
        await until(client.stat, lambda stat: stat.pinned <= 48)
        await store(prompt)
        assert (await load(client, *prompt))[0].num_loaded == 8, number
        await looker.match([block_hash_of(one) for one in prompt])
    await store(last)
    assert (await load(client, *last))[0].num_loaded == 8
    stat = await until(client.stat, lambda stat: stat.leases == 0)
    assert (stat.pinned, stat.quarantined, stat.writing) == (0, 0, 0) and stat.used == 64


async def test_a_stopped_writer_that_is_killed_gives_its_slot_back(site: Site) -> None:
    """Proof by pidfd: quarantined while stopped, free after its death."""
    site.start_host(num_blocks=1)
    client = await site.client()
    writer = await site.worker(lease_ms=50)
    assert await writer.ask("reserve 1") == "reserved granted"
    os.kill(writer.process.pid, signal.SIGSTOP)
    await until(client.stat, lambda stat: stat.quarantined == 1)
    await writer.kill()
    await until(client.stat, lambda stat: stat.free == 1)


async def test_a_killed_node_is_a_miss_and_its_successor_serves_again(site: Site) -> None:
    """Calls answer without an error while there is no node; the new node removes the old slab and starts empty."""
    node = await site.node()
    client = await site.client(call_deadline_s=1.0)
    assert await client.put_blocks(blocks(1)) == PutResult(stored=1)
    await node.kill()
    start_s = time.monotonic()
    assert (await load(client, 1))[0] == LoadResult(0, 0, "end")
    assert await client.put_blocks(blocks(2)) == PutResult(lost=1)
    assert await client.stat() is None
    assert time.monotonic() - start_s < 5.0
    site.start_host()
    client.set_address(*site.address)
    assert await client.wait_connected(DEADLINE_S)
    stat = await until(client.stat, lambda stat: True)
    assert stat.used == 0
    assert await client.put_blocks(blocks(1)) == PutResult(stored=1)


@pytest.mark.parametrize("is_granted", [False, True])
async def test_a_put_that_is_broken_off_holds_nothing_and_leaves_a_tail(
    site: Site, monkeypatch: pytest.MonkeyPatch, is_granted: bool
) -> None:
    """Cancelled at every turn of the loop: no slot stays reserved; what was committed is a right end of the prompt."""
    monkeypatch.setattr(loading_module, "BYTES_PER_LOOP_STEP", BLOCK_BYTES)
    site.start_host(num_blocks=256)
    client = await site.client()
    num_stored = set()
    for turns in range(14):
        numbers = range(1000 + 8 * turns, 1008 + 8 * turns)
        put = asyncio.ensure_future(client.put_blocks(blocks(*numbers)))
        while is_granted and not client._reservations:
            await asyncio.sleep(0)
        for _ in range(turns):
            await asyncio.sleep(0)
        put.cancel()
        await asyncio.gather(put, return_exceptions=True)
        await until(client.stat, lambda stat: stat.writing == 0)
        are_here = client.exist(list(map(block_hash_of, numbers)))
        assert are_here == sorted(are_here), "a parent without its leaves would be the older one"
        num_stored.add(sum(are_here))
        if any(are_here):
            rest = numbers[are_here.index(True) :]
            assert (await load(client, *rest))[1] == [content(number, BLOCK_BYTES) for number in rest]
    if is_granted:
        assert len(num_stored) > 2, num_stored


# --- connections --------------------------------------------------------------------------------------------


async def test_a_cut_connection_quarantines_until_the_client_says_it_writes_no_more(site: Site) -> None:
    """The process lives, so only its own word frees the slot, and it gives it only when it is true."""
    host = site.start_host(num_blocks=2)
    client, observer = await site.client(), await site.client()
    reservation = await client.reserve([block_hash_of(1)])
    assert reservation is not None
    reservation.session.abort()
    await until(observer.stat, lambda stat: stat.quarantined == 1)
    await until(observer.stat, lambda stat: stat.clients == 2)
    assert not reservation.stands()
    assert not reservation.write(0, content(1, BLOCK_BYTES))
    assert await client.put_blocks(blocks(2)) == PutResult(stored=1)
    assert host.status()["quarantined"] == 1
    reservation.abort()
    stat = await until(observer.stat, lambda stat: stat.quarantined == 0)
    assert (stat.free, stat.used) == (1, 1)


async def test_a_cut_connection_ends_read_leases(site: Site) -> None:
    """A lease does not stand on a connection that is gone, on either side."""
    site.start_host()
    client, observer = await site.client(), await site.client()
    await client.put_blocks(blocks(1))
    lease = await client.match([block_hash_of(1)])
    assert lease is not None and lease.stands()
    reservation = await client.reserve([block_hash_of(2)])
    assert reservation is not None
    reservation.session.abort()
    assert not lease.stands()
    await until(observer.stat, lambda stat: stat.leases == 0)
    reservation.abort()


async def test_an_answer_that_comes_too_late_is_given_back(site: Site) -> None:
    """A caller that stopped waiting holds neither a lease nor a slot."""
    site.start_host()
    patient, hasty = await site.client(), await site.client(call_deadline_s=0.0)
    await patient.put_blocks(blocks(1))
    assert await hasty.match([block_hash_of(1)]) is None
    assert await hasty.reserve([block_hash_of(2)]) is None
    stat = await until(patient.stat, lambda stat: stat.counters["aborted_blocks"] == 1 and stat.leases == 0)
    assert (stat.writing, stat.quarantined, stat.free) == (0, 0, 15)
    assert stat.counters["hit_blocks"] == 1


@pytest.mark.parametrize("field", ["block_bytes", "host_identity"])
async def test_a_client_that_cannot_use_the_slab_is_refused_by_field(site: Site, field: str) -> None:
    """The refusal names what differs; the client then treats the store as lost."""
    site.start_host()
    if field == "block_bytes":
        client = site.make_client(block_bytes=BLOCK_BYTES + 1)
    else:
        me = make_peer("elsewhere")
        client = site.make_client(
            me=PeerInfo(
                role=me.role, peer_id=me.peer_id, incarnation=me.incarnation, pid=me.pid, host_identity="other host"
            )
        )
    client.start(*site.address)
    async with asyncio.timeout(DEADLINE_S):
        while not client.refusal:
            await asyncio.sleep(0)
    assert field in client.refusal
    assert not client.is_connected
    assert await client.put_blocks(blocks(1)) == PutResult(lost=1)


async def test_another_secret_gets_nothing(site: Site) -> None:
    """A client without the cluster secret never attaches."""
    host = site.start_host()
    client = StoreClient(me=make_peer("stranger"), secret=secrets.token_bytes(32), block_bytes=BLOCK_BYTES)
    client.start(*site.address)
    assert not await client.wait_connected(0.3)
    assert host.status()["clients"] == 0
    await client.close()


# --- wrong bytes, time --------------------------------------------------------------------------------------


async def test_a_damaged_block_is_a_miss_and_is_never_served_again(site: Site) -> None:
    """C3 at the slab: one flipped bit ends the load there, is counted at the node, and the block is gone."""
    site.start_host()
    client = await site.client()
    await client.put_blocks(blocks(1, 2, 3))
    lease = await client.match([block_hash_of(1), block_hash_of(2)])
    assert lease is not None
    reservation = await client.reserve([block_hash_of(9)])
    assert reservation is not None
    # Block 2 was reserved as the second slot of the slab.
    reservation.session.slab.slot(1)[BLOCK_BYTES - 1] ^= 1
    reservation.abort()
    lease.release()
    buffers = [bytearray(b"\xff" * BLOCK_BYTES) for _ in range(3)]
    result = await client.load_blocks([block_hash_of(n) for n in (1, 2, 3)], buffers.__getitem__)
    assert result == LoadResult(1, 3, "corrupt")
    assert buffers == [content(1, BLOCK_BYTES), bytes(BLOCK_BYTES), b"\xff" * BLOCK_BYTES]
    stat = await until(client.stat, lambda stat: stat.counters["corrupt_blocks"] == 1)
    assert (stat.used, stat.quarantined, stat.leases) == (2, 0, 0)
    assert (await load(client, 1, 2, 3))[0] == LoadResult(1, 1, "end")
    assert client.counters.corrupt_blocks == 1
    assert await client.put_blocks(blocks(1, 2, 3)) == PutResult(stored=1, present=2)
    assert (await load(client, 1, 2, 3))[0] == LoadResult(3, 3, "end")


class Clock:
    """CLOCK_BOOTTIME plus what a test adds."""

    def __init__(self) -> None:
        self.added_ns = 0

    def __call__(self) -> int:
        return boottime_ns() + self.added_ns


async def test_a_load_stops_at_its_deadline(site: Site) -> None:
    """Time passes while the second block is copied: it is the last one."""
    site.start_host()
    clock = Clock()
    client = await site.client(clock_ns=clock)
    await client.put_blocks(blocks(1, 2, 3))
    buffers = [bytearray(BLOCK_BYTES) for _ in range(3)]

    def into(index: int) -> bytearray:
        clock.added_ns += 2_000_000_000 if index == 1 else 0
        return buffers[index]

    hashes = [block_hash_of(n) for n in (1, 2, 3)]
    assert await client.load_blocks(hashes, into, deadline_s=1.0) == LoadResult(2, 3, "deadline")
    assert buffers == [content(1, BLOCK_BYTES), content(2, BLOCK_BYTES), bytes(BLOCK_BYTES)]


@pytest.mark.parametrize(
    ("step_ns", "expected"),
    [(2_000_000_000, LoadResult(2, 3, "deadline")), (10_000_000_000, LoadResult(1, 3, "lease_over"))],
)
async def test_a_leased_load_stops_at_its_deadline_and_at_the_end_of_its_lease(
    site: Site, step_ns: int, expected: LoadResult
) -> None:
    """Time passes while the second block is copied: a block copied after the lease does not count."""
    site.start_host()
    clock = Clock()
    client = await site.client(clock_ns=clock, lease_ms=5_000)
    await client.put_blocks(blocks(1, 2, 3))
    buffers = [bytearray(BLOCK_BYTES) for _ in range(3)]

    def into(index: int) -> bytearray:
        if index == 1:
            clock.added_ns += step_ns
        return buffers[index]

    prefix = await client.match([block_hash_of(n) for n in (1, 2, 3)])
    assert prefix is not None
    with prefix:
        assert await client.load_leased(prefix, into, deadline_s=1.0) == expected
    wanted = [content(n, BLOCK_BYTES) if n <= expected.num_loaded else bytes(BLOCK_BYTES) for n in (1, 2, 3)]
    assert buffers == wanted


async def test_a_put_stops_when_its_reservation_is_over(site: Site) -> None:
    """Nothing is written into slots whose reservation may have ended at the node."""
    site.start_host()
    clock = Clock()
    client = await site.client(clock_ns=clock, lease_ms=5_000)
    reservation = await client.reserve([block_hash_of(1), block_hash_of(2)])
    assert reservation is not None
    assert reservation.write(0, content(1, BLOCK_BYTES))
    clock.added_ns += 5_000_000_000
    assert not reservation.write(1, content(2, BLOCK_BYTES))
    assert await reservation.commit(deadline_s=DEADLINE_S) == 1
    assert (await load(client, 1, 2))[0].num_loaded == 1


async def test_a_put_that_fails_gives_its_slots_back(site: Site) -> None:
    """A view of the wrong size is the caller's mistake: it raises, nothing is visible, nothing stays reserved."""
    site.start_host()
    client = await site.client()
    with pytest.raises(ValueError):
        await client.put_blocks([*blocks(1), PutBlock(block_hash_of(2), b"short")])
    stat = await until(client.stat, lambda stat: stat.counters["aborted_blocks"] == 2)
    assert (stat.used, stat.writing, stat.quarantined, stat.free) == (0, 0, 0, 16)


async def test_what_is_read_without_asking_counts_as_used(site: Site) -> None:
    """The node learns hits and misses a moment later, and evicts the block that nobody read."""
    site.start_host(num_blocks=2)
    client = await site.client()
    await client.put_blocks(blocks(1))
    await client.put_blocks(blocks(2))
    assert (await load(client, 1, 3))[0] == LoadResult(1, 1, "end")
    stat = await until(client.stat, lambda stat: stat.counters["hit_blocks"] == 1)
    assert stat.counters["missed_blocks"] == 1
    assert await client.put_blocks(blocks(4)) == PutResult(stored=1)
    assert client.exist([block_hash_of(n) for n in (1, 2, 4)]) == [True, False, True]
    many = [block_hash_of(n) for n in range(100)]
    assert [n for n, present in enumerate(client.exist(many)) if present] == [1, 4]


async def test_a_cancelled_load_leaves_no_lease_and_tells_what_it_read(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is cancelled while its blocks are copied: nothing is pinned, and what was read counts as used."""
    site.start_host()
    client = await site.client()
    numbers = tuple(range(1, 9))
    await client.put_blocks(blocks(*numbers))
    loading: list[asyncio.Task[LoadResult]] = []

    def into(index: int) -> bytearray:
        loading[0].cancel()
        return bytearray(BLOCK_BYTES)

    monkeypatch.setattr(loading_module, "BYTES_PER_LOOP_STEP", BLOCK_BYTES)
    loading.append(asyncio.create_task(client.load_blocks(list(map(block_hash_of, numbers)), into)))
    with pytest.raises(asyncio.CancelledError):
        await loading[0]
    stat = await until(client.stat, lambda stat: stat.counters["hit_blocks"] >= 1)
    assert (stat.leases, stat.pinned) == (0, 0)
