"""The layout checker: proof that a block is what its label says.

Owns the meaning of a scan: which kinds of damage and mix-up there are and where each lies. Works on whole pools:
full mode looks at every block, sampling mode at a few that follow from a seed. Clean is a result, not an exception.
It never mends anything and never writes to the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import numpy as np
import xxhash

from kernels.layout import Coordinates, KVLayout, LayoutError, alternatives, reorder_blocks
from kernels.pattern import block_keys, canary_block, expected_bits, expected_first_rows
from kernels.scan import DIGEST_BYTES, Field, NumpyScanner, Scanner, ScanRequest

MAX_DIAGNOSED_BLOCKS: Final = 64
"""Blocks whose damage is named closely; a pool that is all wrong needs no more to be refused."""

MIN_ROW_BYTES_TO_SEARCH: Final = 8
"""Shorter head vectors could be found elsewhere by chance."""


class Kind(Enum):
    """What is wrong with a block."""

    AXIS_ORDER = "axis_order"
    STRIDE = "stride"
    SHARD = "shard"
    DTYPE = "dtype"
    NOT_FINITE = "not_finite"
    UNWRITTEN = "unwritten"
    SWAPPED = "swapped"
    TAIL_TOUCHED = "tail_touched"
    PADDING_TOUCHED = "padding_touched"
    BOUNDARY = "boundary"
    DAMAGED = "damaged"
    DIGEST = "digest"


KIND_OF_FIELD: Final = {
    "token_order": Kind.AXIS_ORDER,
    "kv_together": Kind.AXIS_ORDER,
    "tp_rank": Kind.SHARD,
    "dtype": Kind.DTYPE,
    "row_align_bytes": Kind.STRIDE,
}
"""What it means that a block was written by a layout that differs in this field."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One finding. ``offset_bytes`` counts from the start of the block; ``at`` is None for whole blocks and padding."""

    kind: Kind
    block: int
    offset_bytes: int | None = None
    at: Coordinates | None = None
    count: int = 1
    detail: str = ""

    def __str__(self) -> str:
        place = "" if self.offset_bytes is None else f" offset {self.offset_bytes}"
        if self.at is not None:
            place += f" layer {self.at.layer} {'kv'[self.at.kv]} head {self.at.kv_head} token {self.at.token}"
        return f"{self.kind.value}: block {self.block}{place} ({self.count}){': ' + self.detail if self.detail else ''}"


@dataclass(frozen=True, slots=True)
class Report:
    """The verdict over a pool."""

    layout: str
    scanner: str
    num_blocks: int
    num_checked: int
    violations: tuple[Violation, ...] = ()

    @property
    def is_clean(self) -> bool:
        return not self.violations

    def counts(self) -> dict[str, int]:
        """Returns findings per kind, kinds in the order of ``Kind``."""
        found = [violation.kind for violation in self.violations]
        return {kind.value: found.count(kind) for kind in Kind if kind in found}


@dataclass(frozen=True, slots=True)
class Sample:
    """Sampling mode: at most ``blocks_max`` blocks, chosen by ``seed``. A different seed each time covers the pool."""

    blocks_max: int
    seed: int

    def __post_init__(self) -> None:
        if self.blocks_max < 1:
            raise LayoutError("blocks_max", self.blocks_max, "must be at least 1")
        if self.seed < 0:
            raise LayoutError("seed", self.seed, "must not be negative")


@dataclass(frozen=True, slots=True)
class Claim:
    """What the pool is said to hold; everything has one entry per block of the pool.

    Attributes:
        num_tokens: written tokens; None when every block is full.
        digests: xxh3-128 of whole blocks (16 bytes each).
        probe_seed: seed of the probe pattern that the blocks hold; None for real content.
        block_ids: the numbers that went into the pattern, and by which details name blocks; 0, 1, 2 and so on without.
        fill: the byte of unwritten tails and of padding.
        is_numeric: False for content whose dtype proves nothing, such as a packed or encrypted block.
    """

    num_tokens: Sequence[int] | np.ndarray | None = None
    digests: Sequence[bytes] | None = None
    probe_seed: int | None = None
    block_ids: Sequence[int] | None = None
    fill: int = 0
    is_numeric: bool = True


