"""Which pair of workers takes the next attempt. Pure and deterministic: equal inputs give the same pair."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from cluster.core.attempt_events import WorkerRef

COOL_DOWN_NS_MIN = 500 * 10**6
COOL_DOWN_NS_MAX = 30 * 10**9
COOL_DOWNS_MAX = 1024
"""Lives that are remembered as failing; the one that failed longest ago is forgotten first."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One worker life that is ready and connected. ``load`` is the number of attempts this ingress has there."""

    ref: WorkerRef
    role: str
    load: int
    pool_blocks: int


@dataclass(frozen=True, slots=True)
class Pair:
    """Prefill and decode side of an attempt; the same worker twice when it is a combined one."""

    prefill: WorkerRef
    decode: WorkerRef


@dataclass(frozen=True, slots=True)
class NoPair:
    """Nobody can take it. ``never`` says that no connected pair is large enough at all."""

    why: str
    never: bool = False


def choose_pair(
    candidates: Iterable[Candidate], *, prompt_blocks: int, total_blocks: int, avoid: Collection[str] = ()
) -> Pair | NoPair:
    """Returns the least loaded pair whose pools can ever hold the request.

    Args:
        prompt_blocks: blocks that the prefill side must hold.
        total_blocks: blocks that the decode side must hold for prompt and answer.
        avoid: incarnations this request has failed on; used again only when nobody else is left.
    """
    large = large_enough(candidates, prompt_blocks=prompt_blocks, total_blocks=total_blocks)
    if isinstance(large, NoPair):
        return large
    large.sort(key=lambda c: (c.ref.incarnation in avoid, c.load, c.ref.worker_id))
    prefill = next((c for c in large if c.role == "prefill"), None)
    decode = next((c for c in large if c.role == "decode"), None)
    combined = next((c for c in large if c.role == "combined"), None)
    if prefill is None or decode is None:
        assert combined is not None
        return Pair(combined.ref, combined.ref)
    if combined is not None and _rank(combined, avoid) < max(_rank(prefill, avoid), _rank(decode, avoid)):
        return Pair(combined.ref, combined.ref)
    return Pair(prefill.ref, decode.ref)


def large_enough(candidates: Iterable[Candidate], *, prompt_blocks: int, total_blocks: int) -> list[Candidate] | NoPair:
    """Returns the candidates whose pools can ever hold their side of the request, if there is a pair among them."""
    known = list(candidates)
    if not _has_pair(known):
        return NoPair("no connected pair of prefill and decode workers")
    large = [c for c in known if c.pool_blocks >= (prompt_blocks if c.role == "prefill" else total_blocks)]
    if not _has_pair(large):
        return NoPair(f"needs {total_blocks} KV blocks, more than the pools of any pair", never=True)
    return large


def elsewhere(candidates: Iterable[Candidate], nodes: Collection[str]) -> list[Candidate]:
    """Returns the candidates that live on no host of ``nodes``, or all of them where the others are no pair.

    A network that lost one worker has lost its neighbours, and those do not show it before their own lease ends.
    """
    known = list(candidates)
    others = [candidate for candidate in known if candidate.ref.node not in nodes]
    return others if _has_pair(others) else known


def _rank(candidate: Candidate, avoid: Collection[str]) -> tuple[bool, int]:
    return candidate.ref.incarnation in avoid, candidate.load


def _has_pair(candidates: list[Candidate]) -> bool:
    roles = {candidate.role for candidate in candidates}
    return "combined" in roles or {"prefill", "decode"} <= roles


@dataclass(slots=True)
class _Cooling:
    num_failures: int
    until_ns: int


@dataclass(slots=True)
class CoolDown:
    """Lives that failed lately. Each failure in a row doubles the time aside; one success ends it."""

    _cooling: OrderedDict[str, _Cooling] = field(default_factory=OrderedDict)

    def failed(self, incarnation: str, now_ns: int) -> None:
        """An attempt was lost there. Modifies: the time until the life is used again."""
        num_failures = self._cooling[incarnation].num_failures + 1 if incarnation in self._cooling else 1
        aside_ns = min(COOL_DOWN_NS_MIN << min(num_failures - 1, 16), COOL_DOWN_NS_MAX)
        self._cooling[incarnation] = _Cooling(num_failures, now_ns + aside_ns)
        self._cooling.move_to_end(incarnation)
        if len(self._cooling) > COOL_DOWNS_MAX:
            self._cooling.popitem(last=False)

    def succeeded(self, incarnation: str) -> None:
        """An attempt came to its end there."""
        self._cooling.pop(incarnation, None)

    def set_aside(self, now_ns: int) -> tuple[str, ...]:
        """Returns the lives to avoid now, in order of failure."""
        return tuple(life for life, cooling in self._cooling.items() if now_ns < cooling.until_ns)
