"""Load or recompute: what a load of cached blocks may cost before computing them again is the better choice. Pure.

Learns online how fast each tier below the slab loads and how fast prefill computes, and gives each load a deadline.
Whoever loads asks ``plan`` first: a load that is predicted to take longer than it is worth is not started, one that
overruns its deadline is abandoned and the rest computed. Afterwards it reports: ``loaded``, ``abandoned`` or, where
nothing was asked for, ``skipped``; and ``computed`` for each prefill. A miss says nothing of a tier's speed.

A slow tier is never worse than no cache, whatever it does: time lost on loads is paid from a budget. It starts with
``GRANT_NS``, grows by a share of all that is computed (``LOSS_SHARE``) and by all time that loads saved, and no
deadline is longer than what is in it. So at any time

    time with the cache  <=  (1 + LOSS_SHARE) x time without it  +  GRANT_NS.

That share also pays for the probes by which a tier that has become fast again is found out. A single load that hangs
costs no more than ``STEP_MAX`` times what such a load took before, and ``SMALL_NS``.
"""

from __future__ import annotations

from dataclasses import dataclass

GAIN = 0.2
"""Weight of the newest observation."""
STEP_MAX = 4.0
"""One observation moves an estimate as if it were at most so many times larger or smaller: a single pause is noise."""
LOSS_SHARE = 0.02
GRANT_NS = 1_000_000_000
SMALL_NS = 250_000_000
"""So much a load may always take, as far as the budget has it: shorter prefills are not worth a choice."""
BUDGET_NS_MAX = 2_000_000_000
"""A tier that was good for hours may not waste more than this at once when it turns bad."""
SAMPLE_TOKENS_MIN = 64
"""The time of a shorter prefill is that of a step, not of its tokens."""


class _Rate:
    """A cost per unit in ns, learned from totals."""

    def __init__(self) -> None:
        self.ns_per_unit: float | None = None

    def observe(self, units: int, took_ns: int) -> None:
        seen = took_ns / units
        known = self.ns_per_unit
        if known is None or known <= 0:
            self.ns_per_unit = seen
            return
        bounded = min(max(seen, known / STEP_MAX), known * STEP_MAX)
        self.ns_per_unit = known + GAIN * (bounded - known)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Whether to load, and how long at most. All in ns; ``deadline_ns`` is relative to the start of the load."""

    starts: bool
    deadline_ns: int
    predicted_ns: int | None
    """None: nothing is known of the tier yet."""


class LoadCost:
    """Predictions and the budget of one worker. Belongs to one thread."""

    def __init__(self) -> None:
        self._tiers: dict[str, _Rate] = {}
        self._prefill = _Rate()
        self._budget_ns = float(GRANT_NS)

    @property
    def budget_ns(self) -> int:
        """Returns how much time loads may lose from now on."""
        return int(self._budget_ns)

    def computed(self, num_tokens: int, took_ns: int) -> None:
        """Prefill computed so many tokens (at least one) in so long."""
        assert num_tokens > 0, num_tokens
        assert took_ns >= 0, took_ns
        if num_tokens >= SAMPLE_TOKENS_MIN or self._prefill.ns_per_unit is None:
            self._prefill.observe(num_tokens, took_ns)
        self._earn(LOSS_SHARE * took_ns)

    def plan(self, tier: str, *, num_bytes: int, num_tokens: int) -> LoadPlan:
        """Returns what to do with blocks of so many bytes that hold so many tokens and may be there. Changes nothing.

        As long as nothing is known of prefill or of the tier, a load starts: that is how it gets known.
        """
        assert num_bytes > 0, num_bytes
        assert num_tokens > 0, num_tokens
        worth_ns = float(SMALL_NS)
        if self._prefill.ns_per_unit is None:
            worth_ns = float(BUDGET_NS_MAX)
        else:
            worth_ns = max(worth_ns, self._prefill.ns_per_unit * num_tokens)
        deadline_ns = min(worth_ns, self._budget_ns)
        rate = self._tiers.get(tier)
        if rate is None or rate.ns_per_unit is None:
            return LoadPlan(deadline_ns >= 1, int(deadline_ns), None)
        predicted_ns = rate.ns_per_unit * num_bytes
        starts = deadline_ns >= max(1, predicted_ns)
        # What hangs is noticed by what it usually takes, long before it has cost a whole prefill.
        deadline_ns = min(deadline_ns, SMALL_NS + STEP_MAX * predicted_ns)
        return LoadPlan(starts, int(deadline_ns), int(predicted_ns))

    def loaded(self, tier: str, *, num_bytes: int, num_tokens: int, took_ns: int) -> None:
        """A load came to its end; so much was there. Call it for what was loaded, at least one block."""
        assert num_bytes > 0, num_bytes
        assert took_ns >= 0, took_ns
        self._tiers.setdefault(tier, _Rate()).observe(num_bytes, took_ns)
        self._settle(num_tokens, took_ns)

    def abandoned(self, tier: str, plan: LoadPlan, *, num_bytes: int, num_tokens: int, took_ns: int) -> None:
        """A load of ``num_bytes`` was given up: it would have taken longer. ``num_tokens`` came in time, possibly none.

        ``took_ns``: time until it was given up. More than the deadline is a fault of the caller, and is paid for all
        the same.
        """
        assert num_bytes > 0, num_bytes
        assert took_ns >= 0, took_ns
        # Doubled, because how long it would have taken is not known and is more than this.
        self._tiers.setdefault(tier, _Rate()).observe(num_bytes, 2 * max(took_ns, plan.predicted_ns or 0))
        self._settle(num_tokens, took_ns)

    def skipped(self, tier: str) -> None:
        """Nothing was asked for. A prediction that kept a load back fades, so that the tier is tried again."""
        rate = self._tiers.get(tier)
        if rate is not None and rate.ns_per_unit is not None:
            rate.ns_per_unit *= 1 - LOSS_SHARE

    def _settle(self, num_tokens: int, took_ns: int) -> None:
        """What was loaded need not be computed; what the load took is spent."""
        per_token = self._prefill.ns_per_unit
        if per_token is not None or num_tokens == 0:
            self._earn((per_token or 0.0) * num_tokens - took_ns)

    def _earn(self, earned_ns: float) -> None:
        self._budget_ns = max(0.0, min(self._budget_ns + earned_ns, BUDGET_NS_MAX))
