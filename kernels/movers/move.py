"""Moves KV of one sequence between pools: gather, scatter, other order, other shard, other block size, other dtype.

Owns the one operation all of these are, and its torch reference. On a GPU the Triton kernel (``triton_move``) does
it in one launch; anywhere else, and as the measure for the kernel, the reference does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from kernels.layout import LayoutError
from kernels.movers.conversions import (
    BITS_DTYPES,
    FP8_MAX,
    STANDARD,
    TORCH_DTYPES,
    Conversion,
    Registry,
    check_scales,
)
from kernels.movers.pages import Pages, shared_heads

Backend = Literal["auto", "torch", "triton"]


@dataclass(frozen=True, slots=True)
class MovePlan:
    """A move that has been checked. ``heads`` are the model's heads that move; positions are [0, num_tokens)."""

    source: Pages
    target: Pages
    num_tokens: int
    heads: range
    conversion: Conversion
    scales: torch.Tensor | None


def plan_move(
    source: Pages,
    target: Pages,
    num_tokens: int,
    *,
    scales: torch.Tensor | None = None,
    allow_lossy: bool = False,
    registry: Registry = STANDARD,
) -> MovePlan:
    """Returns the checked move.

    Args:
        scales: float32, shape (num_layers, 2, num_kv_heads), powers of two; needed by float8 and by nothing else.
        allow_lossy: permits a conversion that loses bits.
    Raises LayoutError naming what stands in the way; nothing has been written then.
    """
    if num_tokens < 1 or num_tokens > min(source.max_tokens, target.max_tokens):
        most = min(source.max_tokens, target.max_tokens)
        raise LayoutError("num_tokens", num_tokens, f"must lie in [1, {most}]: that is what both tables hold")
    if source.pool.device != target.pool.device:
        raise LayoutError("pool.device", str(target.pool.device), f"the source lies on {source.pool.device}")
    used = target.block_table[: target.layout.num_blocks_for(num_tokens)]
    if len(torch.unique(used)) != len(used):
        raise LayoutError("block_table", used.tolist()[:16], "a target block may be written once only")
    if source.pool.data_ptr() == target.pool.data_ptr():
        raise LayoutError("target", "the source's pool", "a move between blocks of one memory is not defined")
    heads = shared_heads(source.layout, target.layout)
    conversion = registry.find(source.layout.dtype, target.layout.dtype, allow_lossy=allow_lossy)
    check_scales(scales, conversion, (source.layout.num_layers, 2, source.layout.num_kv_heads))
    if scales is not None and scales.device != source.pool.device:
        raise LayoutError("scales.device", str(scales.device), f"the pools lie on {source.pool.device}")
    return MovePlan(source, target, num_tokens, heads, conversion, scales)


def move(plan: MovePlan, *, backend: Backend = "auto") -> None:
    """Writes the positions and heads of the plan into the target. Modifies: exactly those elements of its pool."""
    if backend == "triton" or (backend == "auto" and plan.source.pool.is_cuda):
        # Imported here: Triton decides at import whether it interprets, and a CPU-only process needs none.
        from kernels.movers.triton_move import launch

        launch(plan)
        return
    move_reference(plan)


def reshard(
    sources: Sequence[Pages], target: Pages, num_tokens: int, *, backend: Backend = "auto", allow_lossy: bool = False
) -> None:
    """Writes a shard of another tensor-parallel size from the shards that hold its heads.

    Modifies: the positions [0, num_tokens) of the target, every head of it.
    Raises LayoutError when a head of the target is in none of the sources; nothing has been written then.
    """
    first = target.layout.first_kv_head
    missing = set(range(first, first + target.layout.shard_kv_heads))
    plans = []
    for source in sources:
        held = range(source.layout.first_kv_head, source.layout.first_kv_head + source.layout.shard_kv_heads)
        if missing & set(held):
            plans.append(plan_move(source, target, num_tokens, allow_lossy=allow_lossy))
            missing -= set(held)
    if missing:
        raise LayoutError("sources", sorted(missing), "no source holds these KV heads")
    for plan in plans:
        move(plan, backend=backend)


def move_reference(plan: MovePlan) -> None:
    """The move in torch, on any device: what the kernels are measured against."""
    source, target = plan.source, plan.target
    positions = torch.arange(plan.num_tokens, device=source.pool.device)

    def places(pages: Pages) -> tuple[torch.Tensor, slice, torch.Tensor]:
        tokens = pages.layout.block_tokens
        start = plan.heads.start - pages.layout.first_kv_head
        return pages.block_table[positions // tokens], slice(start, start + len(plan.heads)), positions % tokens

    block, heads, token = places(source)
    # Shape (tokens, layers, 2, heads, head_size): axes indexed by tensors come first.
    moved = source.logical()[block, :, :, heads, token]
    scales = None if plan.scales is None else plan.scales[:, :, plan.heads.start : plan.heads.stop, None]
    block, heads, token = places(target)
    target.logical()[block, :, :, heads, token] = convert_reference(moved, plan.conversion, scales)


def convert_reference(bits: torch.Tensor, conversion: Conversion, scales: torch.Tensor | None) -> torch.Tensor:
    """Returns elements in the target's dtype; both sides are integers of the elements' sizes.

    ``scales`` broadcasts against ``bits``. float8 saturates at its largest number instead of becoming NaN.
    """
    if conversion.is_copy:
        return bits
    numbers = bits.view(TORCH_DTYPES[conversion.source]).to(torch.float32)
    if scales is not None:
        numbers = numbers * scales if conversion.source == "float8_e4m3" else numbers * (1.0 / scales)
    if conversion.target == "float8_e4m3":
        numbers = numbers.clamp(-FP8_MAX, FP8_MAX)
    converted = numbers.to(TORCH_DTYPES[conversion.target])
    return converted.view(BITS_DTYPES[converted.element_size()])
