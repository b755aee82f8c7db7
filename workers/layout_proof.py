"""Proof that two workers mean the same by the bytes of a block, and the checks of landed blocks in debug mode.

Owns the probe block of a joining link: the side that pushes writes a pattern through the engine's own view of a pool,
the transport carries it as it carries any block, and the side that reads compares every byte. The pattern follows
from a challenge of the reader and the cluster's secret, so that neither an old block nor a guess can pass. Counts
everything for ``/metrics``. Used on the link loop only.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets

import numpy as np
import torch

from kernels.checker import Claim, LayoutChecker, Report
from kernels.layout import KVLayout
from kernels.pattern import block_keys, expected_bits
from workers.kv_pool import KvPool

logger = logging.getLogger(__name__)

CHALLENGE_BYTES = 16
BITS_DTYPES = {2: torch.int16, 4: torch.int32}
VIOLATIONS_NAMED_MAX = 8


class LayoutProof:
    """Challenges, probe blocks and verdicts of one worker."""

    def __init__(self, layout: KVLayout, secret: bytes) -> None:
        self.layout = layout
        self._secret = secret
        self._checker = LayoutChecker(layout)
        self.counters: dict[str, int] = {"layout_checks": 0}
        """``layout_checks`` and one ``layout_violations.<kind>`` for each kind that was found."""

    def challenge(self) -> bytes:
        """Returns fresh bytes that the other side's pattern must depend on."""
        return secrets.token_bytes(CHALLENGE_BYTES)

    def probe_block(self, challenge: bytes, *, writer: str, reader: str) -> KvPool:
        """Returns a pool of one block that answers the challenge, written as the engine writes KV.

        ``writer`` and ``reader`` are incarnations: an answer to somebody else is no answer.
        """
        pool = KvPool(self.layout, 1)
        key = block_keys(self.layout, self._seed(challenge, writer, reader), [0])[0]
        bits = expected_bits(self.layout, key)
        signed = torch.from_numpy(bits.view(f"i{self.layout.item_bytes}"))
        pool.tensor[0].view(BITS_DTYPES[self.layout.item_bytes]).copy_(signed)
        return pool

    def check_probe(self, block: np.ndarray, challenge: bytes, *, writer: str, reader: str) -> Report:
        """Returns the verdict on a probe block that arrived. ``block``: uint8, shape (block_bytes,)."""
        claim = Claim(probe_seed=self._seed(challenge, writer, reader))
        return self._count(self._checker.check(block[None], claim))

    def check_landed(self, block: np.ndarray, num_tokens: int) -> Report:
        """Returns the verdict on a block of real KV: finite, written, zero beyond ``num_tokens``."""
        return self._count(self._checker.check(block[None], Claim(num_tokens=[num_tokens])))

    def is_sound(self, block: memoryview) -> bool:
        """Returns True when a cached block can be KV: cached blocks are full. Logs what is wrong."""
        report = self.check_landed(np.frombuffer(block, np.uint8), self.layout.block_tokens)
        if not report.is_clean:
            logger.error("layout_violation from=cache %s", describe(report))
        return report.is_clean

    def _seed(self, challenge: bytes, writer: str, reader: str) -> int:
        text = b"\0".join((b"kopir layout probe", challenge, writer.encode(), reader.encode()))
        return int.from_bytes(hmac.digest(self._secret, text, hashlib.sha256)[:8], "big")

    def _count(self, report: Report) -> Report:
        self.counters["layout_checks"] += report.num_checked
        for kind, count in report.counts().items():
            name = f"layout_violations.{kind}"
            self.counters[name] = self.counters.get(name, 0) + count
        return report


def describe(report: Report) -> tuple[str, ...]:
    """Returns the first violations as text, for messages and logs."""
    return tuple(str(violation) for violation in report.violations[:VIOLATIONS_NAMED_MAX])
