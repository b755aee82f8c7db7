"""What comes into a store and leaves it, as its followers are told: in order, from a number on, from a snapshot on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from store_process import block_hash_of
from store_site import BLOCK_BYTES, DEADLINE_S, Site, blocks, blocks_in, looking, until

from kvstore.core.event_log import BlockEvent, EventLog
from kvstore.store.disk.layout import file_bytes
from kvstore.store.host import DiskPlan
from kvstore.store.looker import BlockChange, BlockSnapshot


@given(st.integers(1, 5), st.integers(0, 12), st.integers(-2, 14), st.integers(1, 4))
def test_the_log_gives_the_next_events_or_says_that_it_cannot(
    kept: int, num_events: int, after: int, at_most: int
) -> None:
    """Against a plain list: the events after a number, as long as none of them is forgotten."""
    log, all_events = EventLog(kept), []
    for number in range(num_events):
        all_events.append(BlockEvent("host", block_hash_of(number), number % 2 == 0))
        log.add(all_events[-1])
    assert log.sequence == num_events
    is_known = num_events - kept <= after <= num_events and after >= 0
    assert log.after(after, at_most) == (tuple(all_events[after : after + at_most]) if is_known else None)


async def changes_of(told: AsyncIterator[BlockSnapshot | BlockChange], num_changes: int) -> list[BlockChange]:
    changes = []
    async with asyncio.timeout(DEADLINE_S):
        for _ in range(num_changes):
            change = await anext(told)
            assert isinstance(change, BlockChange)
            changes.append(change)
    return changes


async def test_a_follower_has_what_the_store_has(site: Site, tmp_path: Path) -> None:
    """A snapshot, then every change of both tiers; one that comes back goes on after its last number."""
    site.start_host(4, disk=DiskPlan(tmp_path / "disk", file_bytes(BLOCK_BYTES, 16)))
    client = await site.client()
    await client.put_blocks(blocks(1, 2))
    await until(client.stat, lambda stat: stat.tiers[1].used_blocks == 2)
    async with looking(client) as looker:
        told = looker.changes()
        snapshot = await anext(told)
        assert isinstance(snapshot, BlockSnapshot)
        assert snapshot.blocks == {tier: {block_hash_of(1), block_hash_of(2)} for tier in ("host", "disk")}
        await client.put_blocks(blocks(3, 4))
        await until(client.stat, lambda stat: stat.tiers[1].used_blocks == 4)
        changes = await changes_of(told, 4)
    await client.put_blocks(blocks(5, 6))
    await until(client.stat, lambda stat: stat.tiers[1].used_blocks == 6)
    async with looking(client) as looker:
        changes += await changes_of(looker.changes(changes[-1].sequence), 6)
    assert [change.sequence for change in changes] == list(range(snapshot.sequence + 1, snapshot.sequence + 11))
    held = {tier: set(hashes) for tier, hashes in snapshot.blocks.items()}
    for change in changes:
        (held[change.tier].add if change.is_added else held[change.tier].remove)(change.block_hash)
    for tier in ("host", "disk"):
        assert held[tier] == {block.block_hash for block in await blocks_in(client, tier)}  # type: ignore[arg-type]
    assert len(held["host"]) == 4 and len(held["disk"]) == 6


async def test_a_number_of_another_life_is_answered_with_a_snapshot(site: Site) -> None:
    """Nothing is made up: whoever is ahead of the node, or far behind it, starts again."""
    site.start_host()
    client = await site.client()
    await client.put_blocks(blocks(1))
    async with looking(client) as looker:
        told = await anext(looker.changes(after=1_000_000))
    assert told == BlockSnapshot(1, {"host": frozenset([block_hash_of(1)]), "disk": frozenset()})
