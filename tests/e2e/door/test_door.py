"""The endpoint behind TLS, with keep-alive comments and traces: long prefills, keys, malformed input, one trace."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import httpx
import pytest

from tests.collector import Collector, attributes
from tests.unit.ingress.families import FAMILIES, Case, make_cases

from ..asking import ask, events
from ..cluster import MODEL, Cluster, poll_until
from ..conftest import RunCluster
from ..golden import Golden, make_prompt

CASES_PER_FAMILY = 4
PINGS = 4
CALLER_TRACE, CALLER_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CONFIG: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "workers": {"prefill": {"pool_blocks": 256}, "decode": {"pool_blocks": 256}},
    "kv": {"host_bytes": "128MiB"},
    # A worker that stands still for a moment is slow here, not lost.
    "attempts": {"lease_ms": 60_000},
}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="module")
def door(run_cluster: RunCluster, collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The cluster; idle at its end."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate of this test, is not installed")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    subprocess.run([*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True, timeout=60)
    server = {"tls_cert_file": str(cert), "tls_key_file": str(key), "keep_alive_ping_s": 0.3}
    tracing = {"otlp_endpoint": collector.url, "service_name": "door"}
    with run_cluster({**CONFIG, "server": server, "tracing": tracing}) as cluster:
        yield cluster
        cluster.wait_idle()


def dispatched(data: bytes) -> list[str]:
    """Returns the data of every event, as a parser that goes by the letter of the SSE specification sees it."""
    found: list[str] = []
    buffer: list[str] = []
    fields: set[str] = set()
    for line in data.decode("utf-8").split("\n"):
        if line:
            name, _, value = line.partition(":")
            if name:  # Otherwise the line is a comment.
                fields.add(name)
                buffer.append(value.removeprefix(" "))
        elif fields:
            assert fields == {"data"}, f"fields {fields}"
            found.append("\n".join(buffer))
            buffer, fields = [], set()
    assert not fields, "the body ends inside an event"
    return found


def test_it_speaks_https_only(door: Cluster) -> None:
    """The command line finds its way; plain HTTP gets no answer."""
    assert door.url.startswith("https://")
    assert door.kopir("status", "--json").returncode == 0
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://127.0.0.1:{door.port}/healthz", timeout=10)


def test_f40_comments_during_a_long_prefill(door: Cluster, golden: Golden) -> None:
    """Prefill stands still for several pings: no event without data, no other field, no blank line behind a comment.
    The raw bytes, a parser by the specification and the official client give the whole answer of a run without any."""
    num_tokens = 12
    prompt, other = make_prompt(40, 300), make_prompt(4000, 300)
    body = {"model": MODEL, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "stream": True}
    pid = door.workers()["prefill-0"]["pid"]
    with ThreadPoolExecutor(1) as pool, door.client() as client:
        os.kill(pid, signal.SIGSTOP)
        try:
            official = pool.submit(ask, client, stream=True, prompt=other, max_tokens=num_tokens)
            with door.http.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.status_code == 200
                chunks = answer.iter_raw()
                data = b""
                while data.count(b": ping\n") < PINGS:
                    data += next(chunks)
                assert b"data:" not in data, "nothing can have been computed yet"
                os.kill(pid, signal.SIGCONT)
                data += b"".join(chunks)
        finally:
            os.kill(pid, signal.SIGCONT)
        by_client = official.result(timeout=60)
    lines = data.split(b"\n")
    assert {line.partition(b":")[0] for line in lines} == {b"", b"data"}, "comments, data and blank lines only"
    assert not any(line.startswith(b":") and follower == b"" for line, follower in pairwise(lines))
    seen = dispatched(data)
    assert all(seen) and seen[-1] == "[DONE]" and seen.count("[DONE]") == 1
    plain = b"\n".join(line for line in lines if not line.startswith(b":"))
    chunks_seen = events(plain)[:-1]
    assert len(chunks_seen) == len(seen) - 1
    expected = golden.run(prompt, num_tokens)
    assert "".join(choice["text"] for chunk in chunks_seen for choice in chunk["choices"]) == expected.text
    assert chunks_seen[-1]["choices"][0]["finish_reason"] == expected.finish_reason
    assert by_client.text == golden.run(other, num_tokens).text


def test_a_keyed_answer_is_replayed_across_the_proxy(door: Cluster) -> None:
    """Through Serve's proxy too: the header is there, the bytes are equal, another body is told so."""
    body = {"model": MODEL, "prompt": "One two three", "max_tokens": 4}
    headers = {"idempotency-key": "e2e-1"}
    first = door.http.post("/v1/completions", json=body, headers=headers)
    again = door.http.post("/v1/completions", json=body, headers=headers)
    assert (first.status_code, again.status_code) == (200, 200)
    assert again.content == first.content and again.headers["x-idempotent-replay"] == "true"
    assert "x-idempotent-replay" not in first.headers
    other = door.http.post("/v1/completions", json=body | {"max_tokens": 5}, headers=headers)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_reused")
    assert other.headers["x-should-retry"] == "false"


