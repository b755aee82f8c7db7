"""Case F56, workers: they come, go and are replaced under load, a roll-out fails, and no client notices."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from ..asking import raw_body
from ..cluster import Cluster, poll_until
from ..conftest import RunCluster
from ..golden import make_prompt
from ..streams import Stream

STREAMS = 4
SECONDS_MIN = float(os.environ.get("KOPIR_SOAK_SCALING_S", "0"))
"""For how long clients ask at least (case F56: 60); without it as long as the changes take."""
TOKENS = 60
LONG = 400
GONE_DEADLINE_S = 30.0
CONFIG: dict[str, Any] = {
    "max_model_len": 2048,
    "workers": {
        "engine": "paced",
        "paced": {"step_ms": 20, "prefill_ms_per_token": 0.1},
        "prefill": {"replicas": 1, "pool_blocks": 128},
        "decode": {"replicas": 2, "pool_blocks": 128},
    },
    "kv": {"host_bytes": "64MiB"},
}


@pytest.fixture(scope="module")
def folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose configuration a test can damage."""
    folder = tmp_path_factory.mktemp("model")
    for path in model_folder.iterdir():
        (folder / path.name).symlink_to(path)
    config = folder / "config.json"
    text = config.read_text()
    config.unlink()
    config.write_text(text)
    return folder


@pytest.fixture(scope="module")
def cluster(run_cluster: RunCluster, folder: Path) -> Iterator[Cluster]:
    """The cluster; idle at its end."""
    with run_cluster({**CONFIG, "model": str(folder), "served_model_name": "smollm2-135m-instruct"}) as cluster:
        yield cluster
        cluster.wait_idle()


class Clients:
    """Steady streams, one after the other, until told to stop; counts how each one ended."""

    def __init__(self, cluster: Cluster) -> None:
        self._url = f"{cluster.url}/v1/completions"
        self._stop = threading.Event()
        self.ended: Counter[str] = Counter()
        self._pool = ThreadPoolExecutor(STREAMS)
        self._running = [self._pool.submit(self._run, number) for number in range(STREAMS)]

    def _run(self, number: int) -> None:
        with httpx.Client(timeout=60) as http:
            while not self._stop.is_set():
                self.ended[self._ask(http, number)] += 1

    def _ask(self, http: httpx.Client, number: int) -> str:
        body = raw_body(prompt=make_prompt(number, 40), max_tokens=TOKENS, ignore_eos=True, stream=True)
        with http.stream("POST", self._url, content=body) as answer:
            text = answer.read().decode()
        if answer.status_code != 200:
            return f"{answer.status_code} {text[:200]}"
        return "whole" if text.rstrip().endswith("data: [DONE]") else text[-300:]

    def stop(self) -> None:
        self._stop.set()
        for running in self._running:
            running.result(60)
        self._pool.shutdown()


def decode_pids(cluster: Cluster) -> dict[str, int]:
    return {name: worker["pid"] for name, worker in cluster.workers().items() if worker["role"] == "decode"}


def applied(cluster: Cluster, *arguments: str) -> dict[str, list[str]]:
    done = cluster.kopir("apply", *arguments, "--json", timeout_s=120)
    assert done.returncode == 0, done.stderr
    answer: dict[str, list[str]] = json.loads(done.stdout)
    return answer


def wait_decodes(cluster: Cluster, *names: str) -> None:
    poll_until(
        lambda: set(decode_pids(cluster)) == set(names), deadline_s=GONE_DEADLINE_S, what=f"only {names} are left"
    )
    cluster.wait_ready()


def test_f56_workers_come_and_go_and_a_roll_out_fails_under_load(cluster: Cluster, folder: Path) -> None:
    """Decode 2 -> 1 -> 2, a roll-out that cannot start, one that can: every stream is whole, long ones included."""
    clients = Clients(cluster)
    ends = threading.Event()
    try:
        long = [Stream(cluster, max_tokens=LONG, seed=50 + number) for number in range(2)]
        assert {cluster.record(s.request_id)["attempts"][0]["decode"]["worker_id"] for s in long} <= {
            "decode-0",
            "decode-1",
        }
        assert applied(cluster, "--decode", "1") == {"started": [], "taken_back": [], "leaving": ["decode-1"]}
        assert cluster.workers().get("decode-1", {"state": "draining"})["state"] == "draining"
        wait_decodes(cluster, "decode-0")
        assert applied(cluster, "--decode", "2")["started"] == ["decode-1"]
        cluster.wait_ready()
        before, good = decode_pids(cluster), (folder / "config.json").read_text()
        (folder / "config.json").write_text("{")
        failed = cluster.kopir("apply", "--set", "workers.decode.pool_blocks=160", timeout_s=120)
        assert failed.returncode == 1 and "not started, and nothing was changed" in failed.stderr, failed
        assert decode_pids(cluster) == before
        (folder / "config.json").write_text(good)
        assert applied(cluster, "--set", "workers.decode.pool_blocks=160") == {
            "started": ["decode-2", "decode-3"],
            "taken_back": [],
            "leaving": ["decode-0", "decode-1"],
        }
        wait_decodes(cluster, "decode-2", "decode-3")
        ends.wait(SECONDS_MIN)
        for stream in long:
            stream.wait(60)
            assert stream.is_whole, (stream.error, stream.received[-300:])
    finally:
        clients.stop()
    print(dict(clients.ended))
    assert set(clients.ended) == {"whole"} and clients.ended["whole"] >= STREAMS, clients.ended
    assert all(worker["pool_blocks"] == 160 for worker in cluster.workers().values() if worker["role"] == "decode")


def test_what_cannot_change_is_refused_by_name(cluster: Cluster) -> None:
    """Wrong values, and keys that no worker alone can follow; nothing moves."""
    before = cluster.pids()
    for setting, words in (
        ("kv.block_tokens=32", "kv.block_tokens: cannot change while the cluster serves"),
        ("workers.engine=torch", "workers.engine: cannot change"),
        ("workers.decode.pool_block=3", "did you mean workers.decode.pool_blocks"),
        ("workers.decode.replicas=0", "workers."),
        ("workers.decode.pool_blocks=16000000", "not enough memory"),
    ):
        done = cluster.kopir("apply", "--set", setting)
        assert done.returncode in (1, 2) and words in done.stderr, (setting, done)
        assert len(done.stderr.splitlines()) == 1
    assert cluster.pids() == before
    assert "Nothing to change." in cluster.kopir("apply", "--decode", "2").stdout