class LayoutChecker:
    """Checks pools of one layout. Stateless apart from its scanner; safe to share between threads if that is."""

    def __init__(self, layout: KVLayout, scanner: Scanner | None = None) -> None:
        self.layout = layout
        self.scanner: Scanner = NumpyScanner() if scanner is None else scanner

    def check(self, pool: Any, claim: Claim | None = None, *, sample: Sample | None = None) -> Report:
        """Returns the verdict over a pool of blocks.

        Args:
            pool: uint8, shape (num_blocks, block_bytes), C-contiguous, where the scanner can read it.
            claim: what the pool is said to hold; full blocks of finite numbers without it.
            sample: looks at a few blocks only.
        Raises LayoutError naming the argument that cannot be used.
        """
        claim = Claim() if claim is None else claim
        num_blocks = self.scanner.admit(pool, self.layout)
        num_tokens = self._tokens(claim, num_blocks)
        digests = self._digests(claim, num_blocks)
        ids = self._ids(claim, num_blocks)
        slots = np.arange(num_blocks, dtype=np.int64)
        if sample is not None and sample.blocks_max < num_blocks:
            chosen = np.random.default_rng(sample.seed).choice(num_blocks, sample.blocks_max, replace=False)
            slots = np.sort(chosen).astype(np.int64)

        keys = None
        if claim.probe_seed is not None:
            keys = block_keys(self.layout, claim.probe_seed, (ids[slot] for slot in slots.tolist()))
        findings = _Findings(self, pool, claim, ids, num_tokens)
        if claim.is_numeric or keys is not None:
            request = ScanRequest(slots, num_tokens[slots], claim.fill, keys)
            findings.from_scan(slots, self.scanner.scan(pool, self.layout, request), has_probe=keys is not None)
        if digests is not None:
            findings.from_digests(slots, self.scanner.digests(pool, slots), digests)
        return Report(self.layout.label, self.scanner.name, num_blocks, len(slots), tuple(findings.violations))

    def _tokens(self, claim: Claim, num_blocks: int) -> np.ndarray:
        if claim.num_tokens is None:
            return np.full(num_blocks, self.layout.block_tokens, np.int64)
        tokens = np.asarray(claim.num_tokens)
        if tokens.shape != (num_blocks,) or tokens.dtype.kind not in "iu":
            raise LayoutError("num_tokens", claim.num_tokens, f"needs one whole number for each of {num_blocks} blocks")
        if tokens.min() < 1 or tokens.max() > self.layout.block_tokens:
            wrong = int(tokens.min() if tokens.min() < 1 else tokens.max())
            raise LayoutError("num_tokens", wrong, f"must lie in [1, {self.layout.block_tokens}]")
        return tokens.astype(np.int64)

    def _digests(self, claim: Claim, num_blocks: int) -> np.ndarray | None:
        if claim.digests is None:
            return None
        if len(claim.digests) != num_blocks:
            raise LayoutError("digests", len(claim.digests), f"needs one for each of {num_blocks} blocks")
        for digest in claim.digests:
            if len(digest) != DIGEST_BYTES:
                raise LayoutError("digests", bytes(digest), f"a digest has {DIGEST_BYTES} bytes")
        return np.frombuffer(b"".join(claim.digests), np.uint8).reshape(-1, DIGEST_BYTES)

    def _ids(self, claim: Claim, num_blocks: int) -> Sequence[int]:
        if claim.fill not in range(256):
            raise LayoutError("fill", claim.fill, "must be one byte")
        if claim.block_ids is None:
            return range(num_blocks)
        if len(claim.block_ids) != num_blocks or min(claim.block_ids) < 0:
            raise LayoutError("block_ids", list(claim.block_ids)[:8], f"needs {num_blocks} numbers of at least 0")
        return claim.block_ids


