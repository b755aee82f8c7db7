"""How late leases are renewed while everything is busy: from the due moment of a renewal to its grant at the worker.

One pair with the real model and as many streams as decode has seats, all of them asked for at once, so that prefill,
decode, their link loops and the ingress's loop are busy together. The lease is short, so that a minute holds enough
renewals for a 99.9th percentile; how late one is does not depend on the lease's length. Every answer must be whole: one
lease that was lost would have ended a stream.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from bench.kills import Seen, read
from bench.process_cluster import ProcessCluster
from bench.report import Report, Row, Target, finish, make_target
from cluster.config import load
from kvstore.core.messages import GenerationSpec

LEASE_MS = 300
NUM_STREAMS = 64
NUM_PROMPT_TOKENS = 32
NUM_TOKENS = 40
RENEWALS_AT_LEAST = 1000
ROUNDS_MAX = 16
SETTINGS = (
    f"workers.decode.max_num_seqs={NUM_STREAMS}",
    "workers.prefill.pool_blocks=512",
    "workers.decode.pool_blocks=512",
    "max_model_len=512",
    "kv.host_bytes=128MiB",
    f"attempts.lease_ms={LEASE_MS}",
)
COLUMNS = ("case", "num_renewals", "p50_ms", "p99_ms", "p999_ms", "max_ms", "p999_share_of_lease")


async def measure_renewals(model: Path, *, quick: bool, seed: int) -> tuple[Row, Target]:
    """Runs rounds of streams until enough renewals were seen. Raises: AssertionError when an answer is not whole."""
    cluster = ProcessCluster(load(None, SETTINGS), model)
    late_ns: dict[str, list[int]] = {}
    num_rounds = 0
    try:
        await cluster.start()
        while num_rounds < (1 if quick else ROUNDS_MAX) and sum(map(len, late_ns.values())) < RENEWALS_AT_LEAST:
            await _round(cluster, seed, num_rounds)
            num_rounds += 1
            late_ns = {name: await life.call("lease_lateness_ns") for name, life in cluster.lives.items()}
        await cluster.at_rest()
    finally:
        await cluster.close()
    late_ms = sorted(late / 1e6 for lates in late_ns.values() for late in lates)
    row: Row = {"case": "renewal", "num_renewals": len(late_ms), "num_streams": NUM_STREAMS, "num_rounds": num_rounds}
    row |= {f"{name}_ms": _at(late_ms, share) for name, share in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999))}
    row |= {"max_ms": late_ms[-1], "lease_ms": LEASE_MS, "p999_share_of_lease": row["p999_ms"] / LEASE_MS}
    row = {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in row.items()}
    target = make_target(
        "renewal_lateness_p999_below_a_third_of_the_lease",
        ours=row["p999_ms"],
        reference=LEASE_MS / 3,
        unit="ms",
        at_least=1.0,
        smaller_is_better=True,
    )
    return row, target


async def _round(cluster: ProcessCluster, seed: int, number: int) -> None:
    seen = [_ask(cluster.vocab_size, seed, number, stream) for stream in range(NUM_STREAMS)]
    readers = [
        asyncio.ensure_future(read(await cluster.submit(one.spec, one.request_id, stream=True), one)) for one in seen
    ]
    await asyncio.gather(*readers)
    wrong = [(one.request_id, one.ending, one.error) for one in seen if one.ending != "finished"]
    assert not wrong, f"streams that were not whole: {wrong}"


def _ask(vocab_size: int, seed: int, number: int, stream: int) -> Seen:
    start = seed * 7919 + number * 104729 + stream * 613
    prompt = tuple(10 + (start + i * 31) % (vocab_size - 10) for i in range(NUM_PROMPT_TOKENS))
    spec = GenerationSpec(prompt_token_ids=prompt, max_tokens=NUM_TOKENS)
    return Seen(f"r{number}-{stream}", spec, stream=True)


def _at(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def main() -> int:
    """Measures renewals alone; ``kopir bench failover`` has the same row."""
    from workers.model import hub

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    report = Report.start("renewals", seed=arguments.seed)
    model = hub.pull(load(None, SETTINGS).model)
    row, target = asyncio.run(measure_renewals(model, quick=False, seed=arguments.seed))
    report.rows.append(row)
    report.targets.append(target)
    report.show("Renewal of leases under full load", COLUMNS, report.rows)
    return finish(report, json_path=arguments.json, check=False)


if __name__ == "__main__":
    raise SystemExit(main())
