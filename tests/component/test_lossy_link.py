"""F31: a relay that delays and loses what workers report. A slice runs with all tests, 200 streams in ``make soak``."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable

import pytest
from lossy_relay import LossyRelay
from mini_cluster import LEASE_MS, MiniCluster, collect, make_spec

from kvstore.errors import KopirError

NUM_STREAMS = int(os.environ.get("KOPIR_SOAK_STREAMS", "40"))
AT_A_TIME = 8
SHARE = 0.01
STREAM_DEADLINE_S = 15 * LEASE_MS / 1000
"""Two attempts that each wait out a lease or more, on a machine that does other work too."""


@pytest.mark.timeout(600)
async def test_no_stream_waits_for_ever_or_skips_an_item(make_cluster: Callable[..., MiniCluster]) -> None:
    """Every stream has exactly the tokens of a quiet run, or a beginning of them and an error, in time."""
    cluster = make_cluster()
    relay = LossyRelay(31, share=SHARE)
    cluster.relay_through = relay.start
    await cluster.start("combined")
    ends: Counter[str] = Counter()
    gate = asyncio.Semaphore(AT_A_TIME)

    async def run(number: int) -> None:
        spec = make_spec(16, 32, salt=number)
        async with gate:
            began = time.monotonic()
            try:
                async with asyncio.timeout(STREAM_DEADLINE_S):
                    generation = await cluster.submit(spec, f"req-{number}")
                    tokens, end = await collect(generation)
            except KopirError as error:
                tokens, end = [], type(error).__name__
            assert time.monotonic() - began < STREAM_DEADLINE_S
        golden = cluster.golden(spec)
        assert tokens == golden[: len(tokens)], f"stream {number}"
        assert (tokens == golden) == (end == "length"), f"stream {number} ended with {end} after {len(tokens)}"
        ends[end] += 1

    try:
        await asyncio.gather(*(run(number) for number in range(NUM_STREAMS)))
        assert sum(relay.faults.values()) > 0, "the relay did nothing"
        assert ends["length"] > NUM_STREAMS // 2, ends
        await cluster.at_rest()
    finally:
        await relay.close()
