"""Half of the workers killed under load: what the healthy half completes, against what it completes alone.

Clients ask one after another without a pause, as many at a time as one pair has seats, so that the pair is full in
both measurements. Goodput counts the tokens of complete answers only. The paced engine's step time is set, so that
the cores of this machine do not decide; the two are measured in turn, and the median of their ratios counts.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.kills import Seen, check, read
from bench.process_cluster import ProcessCluster
from bench.report import Row, Target, make_target
from cluster.config import Config, load
from cluster.ingress.api.errors import ApiError
from kvstore.core.messages import GenerationSpec
from workers.paced import expected_tokens

NUM_CLIENTS = 16
NUM_PROMPT_TOKENS = 64
NUM_TOKENS = 40
RETRY_TOKENS_PER_S = 4
WARM_S = 2.0
PAUSE_S = 0.05
"""Before a client that was refused asks again."""
GOODPUT_AT_LEAST = 0.9
SETTINGS = (
    "workers.engine=paced",
    "workers.paced.step_ms=30",
    "workers.paced.prefill_ms_per_token=0.2",
    f"workers.decode.max_num_seqs={NUM_CLIENTS // 2}",
    "workers.prefill.pool_blocks=256",
    "workers.decode.pool_blocks=256",
    "max_model_len=512",
    "kv.host_bytes=64MiB",
    f"attempts.cluster_retry_tokens_per_s={RETRY_TOKENS_PER_S}",
)
VICTIMS = ("prefill-1", "decode-1")


@dataclass(slots=True)
class HalfKilled:
    """What was measured."""

    rows: list[Row] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)


async def measure_half_killed(config: Config, model: Path, *, quick: bool, seed: int) -> HalfKilled:
    """Measures one pair alone, then two pairs of which one is killed. Raises: AssertionError for a wrong answer."""
    window_s = 4.0 if quick else 10.0
    lease = f"attempts.lease_ms={config.attempts.lease_ms}"
    one = load(None, [*SETTINGS, lease])
    two = load(None, [*SETTINGS, lease, "workers.prefill.replicas=2", "workers.decode.replicas=2"])
    allowed = RETRY_TOKENS_PER_S * (1 + window_s)
    rows: list[Row] = []
    for number in range(1 if quick else 3):
        alone, _ = await _measure(one, model, window_s, seed=seed + 2 * number, victims=())
        half, clients = await _measure(two, model, window_s, seed=seed + 2 * number + 1, victims=VICTIMS)
        row: Row = {"case": "half killed", "alone_tokens_per_s": alone, "half_tokens_per_s": half}
        row |= {"window_s": window_s, "num_repeated": sum(c.num_restarts for c in clients), "repeated_at_most": allowed}
        row["endings"] = dict(Counter(str(client.ending) for client in clients))
        rows.append(row)
    return HalfKilled(rows, make_targets(rows))


def make_targets(rows: Sequence[Row]) -> list[Target]:
    """Compares the repetition whose ratio is the median, and the largest number of repeated prefills."""
    middle = sorted(rows, key=lambda row: row["half_tokens_per_s"] / row["alone_tokens_per_s"])[len(rows) // 2]
    goodput = make_target(
        "goodput_of_the_healthy_half",
        ours=middle["half_tokens_per_s"],
        reference=middle["alone_tokens_per_s"],
        unit="tokens/s",
        at_least=GOODPUT_AT_LEAST,
    )
    budget = make_target(
        "repeated_prefills_within_budget",
        ours=max([1, *(row["num_repeated"] for row in rows)]),
        reference=rows[0]["repeated_at_most"],
        unit="prefills",
        at_least=1.0,
        smaller_is_better=True,
    )
    return [goodput, budget]


async def _measure(
    config: Config, model: Path, window_s: float, *, seed: int, victims: tuple[str, ...]
) -> tuple[float, list[Seen]]:
    """Returns tokens of complete answers per second from the kill (or its absence) on, and what every client saw."""
    cluster = ProcessCluster(config, model)
    loop = asyncio.get_running_loop()
    done: list[Seen] = []
    try:
        await cluster.start()
        stopping = asyncio.Event()
        asking = [asyncio.ensure_future(_client(cluster, n, seed, done.append, stopping)) for n in range(NUM_CLIENTS)]
        await asyncio.sleep(WARM_S)
        for name in victims:
            cluster.kill(name)
        from_s = loop.time()
        await asyncio.sleep(window_s)
        to_s = loop.time()
        stopping.set()
        await asyncio.gather(*asking)
        await cluster.at_rest()
        for seen in done:
            record = await cluster.backend.request_record(seen.request_id, tenant="t")
            if record is None and seen.ending == "failed":
                continue  # refused at the door: there is nothing of it
            assert record is not None
            check(seen, record, expected_tokens(seen.spec.prompt_token_ids, NUM_TOKENS, cluster.vocab_size))
    finally:
        await cluster.close()
    good = [seen for seen in done if seen.ending == "finished" and from_s <= (seen.ended_s or 0.0) < to_s]
    return sum(len(seen.tokens) for seen in good) / (to_s - from_s), done


async def _client(
    cluster: ProcessCluster, number: int, seed: int, done: Callable[[Seen], None], stopping: asyncio.Event
) -> None:
    """Asks again and again; half of the clients stream."""
    turn = 0
    while not stopping.is_set():
        turn += 1
        start = seed * 7919 + number * 104729 + turn * 31337
        prompt = tuple(10 + (start + i * 31) % (cluster.vocab_size - 10) for i in range(NUM_PROMPT_TOKENS))
        spec = GenerationSpec(prompt_token_ids=prompt, max_tokens=NUM_TOKENS)
        seen = Seen(f"h{number}-{turn}", spec, stream=number % 2 == 0)
        try:
            generation = await cluster.submit(spec, seen.request_id, stream=seen.stream)
        except ApiError as error:
            seen.ending, seen.error = "failed", str(error)
            await asyncio.sleep(PAUSE_S)
        else:
            await read(generation, seen)
        done(seen)