class _Findings:
    """Turns figures into violations for one check."""

    def __init__(
        self, checker: LayoutChecker, pool: Any, claim: Claim, ids: Sequence[int], num_tokens: np.ndarray
    ) -> None:
        self.violations: list[Violation] = []
        self._layout = checker.layout
        self._scanner = checker.scanner
        self._pool = pool
        self._claim = claim
        self._ids = ids
        self._num_tokens = num_tokens
        self._num_diagnosed = 0

    def from_scan(self, slots: np.ndarray, scan: np.ndarray, *, has_probe: bool) -> None:
        bad = np.flatnonzero(scan[:, Field.BAD_LAST] >= 0)
        for row in bad:
            slot, figures = int(slots[row]), scan[row]
            if has_probe and figures[Field.PROBE]:
                self._probe_mismatch(slot, figures)
            else:
                self._add(Kind.NOT_FINITE, slot, figures, Field.NON_FINITE)
                self._add(Kind.UNWRITTEN, slot, figures, Field.CANARY)
            self._add(Kind.TAIL_TOUCHED, slot, figures, Field.TAIL)
            self._add(Kind.PADDING_TOUCHED, slot, figures, Field.PAD)
        self._boundaries(slots, scan)

    def from_digests(self, slots: np.ndarray, found: np.ndarray, expected: np.ndarray) -> None:
        wrong = np.flatnonzero((found != expected[slots]).any(axis=1))
        if not len(wrong):
            return
        owners = {digest.tobytes(): slot for slot, digest in reversed(list(enumerate(expected)))}
        for row in wrong:
            slot, digest = int(slots[row]), found[row].tobytes()
            if digest in owners:
                detail = f"holds the bytes of block {self._ids[owners[digest]]}"
                self.violations.append(Violation(Kind.SWAPPED, slot, detail=detail))
                continue
            self.violations.append(self._reordered(slot, expected[slot].tobytes()) or Violation(Kind.DIGEST, slot))

    def _add(self, kind: Kind, slot: int, figures: np.ndarray, field: Field, detail: str = "") -> None:
        if figures[field]:
            offset = int(figures[field + 1])
            at = self._layout.coordinates(offset)
            self.violations.append(Violation(kind, slot, offset, at, int(figures[field]), detail))

    def _boundaries(self, slots: np.ndarray, scan: np.ndarray) -> None:
        """Damage that ends one block and starts the next came from one write that ran over the border."""
        layout = self._layout
        step = layout.item_bytes if layout.row_stride_bytes == layout.row_bytes else 1
        ends = scan[:, Field.BAD_LAST] + step >= layout.block_bytes
        starts = scan[:, Field.BAD_FIRST] == 0
        for row in np.flatnonzero(ends[:-1] & starts[1:] & (np.diff(slots) == 1)):
            slot = int(slots[row])
            detail = f"runs into block {self._ids[slot + 1]}"
            self.violations.append(Violation(Kind.BOUNDARY, slot, int(scan[row, Field.BAD_LAST]), detail=detail))

    def _probe_mismatch(self, slot: int, figures: np.ndarray) -> None:
        if figures[Field.PROBE] == figures[Field.CANARY]:
            self._add(Kind.UNWRITTEN, slot, figures, Field.CANARY)
            return
        self._num_diagnosed += 1
        mix_up = self._mix_up(slot) if self._num_diagnosed <= MAX_DIAGNOSED_BLOCKS else None
        if mix_up is not None:
            self._add(mix_up[0], slot, figures, Field.PROBE, mix_up[1])
            return
        self._add(Kind.NOT_FINITE, slot, figures, Field.NON_FINITE)
        self._add(Kind.UNWRITTEN, slot, figures, Field.CANARY)
        self._add(Kind.DAMAGED, slot, figures, Field.PROBE)

    def _mix_up(self, slot: int) -> tuple[Kind, str] | None:
        """Names what an unexpected pattern is: another block's, or this block's in another layout."""
        layout, seed = self._layout, self._claim.probe_seed
        assert seed is not None, "only a probe pattern can be recognised"
        count = int(self._num_tokens[slot])
        found = self._scanner.fetch(self._pool, [slot])[0]
        written = layout.logical_view(found)[:, :, :, :count]
        keys = block_keys(layout, seed, self._ids)
        rows = expected_first_rows(layout, keys)
        for other in np.flatnonzero((rows == written[0, 0, 0, 0]).all(axis=1)).tolist():
            both = min(count, int(self._num_tokens[other]))
            if other != slot and np.array_equal(
                written[:, :, :, :both], expected_bits(layout, keys[other])[:, :, :, :both]
            ):
                return Kind.SWAPPED, f"holds the pattern of block {self._ids[other]}"
        for field, writer in alternatives(layout):
            if _looks_like(found, writer, block_keys(writer, seed, [self._ids[slot]])[0], count):
                return KIND_OF_FIELD[field], f"written as {writer.dtype} {writer.label}"
        return self._displaced(slot, found, rows[slot])

    def _displaced(self, slot: int, found: np.ndarray, row: np.ndarray) -> tuple[Kind, str] | None:
        """Looks for the block's first head vector elsewhere: a writer counted with another stride."""
        wanted = row.tobytes()
        if len(wanted) < MIN_ROW_BYTES_TO_SEARCH:
            return None
        around = [found.tobytes()]
        if slot + 1 < len(self._ids):
            around.append(self._scanner.fetch(self._pool, [slot + 1])[0].tobytes())
        place = b"".join(around).find(wanted)
        return (Kind.STRIDE, f"starts {place} bytes late") if place > 0 else None

    def _reordered(self, slot: int, digest: bytes) -> Violation | None:
        """Looks for an order of the same bytes under which the digest is right."""
        self._num_diagnosed += 1
        if self._num_diagnosed > MAX_DIAGNOSED_BLOCKS:
            return None
        found = self._scanner.fetch(self._pool, [slot])
        for field, other in alternatives(self._layout):
            if KIND_OF_FIELD[field] is not Kind.AXIS_ORDER:
                continue
            turned = reorder_blocks(found, other, self._layout, fill=self._claim.fill)
            if xxhash.xxh3_128_digest(turned.tobytes()) == digest:
                return Violation(Kind.AXIS_ORDER, slot, detail=f"the bytes are those of {other.label}")
        return None


