"""The layout of the KV pool: what the bytes of one block mean.

Owns the axis order, the sizes derived from it and their checks. A block is one contiguous run of bytes that holds
``block_tokens`` positions of every layer: axes (layer, k/v, kv_head, token, head), C order. Two processes may
exchange blocks only when their layouts are equal. It never touches memory and knows no tensor library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

AXES: Final = ("layer", "kv", "kv_head", "token", "head")
"""Order of the axes inside a block, slowest first; ``kv`` is 0 for keys and 1 for values."""

DType = Literal["bfloat16", "float32"]

ITEM_BYTES: Final[dict[str, int]] = {"bfloat16": 2, "float32": 4}

MAX_BLOCK_BYTES: Final = 1 << 30


class LayoutError(ValueError):
    """A field of a layout cannot be used; names field, value and reason."""

    def __init__(self, field: str, value: object, why: str) -> None:
        super().__init__(field, value, why)
        self.field = field
        self.value = value
        self.why = why

    def __str__(self) -> str:
        return f"{self.field}: {self.why} (got {self.value!r})"


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Sizes of one KV block. All counts are at least 1; ``dtype`` names the element type.

    Raises LayoutError when a field cannot be used.
    """

    num_layers: int
    num_kv_heads: int
    head_size: int
    block_tokens: int = 16
    dtype: DType = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_size", "block_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise LayoutError(name, value, "must be a whole number of at least 1")
        if self.dtype not in ITEM_BYTES:
            raise LayoutError("dtype", self.dtype, f"must be one of {', '.join(ITEM_BYTES)}")
        if self.block_bytes > MAX_BLOCK_BYTES:
            raise LayoutError("block_bytes", self.block_bytes, f"a block may hold at most {MAX_BLOCK_BYTES} bytes")

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Shape of one block, axes as in ``AXES``."""
        return (self.num_layers, 2, self.num_kv_heads, self.block_tokens, self.head_size)

    @property
    def strides_bytes(self) -> tuple[int, int, int, int, int]:
        """Byte strides of one block, axes as in ``AXES``."""
        head = self.item_bytes
        token = head * self.head_size
        kv_head = token * self.block_tokens
        kv = kv_head * self.num_kv_heads
        return (kv * 2, kv, kv_head, token, head)

    @property
    def token_bytes(self) -> int:
        """Bytes that one position takes over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_size * self.item_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.token_bytes * self.block_tokens

    def num_blocks_for(self, num_tokens: int) -> int:
        """Returns how many blocks ``num_tokens`` positions need (0 for none)."""
        if num_tokens < 0:
            raise LayoutError("num_tokens", num_tokens, "must not be negative")
        return -(-num_tokens // self.block_tokens)
