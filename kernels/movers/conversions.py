"""Which conversions of KV elements exist, and which of them lose nothing.

Owns the registry. A pair of dtypes that is not registered is refused; one that loses bits is refused unless the
caller says so; one that claims to lose nothing is proved over every bit pattern of its source before first use.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch

from kernels.layout import ITEM_BYTES, LayoutError

TORCH_DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3": torch.float8_e4m3fn,
}
BITS_DTYPES: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
FP8_MAX: Final = 448.0
MAX_PROVABLE_BYTES: Final = 2


@dataclass(frozen=True, slots=True)
class Conversion:
    """One registered pair. ``is_scaled``: numbers are divided by a scale before the target, or multiplied after."""

    source: str
    target: str
    is_lossless: bool

    @property
    def is_copy(self) -> bool:
        return self.source == self.target

    @property
    def is_scaled(self) -> bool:
        return not self.is_copy and "float8_e4m3" in (self.source, self.target)


class Registry:
    """The conversions that may be used."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Conversion] = {}

    def register(self, source: str, target: str, *, is_lossless: bool) -> None:
        """Adds a pair. Raises LayoutError for unknown dtypes, a second entry, or a claim that could not be proved."""
        for field, dtype in (("source", source), ("target", target)):
            if dtype not in ITEM_BYTES:
                raise LayoutError(field, dtype, f"must be one of {', '.join(ITEM_BYTES)}")
        if (source, target) in self._known:
            raise LayoutError("target", target, f"a conversion from {source} is registered already")
        if is_lossless and source != target and ITEM_BYTES[source] > MAX_PROVABLE_BYTES:
            raise LayoutError("source", source, "too many bit patterns to prove that nothing is lost")
        self._known[source, target] = Conversion(source, target, is_lossless)

    def find(self, source: str, target: str, *, allow_lossy: bool = False) -> Conversion:
        """Returns the conversion to use.

        Raises LayoutError for a pair that is not registered, that loses bits without ``allow_lossy``, or whose
        claim to lose nothing does not hold.
        """
        found = self._known.get((source, target))
        if found is None:
            raise LayoutError("dtype", target, f"no conversion from {source} is registered")
        if not found.is_lossless and not allow_lossy:
            raise LayoutError("dtype", target, f"the conversion from {source} loses bits and was not allowed")
        if found.is_lossless and not found.is_copy and not proved(source, target):
            raise LayoutError("dtype", target, f"the conversion from {source} was declared lossless and is not")
        return found


@lru_cache(maxsize=16)
def proved(source: str, target: str) -> bool:
    """Returns True when every number of ``source`` survives the way to ``target`` and back, sign of zero included."""
    size_bits = 8 * ITEM_BYTES[source]
    patterns = torch.arange(1 << size_bits, dtype=torch.int32).to(BITS_DTYPES[ITEM_BYTES[source]])
    numbers = patterns.view(TORCH_DTYPES[source])
    back = numbers.to(torch.float32).to(TORCH_DTYPES[target]).to(torch.float32).to(TORCH_DTYPES[source])
    is_nan = numbers.to(torch.float32).isnan()
    same = back.view(patterns.dtype) == patterns
    return bool((same | (is_nan & back.to(torch.float32).isnan())).all())


def _standard() -> Registry:
    registry = Registry()
    for dtype in ITEM_BYTES:
        registry.register(dtype, dtype, is_lossless=True)
    for source, target in (
        ("bfloat16", "float32"),
        ("float16", "float32"),
        ("float8_e4m3", "float32"),
        ("float8_e4m3", "bfloat16"),
        ("float8_e4m3", "float16"),
    ):
        registry.register(source, target, is_lossless=True)
    for source, target in (
        ("float32", "bfloat16"),
        ("float32", "float16"),
        ("float32", "float8_e4m3"),
        ("bfloat16", "float8_e4m3"),
        ("float16", "float8_e4m3"),
    ):
        registry.register(source, target, is_lossless=False)
    return registry


STANDARD: Final = _standard()
"""What the product may use. bfloat16 <-> float16 is missing on purpose: each loses what the other is chosen for."""


def fp8_scales(absmax: torch.Tensor) -> torch.Tensor:
    """Returns scales for float8, float32, same shape: powers of two, so that scaling itself never rounds.

    ``absmax``: largest magnitude of each head's numbers. Raises LayoutError when one is not finite.
    """
    if not bool(torch.isfinite(absmax).all()) or bool((absmax < 0).any()):
        raise LayoutError("absmax", float(absmax.abs().max()), "must be finite and not negative")
    exponent = torch.ceil(torch.log2(torch.clamp(absmax.to(torch.float64), min=2.0**-60) / FP8_MAX))
    return torch.exp2(exponent).to(torch.float32)


def check_scales(scales: torch.Tensor | None, conversion: Conversion, shape: tuple[int, ...]) -> None:
    """Raises LayoutError unless scales are there exactly when needed, of shape (layers, 2, heads), powers of two."""
    if not conversion.is_scaled:
        if scales is not None:
            raise LayoutError("scales", tuple(scales.shape), "this conversion takes none")
        return
    if scales is None:
        raise LayoutError("scales", None, "float8 needs one for each layer, k/v and head")
    if tuple(scales.shape) != shape or scales.dtype != torch.float32:
        raise LayoutError("scales", (tuple(scales.shape), scales.dtype), f"must be float32 of shape {shape}")
    mantissa, _ = torch.frexp(scales)
    if not bool((mantissa == 0.5).all()):
        raise LayoutError("scales", float(scales.flatten()[0]), "must be powers of two: others would round twice")