def _looks_like(found: np.ndarray, writer: KVLayout, key: np.ndarray, num_tokens: int) -> bool:
    """True when the bytes are what a writer with another layout would have left in this block's place.

    A writer with larger blocks leaves the start of its block here, one with smaller blocks fills only a part.
    """
    row = expected_first_rows(writer, key[None])[0].view(np.uint8)[: len(found)]
    if not np.array_equal(found[: len(row)], row):
        return False  # every layout starts with the same head vector, which settles most candidates
    left = np.zeros(writer.block_bytes, np.uint8)
    known = np.zeros(writer.block_bytes, np.uint8)
    writer.logical_view(left)[:, :, :, :num_tokens] = expected_bits(writer, key)[:, :, :, :num_tokens]
    writer.logical_view(known)[:, :, :, :num_tokens] = (1 << 8 * writer.item_bytes) - 1
    size = min(len(found), len(left))
    is_known = known[:size] != 0
    return bool(is_known.any()) and bool(np.array_equal(found[:size][is_known], left[:size][is_known]))


def unwritten_pool(layout: KVLayout, num_blocks: int) -> np.ndarray:
    """Returns a pool in which every element is the canary: what debug mode hands out. uint8, (n, block_bytes)."""
    if num_blocks < 1:
        raise LayoutError("num_blocks", num_blocks, "must be at least 1")
    return np.tile(canary_block(layout), (num_blocks, 1))
