"""What the bytes of stored blocks mean, and whether they can be that: the layout checker over both tiers.

Owns the layouts of the namespaces, as the fingerprints of their clients name them, which origin each slot of the slab
has, and the counts of what was found. Only full blocks are stored, so there is no tail to look at. A block whose
origin nobody has named in this life of the node (the disk keeps blocks longer than that) is compared with its digest
only. It never removes a block: that is up to who asked.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np

from kernels.checker import Claim, Kind, LayoutChecker, Violation
from kernels.layout import KVLayout, LayoutError
from kvstore.core.ids import BlockDigest
from kvstore.core.slot_origins import SlotOrigins
from kvstore.digest import block_digest, verify

logger = logging.getLogger(__name__)

MAX_LAYOUTS = 256
"""Origins whose layout is remembered, the last ones that attached."""


def layout_of(fingerprint: Mapping[str, str]) -> KVLayout | None:
    """Returns the layout that a fingerprint (``Fingerprint.to_dict``) names; None when it names none that is known."""
    try:
        return KVLayout.from_label(
            fingerprint["kv_layout"],
            num_layers=int(fingerprint["num_layers"]),
            num_kv_heads=int(fingerprint["num_kv_heads"]),
            head_size=int(fingerprint["head_size"]),
            block_tokens=int(fingerprint["block_tokens"]),
            dtype=fingerprint["kv_dtype"],
        )
    except (KeyError, LayoutError, ValueError):
        return None


class ContentChecks:
    """One per store node. Belongs to its loop, but for ``check``."""

    def __init__(self, *, block_bytes: int, num_slots: int) -> None:
        self.origins = SlotOrigins(num_slots)
        self._block_bytes = block_bytes
        self._checkers: OrderedDict[bytes, LayoutChecker] = OrderedDict()
        self.counters: dict[str, int] = {"layout_checks": 0}
        """``layout_checks`` and one ``layout_violations.<kind>`` for each kind that was found."""

    def learn(self, origin: bytes, fingerprint: Mapping[str, str]) -> None:
        """Notes the layout of the blocks of an origin, as its fingerprint names it."""
        layout = layout_of(fingerprint)
        if layout is None or layout.block_bytes != self._block_bytes:
            if fingerprint:
                logger.warning("store_layout_unknown kv_layout=%s", fingerprint.get("kv_layout"))
            return
        self._checkers[origin] = LayoutChecker(layout)
        self._checkers.move_to_end(origin)
        if len(self._checkers) > MAX_LAYOUTS:
            self._checkers.popitem(last=False)

    def checker(self, origin: bytes) -> LayoutChecker | None:
        """Returns the checker of an origin; None when its layout is not known."""
        return self._checkers.get(origin)

    def count(self, num_checked: int, violations: Sequence[Violation]) -> None:
        """Adds a verdict to the counters. ``num_checked``: blocks of a known layout."""
        self.counters["layout_checks"] += num_checked
        for violation in violations:
            name = f"layout_violations.{violation.kind.value}"
            self.counters[name] = self.counters.get(name, 0) + 1


def check(
    pool: np.ndarray, digests: Sequence[BlockDigest], names: Sequence[int], checker: LayoutChecker | None
) -> list[Violation]:
    """Returns what is wrong with blocks; ``Violation.block`` is their place in ``pool``. For any thread.

    Args:
        pool: uint8, shape (n, block_bytes).
        digests: of each block.
        names: of each block, for what is said about others.
        checker: of their layout; None: digests are all there is.
    """
    if checker is None:
        pairs = enumerate(zip(pool, digests, strict=True))
        return [Violation(Kind.DIGEST, place) for place, (block, digest) in pairs if not verify(block, digest)]
    claim = Claim(digests=digests, block_ids=names)
    # A slab whose blocks are no multiple of its slots' alignment is no pool without a copy.
    return list(checker.check(np.ascontiguousarray(pool), claim).violations)


def named_swap(violation: Violation, block: np.ndarray, owners: Mapping[bytes, int]) -> Violation:
    """Returns the finding of a wrong digest as a swap, when the bytes are those of another block of the tier."""
    owner = owners.get(block_digest(block)) if violation.kind is Kind.DIGEST else None
    if owner is None:
        return violation
    return Violation(Kind.SWAPPED, violation.block, detail=f"holds the bytes of block {owner}")
