"""Names for the identities and raw hashes that travel between processes.

Owns nothing. Every identity is compared for equality only; none is ordered or counted up, so that a
counter that resets can never make an old holder look current.
"""

from typing import NewType

RequestId = NewType("RequestId", str)
"""Logical request, made by the ingress. Format: ``req-`` + 32 hex digits."""

AttemptId = NewType("AttemptId", str)
"""One run of a request on one pair of workers. Format: ``att-`` + 32 hex digits."""

WorkerId = NewType("WorkerId", str)
"""Stable name of a worker slot, for example ``decode-0``; a replacement keeps the name."""

Incarnation = NewType("Incarnation", str)
"""One life of a process: 32 hex digits, random, never reused."""

BlockHash = NewType("BlockHash", bytes)
"""Identity of a block: 32 bytes, see ``kvstore.core.identity``."""

BlockDigest = NewType("BlockDigest", bytes)
"""Digest of a block's content: 16 bytes, xxh3-128."""

TenantId = NewType("TenantId", str)
"""Whom the store counts a block for: 16 hex digits made from the tenant's salt, or empty for blocks without one."""

INCARNATION_HEX_DIGITS = 32
BLOCK_HASH_BYTES = 32
BLOCK_DIGEST_BYTES = 16
