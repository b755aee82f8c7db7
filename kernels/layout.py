"""The layout of the KV pool: what the bytes of one block mean.

Owns the axis orders, the sizes derived from them, their checks and the index maps between two layouts. A block is
one contiguous run of bytes that holds ``block_tokens`` positions of every layer. Its logical axes are always
``AXES``; where each lies in memory follows from the layout. Two processes may exchange blocks only when their
layouts are equal. It never touches the memory of a pool and knows no tensor library.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np

AXES: Final = ("layer", "kv", "kv_head", "token", "head")
"""Logical axes of a block; ``kv`` is 0 for keys and 1 for values, ``head`` counts the elements of one head vector."""

DType = Literal["bfloat16", "float32", "float16", "float8_e4m3"]

TokenOrder = Literal["HND", "NHD"]
"""HND: all tokens of a head lie together. NHD: all heads of a token lie together."""

ITEM_BYTES: Final[dict[str, int]] = {"bfloat16": 2, "float32": 4, "float16": 2, "float8_e4m3": 1}

MAX_BLOCK_BYTES: Final = 1 << 30
MAX_ROW_ALIGN_BYTES: Final = 4096


class LayoutError(ValueError):
    """A field of a layout, or an argument next to it, cannot be used; names field, value and reason."""

    def __init__(self, field: str, value: object, why: str) -> None:
        super().__init__(field, value, why)
        self.field = field
        self.value = value
        self.why = why

    def __str__(self) -> str:
        return f"{self.field}: {self.why} (got {self.value!r})"


class Coordinates(NamedTuple):
    """Where an element belongs. ``kv_head`` counts over the whole model, not over the shard."""

    layer: int
    kv: int
    kv_head: int
    token: int
    element: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Sizes and order of one KV block. All counts are at least 1; ``dtype`` names the element type.

    ``num_kv_heads`` are those of the model; a shard of a tensor-parallel group holds ``shard_kv_heads`` of them, and
    where the group is larger than the number of heads, several ranks hold the same head. Head vectors ("rows") start
    at multiples of ``row_align_bytes``; the bytes between two rows are padding. With ``kv_together`` keys and values
    of a layer are neighbours, without it all layers' keys come before all layers' values.

    Raises LayoutError when a field cannot be used.
    """

    num_layers: int
    num_kv_heads: int
    head_size: int
    block_tokens: int = 16
    dtype: DType = "bfloat16"
    token_order: TokenOrder = "HND"
    kv_together: bool = True
    row_align_bytes: int = 1
    tp_size: int = 1
    tp_rank: int = 0

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_size", "block_tokens", "row_align_bytes", "tp_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise LayoutError(name, value, "must be a whole number of at least 1")
        if self.dtype not in ITEM_BYTES:
            raise LayoutError("dtype", self.dtype, f"must be one of {', '.join(ITEM_BYTES)}")
        if self.token_order not in get_args(TokenOrder):
            raise LayoutError("token_order", self.token_order, f"must be one of {', '.join(get_args(TokenOrder))}")
        if not isinstance(self.kv_together, bool):
            raise LayoutError("kv_together", self.kv_together, "must be true or false")
        align = self.row_align_bytes
        if align & (align - 1) or align > MAX_ROW_ALIGN_BYTES:
            raise LayoutError("row_align_bytes", align, f"must be a power of two up to {MAX_ROW_ALIGN_BYTES}")
        rank = self.tp_rank
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.tp_size:
            raise LayoutError("tp_rank", rank, f"must be a whole number in [0, {self.tp_size})")
        if self.num_kv_heads % self.tp_size and self.tp_size % self.num_kv_heads:
            raise LayoutError("tp_size", self.tp_size, f"must divide {self.num_kv_heads} KV heads, or be divided by it")
        if self.block_bytes > MAX_BLOCK_BYTES:
            raise LayoutError("block_bytes", self.block_bytes, f"a block may hold at most {MAX_BLOCK_BYTES} bytes")

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def shard_kv_heads(self) -> int:
        """KV heads in one block of this rank."""
        return max(1, self.num_kv_heads // self.tp_size)

    @property
    def first_kv_head(self) -> int:
        """The model's number of this rank's first KV head."""
        if self.tp_size <= self.num_kv_heads:
            return self.tp_rank * self.shard_kv_heads
        return self.tp_rank * self.num_kv_heads // self.tp_size

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Logical shape of one block, axes as in ``AXES``."""
        return (self.num_layers, 2, self.shard_kv_heads, self.block_tokens, self.head_size)

    @property
    def row_bytes(self) -> int:
        """Bytes of one head vector without padding."""
        return self.head_size * self.item_bytes

    @property
    def row_stride_bytes(self) -> int:
        """Bytes from one head vector to the next in memory."""
        return -(-self.row_bytes // self.row_align_bytes) * self.row_align_bytes

    @property
    def num_rows(self) -> int:
        """Head vectors of one block."""
        return self.num_layers * 2 * self.shard_kv_heads * self.block_tokens

    @property
    def strides_bytes(self) -> tuple[int, int, int, int, int]:
        """Byte strides of one block, axes as in ``AXES``."""
        row = self.row_stride_bytes
        if self.token_order == "HND":
            token, kv_head = row, row * self.block_tokens
        else:
            token, kv_head = row * self.shard_kv_heads, row
        plane = row * self.block_tokens * self.shard_kv_heads
        layer, kv = (2 * plane, plane) if self.kv_together else (plane, self.num_layers * plane)
        return (layer, kv, kv_head, token, self.item_bytes)

    @property
    def token_bytes(self) -> int:
        """Bytes that one position takes over all layers of this rank, padding included."""
        return self.num_layers * 2 * self.shard_kv_heads * self.row_stride_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.token_bytes * self.block_tokens

    @property
    def is_canonical(self) -> bool:
        """True when memory order is the order of ``AXES``, without padding: what the engine computes on."""
        return self.token_order == "HND" and self.kv_together and self.row_stride_bytes == self.row_bytes

    @property
    def label(self) -> str:
        """One line that names order, alignment and shard; equal labels and sizes mean equal bytes."""
        inner = "head,token,dim" if self.token_order == "HND" else "token,head,dim"
        outer = "layer,kv" if self.kv_together else "kv,layer"
        aligned = "" if self.row_stride_bytes == self.row_bytes else f";row_stride={self.row_stride_bytes}"
        shard = "" if self.tp_size == 1 else f";tp={self.tp_rank}/{self.tp_size}"
        return f"{outer},{inner}{aligned}{shard}"

    @classmethod
    def from_label(cls, label: str, **sizes: Any) -> KVLayout:
        """Returns the layout that ``label`` names.

        Args:
            sizes: ``num_layers``, ``num_kv_heads``, ``head_size``, ``block_tokens`` and ``dtype``.
        Raises LayoutError for a label that no layout of these sizes has.
        """
        words = dict(part.split("=", 1) for part in label.split(";")[1:] if "=" in part)
        rank, slash, size = words.get("tp", "0/1").partition("/")
        if not (slash and rank.isdecimal() and size.isdecimal()):
            raise LayoutError("kv_layout", label, "names no shard")
        shard: dict[str, Any] = {"tp_rank": int(rank), "tp_size": int(size)}
        aligns = [1] if "row_stride" not in words else [1 << n for n in range(MAX_ROW_ALIGN_BYTES.bit_length())]
        orders = product(get_args(TokenOrder), (True, False), aligns)
        for token_order, kv_together, align in orders:
            layout = cls(token_order=token_order, kv_together=kv_together, row_align_bytes=align, **sizes, **shard)
            if layout.label == label:
                return layout
        raise LayoutError("kv_layout", label, "no layout is called so")

    def num_blocks_for(self, num_tokens: int) -> int:
        """Returns how many blocks ``num_tokens`` positions need (0 for none)."""
        if num_tokens < 0:
            raise LayoutError("num_tokens", num_tokens, "must not be negative")
        return -(-num_tokens // self.block_tokens)

    def offset_bytes(self, at: Coordinates) -> int:
        """Returns the byte offset inside a block of the element at ``at``. Raises LayoutError for one outside."""
        local = at._replace(kv_head=at.kv_head - self.first_kv_head)
        for name, value, size in zip(Coordinates._fields, local, self.shape, strict=True):
            if not 0 <= value < size:
                raise LayoutError(name, getattr(at, name), f"this block has no such {name}")
        return sum(index * stride for index, stride in zip(local, self.strides_bytes, strict=True))

    def coordinates(self, offset_bytes: int) -> Coordinates | None:
        """Returns what lies at a byte offset of a block: the element's place, or None in padding.

        Raises LayoutError for an offset outside the block.
        """
        if not 0 <= offset_bytes < self.block_bytes:
            raise LayoutError("offset_bytes", offset_bytes, f"must lie in [0, {self.block_bytes})")
        row, within = divmod(offset_bytes, self.row_stride_bytes)
        if within >= self.row_bytes:
            return None
        if self.token_order == "HND":
            row, token = divmod(row, self.block_tokens)
            plane, kv_head = divmod(row, self.shard_kv_heads)
        else:
            row, kv_head = divmod(row, self.shard_kv_heads)
            plane, token = divmod(row, self.block_tokens)
        layer, kv = divmod(plane, 2) if self.kv_together else divmod(plane, self.num_layers)[::-1]
        return Coordinates(layer, kv, kv_head + self.first_kv_head, token, within // self.item_bytes)

    def logical_view(self, blocks: np.ndarray) -> np.ndarray:
        """Returns elements of blocks as unsigned bits by their logical axes, without a copy.

        Args:
            blocks: uint8, shape (..., block_bytes), C-contiguous.

        Returns: shape (..., *shape) of uint8, uint16 or uint32, the same memory.
        """
        return np.ndarray(
            blocks.shape[:-1] + self.shape,
            f"u{self.item_bytes}",
            buffer=blocks,
            strides=blocks.strides[:-1] + self.strides_bytes,
        )

    def same_bytes_as(self, other: KVLayout) -> bool:
        """True when both put every element at the same place, whatever the fields are called."""
        mine = [(size, stride) for size, stride in zip(self.shape, self.strides_bytes, strict=True) if size > 1]
        theirs = [(size, stride) for size, stride in zip(other.shape, other.strides_bytes, strict=True) if size > 1]
        return (self.dtype, self.first_kv_head, self.shape, self.block_bytes, mine) == (
            other.dtype,
            other.first_kv_head,
            other.shape,
            other.block_bytes,
            theirs,
        )


@lru_cache(maxsize=64)
def element_offsets(layout: KVLayout) -> np.ndarray:
    """Returns byte offsets inside a block, shape ``layout.shape``, int64, read-only: the layout as an index map."""
    offsets = np.zeros(layout.shape, np.int64)
    for axis, (size, stride) in enumerate(zip(layout.shape, layout.strides_bytes, strict=True)):
        offsets += (np.arange(size, dtype=np.int64) * stride).reshape([-1 if i == axis else 1 for i in range(5)])
    offsets.flags.writeable = False
    return offsets


def index_map(source: KVLayout, target: KVLayout) -> np.ndarray:
    """Returns the map that rewrites a block of one layout in another.

    Returns: int64, shape (elements,): the source element index for each element of the target in logical order,
        where an element index is its byte offset divided by the item size.
    Raises LayoutError when the two do not hold the same elements; order, K/V placement and padding may differ.
    """
    for name in ("num_layers", "num_kv_heads", "head_size", "block_tokens", "dtype", "tp_size", "tp_rank"):
        if getattr(source, name) != getattr(target, name):
            raise LayoutError(name, getattr(target, name), f"the source has {getattr(source, name)!r}")
    return element_offsets(source).reshape(-1) // source.item_bytes


def reorder_blocks(blocks: np.ndarray, source: KVLayout, target: KVLayout, *, fill: int = 0) -> np.ndarray:
    """Returns a copy of uint8 blocks (n, source.block_bytes) in the order of ``target``; padding gets ``fill``."""
    index_map(source, target)
    out = np.full((len(blocks), target.block_bytes), fill, np.uint8)
    target.logical_view(out)[...] = source.logical_view(blocks)
    return out


@lru_cache(maxsize=64)
def alternatives(layout: KVLayout) -> tuple[tuple[str, KVLayout], ...]:
    """Returns layouts a confused writer may have used instead, each with the field that differs; nearest first."""
    found: list[tuple[str, KVLayout]] = []

    def add(field: str, **changes: object) -> None:
        try:
            other = replace(layout, **changes)  # type: ignore[arg-type]
        except LayoutError:
            return
        if not other.same_bytes_as(layout):
            found.append((field, other))

    order = "NHD" if layout.token_order == "HND" else "HND"
    add("token_order", token_order=order)
    add("kv_together", kv_together=not layout.kv_together)
    add("token_order", token_order=order, kv_together=not layout.kv_together)
    for rank in range(min(layout.tp_size, 64)):
        add("tp_rank", tp_rank=rank)
    for dtype in ITEM_BYTES:
        add("dtype", dtype=dtype)
    strides = {layout.row_stride_bytes}
    for align in (1, 16, 32, 64, 128, 256):
        other = replace(layout, row_align_bytes=align)
        if other.row_stride_bytes not in strides:
            strides.add(other.row_stride_bytes)
            add("row_align_bytes", row_align_bytes=align)
    return tuple(found)
