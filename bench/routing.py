"""``kopir bench routing``: what share of a trace's prompt tokens the chosen worker has in its own tiers.

Replays a trace through the router of the ingress against simulated workers, beside one cache without bounds (which no
choice can beat), random routing and the least loaded pair. Nothing here depends on this machine's speed.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.progress import Progress

from bench.hitrate import SAMPLE_TRACE
from bench.report import Report, Row, Target, finish, make_target, make_unmeasured, quantile
from bench.routing_replay import Outcome, Replay, RouterName, Setup, TraceRequest, infinite_tokens, read_requests
from kvstore.errors import BadInput

ROUTERS: tuple[RouterName, ...] = ("prefix", "random", "least_loaded")
NUM_RANDOM_SEEDS = 5
WORKERS = (2, 4)
WORKERS_MAX = 256
BLOCK_BYTES = 368_640
"""A 16-token block of the packaged model in bfloat16."""
BYTES_PER_TOKEN = BLOCK_BYTES // 16
INFINITE_AT_LEAST, RANDOM_AT_LEAST, SPREAD_AT_MOST = 0.9, 1.3, 1.5
MIB = 1 << 20


def run_routing(
    *,
    trace: Path | None,
    workers: Sequence[int],
    device_blocks: int,
    host_blocks: int,
    prefill_ms_per_token: float,
    seed: int,
    json_path: Path | None,
    check: bool,
) -> int:
    """Prints the table; returns the exit status. Raises: BadInput naming an option, or the file and line."""
    for num_workers in workers:
        if not 1 <= num_workers <= WORKERS_MAX:
            raise BadInput("--workers", num_workers, f"must be in [1, {WORKERS_MAX}]")
    for name, value in (("--device-blocks", device_blocks), ("--host-blocks", host_blocks)):
        if value < 1:
            raise BadInput(name, value, "must be at least 1")
    if not 0 < prefill_ms_per_token <= 1e4:
        raise BadInput("--prefill-ms-per-token", prefill_ms_per_token, "must be above 0 and at most 10000")
    path = SAMPLE_TRACE if trace is None else trace
    requests, block_tokens = read_requests(path)
    report = Report.start("routing", seed=seed)
    num_infinite = infinite_tokens(requests, block_tokens)
    num_tokens = sum(request.num_tokens for request in requests)
    report.notes.append(
        f"trace {path.name}: {len(requests)} requests, {num_tokens} prompt tokens, blocks of {block_tokens} tokens; "
        f"one infinite cache would serve {num_infinite / num_tokens:.1%}"
    )
    chosen = sorted(set(workers or WORKERS))
    with Progress(transient=True) as progress:
        task = progress.add_task("replay", total=len(chosen) * (len(ROUTERS) - 1 + NUM_RANDOM_SEEDS))
        for num_workers in chosen:
            setup = Setup(
                num_workers=num_workers,
                device_blocks=device_blocks,
                host_blocks=host_blocks,
                block_bytes=BYTES_PER_TOKEN * block_tokens,
                prefill_ms_per_token=prefill_ms_per_token,
                step_ms=20.0,
            )
            for name in ROUTERS:
                progress.update(task, description=f"{num_workers} workers, {name}")
                outcomes = []
                for number in range(NUM_RANDOM_SEEDS if name == "random" else 1):
                    outcomes.append(Replay(setup, block_tokens, name, seed + number).run(requests))
                    progress.advance(task)
                report.rows.append(_row(setup, name, outcomes, requests, num_infinite))
    report.show("Routing", list(_COLUMNS), [_shown(row) for row in report.rows])
    _add_targets(report, chosen, num_infinite / num_tokens)
    return finish(report, json_path=json_path, check=check)


_COLUMNS = {
    "workers": "workers",
    "router": "router",
    "own tiers": "own_tiers_share",
    "of infinite": "share_of_infinite",
    "spread": "load_spread",
    "TTFT p50 ms": "ttft_ms_p50",
    "TTFT p90 ms": "ttft_ms_p90",
    "MiB to decode": "to_decode_mib",
    "MiB from host": "from_host_mib",
}


def _row(
    setup: Setup, name: RouterName, outcomes: Sequence[Outcome], requests: Sequence[TraceRequest], num_infinite: int
) -> Row:
    """Returns the medians over the outcomes of one router."""
    ttft_ms = [ns / 1e6 for outcome in outcomes for ns in outcome.ttft_ns]
    own_tokens = statistics.median(outcome.own_tokens for outcome in outcomes)
    return {
        "workers": setup.num_workers,
        "router": name,
        "requests": len(requests),
        "runs": len(outcomes),
        "own_tiers_share": own_tokens / outcomes[0].prompt_tokens,
        "share_of_infinite": own_tokens / num_infinite if num_infinite else None,
        "load_spread": statistics.median(outcome.spread for outcome in outcomes),
        "ttft_ms_p50": quantile(ttft_ms, 0.5),
        "ttft_ms_p90": quantile(ttft_ms, 0.9),
        "to_decode_mib": statistics.median(o.handed_blocks for o in outcomes) * setup.block_bytes / MIB,
        "from_host_mib": statistics.median(o.loaded_blocks for o in outcomes) * setup.block_bytes / MIB,
        "device_blocks": setup.device_blocks,
        "host_blocks": setup.host_blocks,
        "prefill_ms_per_token": setup.prefill_ms_per_token,
        "reasons": outcomes[0].reasons,
    }


def _shown(row: Row) -> Row:
    cells = {name: row[key] for name, key in _COLUMNS.items()}
    return {name: round(cell, 3) if isinstance(cell, float) else cell for name, cell in cells.items()}


def _add_targets(report: Report, workers: Sequence[int], infinite_share: float) -> None:
    rows = {(row["workers"], row["router"]): row for row in report.rows}
    for number in workers:
        ours, chance = rows[number, "prefix"], rows[number, "random"]
        if ours["own_tiers_share"] <= 0 or chance["own_tiers_share"] <= 0:
            report.notes.append(f"{number} workers: no hits to compare")
            continue
        report.targets.append(
            make_target(
                f"own_tiers_of_infinite_{number}_workers",
                ours=ours["own_tiers_share"],
                reference=infinite_share,
                unit="share of prompt tokens",
                at_least=INFINITE_AT_LEAST,
            )
        )
        report.targets.append(_against_chance(number, ours, chance, infinite_share))
        if number > 1:
            report.targets.append(
                make_target(
                    f"load_spread_{number}_workers",
                    ours=ours["load_spread"],
                    reference=SPREAD_AT_MOST,
                    unit="busiest over least busy",
                    at_least=1.0,
                    smaller_is_better=True,
                )
            )


def _against_chance(number: int, ours: Row, chance: Row, infinite_share: float) -> Target:
    name, unit = f"own_tiers_vs_random_{number}_workers", "share of prompt tokens"
    best = infinite_share / chance["own_tiers_share"]
    if best < RANDOM_AT_LEAST:
        why = f"even one infinite cache is only {best:.2f} times random routing here"
        return make_unmeasured(name, unit=unit, at_least=RANDOM_AT_LEAST, reason=why)
    return make_target(
        name,
        ours=ours["own_tiers_share"],
        reference=chance["own_tiers_share"],
        unit=unit,
        at_least=RANDOM_AT_LEAST,
    )
