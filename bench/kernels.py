"""``kopir bench kernels``: what the layout checker costs on the host, beside one copy and one digest of the same bytes.

The pool is 64 MiB of finite numbers. The reference is a memcpy into memory that is already mapped, plus one xxh3-128
pass; all are measured in turns within each round, and the median round counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import xxhash

from bench.report import Report, finish, make_target
from kernels.checker import Claim, LayoutChecker, Sample
from kernels.layout import KVLayout
from kernels.pattern import write_pattern

POOL_BYTES = 64 << 20
ROUNDS, QUICK_ROUNDS = 15, 5
LIMIT = 6.0
"""A check may take this many times the copy and the digest together."""


def run_kernels(*, quick: bool, json_path: Path | None, check: bool, seed: int) -> int:
    """Measures and returns the exit status."""
    report = Report.start("kernels", seed=seed)
    layout = KVLayout(30, 3, 64, 16, "bfloat16")
    num_blocks = POOL_BYTES // layout.block_bytes
    pool = np.zeros((num_blocks, layout.block_bytes), np.uint8)
    write_pattern(pool, layout, seed=seed)
    digests = [xxhash.xxh3_128_digest(block.data) for block in pool]
    checker, copy = LayoutChecker(layout), np.ones_like(pool)

    def checked(claim: Claim, sample: Sample | None = None) -> None:
        verdict = checker.check(pool, claim, sample=sample)
        assert verdict.is_clean, verdict

    steps: dict[str, Callable[[], object]] = {
        "memcpy": lambda: np.copyto(copy, pool),
        "xxh3_128": lambda: xxhash.xxh3_128_digest(pool.data),
        "check_content": lambda: checked(Claim()),
        "check_content_and_digest": lambda: checked(Claim(digests=digests)),
        "check_probe": lambda: checked(Claim(probe_seed=seed)),
        "check_sample_of_8": lambda: checked(Claim(digests=digests), Sample(8, seed)),
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(QUICK_ROUNDS if quick else ROUNDS):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)

    seconds = {name: median(values) for name, values in times.items()}
    for name, value in seconds.items():
        gib_s = pool.nbytes / value / (1 << 30)
        report.rows.append({"step": name, "pool_bytes": pool.nbytes, "ms": round(value * 1e3, 3), "GiB_s": gib_s})
    reference_ms = (seconds["memcpy"] + seconds["xxh3_128"]) * 1e3
    report.targets.append(
        make_target(
            "check_64_mib_within_6_copies_and_digests",
            ours=seconds["check_content_and_digest"] * 1e3,
            reference=reference_ms,
            unit="ms",
            at_least=round(1 / LIMIT, 4),
            smaller_is_better=True,
        )
    )
    report.notes.append("GPU paths are measured by `make gpu-check`; without a GPU their figures are unmeasured")
    report.show("Layout checker on the host", ["step", "ms", "GiB_s"])
    return finish(report, json_path=json_path, check=check)
