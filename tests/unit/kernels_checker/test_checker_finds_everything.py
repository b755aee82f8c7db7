"""The checker over random pools: every damage is found, named rightly where it can be, and no clean pool is accused."""

from __future__ import annotations

import os
from collections import Counter

import numpy as np
import pytest

from kernels.checker import Claim, Kind, LayoutChecker, Sample, unwritten_pool
from kernels.layout import KVLayout
from kernels.pattern import write_pattern
from tests.unit.kernels_checker.pools import DAMAGES, random_layout, random_pool

NUM_POOLS = int(os.environ.get("KOPIR_SOAK_POOLS", "3000"))


@pytest.mark.timeout(600)  # a soak of 20,000 takes about 20 s of one core, much longer on a busy machine
def test_every_damage_is_found_and_no_clean_pool_accused() -> None:
    """Random pools: every second one is checked clean first, then each has one damage or mix-up and is refused."""
    rng = np.random.default_rng(20_260_701)
    applied: Counter[str] = Counter()
    for number in range(NUM_POOLS):
        if number % len(DAMAGES) == 0:
            layout = random_layout(rng)
            checker = LayoutChecker(layout)
        pool = random_pool(rng, layout)
        if number % 2 == 0:
            assert checker.check(pool.bytes, pool.claim).is_clean, pool
        clean = pool.bytes.copy()
        damage = DAMAGES[number % len(DAMAGES)]
        kind = damage(pool, rng)
        if kind is None or np.array_equal(clean, pool.bytes):
            # Nothing to mix up here, such as the order of a single head: then it must not be accused either.
            assert checker.check(pool.bytes, pool.claim).is_clean, pool
            continue
        report = checker.check(pool.bytes, pool.claim)
        assert not report.is_clean, (number, damage.__name__, pool)
        applied[damage.__name__] += 1
    assert min(applied.values()) > NUM_POOLS // 70 and len(applied) == len(DAMAGES), applied


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_each_damage_gets_its_name(damage) -> None:
    """Where blocks are large enough to tell, the violation has the right kind and a place inside its block."""
    rng = np.random.default_rng(7)
    layout = KVLayout(2, 4, 12, 8, "bfloat16", row_align_bytes=32, tp_size=2, tp_rank=1)
    named = 0
    for _ in range(20):
        pool = random_pool(rng, layout)
        clean = pool.bytes.copy()
        kind = damage(pool, rng)
        if kind is None or np.array_equal(clean, pool.bytes):
            continue
        report = LayoutChecker(layout).check(pool.bytes, pool.claim)
        for violation in report.violations:
            assert violation.offset_bytes is None or 0 <= violation.offset_bytes < layout.block_bytes
            assert str(violation).startswith(violation.kind.value)
        if kind == "any":
            assert report.violations
        else:
            assert kind in report.counts(), (kind, report)
        named += 1
    assert named >= 5


def test_digests_find_every_single_bit_and_name_swaps_and_orders() -> None:
    """Real content has no pattern: its digest finds each flipped bit, and tells a swap or a wrong order by name."""
    rng = np.random.default_rng(3)
    layout = KVLayout(2, 3, 8, 4, "float32")
    pool = random_pool(rng, layout)
    pool.bytes = np.concatenate([pool.bytes, random_pool(rng, layout).bytes])
    claim = Claim(digests=pool.digests(), is_numeric=False)
    checker = LayoutChecker(layout)
    assert checker.check(pool.bytes, claim).is_clean
    for bit in range(0, 8 * layout.block_bytes, 97):
        pool.bytes[0, bit // 8] ^= np.uint8(1 << bit % 8)
        assert checker.check(pool.bytes, claim).counts() == {"digest": 1}
        pool.bytes[0, bit // 8] ^= np.uint8(1 << bit % 8)
    swapped = pool.bytes.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert checker.check(swapped, claim).counts() == {"swapped": 2}
    other = KVLayout(2, 3, 8, 4, "float32", token_order="NHD")
    turned = pool.bytes.copy()
    other.logical_view(turned)[...] = layout.logical_view(pool.bytes)
    assert checker.check(turned, claim).counts() == {"axis_order": len(turned)}


def test_a_shifted_pool_is_a_stride() -> None:
    """A writer that counted with a larger block stride starts every later block late."""
    layout = KVLayout(2, 2, 8, 4, "bfloat16")
    claim = Claim(probe_seed=9)
    data = np.zeros((4, layout.block_bytes), np.uint8)
    write_pattern(data, layout, seed=9)
    flat, shift = np.zeros(data.size + 96, np.uint8), 32
    for slot in range(4):
        start = slot * (layout.block_bytes + shift)
        flat[start : start + layout.block_bytes] = data[slot]
    report = LayoutChecker(layout).check(flat[: data.size].reshape(data.shape).copy(), claim)
    assert report.counts()["stride"] >= 2, report


def test_violations_say_where() -> None:
    """Block, layer, head, token and offset of one bad element are exact."""
    layout = KVLayout(3, 4, 8, 4, "float32", token_order="NHD", row_align_bytes=64, tp_size=2, tp_rank=1)
    pool = random_pool(np.random.default_rng(5), layout)
    pool.claim = Claim(num_tokens=pool.claim.num_tokens, fill=pool.claim.fill)
    layout.logical_view(pool.bytes[0])[2, 1, 1, 0, 5] = 0x7FC00000
    (violation,) = LayoutChecker(layout).check(pool.bytes, pool.claim).violations
    assert violation.kind is Kind.NOT_FINITE and violation.block == 0 and violation.count == 1
    assert violation.at is not None and tuple(violation.at) == (2, 1, 3, 0, 5)
    assert violation.offset_bytes == layout.offset_bytes(violation.at)


def test_a_pool_nobody_wrote_is_unwritten_everywhere() -> None:
    """Every block of a fresh debug pool is accused of being unwritten, in probe mode and without a pattern."""
    for dtype in ("bfloat16", "float32", "float16", "float8_e4m3"):
        layout = KVLayout(2, 2, 4, 4, dtype)
        pool = unwritten_pool(layout, 3)
        for claim in (Claim(), Claim(probe_seed=1)):
            report = LayoutChecker(layout).check(pool, claim)
            assert set(report.counts()) - {"boundary"} == {"unwritten"}
            assert report.counts()["unwritten"] == 3


def test_samples_cover_the_pool_as_seeds_change() -> None:
    """Sampling looks at the asked number of blocks, the same for one seed, all of them over many seeds."""
    layout = KVLayout(1, 1, 8, 2, "bfloat16")
    pool = unwritten_pool(layout, 16)
    checker = LayoutChecker(layout)
    seen: set[int] = set()
    for seed in range(40):
        report = checker.check(pool, sample=Sample(3, seed))
        assert (report.num_checked, report.num_blocks) == (3, 16)
        assert report == checker.check(pool, sample=Sample(3, seed))
        seen |= {violation.block for violation in report.violations}
    assert seen == set(range(16))
