"""Who may use which blocks: fingerprints by field, updated weights, tenants and their quotas; who holds what."""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import time

import pytest
from store_process import block_hash_of, content
from store_site import BLOCK_BYTES, DEADLINE_S, Site, blocks, load, looking, until
from test_identity import FIELD_NAMES, changed, make_fingerprint

from kvstore.core.identity import prefix_hashes
from kvstore.core.quota import tenant_of
from kvstore.store.client import LoadResult, PutResult, StoreClient

A, B = tenant_of(b"salt of A"), tenant_of(b"salt of B")


async def refused(site: Site, **options: object) -> StoreClient:
    """A client that tried to attach and was refused."""
    client = site.make_client(**options)
    client.start(*site.address)
    async with asyncio.timeout(DEADLINE_S):
        while not client.refusal:
            await asyncio.sleep(0)
    assert not client.is_connected
    return client


# --- fingerprints -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FIELD_NAMES)
async def test_one_differing_field_refuses_the_client_and_is_named(site: Site, name: str) -> None:
    """C2, K6: the refusal names the field and both values; the refused client neither reads nor writes."""
    site.start_host()
    mine = make_fingerprint()
    first = await site.client(fingerprint=mine)
    assert (await first.put_blocks(blocks(1))).stored == 1
    theirs = dataclasses.replace(mine, **{name: changed(getattr(mine, name))})
    other = await refused(site, fingerprint=theirs)
    assert other.differing_fields == (name,)
    here, there = mine.to_dict()[name], theirs.to_dict()[name]
    assert other.refusal == (
        f"namespace 'default': fingerprints differ in: {name} ({name} is {here!r} here, {there!r} there)"
    )
    assert (await load(other, 1))[0] == LoadResult(0, 0, "end")
    assert other.exist([block_hash_of(1)]) == [False]
    assert await other.put_blocks(blocks(2)) == PutResult(lost=1)


async def test_two_groups_side_by_side_use_two_namespaces(site: Site) -> None:
    """A rolling upgrade: each group attaches to its own namespace, and their hashes have nothing in common (F10)."""
    site.start_host()
    old, new = make_fingerprint(), make_fingerprint(weights_digest="w1")
    tokens = list(range(64))
    old_client = await site.client(fingerprint=old, namespace="old")
    new_client = await site.client(fingerprint=new, namespace="new")
    old_hashes = prefix_hashes(old.digest(), None, tokens, 16)
    new_hashes = prefix_hashes(new.digest(), None, tokens, 16)
    items = [(block_hash, content(n, BLOCK_BYTES)) for n, block_hash in enumerate(old_hashes)]
    assert (await old_client.put_blocks(items)).stored == 4
    assert new_client.exist(new_hashes) == [False] * 4
    assert old_client.exist(old_hashes) == [True] * 4
    assert (await refused(site, fingerprint=new, namespace="old")).differing_fields == ("weights_digest",)


async def test_updated_weights_supersede_whoever_has_the_old_ones(site: Site) -> None:
    """The epoch goes up: the other client is told the field, is given nothing new, and may finish what it holds."""
    site.start_host(num_blocks=4)
    old = make_fingerprint()
    new = dataclasses.replace(old, weights_epoch=1)
    updater, other = await site.client(fingerprint=old), await site.client(fingerprint=old)
    reservation = await other.reserve([block_hash_of(1)])
    assert reservation is not None
    assert await updater.update_weights(new)
    async with asyncio.timeout(DEADLINE_S):
        while not other.refusal:
            await asyncio.sleep(0)
    assert other.differing_fields == ("weights_epoch",)
    assert other.refusal == "weights were updated: fingerprints differ in: weights_epoch"
    assert await other.match([block_hash_of(1)]) is None
    assert await other.reserve([block_hash_of(2)]) is None
    assert reservation.write(0, content(1, BLOCK_BYTES))
    assert await reservation.commit(deadline_s=DEADLINE_S) == 1
    late = await refused(site, fingerprint=old)
    assert late.differing_fields == ("weights_epoch",)
    assert not await updater.update_weights(old), "an epoch never goes back"
    assert await other.update_weights(new)
    assert (await other.put_blocks(blocks(3))).stored == 1


# --- tenants ------------------------------------------------------------------------------------------------


async def test_a_tenant_at_its_quota_replaces_its_own_blocks_only(site: Site) -> None:
    """The quota is hard although the slab has room; others keep their blocks; usage is told by tenant."""
    site.start_host(num_blocks=16, quotas={A: 2 * BLOCK_BYTES})
    client = await site.client()
    assert await client.put_blocks(blocks(1, 2), tenant=B) == PutResult(stored=2)
    assert await client.put_blocks(blocks(11, 12, 13), tenant=A) == PutResult(stored=2, over_quota=1)
    assert await client.put_blocks(blocks(14), tenant=A) == PutResult(stored=1)
    present = client.exist([block_hash_of(n) for n in (1, 2, 11, 12, 14)])
    assert present == [True, True, True, False, True]
    stat = await until(client.stat, lambda stat: True)
    assert stat.tenants == {A: {"host": 2 * BLOCK_BYTES}, B: {"host": 2 * BLOCK_BYTES}}
    assert stat.quotas == {A: 2 * BLOCK_BYTES}
    assert (stat.free, stat.used, stat.counters["over_quota_blocks"]) == (12, 4, 1)


