"""The part of ``kopir bench tiers`` about load or recompute: what deadlines on loads are worth, by arithmetic.

Prompts whose prefix lies whole in a tier below the slab are served one after the other, in time that is only counted:
prefill takes so long per token, the tier so long per byte, as its kind says. Each way of deciding serves the same
prompts. ``none`` has no cache. ``wait`` takes whatever comes, however late. ``fixed`` gives each load one second and
keeps the blocks that came by then, as Kopir did before it learned costs. ``learned`` is ``kvstore.core.load_cost``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

from bench.report import Row, Target, make_target
from kvstore.core.load_cost import GRANT_NS, LOSS_SHARE, LoadCost

BLOCK_BYTES, BLOCK_TOKENS = 368_640, 16
PREFILL_NS_PER_TOKEN = 740_000
"""1,350 tokens a second: two cores and the packaged model."""
NUM_PROMPTS = 400
PROMPT_BLOCKS = (4, 256)
FIXED_NS = 1_000_000_000
HANG_NS = 60_000_000_000
"""After so long a device that hangs answers after all."""
WAYS = ("none", "wait", "fixed", "learned")

LoadNs = Callable[[int, int], int]
"""(number of the prompt, blocks) -> nanoseconds until the last of them is there."""


def _at_rate(mb_per_s: float, _number: int, num_blocks: int) -> int:
    return int(num_blocks * BLOCK_BYTES / mb_per_s * 1000)


def _turns_slow(number: int, num_blocks: int) -> int:
    return _at_rate(1500 if number < NUM_PROMPTS // 2 else 10, number, num_blocks)


def _hangs(number: int, num_blocks: int) -> int:
    return _at_rate(1500, number, num_blocks) if number < NUM_PROMPTS // 2 else HANG_NS


def _pauses(number: int, num_blocks: int) -> int:
    return _at_rate(1500, number, num_blocks) + (5_000_000_000 if number % 10 == 9 else 0)


TIERS: dict[str, LoadNs] = {
    "1500 MB/s": partial(_at_rate, 1500),
    "100 MB/s": partial(_at_rate, 100),
    "20 MB/s, slower than prefill": partial(_at_rate, 20),
    "turns from 1500 to 10 MB/s": _turns_slow,
    "hangs from the middle on": _hangs,
    "pauses 5 s at every tenth": _pauses,
}


def load_choice(seed: int) -> tuple[list[Row], list[Target]]:
    """Serves the same prompts over each kind of tier in each way; returns rows and targets."""
    rows: list[Row] = []
    targets: list[Target] = []
    for name, load_ns in TIERS.items():
        sums = {way: sum(_serve(way, load_ns, seed)) for way in WAYS}
        for way, total_ns in sums.items():
            rows.append(
                {
                    "what": "load_choice",
                    "kind": name,
                    "way": way,
                    "prompts": NUM_PROMPTS,
                    "total_s": round(total_ns / 1e9, 2),
                    "vs_none": round(total_ns / sums["none"], 4),
                }
            )
        bound_ns = (1 + LOSS_SHARE) * sums["none"] + GRANT_NS
        targets.append(
            make_target(
                f"load_choice_bound: {name}", ours=sums["learned"] / 1e9, reference=bound_ns / 1e9, unit="s",
                at_least=1.0, smaller_is_better=True,
            )
        )  # fmt: skip
    return rows, targets


def _serve(way: str, load_ns: LoadNs, seed: int) -> Iterator[int]:
    """Yields what each prompt took, in nanoseconds."""
    numbers, cost = random.Random(seed), LoadCost()
    for number in range(NUM_PROMPTS):
        num_blocks = numbers.randint(*PROMPT_BLOCKS)
        compute_ns = num_blocks * BLOCK_TOKENS * PREFILL_NS_PER_TOKEN
        due_ns = load_ns(number, num_blocks)
        if way == "none":
            yield compute_ns
        elif way == "wait":
            yield due_ns
        elif way == "fixed":
            yield sum(_within(FIXED_NS, due_ns, num_blocks)[:2])
        else:
            yield _learned(cost, due_ns, num_blocks)


def _within(limit_ns: int, due_ns: int, num_blocks: int) -> tuple[int, int, int]:
    """Returns (time of the load, time to compute what had not come by then, blocks that had)."""
    if due_ns <= limit_ns:
        return due_ns, 0, num_blocks
    # What hangs brings nothing; what is slow has brought its share.
    num_loaded = 0 if due_ns >= HANG_NS else num_blocks * limit_ns // due_ns
    return limit_ns, (num_blocks - num_loaded) * BLOCK_TOKENS * PREFILL_NS_PER_TOKEN, num_loaded


def _learned(cost: LoadCost, due_ns: int, num_blocks: int) -> int:
    num_bytes, num_tokens = num_blocks * BLOCK_BYTES, num_blocks * BLOCK_TOKENS
    plan = cost.plan("disk", num_bytes=num_bytes, num_tokens=num_tokens)
    if not plan.starts:
        cost.skipped("disk")
        took_ns, compute_ns, num_loaded = 0, num_tokens * PREFILL_NS_PER_TOKEN, 0
    else:
        took_ns, compute_ns, num_loaded = _within(plan.deadline_ns, due_ns, num_blocks)
        here = num_loaded * BLOCK_TOKENS
        if compute_ns:
            cost.abandoned("disk", plan, num_bytes=num_bytes, num_tokens=here, took_ns=took_ns)
        else:
            cost.loaded("disk", num_bytes=num_bytes, num_tokens=here, took_ns=took_ns)
    # One token is always computed, because its logits are needed; a prefill of one token says nothing of a rate.
    if compute_ns:
        cost.computed(num_tokens - num_loaded * BLOCK_TOKENS, compute_ns)
    return took_ns + compute_ns
