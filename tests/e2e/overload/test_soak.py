"""Hours at the limit, in small: more clients than seats, all kinds of endings, and nothing that grows.

``KOPIR_SOAK_LIMIT_S`` says for how long (``make soak``: 30 minutes); without it a slice runs.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from ..cluster import MODEL, Cluster
from ..conftest import RunCluster

DURATION_S = float(os.environ.get("KOPIR_SOAK_LIMIT_S", "12"))
SEED = 41
SEATS = 4
CLIENTS = 12
LEAVE_SHARE = 0.2
WRONG_SHARE = 0.1
REST_AFTER_REFUSAL_S = 0.1
GROWTH_BYTES_MAX = 32 << 20
"""Of one process, once it has had the first third of the time to fill what is bounded (records, pools, logs)."""
GROWTH_DESCRIPTORS_MAX = 8
"""Of one process: connections between the parts that were opened late and are kept."""
CONFIG = {
    "max_model_len": 1024,
    "workers": {
        "engine": "paced",
        "paced": {"step_ms": 10, "prefill_ms_per_token": 0.1},
        "prefill": {"replicas": 1, "pool_blocks": 256},
        "decode": {"replicas": 1, "pool_blocks": 256, "max_num_seqs": SEATS},
    },
    "kv": {"host_bytes": "64MiB"},
    "admission": {"max_wait_ms": 300},
}


@pytest.fixture(scope="module")
def limited(run_cluster: RunCluster) -> Iterator[Cluster]:
    """The cluster; idle at its end."""
    with run_cluster(CONFIG) as cluster:
        yield cluster
        cluster.wait_idle()


class Crowd:
    """Clients that ask, one request after the other, until told to stop; counts how answers ended."""

    def __init__(self, cluster: Cluster) -> None:
        self._url = f"{cluster.url}/v1/completions"
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.ended: Counter[str] = Counter()

    def run_for(self, seconds: float, *, part: int) -> None:
        """Runs all clients for a while. Raises: what a client raised."""
        self._stop.clear()
        with ThreadPoolExecutor(CLIENTS) as pool:
            running = [pool.submit(self._client, f"{SEED}-{part}-{number}") for number in range(CLIENTS)]
            self._stop.wait(seconds)
            self._stop.set()
            for each in running:
                each.result(60)

    def _client(self, seed: str) -> None:
        dice = random.Random(seed)
        with httpx.Client(timeout=60) as http:
            while not self._stop.is_set():
                how = self._ask(http, dice)
                with self._lock:
                    self.ended[how] += 1
                if how == "refused":
                    self._stop.wait(REST_AFTER_REFUSAL_S)

    def _ask(self, http: httpx.Client, dice: random.Random) -> str:
        prompt = [dice.randrange(100, 40_000)] * dice.randrange(1, 200)
        body = {"model": MODEL, "prompt": prompt, "max_tokens": dice.randrange(1, 60), "ignore_eos": True}
        if dice.random() < WRONG_SHARE:
            assert http.post(self._url, json={**body, "temperature": -1}).status_code == 400
            return "wrong"
        if dice.random() < 0.3:
            answer = http.post(self._url, json=body)
            assert answer.status_code in (200, 429), answer.text
            return "whole" if answer.status_code == 200 else "refused"
        leaves = dice.random() < LEAVE_SHARE
        with http.stream("POST", self._url, json={**body, "stream": True}) as answer:
            if answer.status_code == 429:
                return "refused"
            assert answer.status_code == 200, answer.read()
            last = ""
            for line in answer.iter_lines():
                if leaves and line.startswith("data: {"):
                    return "left"
                last = line or last
        assert last == "data: [DONE]", json.dumps(last)
        return "streamed"


def held(cluster: Cluster) -> dict[int, tuple[str, int, int]]:
    """Returns {pid: (command line, resident bytes, descriptors)} of every process, all requests over."""
    cluster.wait_idle()
    found = {}
    for pid, name in cluster.place.processes().items():
        process = psutil.Process(pid)
        found[pid] = (name[:60], process.memory_info().rss, process.num_fds())
    return found


def test_at_the_limit_nothing_grows(limited: Cluster) -> None:
    """Memory, descriptors, blocks and leases after a long crowd are what they were after a third of it; same PIDs."""
    crowd = Crowd(limited)
    crowd.run_for(DURATION_S / 3, part=0)
    pids, before = limited.pids(), held(limited)
    started_s = time.monotonic()
    crowd.run_for(2 * DURATION_S / 3, part=1)
    after = held(limited)
    print(f"{time.monotonic() - started_s:.0f} s: {dict(crowd.ended)}")
    assert set(crowd.ended) == {"wrong", "whole", "streamed", "left", "refused"}, crowd.ended
    assert limited.pids() == pids
    for pid, (name, rss_bytes, num_fds) in before.items():
        if pid not in after:
            continue  # A helper of Ray's that waits for work; ours are in ``pids``.
        grown = after[pid][1] - rss_bytes
        print(f"{name}: {rss_bytes >> 20} + {grown / (1 << 20):.1f} MiB, {num_fds} -> {after[pid][2]} descriptors")
        assert grown < GROWTH_BYTES_MAX, (name, rss_bytes, after[pid])
        assert after[pid][2] - num_fds <= GROWTH_DESCRIPTORS_MAX, (name, num_fds, after[pid])