async def test_a_pinned_block_is_not_replaced_for_its_own_tenant(site: Site) -> None:
    """A tenant whose blocks are all being read is over its quota, until the reader is done."""
    site.start_host(quotas={A: BLOCK_BYTES})
    client = await site.client()
    await client.put_blocks(blocks(1), tenant=A)
    lease = await client.match([block_hash_of(1)])
    assert lease is not None
    assert await client.put_blocks(blocks(2), tenant=A) == PutResult(over_quota=1)
    lease.release()
    assert await client.put_blocks(blocks(2), tenant=A) == PutResult(stored=1)


async def test_a_quota_that_is_lowered_admits_nothing_until_usage_is_below_it(site: Site) -> None:
    """Blocks that are here already leave one by one, each time the tenant asks for room."""
    host = site.start_host()
    client = await site.client()
    await client.put_blocks(blocks(1, 2, 3), tenant=A)
    host.set_quotas({A: BLOCK_BYTES})
    assert await client.put_blocks(blocks(4), tenant=A) == PutResult(over_quota=1)
    assert await client.put_blocks(blocks(4), tenant=A) == PutResult(over_quota=1)
    assert await client.put_blocks(blocks(4), tenant=A) == PutResult(stored=1)
    stat = await until(client.stat, lambda stat: True)
    assert stat.tenants == {A: {"host": BLOCK_BYTES}}


async def test_another_tenants_prefix_is_a_cold_one(site: Site) -> None:
    """F58, the store's side: same tokens, another salt: the same work as for a prefix that nobody ever sent.

    Compared by what is looked up, found and counted; time alone would prove little on a busy machine.
    """
    site.start_host(num_blocks=64)
    client = await site.client()
    digest, tokens = make_fingerprint().digest(), list(range(512))
    mine = prefix_hashes(digest, b"salt of A", tokens, 16)
    await client.put_blocks([(h, content(n, BLOCK_BYTES)) for n, h in enumerate(mine)], tenant=A)
    theirs = prefix_hashes(digest, b"salt of B", tokens, 16)
    cold = prefix_hashes(digest, b"salt of B", tokens[::-1], 16)
    buffer = bytearray(BLOCK_BYTES)
    before = await until(client.stat, lambda stat: True)
    seconds: dict[str, list[float]] = {"theirs": [], "cold": []}
    for _ in range(50):
        for name, hashes in (("theirs", theirs), ("cold", cold)):
            start_s = time.perf_counter()
            assert await client.load_blocks(hashes, lambda _: buffer) == LoadResult(0, 0, "end")
            seconds[name].append(time.perf_counter() - start_s)
    assert await client.match(theirs) is None and await client.match(cold) is None
    missed = before.counters["missed_blocks"] + 102 * len(theirs)
    stat = await until(client.stat, lambda stat: stat.counters["missed_blocks"] == missed)
    assert stat.counters["hit_blocks"] == before.counters["hit_blocks"]
    ratio = statistics.median(seconds["theirs"]) / statistics.median(seconds["cold"])
    assert 0.2 < ratio < 5.0
    assert (await client.load_blocks(mine, lambda _: buffer)).num_loaded == len(mine)


# --- auditing -----------------------------------------------------------------------------------------------


async def test_leases_are_listed_with_holder_age_and_blocks(site: Site) -> None:
    """What ``kopir store stat --leases`` shows; a reader that is killed leaves the list."""
    site.start_host()
    client = await site.client()
    await client.put_blocks(blocks(1, 2, 3))
    reader = await site.worker()
    assert await reader.ask("match 1 2 3") == "matched 3"
    async with looking(client) as looker:
        listed = await looker.leases()
        assert listed.num_leases == 1
        (lease,) = listed.leases
    assert (lease.holder, lease.pid, lease.num_blocks) == ("worker", reader.process.pid, 3)
    assert 0 <= lease.age_ms < 20_000 and 0 < lease.left_ms <= 61_000
    await reader.kill()
    await until(client.stat, lambda stat: stat.leases == 0)
    async with looking(client) as looker:
        assert (await looker.leases()).leases == ()


async def test_the_auditor_finds_nothing_in_good_books(site: Site) -> None:
    """It has looked at least once while blocks came and went, and at most a damaged index makes it complain."""
    host = site.start_host(num_blocks=2)
    client = await site.client()
    for number in range(10):
        await client.put_blocks(blocks(number))
    stat = await until(client.stat, lambda stat: stat.counters["audits"] >= 1)
    assert stat.counters["audit_findings"] == 0
    assert stat.free + stat.used + stat.writing + stat.quarantined == stat.total
    assert host.status()["counters"]["audit_findings"] == 0
