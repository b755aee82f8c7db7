"""Conversions of dtype: which are allowed, what is proved, and that the kernel rounds like torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.layout import KVLayout, LayoutError
from kernels.movers.conversions import BITS_DTYPES, STANDARD, TORCH_DTYPES, Registry, fp8_scales, proved
from kernels.movers.move import move, plan_move
from kernels.movers.pages import Pages

PAIRS = [
    ("bfloat16", "float32"),
    ("float16", "float32"),
    ("float8_e4m3", "float32"),
    ("float8_e4m3", "bfloat16"),
    ("float8_e4m3", "float16"),
    ("float32", "bfloat16"),
    ("float32", "float16"),
    ("float32", "float8_e4m3"),
    ("bfloat16", "float8_e4m3"),
    ("float16", "float8_e4m3"),
]


def interesting_numbers(dtype: str) -> torch.Tensor:
    """Every pattern of short types; for float32 every float16 and bfloat16, their halfway points and neighbours."""
    if dtype != "float32":
        size = TORCH_DTYPES[dtype].itemsize
        return torch.arange(1 << 8 * size, dtype=torch.int32).to(BITS_DTYPES[size])
    short = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    words = torch.cat(
        [short.view(kind).to(torch.float32).view(torch.int32) for kind in (torch.float16, torch.bfloat16)]
    )
    fp8 = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    halfway = ((fp8[1:0x7F] + fp8[: 0x7F - 1]) / 2).view(torch.int32)
    words = torch.cat([words, halfway, halfway + 1, halfway - 1, halfway | (1 << 31)])
    around = torch.cat([words, words + 1, words - 1, words + 0x8000, words + 0x7FFF, words + 0x1000])
    return around.to(torch.int32)


def pages_of(bits: torch.Tensor, dtype: str) -> Pages:
    layout = KVLayout(1, 1, 64, -(-bits.numel() // 128), dtype)
    padded = torch.zeros(layout.block_bytes // layout.item_bytes, dtype=bits.dtype)
    padded[: bits.numel()] = bits
    return Pages(padded.view(torch.uint8).reshape(1, -1), layout, torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize(
    ("source", "target", "exponent"),
    [(*pair, 0) for pair in PAIRS] + [(*pair, -3) for pair in PAIRS if "float8_e4m3" in pair],
)
def test_kernel_and_reference_round_alike(source: str, target: str, exponent: int) -> None:
    """Every pattern of short types, and all the halfway cases of float32: same bits; NaN stays NaN."""
    pages = pages_of(interesting_numbers(source), source)
    scales = torch.full((1, 2, 1), 2.0**exponent) if "float8_e4m3" in (source, target) else None
    results = []
    for backend in ("torch", "triton"):
        layout = KVLayout(1, 1, 64, pages.layout.block_tokens, target)
        out = Pages(torch.zeros(1, layout.block_bytes, dtype=torch.uint8), layout, pages.block_table)
        plan = plan_move(pages, out, layout.block_tokens, scales=scales, allow_lossy=True)
        # The interpreter computes with NumPy, which warns about the NaNs and overflows that are meant here.
        with np.errstate(all="ignore"):
            move(plan, backend=backend)
        results.append(out.bits().flatten())
    one, two = results
    is_nan = [bits.view(TORCH_DTYPES[target]).to(torch.float32).isnan() for bits in results]
    assert torch.equal(*is_nan)
    assert torch.equal(one[~is_nan[0]], two[~is_nan[0]])


def test_lossy_conversions_are_refused_unless_allowed() -> None:
    """float32 to anything shorter needs an explicit word; unregistered pairs are refused in any case."""
    for source, target in PAIRS:
        if source == "float8_e4m3" or target == "float32":
            assert STANDARD.find(source, target).is_lossless
            continue
        with pytest.raises(LayoutError, match="loses bits"):
            STANDARD.find(source, target)
        assert not STANDARD.find(source, target, allow_lossy=True).is_lossless
    for pair in (("bfloat16", "float16"), ("float16", "bfloat16")):
        with pytest.raises(LayoutError, match="no conversion"):
            STANDARD.find(*pair, allow_lossy=True)


def test_a_false_claim_of_losing_nothing_is_found() -> None:
    """The proof is a real one: bfloat16 through float16 fails it, so does every other lossy pair of short types."""
    registry = Registry()
    registry.register("bfloat16", "float16", is_lossless=True)
    with pytest.raises(LayoutError, match="is not"):
        registry.find("bfloat16", "float16")
    assert proved("bfloat16", "float32") and not proved("bfloat16", "float8_e4m3")
    with pytest.raises(LayoutError, match="too many"):
        registry.register("float32", "bfloat16", is_lossless=True)
    with pytest.raises(LayoutError, match="already"):
        registry.register("bfloat16", "float16", is_lossless=False)
    with pytest.raises(LayoutError, match="source"):
        registry.register("int8", "float16", is_lossless=False)


def test_scales_keep_every_head_in_range() -> None:
    """float8 with scales by head stays within a sixteenth of each number, and needs scales that are powers of two."""
    rng = np.random.default_rng(9)
    layout = KVLayout(2, 3, 8, 4, "float32")
    values = torch.from_numpy(rng.standard_normal((1, *layout.shape)).astype(np.float32))
    values *= torch.tensor([0.001, 1.0, 3000.0])[None, None, None, :, None, None]
    source = Pages(values.view(torch.uint8).reshape(1, -1), layout, torch.zeros(1, dtype=torch.int64))
    scales = fp8_scales(values[0].abs().amax(dim=(3, 4)))
    small = KVLayout(2, 3, 8, 4, "float8_e4m3")
    packed = Pages(torch.zeros(1, small.block_bytes, dtype=torch.uint8), small, source.block_table)
    move(plan_move(source, packed, 4, scales=scales, allow_lossy=True))
    back = Pages(torch.zeros(1, layout.block_bytes, dtype=torch.uint8), layout, source.block_table)
    move(plan_move(packed, back, 4, scales=scales))
    found = back.logical().view(torch.float32)
    limit = values.abs() / 16 + scales[None, :, :, :, None, None] * 2.0**-10
    assert bool(((found - values).abs() <= limit).all())
    for wrong in (None, scales * 1.5, scales[:1], scales.to(torch.float64)):
        with pytest.raises(LayoutError, match="scales"):
            plan_move(source, packed, 4, scales=wrong, allow_lossy=True)
    with pytest.raises(LayoutError, match="takes none"):
        plan_move(source, back, 4, scales=scales)
    for wrong in (torch.tensor([float("inf")]), torch.tensor([-1.0])):
        with pytest.raises(LayoutError, match="absmax"):
            fp8_scales(wrong)
