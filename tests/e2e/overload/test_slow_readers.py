"""Clients that hardly read, through Serve's proxy: decode waits for each, memory has a bound, others are served.

``KOPIR_SOAK_READERS`` says how many (``make soak`` and ``kopir bench relay``: 500); without it a slice runs.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from ..cluster import Cluster, poll_until
from ..conftest import RunCluster

READERS = int(os.environ.get("KOPIR_SOAK_READERS", "60"))
TOKENS = 500
NAME = "m" * 4000
"""Of the model, in every event: few of them fill the buffers between decode and client, in the time of few."""
ANSWER_BYTES = TOKENS * len(NAME)
SMALL_BUFFER_BYTES = 1 << 13
SMALL_SEGMENT_BYTES = 536
"""The system measures the buffer of a sender by its segments, which are large on loopback."""
BACKLOG_TOKENS = 16
HELD_BYTES_MAX = 512 << 10
"""Of one answer, in both processes: the window of the ingress, the buffers of the proxy's server and a write."""
STANDS_STILL_S = 2.0
CONFIG = {
    "max_model_len": 1024,
    "served_model_name": NAME,
    "workers": {
        "engine": "paced",
        "paced": {"step_ms": 0, "prefill_ms_per_token": 0},
        "prefill": {"replicas": 0},
        "decode": {"replicas": 0},
        "combined": {"replicas": 1, "pool_blocks": READERS * 34, "max_num_seqs": READERS + 4},
    },
    "kv": {"host_bytes": "64MiB"},
    "limits": {
        "max_stream_backlog_tokens": BACKLOG_TOKENS,
        "max_queued_requests": 2 * READERS,
        # On a slow machine the first stream stands for long before the last one does.
        "client_stall_ms": 600_000,
    },
    "admission": {"reserve_share": 0.0},
}


@pytest.fixture(scope="module")
def eager(run_cluster: RunCluster) -> Iterator[Cluster]:
    """A cluster that generates as fast as it can; idle at its end."""
    with run_cluster(CONFIG) as cluster:
        yield cluster
        cluster.wait_idle()


def make_body(number: int, max_tokens: int) -> bytes:
    fields = {"model": NAME, "prompt": [100 + number] * 16, "max_tokens": max_tokens}
    return json.dumps({**fields, "ignore_eos": True, "stream": True}).encode()


def open_stream(cluster: Cluster, number: int) -> socket.socket:
    """Asks for a long stream on a connection that takes little, and does not wait for it."""
    url, body = urlsplit(cluster.url), make_body(number, TOKENS)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SMALL_SEGMENT_BYTES)
    connection.settimeout(60)
    connection.connect((url.hostname, url.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.hostname}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def read_whole(cluster: Cluster, number: int, max_tokens: int) -> int:
    """Reads one stream as fast as it comes; returns its events with text or an end."""
    with httpx.stream("POST", f"{cluster.url}/v1/completions", content=make_body(number, max_tokens)) as answer:
        assert answer.status_code == 200, answer.read()
        lines = list(answer.iter_lines())
    assert "data: [DONE]" in lines
    return sum(line.startswith("data: {") for line in lines)


def memory_bytes(pids: list[int]) -> int:
    """Resident memory of the processes that tokens of an answer pass."""
    return sum(psutil.Process(pid).memory_info().rss for pid in pids)


class Progress:
    """What the running streams have taken, looked at again and again."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._since_s = time.monotonic()
        self._taken: list[int] = []

    def stands_still(self) -> list[int] | None:
        """Returns the tokens taken by each stream, once all run and none has taken any for a while."""
        streams: list[dict[str, Any]] = self._cluster.status()["streams"]
        taken = sorted(stream["delivered_output_tokens"] for stream in streams)
        if taken != self._taken or len(taken) < READERS or taken[0] == 0:
            self._taken, self._since_s = taken, time.monotonic()
        return taken if time.monotonic() - self._since_s >= STANDS_STILL_S else None


def test_clients_that_hardly_read_hold_up_only_themselves(eager: Cluster) -> None:
    """Each stream stands still far from its end, what all hold is bounded; one that reads is served, and so goes on."""
    read_whole(eager, 1, 100)
    passed = [pid for pid, name in eager.place.processes().items() if "ProxyActor" in name or "ServeReplica" in name]
    assert len(passed) == 2, eager.place.processes()
    before = memory_bytes(passed)
    with ExitStack() as opened:
        connections = [opened.enter_context(open_stream(eager, number)) for number in range(READERS)]
        taken = poll_until(Progress(eager).stands_still, deadline_s=90, what="streams that stand still")
        assert taken[-1] < TOKENS // 2, taken
        grown = memory_bytes(passed) - before
        assert grown < READERS * HELD_BYTES_MAX < READERS * ANSWER_BYTES // 3, f"{grown >> 20} MiB"
        assert read_whole(eager, 2, 200) > 100, "a few tokens have no text of their own, and so no event"
        # One that reads on gets all that it asked for, while the others still stand.
        tail = b""
        while b"data: [DONE]" not in tail:
            part = connections[0].recv(1 << 16)
            assert part, tail[-400:]
            tail = tail[-64:] + part
        left = poll_until(lambda: rest(eager), deadline_s=10, what="one stream less")
        assert left[-1] < TOKENS // 2, left
        assert memory_bytes(passed) - before < READERS * HELD_BYTES_MAX


def rest(cluster: Cluster) -> list[int] | None:
    """Returns the tokens taken by each stream once one of them has ended."""
    taken = sorted(stream["delivered_output_tokens"] for stream in cluster.status()["streams"])
    return taken if len(taken) == READERS - 1 else None
