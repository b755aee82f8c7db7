"""``kopir store verify`` over a running store: each kind of damage is named with block, layer, head and offset."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from store_process import block_hash_of
from store_site import BLOCK_BYTES, DEADLINE_S, Site, blocks_in, load, until, verified
from test_identity import make_fingerprint

from kernels.layout import Coordinates, KVLayout, LayoutError, reorder_blocks
from kernels.pattern import CANARY_BITS
from kvstore.store.client import PutBlock, StoreClient
from kvstore.store.content import layout_of
from kvstore.store.disk.file import FILE_NAME
from kvstore.store.disk.layout import file_bytes, slots_start, stride_bytes
from kvstore.store.host import DiskPlan, StoreHost
from kvstore.store.messages import BlockViolation

LAYOUT = KVLayout(5, 5, 10, 5, "bfloat16")
FINGERPRINT = make_fingerprint(num_layers=5, num_kv_heads=5, head_size=10, block_tokens=5)
NUM_BLOCKS = 8
NAN = 0x7FC0
AT = Coordinates(3, 1, 4, 2, 7)
"""Layer 3, values, head 4, token 2, element 7."""

Damage = Callable[[np.ndarray], list[dict]]
"""Changes stored blocks (uint8, shape (NUM_BLOCKS, BLOCK_BYTES)), returns what must be found, in order."""


def kv_blocks(rng: np.random.Generator) -> np.ndarray:
    """Finite bfloat16 numbers, as an engine leaves them."""
    values = rng.standard_normal((NUM_BLOCKS, BLOCK_BYTES // 2)).astype(np.float32)
    return np.ascontiguousarray((values.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8)


def put(blocks: np.ndarray, number: int, at: Coordinates, bits: int) -> dict:
    LAYOUT.logical_view(blocks[number])[tuple(at)] = bits
    place = {"layer": at.layer, "kv": at.kv, "kv_head": at.kv_head, "token": at.token}
    return {"block": number, "offset_bytes": LAYOUT.offset_bytes(at), **place}


def not_finite(blocks: np.ndarray) -> list[dict]:
    return [put(blocks, 2, AT, NAN) | {"kind": "not_finite"}, {"block": 2, "kind": "digest"}]


def unwritten(blocks: np.ndarray) -> list[dict]:
    found = put(blocks, 5, AT, CANARY_BITS["bfloat16"]) | {"kind": "unwritten"}
    return [found, {"block": 5, "kind": "digest"}]


def one_bit(blocks: np.ndarray) -> list[dict]:
    blocks[1, 1234] ^= 1
    return [{"block": 1, "kind": "digest"}]


def swapped(blocks: np.ndarray) -> list[dict]:
    blocks[[0, 6]] = blocks[[6, 0]]
    return [{"block": 0, "kind": "swapped"}, {"block": 6, "kind": "swapped"}]


def other_order(blocks: np.ndarray) -> list[dict]:
    theirs = replace(LAYOUT, token_order="NHD")
    blocks[3] = reorder_blocks(blocks[3:4], LAYOUT, theirs)[0]
    return [{"block": 3, "kind": "axis_order"}]


def over_the_border(blocks: np.ndarray) -> list[dict]:
    """A write that ran from the end of a block into the one behind it."""
    last = put(blocks, 3, Coordinates(4, 1, 4, 4, 9), NAN) | {"kind": "not_finite"}
    first = put(blocks, 4, Coordinates(0, 0, 0, 0, 0), NAN) | {"kind": "not_finite"}
    border = {"block": 3, "kind": "boundary", "offset_bytes": BLOCK_BYTES - 2}
    return [last, first, border, {"block": 3, "kind": "digest"}, {"block": 4, "kind": "digest"}]


DAMAGES: list[Damage] = [not_finite, unwritten, one_bit, swapped, other_order, over_the_border]


def as_expected(violation: BlockViolation, wanted: dict, slots: dict[int, int]) -> bool:
    assert violation.slot == slots[wanted["block"]] and violation.block_hash == block_hash_of(wanted["block"])
    names = [name for name in wanted if name != "block"]
    return all(getattr(violation, name) == wanted[name] for name in names)


async def stored(site: Site, tmp_path: Path) -> tuple[StoreHost, StoreClient, np.ndarray]:
    """A store whose slab and disk both hold all the blocks."""
    host = site.start_host(NUM_BLOCKS, disk=DiskPlan(tmp_path / "disk", file_bytes(BLOCK_BYTES, NUM_BLOCKS)))
    client = await site.client(fingerprint=FINGERPRINT)
    data = kv_blocks(np.random.default_rng(11))
    put = await client.put_blocks([PutBlock(block_hash_of(n), memoryview(data[n])) for n in range(NUM_BLOCKS)])
    assert put.stored == NUM_BLOCKS
    await until(client.stat, lambda stat: stat.tiers[1].used_blocks == NUM_BLOCKS)
    return host, client, data


def change(host: StoreHost, tmp_path: Path, tier: str, slots: dict[int, int], data: np.ndarray) -> None:
    """Overwrites what a tier holds, under the feet of the running node."""
    for number, slot in slots.items():
        if tier == "host":
            assert host._slab is not None
            host._slab.slot(slot)[:] = memoryview(data[number])
            continue
        with (tmp_path / "disk" / FILE_NAME).open("r+b") as file:
            file.seek(slots_start(NUM_BLOCKS) + slot * stride_bytes(BLOCK_BYTES))
            file.write(data[number].tobytes())


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
async def test_each_damage_is_named_where_it_is(site: Site, tmp_path: Path, tier: str, damage: Damage) -> None:
    """In a slab and on a disk that are in use; damaged blocks are gone afterwards, the others stay, counts add up."""
    host, client, data = await stored(site, tmp_path)
    listed = await blocks_in(client, tier)
    slots = {n: next(b.slot for b in listed if b.block_hash == block_hash_of(n)) for n in range(NUM_BLOCKS)}
    clean = await verified(client, tier)
    assert (clean.num_checked, clean.num_content, clean.violations) == (NUM_BLOCKS, NUM_BLOCKS, ())
    # Damage lies in neighbouring slots; blocks are numbered as they lie.
    in_order = sorted(range(NUM_BLOCKS), key=slots.__getitem__)
    lying = data[in_order]
    wanted = damage(lying)
    for finding in wanted:
        finding["block"] = in_order[finding["block"]]
    data[in_order] = lying
    change(host, tmp_path, tier, slots, data)
    found = await verified(client, tier)
    assert len(found.violations) == len(wanted), found.violations
    for violation, expected in zip(found.violations, wanted, strict=True):
        assert as_expected(violation, expected, slots), (violation, expected)
    bad = {finding["block"] for finding in wanted}
    assert {ref.block_hash for ref in found.damaged} == {block_hash_of(n) for n in bad}
    after = await verified(client, tier)
    assert (after.num_checked, after.violations) == (NUM_BLOCKS - len(bad), ())
    counters = host.status()["counters"]
    assert counters["layout_checks"] == 3 * NUM_BLOCKS - len(bad)
    kinds = [finding["kind"] for finding in wanted]
    assert {name: counters.get(f"layout_violations.{name}") for name in kinds} == {k: kinds.count(k) for k in kinds}


async def test_a_block_that_was_wrong_before_its_digest_is_found_and_removed(site: Site, tmp_path: Path) -> None:
    """A worker that stores NaN with the right digest: no comparison of digests sees it, the layout does."""
    site.start_host(NUM_BLOCKS)
    client = await site.client(fingerprint=FINGERPRINT)
    data = kv_blocks(np.random.default_rng(12))
    place = put(data, 2, AT, NAN)
    await client.put_blocks([PutBlock(block_hash_of(n), memoryview(data[n])) for n in range(NUM_BLOCKS)])
    found = await verified(client, "host")
    (violation,) = found.violations
    assert (violation.kind, violation.offset_bytes) == ("not_finite", place["offset_bytes"])
    assert [ref.block_hash for ref in found.damaged] == [block_hash_of(2)]
    assert client.exist([block_hash_of(2), block_hash_of(3)]) == [False, True]


async def test_a_client_may_look_at_what_it_loads(site: Site, tmp_path: Path) -> None:
    """``is_sound`` sees every block of right digest, from slab and disk; one it refuses is zeroed and reported."""
    seen: list[int] = []

    def is_sound(block: memoryview) -> bool:
        seen.append(bytes(block) in bad)
        return bytes(block) not in bad

    bad: set[bytes] = set()
    _, client, data = await stored(site, tmp_path)
    bad.add(data[2].tobytes())
    picky = await site.client(fingerprint=FINGERPRINT, is_sound=is_sound)
    result, got = await load(picky, 0, 1, 2, 3)
    assert (result.num_loaded, result.stopped_by, seen) == (2, "corrupt", [0, 0, 1])
    assert got == [data[0].tobytes(), data[1].tobytes()]
    await until(client.stat, lambda stat: stat.counters["corrupt_blocks"] == 1)
    assert not client.exist([block_hash_of(2)])[0]
    # What is on the disk is the same block; it is looked at when it has come up.
    seen.clear()
    buffer = bytearray(b"\xaa" * BLOCK_BYTES)
    again = await picky.load_blocks([block_hash_of(2)], lambda _: buffer, deadline_s=DEADLINE_S)
    assert (again.num_loaded, again.stopped_by, seen) == (0, "corrupt", [1]) and not any(buffer)


async def test_without_a_known_layout_digests_are_compared(site: Site, tmp_path: Path) -> None:
    """Blocks of a former life on the disk, or of a client that names no layout: damage is found, content is not."""
    host, client, data = await stored(site, tmp_path)
    await client.close()
    host.close()
    host = site.start_host(NUM_BLOCKS, disk=DiskPlan(tmp_path / "disk", file_bytes(BLOCK_BYTES, NUM_BLOCKS)))
    nameless = await site.client(namespace="another")
    listed = await blocks_in(nameless, "disk")
    slots = {n: next(b.slot for b in listed if b.block_hash == block_hash_of(n)) for n in range(NUM_BLOCKS)}
    put(data, 2, AT, NAN)
    change(host, tmp_path, "disk", slots, data)
    found = await verified(nameless, "disk")
    assert (found.num_checked, found.num_content) == (NUM_BLOCKS, 0)
    assert [(v.kind, v.slot) for v in found.violations] == [("digest", slots[2])]
    # Whoever computes these blocks says what they mean.
    await site.client(fingerprint=FINGERPRINT)
    assert (await verified(nameless, "disk")).num_content == NUM_BLOCKS - 1


def test_the_layout_is_the_one_that_the_fingerprint_names() -> None:
    """Any order, alignment and shard is read back from its label; what no layout is called is none."""
    texts = FINGERPRINT.to_dict()
    assert layout_of(texts) == LAYOUT
    for layout in (
        replace(LAYOUT, token_order="NHD"),
        replace(LAYOUT, kv_together=False, row_align_bytes=64),
        replace(LAYOUT, tp_size=5, tp_rank=3),
    ):
        again = layout_of(texts | {"kv_layout": layout.label})
        assert again is not None and again.same_bytes_as(layout) and again.label == layout.label
    for wrong in ({"kv_layout": "dim,layer"}, {"kv_layout": LAYOUT.label + ";tp=x"}, {"num_layers": "many"}):
        assert layout_of(texts | wrong) is None
    assert layout_of({}) is None
    with pytest.raises(LayoutError, match="kv_layout"):
        KVLayout.from_label("sideways", num_layers=1, num_kv_heads=1, head_size=1, block_tokens=1, dtype="bfloat16")
