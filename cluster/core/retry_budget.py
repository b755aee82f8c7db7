"""How many attempts may be repeated: a token bucket over all requests of one ingress.

Pure. A failure of many workers at once makes many requests ask for another prefill at the same moment. The bucket lets
through what the healthy rest can take and turns the others into errors, so that a failure stays a failure and does not
become a flood. What client libraries repeat by themselves is the same load, so it is charged as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field

NS_PER_S = 1_000_000_000


@dataclass(slots=True)
class RetryBudget:
    """``per_s`` retries each second on average, at most one second's worth (and at least one) at once; 0: none."""

    per_s: float
    num_taken: int = 0
    num_refused: int = 0
    num_charged: int = 0
    _level: float = field(init=False)
    _filled_ns: int | None = None

    def __post_init__(self) -> None:
        self._level = self.limit

    @property
    def limit(self) -> float:
        """The most that can be taken at once."""
        return max(self.per_s, 1.0) if self.per_s > 0 else 0.0

    def take(self, now_ns: int) -> bool:
        """Takes one retry if there is one. Modifies: the level."""
        self._fill(now_ns)
        if self._level < 1.0:
            self.num_refused += 1
            return False
        self._level -= 1.0
        self.num_taken += 1
        return True

    def charge(self, now_ns: int) -> None:
        """A client has repeated a request by itself; that is counted and never refused here."""
        self._fill(now_ns)
        self._level = max(self._level - 1.0, 0.0)
        self.num_charged += 1

    def _fill(self, now_ns: int) -> None:
        if self._filled_ns is not None:
            elapsed_ns = max(0, now_ns - self._filled_ns)
            self._level = min(self.limit, self._level + elapsed_ns * self.per_s / NS_PER_S)
        self._filled_ns = now_ns

    def check_invariants(self) -> None:
        """Asserts what must hold after every step."""
        assert 0.0 <= self._level <= self.limit, (self._level, self.limit)
