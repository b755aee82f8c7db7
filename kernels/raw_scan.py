"""What both drivers of ``scan.cu`` share: the arguments of its kernels and the sizes of their grids.

Owns the parameter array, whose order is that of the enum in the source. It never touches memory itself: a driver
moves arrays to where the kernels run and launches them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash

from kernels.layout import KVLayout
from kernels.pattern import CANARY_BITS, CLEARED_BIT, NON_FINITE_MASK
from kernels.scan import DIGEST_BYTES, ScanRequest, empty_result

SOURCE: Final = Path(__file__).with_name("scan.cu")
SCAN_THREADS: Final = 256
DIGEST_THREADS: Final = 128
"""Lanes times stripes of one xxh3 round; the kernel counts on it."""

CHUNK_BYTES: Final = 64 * 1024
LONG_INPUT_BYTES: Final = 240
"""xxh3 treats inputs up to this size in other ways, which the kernel leaves to the host."""


def params(layout: KVLayout, request: ScanRequest) -> np.ndarray:
    """Returns the parameter array of ``kopir_scan``, int64."""
    values = [
        layout.block_bytes,
        layout.item_bytes,
        layout.row_bytes,
        layout.row_stride_bytes,
        layout.num_layers,
        layout.shard_kv_heads,
        layout.block_tokens,
        layout.token_order == "NHD",
        layout.kv_together,
        layout.num_kv_heads,
        layout.first_kv_head,
        NON_FINITE_MASK[layout.dtype],
        CANARY_BITS[layout.dtype],
        CLEARED_BIT[layout.dtype],
        request.fill,
        request.keys is not None,
        CHUNK_BYTES,
        num_chunks(layout),
    ]
    return np.array(values, np.int64)


def num_chunks(layout: KVLayout) -> int:
    """Returns how many CUDA blocks share one pool block."""
    return -(-layout.block_bytes // CHUNK_BYTES)


class RawScanner(ABC):
    """A scanner whose passes are the kernels of ``scan.cu``."""

    name: str

    @abstractmethod
    def admit(self, pool: Any, layout: KVLayout) -> int:
        """Returns the number of blocks. Raises LayoutError for a pool that this scanner cannot read."""

    @abstractmethod
    def fetch(self, pool: Any, slots: Sequence[int]) -> np.ndarray:
        """Returns a host copy of blocks."""

    @abstractmethod
    def _there(self, array: np.ndarray) -> Any:
        """Returns the array where the kernels run."""

    @abstractmethod
    def _here(self, array: Any) -> np.ndarray:
        """Returns the array in host memory, after the kernels have run."""

    @abstractmethod
    def _launch(self, kernel: str, grid: int, threads: int, arguments: Sequence[Any]) -> None:
        """Runs a kernel; arguments are arrays that are there, and integers of 64 bits."""

    def scan(self, pool: Any, layout: KVLayout, request: ScanRequest) -> np.ndarray:
        keys = np.zeros((len(request.slots), 2), np.uint32) if request.keys is None else request.keys
        out = self._there(empty_result(layout, len(request.slots)))
        arguments = [
            pool,
            self._there(np.ascontiguousarray(request.slots, np.int64)),
            self._there(np.ascontiguousarray(request.num_tokens, np.int64)),
            self._there(np.ascontiguousarray(keys)),
            self._there(params(layout, request)),
            out,
        ]
        self._launch("kopir_scan", len(request.slots) * num_chunks(layout), SCAN_THREADS, arguments)
        return self._here(out)

    def digests(self, pool: Any, slots: np.ndarray) -> np.ndarray:
        block_bytes = int(pool.shape[1])
        if block_bytes <= LONG_INPUT_BYTES:
            joined = b"".join(xxhash.xxh3_128_digest(block) for block in self.fetch(pool, slots.tolist()))
            return np.frombuffer(joined, np.uint8).reshape(-1, DIGEST_BYTES)
        out = self._there(np.zeros((len(slots), DIGEST_BYTES), np.uint8))
        there = self._there(np.ascontiguousarray(slots, np.int64))
        self._launch("kopir_digest", len(slots), DIGEST_THREADS, [pool, there, block_bytes, out])
        return self._here(out)
