"""The block layout, the pool's memory and the arithmetic between positions and blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.layout import AXES, KVLayout, LayoutError
from kvstore.errors import BadInput
from workers.core.sequence import SeqChunk, chunk_bounds, completed_blocks, num_blocks_for, slot_mapping
from workers.kv_pool import KvPool


def test_sizes_of_the_packaged_model() -> None:
    """SmolLM2-135M has 23,040 KV bytes per token and 368,640 per block in bfloat16, twice that in float32."""
    layout = KVLayout(30, 3, 64, 16, "bfloat16")
    assert (layout.token_bytes, layout.block_bytes) == (23_040, 368_640)
    assert KVLayout(30, 3, 64, 16, "float32").block_bytes == 737_280
    assert AXES == ("layer", "kv", "kv_head", "token", "head")
    assert [layout.num_blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_strides_are_those_of_the_pool_tensor() -> None:
    """The layout's byte strides describe the real memory."""
    layout = KVLayout(3, 2, 8, 4, "bfloat16")
    block = KvPool(layout, 2).tensor[1]
    assert tuple(block.shape) == layout.shape
    assert tuple(step * layout.item_bytes for step in block.stride()) == layout.strides_bytes


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_layers": 0}, "num_layers"),
        ({"num_kv_heads": -1}, "num_kv_heads"),
        ({"head_size": 1.5}, "head_size"),
        ({"block_tokens": True}, "block_tokens"),
        ({"dtype": "int8"}, "dtype"),
        ({"num_layers": 1 << 40}, "block_bytes"),
    ],
)
def test_a_bad_layout_names_its_field(changes: dict, field: str) -> None:
    """Each wrong field is refused by name, as a ValueError."""
    with pytest.raises(LayoutError, match=field) as caught:
        KVLayout(**{"num_layers": 2, "num_kv_heads": 2, "head_size": 8, **changes})
    assert caught.value.field == field
    assert isinstance(caught.value, ValueError)


def test_bytes_and_numbers_are_the_same_memory() -> None:
    """A byte written through a block's view is seen by the tensor, in that block only, and zeroing clears it."""
    pool = KvPool(KVLayout(2, 1, 4, 2, "float32"), 3)
    pool.block_bytes_view(1)[:] = np.full(16, 1.5, dtype=np.float32).tobytes() * 2
    assert torch.equal(pool.tensor[1], torch.full(pool.layout.shape, 1.5))
    assert not pool.tensor[0].any() and not pool.tensor[2].any()
    pool.zero_block(1)
    assert not pool.tensor.any()
    assert pool.size_bytes == 3 * pool.block_bytes == pool.bytes_view.nbytes


def test_slots_and_counts_out_of_range_are_refused() -> None:
    """A negative slot would silently be another request's block."""
    pool = KvPool(KVLayout(1, 1, 2, 1, "float32"), 2)
    for slot in (-1, 2):
        with pytest.raises(BadInput, match="slot"):
            pool.block_bytes_view(slot)
        with pytest.raises(BadInput, match="slot"):
            pool.zero_block(slot)
    with pytest.raises(BadInput, match="pool_blocks"):
        KvPool(pool.layout, 0)


def test_positions_map_to_blocks_through_the_table() -> None:
    """Positions 3 to 8 with blocks of 4 lie in the table's first three blocks, in order."""
    chunk = SeqChunk([0] * 6, 3, [7, 2, 9])
    assert slot_mapping(chunk, 4) == ([7, 2, 2, 2, 2, 9], [3, 0, 1, 2, 3, 0])


@given(st.integers(0, 300), st.integers(1, 300), st.integers(1, 64), st.integers(1, 40))
def test_chunks_cover_exactly_and_every_block_completes_once(
    start: int, length: int, chunk_tokens: int, block_tokens: int
) -> None:
    """Chunks tile the range without gap or overlap; the blocks they complete are those that end inside it."""
    end = start + length
    bounds = chunk_bounds(start, end, chunk_tokens)
    assert [p for a, b in bounds for p in range(a, b)] == list(range(start, end))
    assert all(0 < b - a <= chunk_tokens for a, b in bounds)
    done = [block for a, b in bounds for block in completed_blocks(a, b, block_tokens)]
    assert done == [k for k in range(num_blocks_for(end, block_tokens)) if start < (k + 1) * block_tokens <= end]
