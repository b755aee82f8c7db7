"""Ten times more requests than seats, on the paced engine: refusals at once, and what runs keeps its pace."""

from __future__ import annotations

import itertools
import json
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from ..cluster import MODEL, Cluster
from ..conftest import RunCluster

SEATS = 4
STEP_MS = 25
TOKENS = 120
CROWD = 24
CONFIG = {
    "max_model_len": 1024,
    "workers": {
        "engine": "paced",
        "paced": {"step_ms": STEP_MS, "prefill_ms_per_token": 0.1},
        "prefill": {"replicas": 0},
        "decode": {"replicas": 0},
        "combined": {"replicas": 1, "pool_blocks": 512, "max_num_seqs": SEATS},
    },
    "kv": {"host_bytes": "64MiB"},
    "admission": {"max_wait_ms": 500},
}


@pytest.fixture(scope="module")
def crowded(run_cluster: RunCluster) -> Iterator[Cluster]:
    """The cluster; idle at its end: nothing leaks."""
    with run_cluster(CONFIG) as cluster:
        yield cluster
        cluster.wait_idle()


def stream(cluster: Cluster, number: int, started: threading.Event | None = None) -> list[float]:
    """Reads one whole stream; returns when each event with text came."""
    body = {"model": MODEL, "prompt": [100 + number] * 32, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    came: list[float] = []
    done = False
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            done = done or line == "data: [DONE]"
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["text"]:
                came.append(time.monotonic())
                if started is not None:
                    started.set()
    assert done, "a stream that was cut"
    return came


def test_a_crowd_is_sent_away_at_once_and_running_streams_go_on(crowded: Cluster) -> None:
    """429 with an honest time; every running stream comes to its end, at the pace of the engine's steps."""
    alone = stream(crowded, 0)
    begun = [threading.Event() for _ in range(SEATS)]
    body = {"model": MODEL, "prompt": [90] * 32, "max_tokens": TOKENS, "ignore_eos": True}

    def knock(_: int) -> tuple[float, httpx.Response]:
        since = time.monotonic()
        answer = httpx.post(f"{crowded.url}/v1/completions", json=body, timeout=60)
        return time.monotonic() - since, answer

    with ThreadPoolExecutor(SEATS) as seated, ThreadPoolExecutor(6) as crowd:
        running = [seated.submit(stream, crowded, number + 1, begun[number]) for number in range(SEATS)]
        for event in begun:
            assert event.wait(30)
        answers = list(crowd.map(knock, range(CROWD)))
        streams = [future.result(60) for future in running]
    refused = [(took_s, answer) for took_s, answer in answers if answer.status_code == 429]
    assert {answer.status_code for _, answer in answers} <= {200, 429}
    assert len(refused) >= CROWD // 2, [answer.status_code for _, answer in answers]
    for took_s, answer in refused:
        assert 1 <= int(answer.headers["retry-after"]) <= 119
        assert answer.json()["error"]["code"] in ("queue_full", "overloaded")
        assert took_s < alone[-1] - alone[0], "a refusal that took as long as an answer"
    solo_s = statistics.median(b - a for a, b in itertools.pairwise(alone))
    for came in streams:
        pace_s = statistics.median(b - a for a, b in itertools.pairwise(came))
        assert pace_s < 3 * solo_s, (pace_s, solo_s)
    status = crowded.wait_idle()
    assert status["streams"] == []
    shown = crowded.http.get("/metrics").text
    assert 'kopir_admission_seats{class="interactive"} 0.0' in shown
    assert 'kopir_admission_waiting{class="interactive"} 0.0' in shown
