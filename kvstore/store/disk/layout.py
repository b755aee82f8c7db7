"""The byte layout of a disk tier's file: superblock, headers, slots. Packs and reads them; does no I/O.

    [0, 4096)                              superblock: MessagePack of ``Superblock`` behind length and CRC-32 (4 + 4)
    [4096 + slot * 256, + 256)             header of a slot; all zero while no whole block is in it
    [slots_start + slot * stride, ...)     payload of a slot; stride = block_bytes rounded up to 4096

Little-endian header: magic (8), store id (8), slot (4), payload bytes (4), generation (8), block hash (32), content
digest (16), origin (16), tenant length (2), tenant (64), zero, CRC-32 of everything before it (4, at 252).

The headers lie together so that recovery reads nothing else. 256 divides a sector: a header never lies in two, and a
sector that is written again carries its neighbours as they are. A header is written only after its payload and erased
before its slot is written again, so a header that proves itself (CRC, own slot number, own store id) stands for a whole
block. What a power cut did in spite of that (a disk that lies about its cache) the digest finds when the block is read.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kvstore.core.disk_slots import DiskBlock
from kvstore.core.ids import BlockDigest, BlockHash, TenantId
from kvstore.errors import ProtocolError

DISK_VERSION = 1
SUPERBLOCK_BYTES = 4096
HEADER_BYTES = 256
SECTOR_BYTES = 512
PAGE_BYTES = 4096
TENANT_BYTES_MAX = 64
STORE_ID_BYTES = 8
MAX_DISK_BYTES = 1 << 46
EMPTY_HEADER = bytes(HEADER_BYTES)

_SUPERBLOCK_MAGIC = "kopir-disk"
_PREFIX = struct.Struct("<II")
_HEADER_MAGIC = b"kopirblk"
_HEADER = struct.Struct("<8s8sIIQ32s16s16sH64s")
_CRC = struct.Struct("<I")
_CRC_AT = HEADER_BYTES - _CRC.size


class Superblock(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a file says about itself. ``store_id`` is random: the file's identity."""

    magic: str = _SUPERBLOCK_MAGIC
    version: int = DISK_VERSION
    store_id: Annotated[bytes, Meta(min_length=STORE_ID_BYTES, max_length=STORE_ID_BYTES)]
    block_bytes: Annotated[int, Meta(ge=1)]
    num_slots: Annotated[int, Meta(ge=1)]

    def pack(self) -> bytes:
        """Returns the first ``SUPERBLOCK_BYTES`` of the file."""
        payload = msgspec.msgpack.encode(self)
        packed = _PREFIX.pack(len(payload), zlib.crc32(payload)) + payload
        return packed.ljust(SUPERBLOCK_BYTES, b"\0")


def read_superblock(data: bytes) -> Superblock:
    """Reads the first bytes of a file. Raises: ProtocolError if they are no whole superblock of ours."""
    if len(data) < SUPERBLOCK_BYTES:
        raise ProtocolError(f"{len(data)} bytes are no superblock")
    length, crc = _PREFIX.unpack_from(data)
    payload = data[_PREFIX.size : _PREFIX.size + min(length, SUPERBLOCK_BYTES)]
    if len(payload) != length or zlib.crc32(payload) != crc:
        raise ProtocolError("no whole superblock")
    try:
        superblock = msgspec.msgpack.decode(payload, type=Superblock)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"superblock of another version: {error}") from error
    if superblock.magic != _SUPERBLOCK_MAGIC:
        raise ProtocolError(f"superblock of {superblock.magic[:32]!r}")
    return superblock


def stride_bytes(block_bytes: int) -> int:
    """Returns the distance between two slots: ``block_bytes`` rounded up to a page."""
    return -(-block_bytes // PAGE_BYTES) * PAGE_BYTES


def header_offset(slot: int) -> int:
    """Returns where the header of a slot begins."""
    return SUPERBLOCK_BYTES + slot * HEADER_BYTES


def slots_start(num_slots: int) -> int:
    """Returns where the payload of slot 0 begins: a whole number of pages."""
    return -(-header_offset(num_slots) // PAGE_BYTES) * PAGE_BYTES


def file_bytes(block_bytes: int, num_slots: int) -> int:
    """Returns the size of the whole file."""
    return slots_start(num_slots) + num_slots * stride_bytes(block_bytes)


def num_slots_in(disk_bytes: int, block_bytes: int) -> int:
    """Returns the largest number of slots whose file takes at most ``disk_bytes``; 0 if there is no room for one."""
    per_slot = stride_bytes(block_bytes) + HEADER_BYTES
    num_slots = max(0, (disk_bytes - SUPERBLOCK_BYTES) // per_slot)
    while num_slots and file_bytes(block_bytes, num_slots) > disk_bytes:
        num_slots -= 1
    return num_slots


def pack_header(block: DiskBlock, *, store_id: bytes, block_bytes: int) -> bytes:
    """Returns the header of a block. The tenant's name has at most ``TENANT_BYTES_MAX`` bytes in UTF-8."""
    tenant = block.tenant.encode()
    assert len(tenant) <= TENANT_BYTES_MAX, block.tenant
    packed = _HEADER.pack(
        _HEADER_MAGIC, store_id, block.slot, block_bytes, block.generation, block.block_hash, block.digest,
        block.origin, len(tenant), tenant,
    ).ljust(_CRC_AT, b"\0")  # fmt: skip
    return packed + _CRC.pack(zlib.crc32(packed))


def read_header(data: bytes | memoryview, slot: int, superblock: Superblock) -> DiskBlock | None:
    """Returns what the header of ``slot`` says; None when it is empty, torn, misplaced or of another file."""
    magic, store_id, own_slot, num_bytes, generation, block_hash, digest, origin, tenant_length, tenant = (
        _HEADER.unpack_from(data)
    )
    if magic != _HEADER_MAGIC or zlib.crc32(data[:_CRC_AT]) != _CRC.unpack_from(data, _CRC_AT)[0]:
        return None
    if (store_id, own_slot, num_bytes) != (superblock.store_id, slot, superblock.block_bytes):
        return None
    try:
        name = tenant[:tenant_length].decode()
    except UnicodeDecodeError:
        return None
    return DiskBlock(slot, generation, BlockHash(block_hash), BlockDigest(digest), TenantId(name), origin)


def read_headers(data: bytes | memoryview, superblock: Superblock) -> Iterator[tuple[int, DiskBlock | None]]:
    """Yields (slot, block) of every header that is not empty; None for one that proves nothing.

    ``data``: the headers of all slots, as they lie in the file.
    """
    view = memoryview(data)
    for slot in range(superblock.num_slots):
        header = view[slot * HEADER_BYTES : (slot + 1) * HEADER_BYTES]
        if header != EMPTY_HEADER:
            yield slot, read_header(header, slot, superblock)
