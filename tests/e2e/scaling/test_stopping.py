"""Case F56, the whole gateway: a stop lets what runs finish, takes nothing new, and cuts what is left honestly."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import httpx
import openai
import pytest

from ..asking import ask, events, raw_body
from ..cluster import Cluster, Place, abandoned_files, poll_until
from ..golden import make_prompt
from ..streams import Stream

DRAIN_S = 30.0
SHORT_DRAIN_S = 1.0
QUICK_S = 5.0
STEP_MS = 20
LONG = 1500
"""Tokens: at the engine's pace, as long as the longer drain."""
CONFIG = {
    "max_model_len": 2048,
    "workers": {
        "engine": "paced",
        "paced": {"step_ms": STEP_MS},
        "prefill": {"replicas": 0},
        "decode": {"replicas": 0},
        "combined": {"replicas": 1, "pool_blocks": 256},
    },
    "kv": {"host_bytes": "64MiB"},
}


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    """Folders of one cluster after the other."""
    place = Place()
    before = abandoned_files()
    yield place
    place.close()
    assert abandoned_files() <= before


def gone(cluster: Cluster, deadline_s: float) -> None:
    assert cluster.process.wait(deadline_s) == 0, cluster.log_tail()
    poll_until(lambda: not cluster.place.processes(), deadline_s=QUICK_S, what="every process is gone")


def test_sigterm_lets_what_runs_finish_and_a_second_one_does_not(place: Place) -> None:
    """New requests: 503 with the time until the end, by the official client too; readyz says why; nothing is cut until
    the second signal, which leaves the honest event on what still runs."""
    cluster = Cluster(place, {**CONFIG, "server": {"drain_s": DRAIN_S}})
    try:
        long, short = Stream(cluster, max_tokens=LONG, seed=1), Stream(cluster, max_tokens=150, seed=2)
        started_s = time.monotonic()
        cluster.process.send_signal(signal.SIGTERM)
        poll_until(lambda: cluster.http.get("/readyz").status_code == 503, deadline_s=5, what="it says that it drains")
        answers = [cluster.http.get("/readyz"), cluster.http.post("/v1/completions", content=raw_body(prompt="a"))]
        for answer in answers:
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready"), answer.text
            assert DRAIN_S / 2 < int(answer.headers["retry-after"]) <= DRAIN_S
        assert answers[0].json()["status"] == "draining"
        with cluster.client() as client, pytest.raises(openai.InternalServerError) as refused:
            ask(client, prompt=make_prompt(3, 8), max_tokens=4)
        assert refused.value.status_code == 503
        assert cluster.http.get("/healthz").status_code == 200 and len(cluster.status()["streams"]) >= 1
        short.wait(DRAIN_S)
        assert short.is_whole, (short.error, short.received[-300:])
        assert time.monotonic() - started_s < DRAIN_S and cluster.process.poll() is None
        cluster.process.send_signal(signal.SIGTERM)
        gone(cluster, QUICK_S)
        long.wait(QUICK_S)
        last = events(long.received)[-1]
        assert last["error"]["code"] == "upstream_decode_interrupted" and last["error"]["reason"] == "shutdown"
        assert "Stopping: what runs has 30 s" in cluster.log_tail()
    except BaseException:
        cluster.kill()
        raise
    finally:
        cluster.http.close()


def test_the_time_of_a_drain_is_bounded_and_down_waits_for_it(place: Place) -> None:
    """`kopir down`: the stream that would take longer is ended with the event; the command returns when all is gone."""
    cluster = Cluster(place, {**CONFIG, "server": {"drain_s": SHORT_DRAIN_S}})
    try:
        stream = Stream(cluster, max_tokens=LONG)
        started_s = time.monotonic()
        down = cluster.kopir("down")
        took_s = time.monotonic() - started_s
        assert down.returncode == 0 and "Stopped." in down.stdout, down.stderr
        assert took_s >= SHORT_DRAIN_S
        gone(cluster, QUICK_S)
        stream.wait(QUICK_S)
        assert stream.error is None or not isinstance(stream.error, httpx.ReadTimeout), stream.error
        last = events(stream.received)[-1]
        assert last["error"]["reason"] == "shutdown"
        assert last["error"]["delivered_output_tokens"] >= SHORT_DRAIN_S * 1000 / STEP_MS / 4
    except BaseException:
        cluster.kill()
        raise
    finally:
        cluster.http.close()
