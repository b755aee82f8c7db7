"""The memory of the KV pool: one tensor, seen by the engine as numbers and by the transport as bytes.

Owns the memory only. Which block is free, leased or quarantined is the block pool's matter; callers pass slots that
they own. Lives as long as the worker. It never allocates after construction and never copies.
"""

from __future__ import annotations

import numpy as np
import torch

from kernels.layout import KVLayout
from kvstore.errors import BadInput, EnvironmentProblem

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class KvPool:
    """``num_blocks`` blocks of one layout in host memory, all zero at first.

    ``tensor``: shape (num_blocks, num_layers, 2, num_kv_heads, block_tokens, head_size), contiguous.
    Raises BadInput for a count below 1 or a layout the engine cannot compute on, EnvironmentProblem when
    the machine has not that much memory.
    """

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        if num_blocks < 1:
            raise BadInput("pool_blocks", num_blocks, "the pool needs at least 1 block")
        if not layout.is_canonical or layout.dtype not in TORCH_DTYPES:
            raise BadInput("kv_layout", f"{layout.dtype} {layout.label}", "the engine needs canonical blocks")
        self.layout = layout
        self.num_blocks = num_blocks
        try:
            # NumPy asks for huge pages, torch does not: transfers out of them cost a quarter less.
            memory = np.zeros(num_blocks * layout.block_bytes, np.uint8)
        except MemoryError as error:
            size_bytes = num_blocks * layout.block_bytes
            raise EnvironmentProblem(f"not enough memory for a KV pool of {size_bytes} bytes") from error
        self.tensor = torch.from_numpy(memory).view(TORCH_DTYPES[layout.dtype]).view(num_blocks, *layout.shape)
        self.bytes_view: np.ndarray = memory.reshape(num_blocks, layout.block_bytes)
        """Shape (num_blocks, block_bytes), uint8, the same memory."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.layout.block_bytes

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.num_blocks * self.layout.block_bytes

    def block_bytes_view(self, slot: int) -> memoryview:
        """Returns the writable bytes of one block, without a copy. Raises BadInput for a slot out of range."""
        return memoryview(self.bytes_view[self._checked(slot)])

    def zero_block(self, slot: int) -> None:
        """Clears one block. Modifies: its bytes. Raises BadInput for a slot out of range."""
        self.bytes_view[self._checked(slot)].fill(0)

    def _checked(self, slot: int) -> int:
        # A negative index would silently mean another request's block.
        if not 0 <= slot < self.num_blocks:
            raise BadInput("slot", slot, f"must lie in [0, {self.num_blocks})")
        return slot
