"""``kopir bench hitrate``: which share of a trace's prompt blocks each eviction policy serves as prefix hits.

Replays the prompts of a trace in their order against one tier of each capacity, once per policy, and beside them the
offline optimum, which knows the future. Nothing here depends on time or on a seed but the cost in microseconds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich.progress import Progress

from bench.hitrate_replay import Prompt, block_hash_of, replay, replay_optimum
from bench.report import Report, Row, finish, make_target
from kvstore.core.eviction import make_policy
from kvstore.core.ids import BlockHash
from kvstore.errors import BadInput

SAMPLE_TRACE = Path(__file__).with_name("traces") / "conversation_sessions60_div32.jsonl"
POLICIES = ("lru", "s3fifo", "arc", "kopir", "belady")
CAPACITIES = (300, 1000, 3000)
CAPACITY_BLOCKS_MAX = 1 << 24
TRACE_BLOCKS_MAX = 1 << 26
PROGRESS_STEP = 256
"""Prompts between two movements of the progress bar."""
SMALL_CAPACITY_BLOCKS = 3000
"""Up to here ours is compared with LRU and S3-FIFO, above with the best of them and ARC."""
SMALL_AT_LEAST, LARGE_AT_LEAST = 1.25, 0.98


def run_hitrate(*, trace: Path | None, capacities: Sequence[int], json_path: Path | None, check: bool) -> int:
    """Prints the table; returns the exit status. Raises: BadInput naming a capacity, or the file and line."""
    for capacity in capacities:
        if not 1 <= capacity <= CAPACITY_BLOCKS_MAX:
            raise BadInput("--capacity", capacity, f"must be in [1, {CAPACITY_BLOCKS_MAX}] blocks")
    prompts = read_trace(SAMPLE_TRACE if trace is None else trace)
    report = Report.start("hitrate", seed=0)
    report.notes.append(
        f"trace {(trace or SAMPLE_TRACE).name}: {len(prompts)} prompts, {sum(map(len, prompts))} blocks"
    )
    chosen = sorted(set(capacities or CAPACITIES))
    with Progress(transient=True) as progress:
        task = progress.add_task("replay", total=len(chosen) * len(POLICIES) * len(prompts))
        for capacity in chosen:
            for name in POLICIES:
                progress.update(task, description=f"{capacity} blocks, {name}")
                report.rows.append(_measure(prompts, capacity, name, lambda n: progress.advance(task, n)))
    report.show("Hit rate", ["capacity_blocks", *POLICIES], [_wide(report.rows, capacity) for capacity in chosen])
    _add_targets(report, chosen)
    return finish(report, json_path=json_path, check=check)


def read_trace(path: Path) -> list[Prompt]:
    """Returns the prompts of a JSONL trace, root block first; lines without blocks are left out.

    Raises: BadInput when the file cannot be read or a line has no ``hash_ids``, a list of integers in [0, 2**64).
    """
    prompts: list[Prompt] = []
    num_blocks = 0
    known: dict[int, BlockHash] = {}
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                prompt = _prompt(line, f"{path}:{number}", known)
                num_blocks += len(prompt)
                if num_blocks > TRACE_BLOCKS_MAX:
                    raise BadInput("--trace", str(path), f"has more than {TRACE_BLOCKS_MAX} blocks")
                if prompt:
                    prompts.append(prompt)
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput("--trace", str(path), f"cannot be read: {error}") from error
    if not prompts:
        raise BadInput("--trace", str(path), "has no prompt with a block")
    return prompts


def _prompt(line: str, place: str, known: dict[int, BlockHash]) -> list[BlockHash]:
    try:
        ids = json.loads(line)["hash_ids"]
        valid = isinstance(ids, list) and all(type(i) is int and 0 <= i < 1 << 64 for i in ids)
    except (ValueError, KeyError, TypeError):
        valid = False
    if not valid:
        raise BadInput(place, line.strip(), "needs an object with hash_ids, a list of integers in [0, 2**64)")
    if len(set(ids)) != len(ids):
        raise BadInput(place, line.strip(), "names a block twice in one prompt")
    return [known.setdefault(i, block_hash_of(i)) for i in ids]


def _measure(prompts: Sequence[Prompt], capacity: int, name: str, advance: Callable[[int], None]) -> Row:
    started_s = time.process_time()
    hits: Iterable[int]
    if name == "belady":
        hits = replay_optimum(prompts, capacity)
    else:
        hits = replay(prompts, capacity, make_policy(name, capacity))
    num_hits = num_blocks = waiting = 0
    for prompt, num in zip(prompts, hits, strict=True):
        num_hits += num
        num_blocks += len(prompt)
        waiting += 1
        if waiting == PROGRESS_STEP:
            advance(waiting)
            waiting = 0
    advance(waiting)
    return {
        "capacity_blocks": capacity,
        "policy": name,
        "hit_rate": num_hits / num_blocks,
        "hit_blocks": num_hits,
        "prompt_blocks": num_blocks,
        "us_per_block": round((time.process_time() - started_s) * 1e6 / num_blocks, 2),
    }


def _wide(rows: Sequence[Row], capacity: int) -> Row:
    shares = {row["policy"]: f"{row['hit_rate']:.2%}" for row in rows if row["capacity_blocks"] == capacity}
    return {"capacity_blocks": capacity, **shares}


def _add_targets(report: Report, capacities: Sequence[int]) -> None:
    rates = {(row["capacity_blocks"], row["policy"]): row["hit_rate"] for row in report.rows}
    for capacity in capacities:
        is_small = capacity <= SMALL_CAPACITY_BLOCKS
        rivals = ("lru", "s3fifo") if is_small else ("lru", "s3fifo", "arc")
        ours, best = rates[capacity, "kopir"], max(rates[capacity, name] for name in rivals)
        if ours <= 0 or best <= 0:
            report.notes.append(f"{capacity} blocks: no hits to compare")
            continue
        at_least = SMALL_AT_LEAST if is_small else LARGE_AT_LEAST
        report.targets.append(
            make_target(f"hit_rate_{capacity}", ours=ours, reference=best, unit="share of blocks", at_least=at_least)
        )
