"""Workers killed at random moments of the life of requests, and what every client saw.

Used by tests (``tests/component/test_kills_at_random.py``), where any wrong delta is a failure, and by ``kopir bench
failover``. Reads generations as the HTTP layer does, and knows the tokens that are right.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from bench.process_cluster import ProcessCluster
from cluster.core.journal import replay
from cluster.ingress.api.backend import Ended, Generation, Interrupted, Restarted, TokenBatch
from cluster.ingress.api.errors import ApiError
from kvstore.core.messages import GenerationSpec, SamplingParams

READ_DEADLINE_S = 60.0
Ending = Literal["finished", "interrupted", "failed"]
Expected = Callable[[GenerationSpec], list[int]]


@dataclass(slots=True)
class Seen:
    """What one client got. ``tokens`` were delivered; times are the event loop's."""

    request_id: str
    spec: GenerationSpec
    stream: bool
    ending: Ending | None = None
    tokens: list[int] = field(default_factory=list)
    num_restarts: int = 0
    first_delta_s: float | None = None
    ended_s: float | None = None
    error: str = ""


async def read(generation: Generation, seen: Seen, *, on_delta: Callable[[Seen], None] | None = None) -> Seen:
    """Reads a generation to its end as the HTTP layer does. Modifies: ``seen``."""
    loop = asyncio.get_running_loop()
    gathered: list[int] = []
    try:
        while seen.ending is None:
            event = await asyncio.wait_for(generation.next(), READ_DEADLINE_S)
            match event:
                case TokenBatch():
                    assert event.first_index == len(gathered), (seen.request_id, event.first_index, len(gathered))
                    gathered += event.token_ids
                    # Between the giving of an event and this line its attempt may have been lost.
                    if seen.stream and not (seen.first_delta_s is None and generation.has_restarted):
                        _deliver(generation, seen, gathered, loop.time())
                        if on_delta is not None:
                            on_delta(seen)
                case Restarted():
                    assert seen.first_delta_s is None, f"{seen.request_id} ran again after its first delta"
                    gathered.clear()
                    seen.num_restarts += 1
                case Ended():
                    _deliver(generation, seen, gathered, loop.time())
                    generation.completed()
                    seen.ending = "finished"
                case Interrupted():
                    assert seen.first_delta_s is not None, f"{seen.request_id} was interrupted before its first delta"
                    seen.ending, seen.error = "interrupted", event.reason
    except ApiError as error:
        assert seen.first_delta_s is None, f"{seen.request_id} failed by a status after its first delta"
        seen.ending, seen.error = "failed", f"{error.status} {error.message}"
    seen.ended_s = loop.time()
    return seen


def _deliver(generation: Generation, seen: Seen, tokens: list[int], now_s: float) -> None:
    if seen.first_delta_s is None:
        generation.mark_first_delta()
        seen.first_delta_s = now_s
    seen.tokens = list(tokens)
    generation.delivered(len(tokens))


def check(seen: Seen, record: dict[str, Any], expected: list[int]) -> None:
    """Asserts that a client saw nothing doubled, lost or made up, and that the journal explains what happened."""
    request_id = seen.request_id
    assert seen.tokens == expected[: len(seen.tokens)], f"{request_id}: wrong tokens"
    if seen.ending == "finished":
        assert seen.tokens == expected, f"{request_id}: finished after {len(seen.tokens)} of {len(expected)}"
    phases = {"finished": "finished", "interrupted": "interrupted", "failed": "failed"}
    assert record["phase"] == phases[str(seen.ending)], (request_id, record["phase"], seen)
    assert record["delivered_output_tokens"] == len(seen.tokens), (request_id, record["delivered_output_tokens"])
    assert record["first_delta_sent"] == (seen.first_delta_s is not None), request_id
    attempts = record["attempts"]
    assert len(attempts) == 1 + seen.num_restarts or seen.ending == "failed", (request_id, seen)
    assert replay(record["events"]).is_sufficient, (request_id, record["events"])
    spans = publishing_spans(record)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(spans)), f"{request_id}: two published at once"


def publishing_spans(record: dict[str, Any]) -> list[tuple[int, int]]:
    """Returns (started, surely stopped) of each attempt, in nanoseconds since admission by the ingress's clock."""
    fenced: dict[int, int] = {}
    for entry in record["events"]:
        if entry["event"] == "fenced":
            fenced[entry["epoch"]] = max(fenced.get(entry["epoch"], 0), entry["at_ns"])
    return [(attempt["started_ns"], fenced.get(attempt["epoch"], 0)) for attempt in record["attempts"]]


@dataclass(slots=True)
class KillRun:
    """Kills one worker per round, at a random moment of the requests of that round."""

    cluster: ProcessCluster
    expected: Expected
    seed: int
    num_requests: int = 4
    prompt_tokens: tuple[int, int] = (20, 200)
    max_tokens: tuple[int, int] = (1, 60)
    spread_s: float = 0.3
    """Requests start and the worker dies within this time."""
    endings: Counter[str] = field(default_factory=Counter)
    phases_hit: Counter[str] = field(default_factory=Counter)
    """Phases of the requests that the killed worker was part of, when it was killed."""
    num_restarts: int = 0

    async def round(self, number: int) -> None:
        """One kill. Raises: AssertionError for anything a client must not see, or what is not given back."""
        chooser = random.Random(self.seed * 1_000_003 + number)
        cluster = self.cluster
        victim = chooser.choice(sorted(cluster.lives))
        readers = [
            asyncio.ensure_future(self._ask(chooser.random(), f"k{number}-{i}")) for i in range(self.num_requests)
        ]
        await asyncio.sleep(chooser.random() * self.spread_s)
        incarnation = cluster.lives[victim].join.incarnation
        for request in tuple(cluster.backend._running.values()):
            attempt = request.machine.current
            if attempt is not None and incarnation in {ref.incarnation for ref in attempt.workers.values()}:
                self.phases_hit[request.machine.phase.value] += 1
        cluster.kill(victim)
        for seen in await asyncio.gather(*readers):
            record = await self._record(seen.request_id)
            check(seen, record, self.expected(seen.spec))
            self.endings[str(seen.ending)] += 1
            self.num_restarts += seen.num_restarts
        await cluster.replace(victim)
        await cluster.wait_connected()
        await cluster.at_rest()

    async def _ask(self, draw: float, request_id: str) -> Seen:
        chooser = random.Random(f"{self.seed} {request_id} {draw}")
        await asyncio.sleep(chooser.random() * self.spread_s)
        prompt = tuple(
            10 + chooser.randrange(self.cluster.vocab_size - 10) for _ in range(chooser.randint(*self.prompt_tokens))
        )
        spec = GenerationSpec(
            prompt_token_ids=prompt, max_tokens=chooser.randint(*self.max_tokens), sampling=SamplingParams()
        )
        seen = Seen(request_id, spec, stream=chooser.random() < 0.7)
        try:
            generation = await self.cluster.submit(spec, request_id, stream=seen.stream)
        except ApiError as error:
            seen.ending, seen.error = "failed", str(error)
            return seen
        return await read(generation, seen)

    async def _record(self, request_id: str) -> dict[str, Any]:
        """Returns the record once its books are closed."""
        async with asyncio.timeout(READ_DEADLINE_S):
            while request_id in self.cluster.backend._running:
                await asyncio.sleep(0.005)
        record = await self.cluster.backend.request_record(request_id, tenant="t")
        assert record is not None, request_id
        return record
