"""Layouts: places, index maps, labels and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.layout import Coordinates, KVLayout, LayoutError, alternatives, element_offsets, index_map, reorder_blocks
from tests.unit.kernels_checker.pools import random_layout


def test_offsets_and_coordinates_are_inverse() -> None:
    """Every byte of random blocks is one element's or padding, and no two elements share one."""
    rng = np.random.default_rng(1)
    for _ in range(60):
        layout = random_layout(rng)
        offsets = element_offsets(layout)
        assert len(np.unique(offsets)) == offsets.size
        owned = 0
        for offset in range(0, layout.block_bytes, layout.item_bytes):
            at = layout.coordinates(offset)
            if at is None:
                continue
            owned += 1
            local = at._replace(kv_head=at.kv_head - layout.first_kv_head)
            assert layout.offset_bytes(at) == offset == offsets[tuple(local)]
        assert owned == offsets.size


def test_the_logical_view_is_the_layout_in_memory() -> None:
    """Writing an element through the view changes exactly the bytes at its offset."""
    rng = np.random.default_rng(2)
    for _ in range(60):
        layout = random_layout(rng)
        pool = np.zeros((2, layout.block_bytes), np.uint8)
        index = tuple(int(rng.integers(size)) for size in layout.shape)
        layout.logical_view(pool)[(1, *index)] = (1 << 8 * layout.item_bytes) - 1
        start = int(element_offsets(layout)[index])
        assert np.flatnonzero(pool[1]).tolist() == list(range(start, start + layout.item_bytes))
        assert not pool[0].any()


def test_reordering_there_and_back_keeps_every_bit() -> None:
    """A block turned into another order, placement or alignment and back is the same block."""
    rng = np.random.default_rng(3)
    source = KVLayout(2, 3, 8, 4, "bfloat16")
    blocks = rng.integers(0, 256, (3, source.block_bytes), dtype=np.uint8)
    for order in ("HND", "NHD"):
        for together in (True, False):
            target = KVLayout(2, 3, 8, 4, "bfloat16", order, together, row_align_bytes=64)
            turned = reorder_blocks(blocks, source, target, fill=0xAB)
            assert np.array_equal(reorder_blocks(turned, target, source), blocks)
            elements = turned[0].view(np.uint16)[element_offsets(target).reshape(-1) // 2]
            assert np.array_equal(elements, blocks[0].view(np.uint16)[index_map(source, source)])


def test_shards_cover_the_heads_of_the_model() -> None:
    """Ranks split the heads in order; a group larger than the heads holds each head several times."""
    assert [KVLayout(1, 8, 4, tp_size=4, tp_rank=rank).first_kv_head for rank in range(4)] == [0, 2, 4, 6]
    assert KVLayout(1, 8, 4, tp_size=4).shard_kv_heads == 2
    assert [KVLayout(1, 2, 4, tp_size=8, tp_rank=rank).first_kv_head for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_labels_name_what_differs() -> None:
    """The fingerprint's line changes with order, placement, alignment and shard."""
    assert KVLayout(2, 2, 8).label == "layer,kv,head,token,dim"
    other = KVLayout(2, 2, 8, 16, "bfloat16", "NHD", False, 64, tp_size=2, tp_rank=1)
    assert other.label == "kv,layer,token,head,dim;row_stride=64;tp=1/2"


def test_alternatives_differ_in_memory() -> None:
    """No candidate of a mix-up is the layout itself: such a diagnosis would accuse a right block."""
    rng = np.random.default_rng(5)
    for _ in range(50):
        layout = random_layout(rng)
        for _, other in alternatives(layout):
            assert not other.same_bytes_as(layout)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"token_order": "DHN"}, "token_order"),
        ({"kv_together": 1}, "kv_together"),
        ({"row_align_bytes": 3}, "row_align_bytes"),
        ({"row_align_bytes": 8192}, "row_align_bytes"),
        ({"tp_size": 3}, "tp_size"),
        ({"tp_rank": 1}, "tp_rank"),
        ({"tp_size": 2, "tp_rank": 2}, "tp_rank"),
        ({"dtype": "float64"}, "dtype"),
    ],
)
def test_a_bad_field_is_named(changes: dict, field: str) -> None:
    with pytest.raises(LayoutError, match=field) as caught:
        KVLayout(**{"num_layers": 2, "num_kv_heads": 4, "head_size": 8, **changes})
    assert caught.value.field == field


def test_places_outside_and_different_elements_are_refused() -> None:
    """Offsets outside the block, another rank's head, and index maps between different contents name the field."""
    layout = KVLayout(2, 4, 8, 4, tp_size=2, tp_rank=1)
    with pytest.raises(LayoutError, match="offset_bytes"):
        layout.coordinates(layout.block_bytes)
    with pytest.raises(LayoutError, match="kv_head"):
        layout.offset_bytes(Coordinates(0, 0, 1, 0, 0))
    for change in ({"tp_rank": 0}, {"dtype": "float16"}, {"block_tokens": 8}):
        with pytest.raises(LayoutError, match=next(iter(change))):
            index_map(
                layout,
                KVLayout(
                    **{
                        "num_layers": 2,
                        "num_kv_heads": 4,
                        "head_size": 8,
                        "block_tokens": 4,
                        "tp_size": 2,
                        "tp_rank": 1,
                        **change,
                    }
                ),
            )
