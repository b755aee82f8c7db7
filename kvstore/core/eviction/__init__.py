"""Which block of a full tier leaves first: pluggable pure policies behind one interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvstore.core.eviction.arc import ArcPolicy
from kvstore.core.eviction.base import EvictionPolicy
from kvstore.core.eviction.kopir import KopirPolicy
from kvstore.core.eviction.lru import LruPolicy
from kvstore.core.eviction.s3fifo import S3FifoPolicy

DEFAULT_POLICY = "kopir"
POLICIES: Mapping[str, Callable[[int], EvictionPolicy]] = MappingProxyType(
    {"kopir": KopirPolicy, "lru": LruPolicy, "s3fifo": S3FifoPolicy, "arc": ArcPolicy}
)
"""Name in configuration -> makes a policy for so many slots."""


def make_policy(name: str, num_slots: int) -> EvictionPolicy:
    """Returns a new policy; ``name`` is one of ``POLICIES``."""
    assert name in POLICIES, name
    return POLICIES[name](num_slots)


__all__ = [
    "DEFAULT_POLICY",
    "POLICIES",
    "ArcPolicy",
    "EvictionPolicy",
    "KopirPolicy",
    "LruPolicy",
    "S3FifoPolicy",
    "make_policy",
]
