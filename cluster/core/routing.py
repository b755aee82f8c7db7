"""Which pair of workers takes the next attempt. Pure and deterministic: equal inputs give the same pair."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from cluster.core.attempt_events import WorkerRef


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
    known = sorted(candidates, key=lambda c: (c.ref.incarnation in avoid, c.load, c.ref.worker_id))
    if not _has_pair(known):
        return NoPair("no connected pair of prefill and decode workers")
    large = [c for c in known if c.pool_blocks >= (prompt_blocks if c.role == "prefill" else total_blocks)]
    if not _has_pair(large):
        return NoPair(f"needs {total_blocks} KV blocks, more than the pools of any pair", never=True)
    prefill = next((c for c in large if c.role == "prefill"), None)
    decode = next((c for c in large if c.role == "decode"), None)
    combined = next((c for c in large if c.role == "combined"), None)
    if prefill is None or decode is None:
        assert combined is not None
        return Pair(combined.ref, combined.ref)
    if combined is not None and _rank(combined, avoid) < max(_rank(prefill, avoid), _rank(decode, avoid)):
        return Pair(combined.ref, combined.ref)
    return Pair(prefill.ref, decode.ref)


def _rank(candidate: Candidate, avoid: Collection[str]) -> tuple[bool, int]:
    return candidate.ref.incarnation in avoid, candidate.load


def _has_pair(candidates: list[Candidate]) -> bool:
    roles = {candidate.role for candidate in candidates}
    return "combined" in roles or {"prefill", "decode"} <= roles
