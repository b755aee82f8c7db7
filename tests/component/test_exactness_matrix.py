"""The same tokens whatever became of a request: any source of its prefix, company, chunk size, one worker or two.

A slice runs with every test run, on the tiny model in fp32. ``make soak`` runs 300 random cases on the packaged model
in its own numbers and writes each of them to ``bench/results/exactness.json``. There is no exception for near ties.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mini_cluster import MAX_LEN, MiniCluster, collect, until

from bench.report import Report, make_target
from kvstore.core.messages import GenerationSpec, SamplingParams
from kvstore.store.disk.layout import file_bytes
from kvstore.store.host import DiskPlan
from workers.model import hub

SOAK_CASES = int(os.environ.get("KOPIR_SOAK_EXACTNESS", "0"))
SLICE_CASES = 48
SEED = 20_261_202
DISK_BLOCKS = 512
MIN_SHARED = 32
"""Shorter beginnings are hardly a hit."""
SMALL_SLAB = 6
"""Blocks of a slab that keeps hardly a prompt: what comes back comes from the disk."""
FLUSHED = 0.3
"""Share of rounds before which the pools forget what they keep: then the tiers below are asked."""
RESULTS = Path("bench/results/exactness.json")


@dataclass(frozen=True)
class Setup:
    """One cluster of the matrix."""

    name: str
    roles: tuple[str, ...]
    chunk_tokens: int
    has_disk: bool = False
    """Its pools keep nothing, so that what is cached comes from below."""


SETUPS = (
    Setup("pair", ("prefill", "decode"), 512),
    Setup("pair over a disk", ("prefill", "decode"), 16, has_disk=True),
    Setup("combined", ("combined",), 64),
    Setup("combined over a disk", ("combined",), 100, has_disk=True),
    Setup("two combined", ("combined", "combined"), 48),
    Setup("two pairs", ("prefill", "prefill", "decode", "decode"), 200),
)


class Prompts:
    """Fresh prompts, and prompts that begin as an earlier one did."""

    def __init__(self, chooser: random.Random, vocab_size: int) -> None:
        self._chooser = chooser
        self._vocab_size = vocab_size
        self._used: list[tuple[int, ...]] = []

    def fresh(self) -> tuple[int, ...]:
        return self._tokens(self._chooser.randint(1, 300))

    def ran(self, prompts: Sequence[tuple[int, ...]]) -> None:
        """These have been computed: others may begin as they do."""
        self._used += [prompt for prompt in prompts if len(prompt) >= MIN_SHARED]

    def next(self) -> tuple[int, ...]:
        """A fresh one, the whole of an earlier one, or a part of it with other tokens behind."""
        if not self._used or self._chooser.random() < 0.35:
            return self.fresh()
        earlier = self._chooser.choice(self._used)
        if self._chooser.random() < 0.4:
            return earlier
        kept = self._chooser.randint(MIN_SHARED, len(earlier))
        return earlier[:kept] + self._tokens(self._chooser.randint(1, 60))

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._chooser.randrange(5, self._vocab_size - 10) for _ in range(count))


def random_spec(chooser: random.Random, prompt: tuple[int, ...]) -> GenerationSpec:
    """Greedy in three of four cases; sampled with a seed otherwise."""
    sampling = SamplingParams()
    if chooser.random() < 0.25:
        sampling = SamplingParams(temperature=0.9, top_p=0.95, seed=chooser.randrange(1 << 31))
    return GenerationSpec(prompt_token_ids=prompt, max_tokens=chooser.randint(1, 12), sampling=sampling)


async def run_cases(cluster: MiniCluster, setup: Setup, chooser: random.Random, num_cases: int) -> list[dict[str, Any]]:
    """Runs cases in rounds of 1 to 8 at once, and returns what became of each."""
    prompts = Prompts(chooser, cluster.vocab_size)
    makers: dict[tuple[int, ...], set[str]] = {}
    """Which workers computed prompts that begin with this block."""
    found: list[dict[str, Any]] = []
    while len(found) < num_cases:
        size = min(chooser.choice((1, 1, 2, 4, 8)) if found else 1, num_cases - len(found))
        specs = [random_spec(chooser, prompts.next()) for _ in range(size)]
        prompts.ran([spec.prompt_token_ids for spec in specs])
        # In this thread, before anything runs that needs the loop.
        goldens = [cluster.golden(spec) for spec in specs]
        rest(cluster, setup, chooser)
        if chooser.random() < FLUSHED:
            cluster.flush_pools()
        names = [f"req-{setup.chunk_tokens}-{len(found) + n}" for n in range(size)]
        generations = [await cluster.submit(spec, name) for spec, name in zip(specs, names, strict=True)]
        results = await asyncio.gather(*(collect(generation) for generation in generations))
        for spec, golden, generation, (tokens, end) in zip(specs, goldens, generations, results, strict=True):
            case = describe(setup, spec, generation, size, makers)
            found.append(case | {"identical": tokens == golden, "end": end})
            assert tokens == golden and end == "length", (found[-1], tokens, golden)
        await cluster.at_rest()
        await settle(cluster)
    return found


def rest(cluster: MiniCluster, setup: Setup, chooser: random.Random) -> None:
    """Lets one half of a doubled cluster rest, so that prefixes of the other are hit."""
    if len(setup.roles) == 1 or setup.roles == ("prefill", "decode"):
        return
    number = chooser.randrange(2)
    resting = {f"{role}-{number}" for role in set(setup.roles)}
    if chooser.random() < 0.5 and len(setup.roles) == 4:
        # Another decode worker with either prefill worker.
        resting = {f"prefill-{number}", f"decode-{1 - number}"}
    cluster.publish_view(draining=resting)


async def settle(cluster: MiniCluster) -> None:
    """Waits until the disk has what it was given: then a small slab's next miss is a hit below."""
    store = cluster.store
    assert store is not None
    tiers = store.status()["tiers"]
    if len(tiers) == 2:
        await until(lambda: store.status()["writing"] == 0)


