"""Replays a trace through the ingress's own router against workers that are simulated: paced prefill, real caches.

Each prefill worker computes one prompt after the other at a fixed time per token; its own tiers are a device pool and a
host slab of so many blocks, kept by the product's eviction policies; a prompt is looked up when it comes. Each
decode worker keeps the blocks it was given. Time is the trace's; nothing here sleeps or depends on this machine.
"""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bench.hitrate_replay import ReplayTier, block_hash_of
from cluster.core.attempt_events import WorkerRef
from cluster.core.prefix_router import Decision, PrefixRouter, Prompt, held_by_tier, prefix_hint
from cluster.core.routing import Candidate, NoPair, choose_pair
from kvstore.core.eviction import make_policy
from kvstore.core.ids import BlockHash
from kvstore.errors import BadInput

NS_PER_MS = 1_000_000
MAX_REQUESTS = 1 << 20
POOL_BLOCKS = 1 << 22
"""Pools that the router sees never refuse a prompt here; what they keep is the tiers' matter."""
RouterName = Literal["prefix", "random", "least_loaded"]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace; ``at_ns`` from its start."""

    at_ns: int
    num_tokens: int
    output_tokens: int
    blocks: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is simulated."""

    num_workers: int
    device_blocks: int
    host_blocks: int
    block_bytes: int
    prefill_ms_per_token: float
    step_ms: float
    host_ms_per_token: float = 0.01


@dataclass(slots=True)
class Outcome:
    """What one replay gave."""

    prompt_tokens: int = 0
    own_tokens: int = 0
    """Prompt tokens that the chosen worker had in its own tiers when it began."""
    loaded_blocks: int = 0
    """From the host slab into the pool."""
    handed_blocks: int = 0
    """From prefill to decode; blocks that decode had already do not travel."""
    busy_ns: dict[str, int] = field(default_factory=dict)
    ttft_ns: list[int] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)

    @property
    def own_share(self) -> float:
        """Share of prompt tokens served from the chosen worker's own tiers."""
        return self.own_tokens / self.prompt_tokens

    @property
    def spread(self) -> float:
        """Busy time of the busiest worker over that of the least busy one."""
        return max(self.busy_ns.values()) / max(1, min(self.busy_ns.values()))


