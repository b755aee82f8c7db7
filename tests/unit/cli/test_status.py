"""``kopir status`` and ``kopir request``: what the endpoint says, as tables or as it is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster import runfile
from cluster.cli import main as cli

from .conftest import Endpoint, answer_json

STATUS: dict[str, Any] = {
    "workers": [
        {
            "id": "prefill-0",
            "role": "prefill",
            "pid": 11,
            "node": "n1",
            "incarnation": "0123456789abcdef",
            "state": "ready",
            "pool_blocks": 2048,
            "used_blocks": 5,
            "quarantined_blocks": 1,
            "cached_blocks": 3,
            "running": 1,
            "waiting": 0,
        },
        {"id": "decode-0", "role": "decode", "state": "refused", "refused_fields": ["dtype", "[bold]x"]},
    ],
    "store": [{"node": "n1", "pid": 12, "tiers": [{"name": "host", "blocks": 100, "used_blocks": 7, "bytes": 4096}]}],
    "ingress": [{"id": "i0", "pid": 13, "streams": 1}],
    "directory": {"pid": 14},
    "controller": {"pid": 15},
    "leases": 1,
    "streams": [
        {"request_id": "req-1", "phase": "decoding", "attempt": "a1", "epoch": 1, "delivered_output_tokens": 3}
    ],
}

JOURNAL = {
    "request_id": "req-1",
    "phase": "interrupted",
    "first_delta_sent": True,
    "delivered_output_tokens": 37,
    "attempts": [
        {
            "attempt_id": "att-0123456789",
            "epoch": 1,
            "prefill": {"worker_id": "prefill-0", "pid": 11, "incarnation": "0123456789abcdef"},
            "decode": None,
            "started_ns": 100_000,
            "ended_ns": None,
            "end_reason": None,
            "received_tokens": 41,
            "fenced": False,
        }
    ],
    "events": [
        {"at_ns": 0, "event": "phase", "phase": "admitted"},
        {"at_ns": 12_345_600, "event": "prefill_ended", "epoch": 1, "spans_ns": {"hand_off": 3_000_000}},
    ],
    "interruption": {"reason": "worker_exited", "retryable": False},
}


def test_status_shows_workers_store_and_streams(endpoint: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    """Each worker is a row; a refused one names its fields; text from outside is never markup."""
    endpoint.scripts["/internal/status"] = answer_json(STATUS)
    assert cli.run(["status", "--url", endpoint.url]) == 0
    out = capsys.readouterr().out
    for words in ("prefill-0", "01234567 ", "decode-0 is refused; it differs in: dtype, [bold]x", "req-1", "4096"):
        assert words in out
    assert "1 of 2 workers ready, 5 pool blocks used, 3 cached, 1 quarantined, 1 leases, 1 streams" in out
    assert "0123456789abcdef" not in out


def test_status_json_is_what_the_endpoint_said(endpoint: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is added, dropped or renamed."""
    endpoint.scripts["/internal/status"] = answer_json(STATUS)
    assert cli.run(["status", "--url", endpoint.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == STATUS


def test_status_finds_the_running_cluster(endpoint: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    """The run file gives the address."""
    endpoint.scripts["/internal/status"] = answer_json({"workers": []})
    runfile.write(url=endpoint.url, ray_address="local", started_at="now")
    assert cli.run(["status"]) == 0
    assert "0 of 0 workers ready" in capsys.readouterr().out


def test_watch_goes_on_until_the_endpoint_is_gone(endpoint: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    """With --json one document a line; the end of the endpoint ends the watch with exit 1."""
    answers = iter([answer_json({"leases": 1}), answer_json({"leases": 2})])
    gone = answer_json({"error": {"message": "shutting down"}}, status=503)
    endpoint.scripts["/internal/status"] = lambda handler, body: next(answers, gone)(handler, body)
    assert cli.run(["status", "--url", endpoint.url, "--json", "--watch", "--interval", "0.1"]) == 1
    captured = capsys.readouterr()
    assert [json.loads(line) for line in captured.out.splitlines()] == [{"leases": 1}, {"leases": 2}]
    assert "shutting down (HTTP 503)" in captured.err


def test_a_stranger_on_the_port_is_named(endpoint: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    """An answer that is no JSON object does not end in a trace."""
    endpoint.scripts["/internal/status"] = answer_json(["x"])
    assert cli.run(["status", "--url", endpoint.url]) == 1
    assert "is it Kopir?" in capsys.readouterr().err


def test_request_shows_the_timeline(endpoint: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    """Facts, attempts, the timeline in milliseconds and the interruption are all there."""
    endpoint.scripts["/v1/requests/req-1"] = answer_json(JOURNAL)
    assert cli.run(["request", "req-1", "--url", endpoint.url]) == 0
    out = capsys.readouterr().out
    for words in ("interrupted", "yes", "12.3", "hand off 3.0 ms", "worker_exited", "Attempts", "Timeline", "admitted"):
        assert words in out
    assert "prefill-" in out and "41" in out
    assert cli.run(["request", "req-1", "--url", endpoint.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == JOURNAL


def test_an_unknown_request_is_an_error(endpoint: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    """404 comes through with its message."""
    error = {"error": {"message": "no such request", "param": None}}
    endpoint.scripts["/v1/requests/req-2"] = answer_json(error, status=404)
    assert cli.run(["request", "req-2", "--url", endpoint.url]) == 1
    assert capsys.readouterr().err == "kopir: error: no such request (HTTP 404)\n"
