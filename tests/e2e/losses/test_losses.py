"""What else can die: an ingress, the controller, the head of the Ray cluster. What clients see is written down here.

With the paced engine: a stream is as long as a test needs it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from ..asking import events, raw_body
from ..cluster import Cluster, Place, poll_until
from ..golden import make_prompt
from ..streams import Stream

LEASE_S = 2.0
CONFIG = {
    "max_model_len": 2048,
    "workers": {
        "engine": "paced",
        "paced": {"step_ms": 20},
        "prefill": {"pool_blocks": 128},
        "decode": {"pool_blocks": 128},
    },
    "kv": {"host_bytes": "128MiB"},
    "attempts": {"lease_ms": int(LEASE_S * 1000)},
}
GCS_TIMEOUT_S = 10
"""Ray's own default is a minute: so long it tries to reach a head that is gone."""


@pytest.fixture
def place() -> Iterator[Place]:
    """Folders of one cluster."""
    place = Place()
    yield place
    place.close()


def answer(cluster: Cluster) -> int:
    """Returns the status of a small request."""
    return cluster.http.post("/v1/completions", content=raw_body(prompt=make_prompt(8, 20), max_tokens=3)).status_code


def test_an_ingress_dies_and_then_the_controller(place: Place) -> None:
    """Ingress: its stream breaks off without an end, decode stops within a lease, its successor knows what is known.

    Controller: ``kopir serve`` says so and ends everything, with a status that is not 0.
    """
    cluster = Cluster(place, CONFIG)
    try:
        stream = Stream(cluster, max_tokens=1500)
        before = cluster.pids()
        os.kill(before["ingress-0"], signal.SIGKILL)
        stream.wait(10)
        assert not stream.is_whole and b'"finish_reason":"' not in stream.received
        assert isinstance(stream.error, httpx.RemoteProtocolError), stream.error

        poll_until(lambda: _is_back(cluster, before["ingress-0"]), deadline_s=40, what="another ingress answers")
        cluster.wait_ready()
        cluster.wait_idle(LEASE_S + 10)
        assert cluster.pids()["decode-0"] == before["decode-0"], "the worker itself lives on"
        # It is listed, without a process, until its silence has been long enough.
        poll_until(lambda: "ingress-1" not in cluster.pids(), deadline_s=30, what="the dead one is not listed any more")
        record = poll_until(lambda: _ended(cluster, stream.request_id), deadline_s=30, what="the record has an end")
        assert record["phase"] == "interrupted" and record["interruption"]["reason"] == "gateway_lost"
        assert record["interruption"]["delivered_output_tokens"] <= len(_deltas(stream.received))
        assert answer(cluster) == 200

        second = Stream(cluster, max_tokens=1500)
        os.kill(cluster.pids()["controller"], signal.SIGKILL)
        assert cluster.process.wait(20) == 1
        second.wait(10)
        assert not second.is_whole
        poll_until(lambda: not place.processes(), deadline_s=5, what="nothing is left")
        assert "the controller died; everything is being stopped" in cluster.log_tail()
    finally:
        cluster.kill()


def test_the_head_of_the_ray_cluster_dies(place: Place) -> None:
    """Without Ray's own fault tolerance: streams end well, requests are answered, until Ray gives up and ends it all.

    No request needs the head: that is why its loss is not the loss of a single answer before Ray's timeout.
    """
    place.environment["RAY_gcs_rpc_server_reconnect_timeout_s"] = str(GCS_TIMEOUT_S)
    cluster = Cluster(place, CONFIG)
    try:
        stream = Stream(cluster, max_tokens=150)
        (head,) = [pid for pid, command in place.processes().items() if "gcs_server" in command]
        os.kill(head, signal.SIGKILL)
        assert answer(cluster) == 200
        stream.wait(20)
        assert stream.error is None and stream.is_whole
        assert cluster.process.wait(GCS_TIMEOUT_S + 40) != 0
        poll_until(lambda: not _ours(place), deadline_s=20, what="nothing is left")
    finally:
        cluster.kill()


def _ours(place: Place) -> list[str]:
    """Ray's agent for environments may outlive the node that it served."""
    return [command for command in place.processes().values() if "RuntimeEnvAgent" not in command]


def _is_back(cluster: Cluster, dead_pid: int) -> bool:
    try:
        return cluster.pids()["ingress-0"] != dead_pid
    except (AssertionError, KeyError, httpx.HTTPError):
        return False


def _ended(cluster: Cluster, request_id: str) -> dict[str, Any] | None:
    record = cluster.record(request_id)
    return record if record["phase"] in ("interrupted", "finished", "failed", "cancelled") else None


def _deltas(received: bytes) -> list[Any]:
    return [event for event in events(received) if isinstance(event, dict) and event.get("choices")]