def read_requests(path: Path) -> tuple[list[TraceRequest], int]:
    """Returns the requests of a JSONL trace in their order and the tokens of its blocks.

    Raises: BadInput when the file cannot be read or a line is not what a trace has.
    """
    rows: list[tuple[float, int, int, list[int]]] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    rows.append(_row(line, f"{path}:{number}"))
                if len(rows) > MAX_REQUESTS:
                    raise BadInput("--trace", str(path), f"has more than {MAX_REQUESTS} requests")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput("--trace", str(path), f"cannot be read: {error}") from error
    if not rows:
        raise BadInput("--trace", str(path), "has no request")
    # One id per block, the last one partly filled: the smallest power of two that explains every line.
    block_tokens = 1
    while any(num_tokens > len(ids) * block_tokens for _, num_tokens, _, ids in rows):
        block_tokens *= 2
    start_ms = rows[0][0]
    requests = [
        TraceRequest(
            at_ns=int((at_ms - start_ms) * NS_PER_MS),
            num_tokens=num_tokens,
            output_tokens=output,
            # A block that is not full has no name in the product either.
            blocks=tuple(block_hash_of(hash_id) for hash_id in ids[: num_tokens // block_tokens]),
        )
        for at_ms, num_tokens, output, ids in sorted(rows, key=lambda row: row[0])
    ]
    return requests, block_tokens


def _row(line: str, place: str) -> tuple[float, int, int, list[int]]:
    try:
        row = json.loads(line)
        at_ms, num_tokens, output, ids = (
            row[name] for name in ("timestamp", "input_length", "output_length", "hash_ids")
        )
        valid = (
            isinstance(at_ms, (int, float))
            and type(num_tokens) is int
            and 1 <= num_tokens < 1 << 30
            and type(output) is int
            and output >= 0
            and isinstance(ids, list)
            and bool(ids)
            and all(type(hash_id) is int and 0 <= hash_id < 1 << 64 for hash_id in ids)
        )
    except (ValueError, KeyError, TypeError):
        valid = False
    if not valid:
        raise BadInput(place, line.strip()[:80], "needs timestamp, input_length, output_length and hash_ids")
    return float(at_ms), num_tokens, output, ids


def infinite_tokens(requests: Sequence[TraceRequest], block_tokens: int) -> int:
    """Returns the prompt tokens that one cache without bounds would serve."""
    seen: set[BlockHash] = set()
    total = 0
    for request in requests:
        num_blocks = _prefix(request.blocks, seen)
        total += min(num_blocks * block_tokens, request.num_tokens - 1)
        seen.update(request.blocks)
    return total


def _prefix(blocks: Sequence[BlockHash], held: set[BlockHash]) -> int:
    for index, block in enumerate(blocks):
        if block not in held:
            return index
    return len(blocks)


class _Prefill:
    """One paced prefill worker and its tiers."""

    def __init__(self, name: str, setup: Setup) -> None:
        self.ref = WorkerRef(worker_id=name, incarnation=f"{name}#1", pid=1, node=name)
        self.device = ReplayTier(setup.device_blocks, make_policy("lru", setup.device_blocks))
        self.host = ReplayTier(setup.host_blocks, make_policy("kopir", setup.host_blocks))
        self.free_at_ns = 0
        self.load = 0

    def prefixes(self, blocks: Sequence[BlockHash]) -> dict[str, int]:
        """Returns which tier would serve how many blocks now."""
        device = host = 0
        while device < len(blocks) and self.device.holds(blocks[device]):
            device += 1
        while host < len(blocks) and self.host.holds(blocks[host]):
            host += 1
        return held_by_tier(device=device, host=host)


class _Decode:
    """One decode worker: its streams and the blocks that it keeps."""

    def __init__(self, name: str, setup: Setup) -> None:
        self.ref = WorkerRef(worker_id=name, incarnation=f"{name}#1", pid=1, node=name)
        self.device = ReplayTier(setup.device_blocks, make_policy("lru", setup.device_blocks))
        self.load = 0


@dataclass(slots=True)
class _Job:
    request: TraceRequest
    prefill: _Prefill
    decode: _Decode
    attempt_id: str
    found: dict[str, int]


class Replay:
    """One replay: requests arrive, are routed, wait, are computed, handed over, decoded."""

    def __init__(self, setup: Setup, block_tokens: int, router: RouterName, seed: int) -> None:
        self._setup = setup
        self._block_tokens = block_tokens
        self._name = router
        self._random = random.Random(seed)
        self._router = PrefixRouter()
        prefills = [_Prefill(f"prefill-{number}", setup) for number in range(setup.num_workers)]
        decodes = [_Decode(f"decode-{number}", setup) for number in range(setup.num_workers)]
        self._prefills = {worker.ref.incarnation: worker for worker in prefills}
        self._decodes = {worker.ref.incarnation: worker for worker in decodes}
        self._events: list[tuple[int, int, str, _Job]] = []
        self._num_events = 0
        self.outcome = Outcome(busy_ns={w.ref.worker_id: 0 for w in self._prefills.values()})

    def run(self, requests: Sequence[TraceRequest]) -> Outcome:
        """Replays all of it; returns what came out."""
        for number, request in enumerate(requests):
            self._until(request.at_ns)
            self._arrive(number, request)
        self._until(None)
        return self.outcome

    def _until(self, now_ns: int | None) -> None:
        while self._events and (now_ns is None or self._events[0][0] <= now_ns):
            at_ns, _, what, job = heapq.heappop(self._events)
            {"begin": self._begin, "computed": self._computed, "end": self._end}[what](at_ns, job)

    def _at(self, at_ns: int, what: str, job: _Job) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (at_ns, self._num_events, what, job))

    def _arrive(self, number: int, request: TraceRequest) -> None:
        now_ns = request.at_ns
        prefill, decode, decision = self._choose(request, now_ns)
        # As our workers do it: a prompt is looked up when it comes, not when its turn comes.
        job = _Job(request, prefill, decode, f"att-{number}", prefill.prefixes(request.blocks))
        prefill.load += 1
        decode.load += 1
        if decision is not None:
            self._router.started(job.attempt_id, decision, hints=_hints(request), now_ns=now_ns)
            self._router.check_invariants()
            self.outcome.reasons[decision.why] = self.outcome.reasons.get(decision.why, 0) + 1
        self._at(max(now_ns, prefill.free_at_ns), "begin", job)

    def _choose(self, request: TraceRequest, now_ns: int) -> tuple[_Prefill, _Decode, Decision | None]:
        if self._name == "random":
            prefill = self._random.choice(list(self._prefills.values()))
            return prefill, self._random.choice(list(self._decodes.values())), None
        candidates = [Candidate(w.ref, "prefill", w.load, POOL_BLOCKS) for w in self._prefills.values()]
        candidates += [Candidate(d.ref, "decode", d.load, POOL_BLOCKS) for d in self._decodes.values()]
        num_blocks = len(request.blocks) + 1
        if self._name == "least_loaded":
            pair = choose_pair(candidates, prompt_blocks=num_blocks, total_blocks=num_blocks)
            assert not isinstance(pair, NoPair), pair
            return self._prefills[pair.prefill.incarnation], self._decodes[pair.decode.incarnation], None
        held = {life: worker.prefixes(request.blocks) for life, worker in self._prefills.items()}
        held |= {life: {"device": _held(d.device, request.blocks)} for life, d in self._decodes.items()}
        prompt = Prompt(
            num_tokens=request.num_tokens,
            block_tokens=self._block_tokens,
            total_blocks=num_blocks,
            held=held,
            hints=_hints(request),
        )
        decision = self._router.choose(candidates, prompt, now_ns=now_ns)
        assert isinstance(decision, Decision), decision
        pair = decision.pair
        return self._prefills[pair.prefill.incarnation], self._decodes[pair.decode.incarnation], decision

    def _begin(self, now_ns: int, job: _Job) -> None:
        worker, request = job.prefill, job.request
        if now_ns < worker.free_at_ns:
            # Somebody before it has begun meanwhile: it goes on waiting, in its place.
            return self._at(worker.free_at_ns, "begin", job)
        own = min(sum(job.found.values()) * self._block_tokens, request.num_tokens - 1)
        from_host = job.found.get("host", 0)
        computed = request.num_tokens - own
        busy_ns = int(
            (
                computed * self._setup.prefill_ms_per_token
                + from_host * self._block_tokens * self._setup.host_ms_per_token
            )
            * NS_PER_MS
        )
        worker.free_at_ns = now_ns + busy_ns
        outcome = self.outcome
        outcome.prompt_tokens += request.num_tokens
        outcome.own_tokens += own
        outcome.loaded_blocks += from_host
        outcome.busy_ns[worker.ref.worker_id] += busy_ns
        outcome.ttft_ns.append(now_ns + busy_ns - request.at_ns)
        self._router.rates.saw_prefill(
            worker.ref.incarnation,
            num_tokens=computed,
            duration_ns=int(computed * self._setup.prefill_ms_per_token * 1e6),
        )
        self._at(now_ns + busy_ns, "computed", job)
        return None

    def _computed(self, now_ns: int, job: _Job) -> None:
        worker, blocks = job.prefill, job.request.blocks
        worker.device.serve(blocks)
        worker.host.serve(blocks)
        worker.load -= 1
        self._router.ended(job.attempt_id, worker.ref.incarnation, now_ns=now_ns)
        had = job.decode.device.serve(blocks)
        self.outcome.handed_blocks += len(blocks) + 1 - had
        self._at(now_ns + int(job.request.output_tokens * self._setup.step_ms * NS_PER_MS), "end", job)

    def _end(self, now_ns: int, job: _Job) -> None:
        job.decode.load -= 1


def _held(tier: ReplayTier, blocks: Sequence[BlockHash]) -> int:
    num = 0
    while num < len(blocks) and tier.holds(blocks[num]):
        num += 1
    return num


def _hints(request: TraceRequest) -> tuple[str, ...]:
    return (prefix_hint(request.blocks),) if request.blocks else ()
