"""Server-side tools through `kopir serve`, with the official client; a worker and an ingress die at a call. Row H5."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from tests.tool_server import Plan, ToolServer

from ..cluster import MODEL, Cluster, poll_until
from ..conftest import RunCluster

SECRET = "Bearer s3cr3t-of-the-tool"
BACK_DEADLINE_S = 90.0
CONFIG = {
    "max_model_len": 1024,
    "workers": {
        "prefill": {"replicas": 0},
        "decode": {"replicas": 0},
        "combined": {"replicas": 2, "pool_blocks": 160, "chunk_tokens": 128},
    },
    "kv": {"host_bytes": "128MiB"},
    "attempts": {"lease_ms": 1000},
}


@pytest.fixture(scope="module")
def server() -> Iterator[ToolServer]:
    with ToolServer() as server:
        yield server


@pytest.fixture(scope="module")
def cluster(run_cluster: RunCluster, server: ToolServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two workers of which each can do without the other; nothing that it wrote down holds the tool's secret."""
    path: Path = tmp_path_factory.mktemp("tools") / "tools.yaml"
    entry = server.entry("book", headers={"authorization": SECRET}, timeout_ms=20_000)
    path.write_text(yaml.safe_dump({"tools": [entry]}))
    with run_cluster({**CONFIG, "tools": {"file": str(path), "max_rounds": 1}}) as cluster:
        yield cluster
        cluster.wait_ready()
        cluster.wait_idle()
        written = b"".join(file.read_bytes() for file in cluster.place.folder.rglob("*") if file.is_file())
        assert b"s3cr3t" not in written, "a log, the ledger or another file holds the secret of a tool"


def ask(cluster: Cluster, key: str, **body: Any) -> openai.types.chat.ChatCompletion:
    with cluster.client() as client:
        answer: openai.types.chat.ChatCompletion = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Please book a room for me."}],
            tool_choice={"type": "function", "function": {"name": "book"}},
            max_tokens=80,
            temperature=0.7,
            extra_body={"server_tools": ["book"]},
            extra_headers={"Idempotency-Key": key},
            **body,
        )
    return answer


def actions(server: ToolServer, before: int) -> list[str]:
    return [action.key for action in server.actions[before:]]


def test_a_tool_is_called_once_and_seen_by_people(cluster: Cluster, server: ToolServer) -> None:
    """Whole and repeated with its key: one action, the same answer; `kopir request` shows the call in its timeline."""
    before = len(server.actions)
    answer = ask(cluster, "plain")
    assert answer.choices[0].finish_reason in ("stop", "length") and answer.choices[0].message.tool_calls is None
    assert ask(cluster, "plain").choices == answer.choices, "replayed"
    request_id = "req-" + answer.id.removeprefix("chatcmpl-")
    (key,) = actions(server, before)
    assert key.startswith(f"default:{request_id}:call_") and server.calls[-1][1]["authorization"] == SECRET
    record = cluster.record(request_id)
    assert [call["state"] for call in record["tool_calls"]] == ["done"]
    assert record["tool_calls"][0]["idempotency_key"] == key and len(record["rounds"]) == 1
    shown = cluster.kopir("request", request_id, "--url", cluster.url)
    assert shown.returncode == 0, shown.stderr
    for word in ("tool intent", "tool result", "Tool calls", "Timeline of round 1", "book"):
        assert word in shown.stdout, shown.stdout
    assert cluster.metric("kopir_tool_calls_total") == 1


def test_a_request_without_a_key_is_refused(cluster: Cluster, server: ToolServer) -> None:
    """400 that names the header; the tool hears nothing."""
    before = len(server.calls)
    with cluster.client() as client, pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Book."}], extra_body={"server_tools": ["book"]}
        )
    assert refused.value.code == "idempotency_key_required" and refused.value.param == "Idempotency-Key"
    assert len(server.calls) == before


def test_a_worker_that_dies_after_its_call_costs_no_second_action(cluster: Cluster, server: ToolServer) -> None:
    """It is killed while the tool works: the next round runs on the other worker, with the result; one action."""
    before = len(server.actions)

    def kill() -> None:
        (stream,) = cluster.status()["streams"]
        attempt = cluster.record(stream["request_id"])["attempts"][-1]
        os.kill(attempt["decode"]["pid"], signal.SIGKILL)

    server.plans["book"] = [Plan(after=kill)]
    answer = ask(cluster, "worker")
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert len(actions(server, before)) == 1
    record = cluster.record("req-" + answer.id.removeprefix("chatcmpl-"))
    first, second = (part["attempts"][-1]["decode"]["incarnation"] for part in (record, *record["rounds"]))
    assert first != second, "the worker of the first round is dead"
    cluster.wait_ready()


def test_an_ingress_that_dies_at_its_call_costs_no_second_action(cluster: Cluster, server: ToolServer) -> None:
    """It is killed with the action done and the answer on its way. Its client asks again with the same key until
    another life answers: one action, by the tool's own log, under the key of the first request."""
    before = len(server.actions)
    (ingress,) = cluster.status()["ingress"]
    server.plans["book"] = [Plan(after=lambda: os.kill(ingress["pid"], signal.SIGKILL))]
    with pytest.raises((openai.APIConnectionError, openai.InternalServerError)) as died:
        ask(cluster, "ingress", seed=7)
    assert len(actions(server, before)) == 1, f"the tool was to be called first, but: {died.value!r}"
    (key,) = actions(server, before)

    def again() -> openai.types.chat.ChatCompletion | None:
        try:
            return ask(cluster, "ingress", seed=7)
        except openai.ConflictError as error:
            assert error.code == "request_in_progress", error
        except (openai.APIConnectionError, openai.InternalServerError):
            pass  # Until the next ingress and its workers are up.
        time.sleep(0.2)
        return None

    answer = poll_until(again, deadline_s=BACK_DEADLINE_S, what="another life answers")
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert actions(server, before) == [key]
    record = cluster.record("req-" + answer.id.removeprefix("chatcmpl-"))
    (call,) = record["tool_calls"]
    assert call["state"] == "done" and call["idempotency_key"] == key and call["recorded_by"] != record["request_id"]
    assert cluster.metric("kopir_tool_calls_replayed_total") == 1
