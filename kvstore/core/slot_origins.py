"""Whose computation the block in each slot of a slab is. A pure core.

Owns 16 bytes a slot: the digest of namespace and fingerprint of the client that wrote the block. The bytes of a slot
mean something only while it holds a committed block; nobody clears them.
"""

from __future__ import annotations

from kvstore.core.disk_slots import NO_ORIGIN, ORIGIN_BYTES


class SlotOrigins:
    """Slot -> origin. Belongs to one thread."""

    def __init__(self, num_slots: int) -> None:
        self._origins = bytearray(ORIGIN_BYTES * num_slots)

    def note(self, slot: int, origin: bytes) -> None:
        """The block that is in this slot from now on came from ``origin``; empty: nobody knows."""
        assert len(origin) in (0, ORIGIN_BYTES), origin
        self._origins[slot * ORIGIN_BYTES : (slot + 1) * ORIGIN_BYTES] = origin or NO_ORIGIN

    def of(self, slot: int) -> bytes:
        """Returns 16 bytes; ``NO_ORIGIN`` when nobody knows."""
        return bytes(self._origins[slot * ORIGIN_BYTES : (slot + 1) * ORIGIN_BYTES])
