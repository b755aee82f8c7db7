"""Rotary position embedding: the tables and their use.

Owns the cosine and sine tables of one model. A table entry depends on its position alone, so two processes with
different context limits rotate alike. It never looks at weights.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workers.model.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_size: int) -> Tensor:
    """Returns the angular speeds, shape (head_size // 2,), float32, radians per position.

    Computed in float32 as the reference library does: a difference of one ulp here grows with the position.
    Source: Su et al., "RoFormer"; the ``llama3`` blend follows the Llama 3.1 release notes.
    """
    exponents = torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size
    speeds = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "linear":
        return speeds / rope.factor
    if rope.rope_type == "llama3":
        return _llama3_speeds(rope, speeds)
    return speeds


def _llama3_speeds(rope: RopeConfig, speeds: Tensor) -> Tensor:
    wavelengths = 2 * math.pi / speeds
    turns = rope.original_max_positions / wavelengths
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    mixed = (1 - blend) * speeds / rope.factor + blend * speeds
    slow = wavelengths > rope.original_max_positions / rope.low_freq_factor
    fast = wavelengths < rope.original_max_positions / rope.high_freq_factor
    return torch.where(slow, speeds / rope.factor, torch.where(fast, speeds, mixed))


class RopeTable:
    """Cosines and sines of positions [0, num_positions), float32, shape (num_positions, 1, head_size)."""

    def __init__(self, rope: RopeConfig, *, head_size: int, num_positions: int) -> None:
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inverse_frequencies(rope, head_size)
        # float64 and one rounding: the result does not depend on which vector code computed an entry.
        cos, sin = angles.double().cos().float(), angles.double().sin().float()
        self.cos = torch.cat((cos, cos), -1)[:, None]
        # The sign of the rotated half is folded into the table: b * (-sin) equals -(b * sin) exactly.
        self.sin = torch.cat((-sin, sin), -1)[:, None]
        self.num_positions = num_positions

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosines and signed sines for ``positions`` (rows,): two tensors (rows, 1, head_size)."""
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates ``heads`` (rows, num_heads, head_size), float32, and returns a new tensor of that shape."""
    first, second = heads.chunk(2, -1)
    swapped = torch.cat((second, first), -1)
    return (heads * cos).add_(swapped.mul_(sin))