def test_a_request_is_one_trace_of_every_process(door: Cluster, collector: Collector) -> None:
    """Under the caller's span: the HTTP request, its generation, queue, attempt, prefill, hand-off and decode, in
    order, with the ids that the journal has."""
    headers = {"traceparent": f"00-{CALLER_TRACE}-{CALLER_SPAN}-01"}
    body = {"model": MODEL, "prompt": make_prompt(41, 200), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = door.http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    wanted = {"POST /v1/completions", "generation", "queue", "attempt", "prefill", "hand_off", "decode"}

    def ours() -> dict[str, Any] | None:
        spans = [span for span in collector.spans if span.trace_id.hex() == CALLER_TRACE]
        return {span.name: span for span in spans} if len(spans) >= len(wanted) else None

    spans = poll_until(ours, deadline_s=20, what="the collector has every span")
    assert set(spans) == wanted and len({span.span_id for span in spans.values()}) == len(wanted)
    assert {"service.name": "door"}.items() <= collector.resources[0].items()
    root = spans["POST /v1/completions"]
    assert root.parent_span_id.hex() == CALLER_SPAN
    assert answer.headers["traceresponse"] == f"00-{CALLER_TRACE}-{root.span_id.hex()}-01"
    parents = {"generation": root, "queue": spans["generation"], "attempt": spans["generation"]}
    parents |= dict.fromkeys(("prefill", "hand_off", "decode"), spans["attempt"])
    assert {name: spans[name].parent_span_id for name in parents} == {name: s.span_id for name, s in parents.items()}
    order = [spans[name] for name in ("queue", "prefill", "hand_off", "decode")]
    for before, after in pairwise(order):
        assert before.start_time_unix_nano <= before.end_time_unix_nano <= after.start_time_unix_nano
    assert root.start_time_unix_nano <= order[0].start_time_unix_nano
    record = door.record(answer.headers["x-request-id"])
    (attempt,) = record["attempts"]
    assert record["trace_id"] == CALLER_TRACE
    assert attributes(spans["attempt"])["kopir.attempt_id"] == attempt["attempt_id"]
    assert attributes(spans["prefill"])["kopir.worker"] == "prefill-0"
    assert attributes(spans["decode"])["kopir.worker"] == "decode-0"
    assert attributes(spans["decode"])["kopir.received_tokens"] == 4


def test_malformed_input_moves_no_process(door: Cluster) -> None:
    """A seeded choice of every family: no 5xx, no hang, the same processes, and a good request afterwards."""
    before = door.pids()
    by_family: dict[str, list[Case]] = {name: [] for name in FAMILIES}
    for case in make_cases(door.http.get("/openapi.json").json(), MODEL):
        by_family.setdefault(case.family, []).append(case)
    assert len(by_family) >= 24 and all(by_family.values())
    dice = random.Random(8)
    for name, cases in by_family.items():
        for case in dice.sample(cases, min(CASES_PER_FAMILY, len(cases))):
            headers = {"content-type": "application/json"} | case.headers
            answer = door.http.request(case.method, case.path, content=case.content, headers=headers, timeout=30)
            assert answer.status_code < 500, (name, case.name, case.path, answer.status_code, answer.text[:300])
    assert door.pids() == before
    assert door.http.post("/v1/completions", json={"model": MODEL, "prompt": "a", "max_tokens": 1}).status_code == 200