def describe(
    setup: Setup, spec: GenerationSpec, generation: Any, size: int, makers: dict[tuple[int, ...], set[str]]
) -> dict[str, Any]:
    entries = generation.machine.journal.entries
    began = [entry for entry in entries if entry["event"] == "prefill_began"][-1]
    worker = [entry for entry in entries if entry["event"] == "attempt_started"][-1]["prefill"]["worker_id"]
    first_block = spec.prompt_token_ids[:16]
    computed_by = makers.setdefault(first_block, set()) if len(first_block) == 16 else set()
    is_others = bool(began["cached_tokens"]) and worker not in computed_by
    if not is_others:
        computed_by.add(worker)
    return {
        "what": "case",
        "setup": setup.name,
        "chunk_tokens": setup.chunk_tokens,
        "company": size,
        "prompt_tokens": len(spec.prompt_token_ids),
        "output_tokens": spec.max_tokens,
        "sampled": spec.sampling.temperature > 0,
        "cached_tokens": began["cached_tokens"],
        "device_tokens": began["cached_by_tier"].get("device", 0),
        "host_tokens": began["cached_by_tier"].get("host", 0),
        "disk_tokens": began["cached_by_tier"].get("disk", 0),
        "of_another_worker": is_others,
    }


def ways(cases: Sequence[dict[str, Any]]) -> Counter[str]:
    """Counts the ways in which cases came to their tokens."""
    counts: Counter[str] = Counter()
    for case in cases:
        counts["cold"] += case["cached_tokens"] == 0
        counts["device"] += case["device_tokens"] > 0
        counts["host"] += case["host_tokens"] > 0
        counts["disk"] += case["disk_tokens"] > 0
        counts["another worker"] += case["of_another_worker"]
        counts["alone"] += case["company"] == 1
        counts["in company"] += case["company"] > 1
        counts["sampled"] += case["sampled"]
        counts["several chunks"] += case["prompt_tokens"] - case["cached_tokens"] > case["chunk_tokens"]
        counts[case["setup"]] += 1
    return counts


@pytest.mark.timeout(3600 if SOAK_CASES else 120)
async def test_f50_every_way_gives_the_same_tokens(tiny_model: Path, tmp_path: Path) -> None:
    """F50: cold, from pool, slab, disk, another worker, in any batch and chunks, combined or pair: the same tokens."""
    num_cases = SOAK_CASES or SLICE_CASES
    report = Report.start("exactness", seed=SEED)
    model = hub.resolve("smollm2-135m-instruct") if SOAK_CASES else tiny_model
    chooser = random.Random(SEED)
    cases: list[dict[str, Any]] = []
    for number, setup in enumerate(SETUPS):
        cluster = MiniCluster(model, dtype="bfloat16" if SOAK_CASES else "float32")
        if setup.has_disk:
            cluster.host_blocks = SMALL_SLAB
            cluster.disk = DiskPlan(tmp_path / f"disk-{number}", file_bytes(cluster.layout.block_bytes, DISK_BLOCKS))
        try:
            spec = {"chunk_tokens": setup.chunk_tokens, "device_cache": not setup.has_disk}
            await cluster.start(*setup.roles, pool_blocks=8 * MAX_LEN // 16, **spec)
            # What is left is shared out evenly, the remainder to the last.
            share = (num_cases - len(cases)) // (len(SETUPS) - number)
            cases += await run_cases(cluster, setup, chooser, share)
        finally:
            await cluster.close()
    counts = ways(cases)
    assert len(cases) == num_cases and min(counts.values()) >= num_cases // 24, counts
    assert {"device", "host", "disk", "another worker", "several chunks"} <= set(+counts)
    if SOAK_CASES:
        same = sum(case["identical"] for case in cases)
        report.rows += [{"what": "ways", **counts}, *cases]
        report.targets.append(
            make_target("identical_cases", ours=same, reference=num_cases, unit="cases", at_least=1.0)
        )
        report.write_json(RESULTS)
