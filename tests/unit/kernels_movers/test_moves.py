"""Moves between pools: an element-by-element model, the torch reference and the Triton kernel agree."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.checker import Claim, LayoutChecker
from kernels.layout import Coordinates, KVLayout, LayoutError
from kernels.movers.move import move, plan_move, reshard
from kernels.movers.pages import Pages, contiguous, shared_heads
from kernels.pattern import write_pattern

BACKENDS = ("torch", "triton")


def make_pages(layout: KVLayout, num_tokens: int, rng: np.random.Generator, *, spare: int = 2) -> Pages:
    """Blocks in a random order in a pool of finite numbers, larger than the sequence needs."""
    needed = layout.num_blocks_for(num_tokens)
    size = needed + spare
    values = torch.from_numpy(rng.standard_normal((size, layout.block_bytes // layout.item_bytes)).astype(np.float32))
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    pool = values.to(dtypes.get(layout.dtype, torch.float8_e4m3fn)).view(torch.uint8).reshape(size, -1)
    return Pages(pool.clone(), layout, torch.from_numpy(rng.permutation(size)[:needed].astype(np.int64)))


def element(pages: Pages, position: int, at: Coordinates) -> bytes:
    """The bytes of one element, found through the layout alone."""
    tokens = pages.layout.block_tokens
    start = pages.layout.offset_bytes(at._replace(token=position % tokens))
    block = pages.pool[pages.block_table[position // tokens]]
    return bytes(block[start : start + pages.layout.item_bytes].numpy().tobytes())


def random_layout(rng: np.random.Generator, **fixed) -> KVLayout:
    choices = {
        "token_order": str(rng.choice(["HND", "NHD"])),
        "kv_together": bool(rng.integers(2)),
        "row_align_bytes": int(rng.choice([1, 32])),
        "block_tokens": int(rng.choice([1, 4, 16, 32])),
    }
    return KVLayout(**{"num_layers": 2, "num_kv_heads": 4, "head_size": 6, **choices, **fixed})


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_element_arrives_and_nothing_else_changes(backend) -> None:
    """Random orders, placements, alignments, block sizes and shards: checked one element at a time."""
    rng = np.random.default_rng(31)
    for number in range(12):
        dtype = ("bfloat16", "float32", "float16", "float8_e4m3")[number % 4]
        sizes = (1, 2, 4)
        source_tp, target_tp = int(rng.choice(sizes)), int(rng.choice(sizes))
        source_layout = random_layout(rng, dtype=dtype, tp_size=source_tp, tp_rank=0)
        target_layout = random_layout(rng, dtype=dtype, tp_size=target_tp, tp_rank=0)
        num_tokens = int(rng.integers(1, 40))
        source, target = (make_pages(layout, num_tokens, rng) for layout in (source_layout, target_layout))
        before = target.pool.clone()
        move(plan_move(source, target, num_tokens), backend=backend)
        touched = torch.zeros_like(before, dtype=torch.bool)
        for position in range(num_tokens):
            block, token = divmod(position, target_layout.block_tokens)
            for layer in range(2):
                for kv in range(2):
                    for head in shared_heads(source_layout, target_layout):
                        for place in range(6):
                            at = Coordinates(layer, kv, head, 0, place)
                            assert element(target, position, at) == element(source, position, at)
                            start = target_layout.offset_bytes(at._replace(token=token))
                            touched[target.block_table[block], start : start + target_layout.item_bytes] = True
        assert torch.equal(target.pool[~touched], before[~touched])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("before", "after"), [(16, 32), (32, 16), (16, 16), (8, 64)])
def test_other_block_sizes_and_back_keep_every_bit(backend, before: int, after: int) -> None:
    """16 to 32 tokens a block and back: each bit returns."""
    rng = np.random.default_rng(before * after)
    one, two = KVLayout(2, 2, 16, before), KVLayout(2, 2, 16, after, token_order="NHD")
    source = make_pages(one, 70, rng)
    middle, back = make_pages(two, 70, rng), make_pages(one, 70, rng)
    back.pool.copy_(source.pool)
    back.pool.zero_()
    move(plan_move(source, middle, 70), backend=backend)
    move(plan_move(middle, back, 70), backend=backend)
    whole, again = contiguous(one, 70), contiguous(one, 70)
    move(plan_move(source, whole, 70))
    move(plan_move(back, again, 70))
    assert torch.equal(whole.pool, again.pool) and whole.pool.any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 2), (2, 8), (8, 1)])
def test_other_tensor_parallel_sizes(backend, before: int, after: int) -> None:
    """Shards of one group size become those of another; the checker recognises each as the shard it should be."""
    num_tokens, seed = 8, 77
    layouts = {size: [KVLayout(2, 4, 8, 4, tp_size=size, tp_rank=r) for r in range(size)] for size in (before, after)}
    table = torch.arange(2)
    sources = []
    for layout in layouts[before]:
        pool = np.zeros((2, layout.block_bytes), np.uint8)
        write_pattern(pool, layout, seed=seed)
        sources.append(Pages(torch.from_numpy(pool), layout, table))
    for layout in layouts[after]:
        target = Pages(torch.zeros(2, layout.block_bytes, dtype=torch.uint8), layout, table)
        reshard(sources, target, num_tokens, backend=backend)
        report = LayoutChecker(layout).check(target.pool.numpy(), Claim(probe_seed=seed))
        assert report.is_clean, report


def test_a_shard_that_nobody_holds_is_refused_before_anything_is_written() -> None:
    """Half of the heads missing: typed error, target untouched."""
    source = KVLayout(1, 4, 8, 4, tp_size=2, tp_rank=1)
    pages = make_pages(source, 4, np.random.default_rng(1))
    target = Pages(
        torch.zeros(1, 1 * KVLayout(1, 4, 8, 4).block_bytes, dtype=torch.uint8), KVLayout(1, 4, 8, 4), torch.arange(1)
    )
    with pytest.raises(LayoutError, match="sources"):
        reshard([pages], target, 4)
    with pytest.raises(LayoutError, match="tp_rank"):
        plan_move(pages, make_pages(KVLayout(1, 4, 8, 4, tp_size=2, tp_rank=0), 4, np.random.default_rng(1)), 4)
    assert not target.pool.any()


def test_what_cannot_be_moved_is_named() -> None:
    """Empty pools, zero tokens, strided views, wrong devices, tables out of range or written twice."""
    layout = KVLayout(1, 2, 8, 4)
    table = torch.arange(2)
    pool = torch.zeros(3, layout.block_bytes, dtype=torch.uint8)
    bad_pages = [
        (pool[:0], table, "pool.shape"),
        (pool[:, :-2], table, "pool.shape"),
        (pool.view(torch.int16), table, "pool.dtype"),
        (torch.zeros(6, layout.block_bytes, dtype=torch.uint8)[::2], table, "pool.strides"),
        (pool, table.to(torch.int32), "block_table"),
        (pool, table[:0], "block_table"),
        (pool, torch.tensor([0, 3]), "block_table"),
        (pool, torch.tensor([-1, 0]), "block_table"),
        (pool.to("meta"), table, "block_table.device"),
    ]
    for bytes_, ids, field in bad_pages:
        with pytest.raises(LayoutError) as caught:
            Pages(bytes_, layout, ids)
        assert caught.value.field == field
    source, target = Pages(pool, layout, table), Pages(pool.clone(), layout, table)
    for num_tokens in (0, -1, 9):
        with pytest.raises(LayoutError, match="num_tokens"):
            plan_move(source, target, num_tokens)
    with pytest.raises(LayoutError, match="written once"):
        plan_move(source, Pages(pool.clone(), layout, torch.tensor([1, 1])), 8)
    with pytest.raises(LayoutError, match="not defined"):
        plan_move(source, Pages(pool, layout, table), 4)
    with pytest.raises(LayoutError, match="head_size"):
        plan_move(source, make_pages(KVLayout(1, 2, 4, 4), 4, np.random.default_rng(1)), 4)
    with pytest.raises(LayoutError, match="num_tokens"):
        contiguous(layout, 0)
