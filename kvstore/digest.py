"""The digest of a block's content: xxh3-128, 16 bytes.

Owns nothing. It finds damage, not forgery: whoever may write blocks may also write their digests. Identity
of a block (which computation it belongs to) is ``kvstore.core.identity``.
"""

from __future__ import annotations

from typing import Any

import xxhash

from kvstore.core.ids import BlockDigest


def block_digest(buffer: Any) -> BlockDigest:
    """Returns the xxh3-128 digest (16 bytes, big endian) of all bytes of a C-contiguous buffer.

    ``buffer`` is anything with the buffer protocol: bytes, memoryview, a numpy array of uint8.
    Raises: BufferError or ValueError when the buffer is not contiguous.
    """
    return BlockDigest(xxhash.xxh3_128_digest(buffer))


def verify(buffer: Any, digest: BlockDigest | bytes) -> bool:
    """Returns True when the bytes of ``buffer`` have this digest."""
    return block_digest(buffer) == digest
