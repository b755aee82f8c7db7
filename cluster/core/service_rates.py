"""How fast workers are, learnt from what they report: prefill per token, loading per token and tier, hand-over.

Pure. Moving averages per worker life; one that has reported nothing counts as the mean of the others, and before
anybody has, as the defaults say. The figures steer choices only: nothing is right or wrong by them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

WEIGHT = 0.2
"""Share of the newest figure in an average."""
DEFAULT_PREFILL_NS_PER_TOKEN = 1_000_000.0
DEFAULT_LOAD_NS_PER_TOKEN = {"device": 0.0, "host": 10_000.0, "disk": 50_000.0, "remote": 100_000.0}
"""Loading instead of computing; from the block sizes and rates of ``kopir bench store`` and ``tiers`` on two cores."""
TOKENS_MIN = 8
"""A report about fewer tokens says more about fixed costs than about a rate."""


@dataclass(slots=True)
class ServiceRates:
    """Averages of one ingress."""

    _prefill_ns: dict[str, float] = field(default_factory=dict)
    """Life -> nanoseconds per computed token."""
    _load_ns: dict[str, float] = field(default_factory=dict)
    """Tier -> nanoseconds per loaded token."""

    def saw_prefill(self, incarnation: str, *, num_tokens: int, duration_ns: int) -> None:
        """A worker has computed ``num_tokens`` tokens of a prompt."""
        if num_tokens >= TOKENS_MIN and duration_ns > 0:
            old = self._prefill_ns.get(incarnation)
            self._prefill_ns[incarnation] = _averaged(old, duration_ns / num_tokens)

    def saw_load(self, tier: str, *, num_tokens: int, duration_ns: int) -> None:
        """So many tokens came out of one tier and of no other."""
        if num_tokens >= TOKENS_MIN and duration_ns > 0:
            self._load_ns[tier] = _averaged(self._load_ns.get(tier), duration_ns / num_tokens)

    def forget(self, incarnation: str) -> None:
        """A life is over."""
        self._prefill_ns.pop(incarnation, None)

    def prefill_ns_per_token(self, incarnation: str) -> float:
        """Returns what a token costs there, as far as is known."""
        known = self._prefill_ns.get(incarnation)
        if known is not None:
            return known
        others = self._prefill_ns.values()
        return sum(others) / len(others) if others else DEFAULT_PREFILL_NS_PER_TOKEN

    def load_ns_per_token(self, tier: str) -> float:
        """Returns what a token out of a tier costs; an unknown tier is as slow as the slowest."""
        default = DEFAULT_LOAD_NS_PER_TOKEN.get(tier, max(DEFAULT_LOAD_NS_PER_TOKEN.values()))
        return self._load_ns.get(tier, default)


def _averaged(old: float | None, newest: float) -> float:
    return newest if old is None else old + WEIGHT * (newest - old)
