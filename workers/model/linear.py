"""Matrix products whose rows do not depend on their company.

Owns the packed weights and the choice of kernel. oneDNN adds the terms of an output element one after the other in
the order of the inner dimension, whatever the number of rows, columns or threads (measured for fp32: any row count
from 2, 1 to 4 threads, packed and unpacked; a single row takes a matrix-vector kernel with another order). MKL does
not: it changes its order with the row count and the thread count. Therefore every product of the engine goes
through oneDNN with at least two rows. Where oneDNN is missing or refuses
the number format, rows are computed in tiles of a fixed size.

Whether the promise holds on this machine is checked when a model is warmed up; see ``workers.model.numerics``.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

logger = logging.getLogger(__name__)

Compute = Literal["float32", "bfloat16"]

MIN_ROWS: Final = 2
"""One row would take oneDNN's matrix-vector kernel."""

TILE_ROWS: Final = 16
"""Rows of one product where oneDNN is missing."""

PACK_ROWS: Final = 256
"""Row count that the packed weight format is tuned for; results do not depend on it."""

COMPUTE_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def has_onednn() -> bool:
    """Says whether this build of torch can run oneDNN products on packed weights."""
    return bool(torch.backends.mkldnn.is_available()) and hasattr(  # type: ignore[no-untyped-call]
        torch.ops.mkldnn, "_linear_pointwise"
    )


@cache
def can_pack(compute: Compute) -> bool:
    """Says whether oneDNN packs and multiplies weights of ``compute`` on this processor.

    Asked of oneDNN itself, with a small matrix: it refuses bfloat16 where the processor has neither AVX-512 nor
    AVX-NE-CONVERT, and which instructions it asks for is its own affair.
    """
    if not has_onednn():
        return False
    dtype = COMPUTE_DTYPES[compute]
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(torch.zeros(16, 16, dtype=dtype), PACK_ROWS)
        torch.ops.mkldnn._linear_pointwise(torch.zeros(MIN_ROWS, 16, dtype=dtype), packed, None, "none", [], "")
    except RuntimeError as error:
        logger.info("onednn_refused compute=%s reason=%s", compute, error)
        return False
    return True


def best_compute(dtype: str) -> Compute:
    """Returns the number format in which products of a ``dtype`` model run fastest here.

    bfloat16 products pay only where the processor has instructions for them; elsewhere they are emulated, six times
    slower than float32. Weights and KV stay bfloat16 values either way.
    """
    if dtype == "bfloat16" and has_onednn() and torch.cpu._is_avx512_bf16_supported():
        return "bfloat16"
    return "float32"


def product(rows: Tensor, weight: Tensor) -> Tensor:
    """Returns ``rows @ weight.T`` for an activation ``weight``: (M, K), (N, K) -> (M, N), float32, M at least 2.

    ``weight`` must be contiguous or the transpose of a contiguous tensor.
    """
    assert rows.shape[0] >= MIN_ROWS, f"{rows.shape[0]} rows would change the order of the sums"
    if _ONEDNN:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, None, "none", [], "")
        return out
    return _tiled(rows, weight)


class Linear:
    """One weight matrix (out_features, in_features), packed for ``compute``, with an optional bias.

    Called with float32 rows (M, in_features), M at least 2; returns float32 (M, out_features).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, compute: Compute = "float32") -> None:
        self.out_features, self.in_features = weight.shape
        self._dtype = COMPUTE_DTYPES[compute]
        self._bias = None if bias is None else bias.float()
        plain = weight.to(self._dtype).contiguous()
        self._packed = can_pack(compute)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(plain, PACK_ROWS) if self._packed else plain

    def __call__(self, rows: Tensor) -> Tensor:
        assert rows.shape[0] >= MIN_ROWS, f"{rows.shape[0]} rows would change the order of the sums"
        rows = rows.to(self._dtype)
        if self._packed:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, None, "none", [], "").float()
        else:
            out = _tiled(rows, self._weight).float()
        # Added here and not inside the product, so that the order of the sum stays the same with every kernel.
        return out if self._bias is None else out.add_(self._bias)


def _tiled(rows: Tensor, weight: Tensor) -> Tensor:
    num_rows = rows.shape[0]
    padded = F.pad(rows, (0, 0, 0, -num_rows % TILE_ROWS))
    tiles = [F.linear(tile, weight) for tile in torch.split(padded, TILE_ROWS)]
    return torch.cat(tiles)[:num_rows]


def padded_rows(num_rows: int) -> int:
    """Returns the row count to compute with: few distinct values, because each costs a kernel build at first use."""
    if num_rows <= 16:
        return max(MIN_ROWS, 1 << (num_rows - 1).bit_length())
    step = 16 if num_rows <= 64 else 64
    return -(-num_rows // step) * step


_ONEDNN: Final = has_onednn()
