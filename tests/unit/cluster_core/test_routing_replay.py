"""The replay behind ``kopir bench routing``: counts against a hand-made trace, and what is promised on the sample."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.hitrate import SAMPLE_TRACE
from bench.routing_replay import Replay, RouterName, Setup, infinite_tokens, read_requests
from kvstore.errors import BadInput


def make_setup(num_workers: int = 2) -> Setup:
    return Setup(
        num_workers=num_workers,
        device_blocks=2048,
        host_blocks=8192,
        block_bytes=1 << 16,
        prefill_ms_per_token=1.0,
        step_ms=20.0,
    )


def write_trace(path: Path, rows: list[tuple[int, int, list[int]]]) -> Path:
    lines = [
        json.dumps({"timestamp": at, "input_length": length, "output_length": 1, "hash_ids": ids})
        for at, length, ids in rows
    ]
    path.write_text("\n".join(lines))
    return path


def test_tokens_are_counted_as_the_product_counts_them(tmp_path: Path) -> None:
    """The second prompt repeats the first: all but the last token; a block that is not full has no name."""
    rows = [(0, 64, [1, 2, 3, 4]), (10_000, 64, [1, 2, 3, 4]), (20_000, 40, [1, 2, 9])]
    requests, block_tokens = read_requests(write_trace(tmp_path / "t.jsonl", rows))
    assert (block_tokens, [len(request.blocks) for request in requests]) == (16, [4, 4, 2])
    assert infinite_tokens(requests, block_tokens) == 63 + 32
    outcome = Replay(make_setup(1), block_tokens, "prefix", 1).run(requests)
    assert (outcome.prompt_tokens, outcome.own_tokens) == (168, 95)
    assert outcome.ttft_ns == [64_000_000, 1_000_000, 8_000_000]
    # Decode keeps what it was given: four blocks and a tail, a tail, a tail.
    assert outcome.handed_blocks == 5 + 1 + 1


def test_a_prompt_that_comes_while_its_prefix_is_computed_finds_nothing(tmp_path: Path) -> None:
    """Workers look a prompt up when it comes."""
    rows = [(0, 64, [1, 2, 3, 4]), (10, 64, [1, 2, 3, 4])]
    requests, block_tokens = read_requests(write_trace(tmp_path / "t.jsonl", rows))
    outcome = Replay(make_setup(1), block_tokens, "prefix", 1).run(requests)
    assert outcome.own_tokens == 0
    assert outcome.ttft_ns == [64_000_000, 118_000_000]


@pytest.mark.parametrize("num_workers", [2, 4])
def test_the_sample_trace_meets_what_is_promised(num_workers: int) -> None:
    """At least 0.9 of an infinite cache, a spread of at most 1.5; four workers: at least 1.3 times random."""
    requests, block_tokens = read_requests(SAMPLE_TRACE)
    num_infinite = infinite_tokens(requests, block_tokens)

    def run(router: RouterName) -> tuple[int, float]:
        outcome = Replay(make_setup(num_workers), block_tokens, router, 1).run(requests)
        return outcome.own_tokens, outcome.spread

    own_tokens, spread = run("prefix")
    assert own_tokens >= 0.9 * num_infinite
    assert spread <= 1.5
    assert own_tokens > run("least_loaded")[0]
    if num_workers == 4:
        assert own_tokens >= 1.3 * run("random")[0]


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        '{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": [1]}',
        '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": []}',
        '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [-1]}',
        '{"timestamp": 0, "input_length": 5, "hash_ids": [1]}',
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    """File and line number."""
    path = tmp_path / "t.jsonl"
    path.write_text(line)
    with pytest.raises(BadInput, match=r"t\.jsonl:1"):
        read_requests(path)
