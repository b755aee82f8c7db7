"""Which pair of workers takes a prompt: the one with the first token soonest, without wearing one worker out.

A pure state machine; its driver tells it what was sent, what ended and what workers report. For each prefill side it
predicts the time to the first token:

    wait (the queue that stands there now, or the one that its load of the last minute makes likely)
    + tokens that no tier of its own has * its measured nanoseconds per token
    + tokens of each tier * that tier's nanoseconds per token

so a busy worker that has the prefix is left alone as soon as computing it anew elsewhere is faster. Two more rules:

* *Spread.* A worker that was given more than ``SPREAD_MAX`` times the work of the least worked one (beyond a few
  prompts of slack) gets nothing new while another can take it. A prefix that many ask for is thus computed a second
  time while its worker still keeps up: every copy then takes a share. A hit costs little work, so a worker may serve
  many of them before this matters.
* *Ties.* Predictions that differ by less than measurement does are equal: the worker that had the same
  ``prompt_cache_key`` (or the same first blocks, announced or not) takes it, else the one with the least work.

Lives that failed are set aside (``CoolDown``), and those that this request failed on; both come back when nobody else
is left. Never chosen: a life that is not among the candidates.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.core.routing import Candidate, CoolDown, NoPair, Pair, large_enough
from cluster.core.service_rates import ServiceRates
from cluster.core.worker_load import PrefillQueues, WorkMeter
from kvstore.core.ids import BlockHash

SPREAD_MAX = 1.25
"""Kept below the 1.5 that is promised, because predictions are not exact."""
SLACK_PROMPTS = 4
"""Prompts of mean cost that a worker may be ahead before the spread counts."""
EQUAL_SHARE = 0.05
EQUAL_NS = 500_000
"""Predictions within this share, or this time, are equal."""
COST_WEIGHT = 2.0
"""What a prompt takes of a worker delays everybody behind it: so much is added per nanosecond of it. Measured with
``kopir bench routing``: without it a short queue is reason enough to compute a long prefix a second time."""
HINT_TOKENS = 64
"""What a hint is worth: the time to compute so many tokens."""
HINT_BLOCKS = 4
"""Prompts that agree in so many blocks are taken for relatives."""
HINTS_MAX = 16_384
DECODE_NS_PER_STREAM = 1_000_000
"""What one more stream adds to the first steps of a new one; only differences between decode workers matter."""
HAND_OVER_NS_PER_BLOCK = 50_000
"""Per block that decode lacks: a 16-token block of the packaged model over UCX, verified."""

Held = Mapping[str, int]
"""Tier -> blocks of this prompt's prefix that this tier serves; no block counts in two tiers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What the choice needs to know of a request."""

    num_tokens: int
    block_tokens: int
    total_blocks: int
    """KV blocks of prompt and answer."""
    held: Mapping[str, Held] = field(default_factory=dict)
    """Life -> what its own tiers have; lives without anything may be left out."""
    hints: tuple[str, ...] = ()
    """Names under which a worker is remembered, the strongest first: a cache key, a hash of the first blocks."""

    @property
    def num_blocks(self) -> int:
        """Blocks that the prefill side must hold."""
        return -(-self.num_tokens // self.block_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One prefill side as it was weighed; times in nanoseconds."""

    candidate: Candidate
    wait_ns: int
    missing_tokens: int
    compute_ns: int
    load_ns: int
    given_ns: int
    """Work of the last minute."""
    held: Held
    is_hinted: bool = False
    is_ahead: bool = False
    is_avoided: bool = False

    @property
    def cost_ns(self) -> int:
        """What the prompt takes of the worker's time."""
        return self.compute_ns + self.load_ns

    @property
    def ttft_ns(self) -> int:
        """Predicted time to the first token."""
        return self.wait_ns + self.cost_ns

    def to_dict(self) -> dict[str, object]:
        """Returns the numbers for the journal, in milliseconds."""
        return {
            "worker_id": self.candidate.ref.worker_id,
            "predicted_ttft_ms": _ms(self.ttft_ns),
            "wait_ms": _ms(self.wait_ns),
            "missing_tokens": self.missing_tokens,
            "compute_ms": _ms(self.compute_ns),
            "load_ms": _ms(self.load_ns),
            "held_blocks": dict(self.held),
            "recent_work_ms": _ms(self.given_ns),
            "hinted": self.is_hinted,
            "ahead": self.is_ahead,
            "avoided": self.is_avoided,
        }


@dataclass(frozen=True, slots=True)
class Decision:
    """A pair and why."""

    pair: Pair
    chosen: Estimate
    weighed: tuple[Estimate, ...]
    """Every prefill side that could take it, in the order of preference."""
    why: str


@dataclass(slots=True)
class PrefixRouter:
    """Chooses for one ingress. Belongs to one thread."""

    rates: ServiceRates = field(default_factory=ServiceRates)
    queues: PrefillQueues = field(default_factory=PrefillQueues)
    work: WorkMeter = field(default_factory=WorkMeter)
    cool: CoolDown = field(default_factory=CoolDown)
    _hints: OrderedDict[str, str] = field(default_factory=OrderedDict)
    """Name -> life that had it last."""

    # --- the choice -----------------------------------------------------------------------------------------

    def choose(
        self, candidates: Iterable[Candidate], prompt: Prompt, *, now_ns: int, avoid: Collection[str] = ()
    ) -> Decision | NoPair:
        """Returns the pair, the numbers behind it, and why; or why there is none. Changes nothing but bookkeeping."""
        fitting = large_enough(candidates, prompt_blocks=prompt.num_blocks, total_blocks=prompt.total_blocks)
        if isinstance(fitting, NoPair):
            return fitting
        aside = {*avoid, *self.cool.set_aside(now_ns)}
        has_pair = {"prefill", "decode"} <= {candidate.role for candidate in fitting}
        sources = [c for c in fitting if c.role == "combined" or (has_pair and c.role == "prefill")]
        weighed = self._weigh(sources, prompt, aside, now_ns)
        order = sorted(weighed, key=_preference(weighed))
        decodes = [c for c in fitting if c.role == "decode"]
        chosen = order[0]
        best_decode = self._decode(decodes, prompt, aside) if chosen.candidate.role == "prefill" else chosen.candidate
        why = _why(chosen, order)
        return Decision(Pair(chosen.candidate.ref, best_decode.ref), chosen, tuple(order), why)

    def _weigh(self, sources: list[Candidate], prompt: Prompt, aside: Collection[str], now_ns: int) -> list[Estimate]:
        hinted = next((life for name in prompt.hints if (life := self._hints.get(name)) is not None), None)
        self._level(sources, now_ns)
        estimates = [
            self._estimate(source, prompt, hinted, source.ref.incarnation in aside, now_ns) for source in sources
        ]
        usable = [estimate for estimate in estimates if not estimate.is_avoided] or estimates
        least_ns = min(estimate.given_ns for estimate in usable)
        slack_ns = SLACK_PROMPTS * self.work.mean_cost_ns(now_ns)
        return [
            replace(estimate, is_ahead=estimate.given_ns + estimate.cost_ns > SPREAD_MAX * least_ns + slack_ns)
            if len(usable) > 1 and estimate.given_ns > least_ns
            else estimate
            for estimate in estimates
        ]

    def _level(self, sources: list[Candidate], now_ns: int) -> None:
        lives = [source.ref.incarnation for source in sources]
        known = [self.work.given_ns(life, now_ns) for life in lives if self.work.knows(life)]
        for life in lives:
            self.work.level(life, like=min(known, default=0.0), now_ns=now_ns)

    def _estimate(
        self, source: Candidate, prompt: Prompt, hinted: str | None, is_avoided: bool, now_ns: int
    ) -> Estimate:
        life = source.ref.incarnation
        held = prompt.held.get(life, {})
        # The last token of a prompt is always computed, because its logits are needed.
        left = prompt.num_tokens - 1
        load_ns = 0.0
        for tier, num_blocks in held.items():
            num_tokens = min(left, num_blocks * prompt.block_tokens)
            left -= num_tokens
            load_ns += num_tokens * self.rates.load_ns_per_token(tier)
        missing = left + 1
        given_ns = self.work.given_ns(life, now_ns)
        wait_ns = max(self.queues.wait_ns(life, now_ns), int(self.work.expected_wait_ns(life, now_ns)))
        if source.role == "combined":
            wait_ns += source.load * DECODE_NS_PER_STREAM
        return Estimate(
            candidate=source,
            wait_ns=wait_ns,
            missing_tokens=missing,
            compute_ns=int(missing * self.rates.prefill_ns_per_token(life)),
            load_ns=int(load_ns),
            given_ns=int(given_ns),
            held=held,
            is_hinted=life == hinted,
            is_avoided=is_avoided,
        )

    def _decode(self, decodes: list[Candidate], prompt: Prompt, aside: Collection[str]) -> Candidate:
        """Returns the decode side with the least streams, counting the blocks that would have to travel."""

        def price(candidate: Candidate) -> tuple[bool, int, str]:
            held = sum(prompt.held.get(candidate.ref.incarnation, {}).values())
            missing = max(0, prompt.num_blocks - held)
            cost_ns = candidate.load * DECODE_NS_PER_STREAM + missing * HAND_OVER_NS_PER_BLOCK
            return candidate.ref.incarnation in aside, cost_ns, candidate.ref.worker_id

        return min(decodes, key=price)

    # --- what happened --------------------------------------------------------------------------------------

    def started(self, attempt_id: str, decision: Decision, *, hints: Iterable[str] = (), now_ns: int) -> None:
        """The prompt was given to the chosen pair."""
        life, cost_ns = decision.pair.prefill.incarnation, decision.chosen.cost_ns
        self.queues.start(life, attempt_id, cost_ns=cost_ns, now_ns=now_ns)
        self.work.give(life, cost_ns=cost_ns, now_ns=now_ns)
        for name in hints:
            self._hints[name] = life
            self._hints.move_to_end(name)
        while len(self._hints) > HINTS_MAX:
            self._hints.popitem(last=False)

    def ended(self, attempt_id: str, incarnation: str, *, now_ns: int) -> None:
        """The prefill side has nothing to do for this attempt any more."""
        self.queues.end(incarnation, attempt_id, now_ns=now_ns)

    def gone(self, incarnation: str) -> None:
        """A life is over: nothing about it is true any more."""
        self.queues.forget(incarnation)
        self.work.forget(incarnation)
        self.rates.forget(incarnation)
        self.cool.succeeded(incarnation)

    def check_invariants(self) -> None:
        """Asserts what must hold after every step."""
        self.queues.check_invariants()
        assert len(self._hints) <= HINTS_MAX, len(self._hints)


def held_by_tier(*, device: int = 0, host: int = 0, disk: int = 0) -> dict[str, int]:
    """Returns which tier serves how many blocks, from how long a prefix each of them has: the fastest serves first."""
    served: dict[str, int] = {}
    done = 0
    for tier, num_blocks in (("device", device), ("host", host), ("disk", disk)):
        if num_blocks > done:
            served[tier] = num_blocks - done
            done = num_blocks
    return served


def prefix_hint(hashes: Sequence[BlockHash]) -> str:
    """Returns the name under which prompts that begin alike remember their worker. Needs one hash at least."""
    return f"prefix:{hashes[min(HINT_BLOCKS, len(hashes)) - 1].hex()}"


def _preference(weighed: list[Estimate]) -> Callable[[Estimate], tuple[Any, ...]]:
    """Returns the key by which the best estimate comes first."""
    usable = [e for e in weighed if not e.is_avoided and not e.is_ahead] or weighed
    best_ns = min(_scored_ns(estimate) for estimate in usable)
    equal_ns = best_ns + max(EQUAL_NS, int(best_ns * EQUAL_SHARE))

    def key(estimate: Estimate) -> tuple[Any, ...]:
        scored_ns = _scored_ns(estimate)
        is_equal = scored_ns <= equal_ns
        return (
            estimate.is_avoided,
            estimate.is_ahead,
            0 if is_equal else scored_ns,
            not estimate.is_hinted,
            estimate.given_ns,
            estimate.candidate.load,
            scored_ns,
            estimate.candidate.ref.worker_id,
        )

    return key


def _scored_ns(estimate: Estimate) -> int:
    """A hint makes a worker look a little faster than it is."""
    scored_ns = estimate.ttft_ns + int(COST_WEIGHT * estimate.cost_ns)
    if not estimate.is_hinted:
        return scored_ns
    ns_per_token = estimate.compute_ns / max(1, estimate.missing_tokens)
    return max(0, scored_ns - int(HINT_TOKENS * ns_per_token))


def _why(chosen: Estimate, order: list[Estimate]) -> str:
    if len(order) == 1:
        return "the only one"
    most_held = max(order, key=lambda estimate: sum(estimate.held.values()))
    if most_held is chosen or not most_held.held:
        if chosen.held:
            return "has the longest prefix and the first token soonest"
        return "hinted" if chosen.is_hinted else "the first token soonest"
    if most_held.is_avoided:
        return "the one with the longest prefix is set aside"
    if most_held.is_ahead:
        return "the one with the longest prefix was given too much of the work"
    if sum(most_held.held.values()) == sum(chosen.held.values()):
        return "as much of the prefix as the others, and less work"
    return "the one with the longest prefix is busy"


def _ms(ns: int) -> float:
    return round(ns / 1e6, 3)
