"""The move as one Triton kernel: every program carries some head vectors from the source's place to the target's.

Rounding is written out in integer operations, so that a GPU, Triton's interpreter and torch give the same bits. It
is imported only where it is used: Triton decides at import whether it compiles or interprets.
"""

# mypy: allow-untyped-decorators

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

from kernels.movers.conversions import BITS_DTYPES
from kernels.movers.move import MovePlan

ELEMENTS_PER_PROGRAM: Final = 4096
CODES: Final = {"float32": 0, "bfloat16": 1, "float16": 2, "float8_e4m3": 3}


@triton.jit
def _to_float32(bits: Any, source: tl.constexpr) -> Any:
    """Numbers from the bits of ``source``; every one is exact."""
    if source == 0:
        return bits.to(tl.float32, bitcast=True)
    if source == 1:
        return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    if source == 2:
        return bits.to(tl.float16, bitcast=True).to(tl.float32)
    wide = bits.to(tl.int32)
    magnitude = wide & 0x7F
    sign = (wide & 0x80) << 24
    # Below 2**-6 the exponent field is 0: the mantissa counts steps of 2**-9.
    small = (magnitude.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)
    large = (magnitude << 20) + (120 << 23)
    body = tl.where(magnitude < 8, small, large)
    body = tl.where(magnitude == 0x7F, 0x7FC00000, body)
    return (body | sign).to(tl.float32, bitcast=True)


@triton.jit
def _from_float32(numbers: Any, target: tl.constexpr) -> Any:
    """Bits of ``target``, rounded to the nearest, ties to even; float8 saturates."""
    word = numbers.to(tl.int32, bitcast=True)
    magnitude = word & 0x7FFFFFFF
    if target == 0:
        return word
    if target == 1:
        rounded = (word + 0x7FFF + ((word >> 16) & 1)) >> 16
        quiet = (word >> 16) | 0x40
        return tl.where(magnitude > 0x7F800000, quiet, rounded).to(tl.int16)
    if target == 2:
        return numbers.to(tl.float16).to(tl.int16, bitcast=True)
    sign = (word >> 24) & 0x80
    is_nan = magnitude > 0x7F800000
    # 448 is the largest number; what would round above it stays there.
    capped = tl.minimum(magnitude, 0x43E00000)
    large = (capped + 0x7FFFF + ((capped >> 20) & 1) - (120 << 23)) >> 20
    # Adding 2**14 leaves steps of 2**-9 in the sum's last bits, rounded by the addition itself.
    sum_bits = (capped.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True)
    small = sum_bits - 0x46800000
    body = tl.where(capped < 0x3C800000, small, large)
    return (tl.where(is_nan, 0x7F, body) | sign).to(tl.uint8)


@triton.jit
def _move_rows(
    source: Any,
    target: Any,
    source_table: Any,
    target_table: Any,
    scales: Any,
    num_rows: Any,
    num_tokens: Any,
    num_heads: Any,
    first_head: Any,
    model_heads: Any,
    source_head: Any,
    target_head: Any,
    source_tokens: Any,
    target_tokens: Any,
    source_block: Any,
    source_layer: Any,
    source_kv: Any,
    source_head_step: Any,
    source_token: Any,
    target_block: Any,
    target_layer: Any,
    target_kv: Any,
    target_head_step: Any,
    target_token: Any,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    SCALED: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    # Neighbouring rows are neighbours in the target, so that stores fill whole lines.
    if HEADS_FIRST:
        head = row % num_heads
        token = row // num_heads % num_tokens
    else:
        token = row % num_tokens
        head = row // num_tokens % num_heads
    plane = row // (num_tokens * num_heads)
    layer = plane // 2
    kv = plane % 2
    from_block = tl.load(source_table + token // source_tokens, mask=is_row, other=0)
    to_block = tl.load(target_table + token // target_tokens, mask=is_row, other=0)
    read = from_block * source_block + layer * source_layer + kv * source_kv
    read += (head + source_head) * source_head_step + token % source_tokens * source_token
    write = to_block * target_block + layer * target_layer + kv * target_kv
    write += (head + target_head) * target_head_step + token % target_tokens * target_token

    element = tl.arange(0, WIDTH)
    is_element = is_row[:, None] & (element < HEAD_SIZE)[None, :]
    bits = tl.load(source + read[:, None] + element[None, :], mask=is_element, other=0)
    if SOURCE != TARGET:
        numbers = _to_float32(bits, SOURCE)
        if SCALED:
            scale = tl.load(scales + plane * model_heads + head + first_head, mask=is_row, other=1.0)
            numbers = numbers * scale[:, None]
        bits = _from_float32(numbers, TARGET)
    tl.store(target + write[:, None] + element[None, :], bits, mask=is_element)


def launch(plan: MovePlan) -> None:
    """Runs the move. Modifies: the plan's positions and heads of the target's pool."""
    source, target, layout = plan.source, plan.target, plan.source.layout
    scales = plan.scales
    if scales is None:
        scales = torch.ones(1, dtype=torch.float32, device=source.pool.device)
    elif plan.conversion.target == "float8_e4m3":
        scales = 1.0 / scales  # exact: they are powers of two
    scales = scales.contiguous()
    width = triton.next_power_of_2(layout.head_size)
    rows = max(1, ELEMENTS_PER_PROGRAM // width)
    num_rows = layout.num_layers * 2 * len(plan.heads) * plan.num_tokens
    assert BITS_DTYPES[target.layout.item_bytes] == target.bits().dtype
    _move_rows[(triton.cdiv(num_rows, rows),)](
        source.bits(),
        target.bits(),
        source.block_table,
        target.block_table,
        scales,
        num_rows,
        plan.num_tokens,
        len(plan.heads),
        plan.heads.start,
        layout.num_kv_heads,
        plan.heads.start - layout.first_kv_head,
        plan.heads.start - target.layout.first_kv_head,
        layout.block_tokens,
        target.layout.block_tokens,
        *source.strides[:5],
        *target.strides[:5],
        HEAD_SIZE=layout.head_size,
        WIDTH=width,
        ROWS=rows,
        HEADS_FIRST=target.layout.token_order == "NHD",
        SOURCE=CODES[layout.dtype],
        TARGET=CODES[target.layout.dtype],
        SCALED=plan.conversion.is_scaled,
    )
