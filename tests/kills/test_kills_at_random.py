"""Worker processes killed at random over the whole life of requests: nothing doubled, lost, made up or left held.

A slice here; ``make soak`` runs 450 kills with the paced engine and 50 with the packaged model, and
writes what came of them to ``bench/results/kills-paced.json`` and ``kills-model.json``.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from bench.kills import KillRun, Seen, check, read
from bench.process_cluster import ProcessCluster
from bench.report import Report
from cluster.config import load
from kvstore.core.messages import GenerationSpec
from workers.engine import Engine
from workers.kv_pool import KvPool
from workers.model.decoder import load_decoder
from workers.paced import expected_tokens

BLOCK_TOKENS = 16
MAX_LEN = 512
MakeProcesses = Callable[..., ProcessCluster]
NUM_PACED = int(os.environ.get("KOPIR_SOAK_KILLS_PACED", "6"))
NUM_REAL = int(os.environ.get("KOPIR_SOAK_KILLS_REAL", "1"))
SOAK_KILLS = 50
SEED = int(os.environ.get("KOPIR_SOAK_SEED", "1"))
TWO_PAIRS = ("workers.prefill.replicas=2", "workers.decode.replicas=2", "attempts.cluster_retry_tokens_per_s=100")
PACED = ("workers.engine=paced", "workers.paced.step_ms=4", "workers.paced.prefill_ms_per_token=0.3")
SMALL = (f"max_model_len={MAX_LEN}", "kv.host_bytes=128MiB", "attempts.lease_ms=1500")
POOLS = ("workers.prefill.pool_blocks=64", "workers.decode.pool_blocks=64")


@pytest.fixture
async def make_processes() -> AsyncIterator[MakeProcesses]:
    """Returns ``make(model, *overrides)``; whatever was started is closed at the end."""
    clusters: list[ProcessCluster] = []

    def make(model: Path, *overrides: str) -> ProcessCluster:
        clusters.append(ProcessCluster(load(None, overrides), model))
        return clusters[-1]

    yield make
    for cluster in clusters:
        await cluster.close()


def tell(run: KillRun, num_kills: int, engine: str) -> None:
    """Prints what came of the kills; a long run leaves it as a file, too. Every round has been checked by then."""
    row = {"engine": engine, "num_kills": num_kills, "requests": run.endings.total(), "endings": dict(run.endings)}
    row |= {"num_restarts": run.num_restarts, "phases_hit": dict(run.phases_hit)}
    print(row)
    if num_kills >= SOAK_KILLS:
        report = Report.start("kills", seed=SEED)
        report.rows.append(row)
        report.notes.append(
            "each request checked: tokens, end, attempts, journal, publishing spans; each worker at rest"
        )
        report.write_json(Path(f"bench/results/kills-{engine}.json"))


@pytest.mark.timeout(3600)
async def test_kills_with_the_paced_engine(make_processes: MakeProcesses, model_folder: Path) -> None:
    """Two pairs, four requests at a time, one kill each round; every token is known, every block comes back."""
    cluster = make_processes(model_folder, *TWO_PAIRS, *PACED, *SMALL, *POOLS)
    await cluster.start()

    def expected(spec: GenerationSpec) -> list[int]:
        return expected_tokens(spec.prompt_token_ids, spec.max_tokens, cluster.vocab_size)

    run = KillRun(cluster, expected, SEED)
    for number in range(NUM_PACED):
        await run.round(number)
    tell(run, NUM_PACED, "paced")
    assert run.endings["finished"] > 0
    if NUM_PACED >= 100:
        assert run.num_restarts > 0 and run.endings["interrupted"] > 0
        assert {"prefilling", "decoding", "delivering"} <= set(run.phases_hit)


@pytest.mark.timeout(3600)
async def test_kills_with_the_packaged_model(make_processes: MakeProcesses, model_folder: Path) -> None:
    """The same over the real engine."""
    cluster = make_processes(model_folder, *TWO_PAIRS, f"max_model_len={MAX_LEN}", "kv.host_bytes=64MiB", *POOLS)
    await cluster.start()
    decoder = load_decoder(model_folder, dtype="bfloat16", max_positions=MAX_LEN)
    layout = decoder.config.kv_layout(BLOCK_TOKENS, "bfloat16")
    engine = Engine(decoder, KvPool(layout, MAX_LEN // BLOCK_TOKENS), threads=1)
    table = range(MAX_LEN // BLOCK_TOKENS)

    def expected(spec: GenerationSpec) -> list[int]:
        logits = [step.logits for step in engine.prefill(spec.prompt_token_ids, table)][-1]
        tokens: list[int] = []
        position = len(spec.prompt_token_ids)
        while True:
            assert logits is not None
            tokens.append(int(logits.argmax()))
            if len(tokens) == spec.max_tokens:
                return tokens
            logits = engine.decode_step([(tokens[-1], position, table)])[0]
            position += 1

    run = KillRun(cluster, expected, SEED, num_requests=2, max_tokens=(1, 40), spread_s=1.5)
    for number in range(NUM_REAL):
        await run.round(number)
    tell(run, NUM_REAL, "model")
    assert run.endings["finished"] > 0


async def test_half_of_the_workers_die_under_load(make_processes: MakeProcesses, model_folder: Path) -> None:
    """Mass failure: the budget bounds what is repeated, the rest are honest errors, the healthy half goes on."""
    budget_per_s = 2
    cluster = make_processes(
        model_folder, *TWO_PAIRS[:2], f"attempts.cluster_retry_tokens_per_s={budget_per_s}", *PACED, *SMALL, *POOLS
    )
    await cluster.start()
    specs = [
        GenerationSpec(prompt_token_ids=tuple(10 + (n * 37 + i) % 4000 for i in range(60)), max_tokens=60)
        for n in range(24)
    ]
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    # Not streamed: every one of them could be repeated, and the budget says how many are.
    seen = [Seen(f"m{n}", spec, stream=False) for n, spec in enumerate(specs)]
    readers = [
        asyncio.ensure_future(read(await cluster.submit(one.spec, one.request_id, stream=False), one)) for one in seen
    ]
    async with asyncio.timeout(20):
        while not any(stream["phase"] == "decoding" for stream in cluster.backend.streams()):
            await asyncio.sleep(0.002)
    for name in ("prefill-1", "decode-1"):
        cluster.kill(name)
    await asyncio.gather(*readers)
    elapsed_s = loop.time() - started_s
    for one in seen:
        record = await cluster.backend.request_record(one.request_id, tenant="t")
        assert record is not None
        check(one, record, expected_tokens(one.spec.prompt_token_ids, one.spec.max_tokens, cluster.vocab_size))
    num_repeated = sum(one.num_restarts for one in seen)
    assert 0 < num_repeated <= budget_per_s + budget_per_s * elapsed_s
    endings = Counter(str(one.ending) for one in seen)
    assert endings["finished"] >= len(specs) // 2 and endings["failed"] > 0, endings
    assert all("retry budget" in one.error for one in seen if one.ending == "failed"), [one.error for one in seen]
    await cluster.at_rest()
