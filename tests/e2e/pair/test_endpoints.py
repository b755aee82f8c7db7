"""Everything beside generation: probes, metrics, journal, command line, and the ports behind the endpoint."""

from __future__ import annotations

import json
import os
import pickle
import socket
import struct
from pathlib import Path

import grpc
import openai
import psutil
import pytest
from ray.serve.generated.serve_pb2 import ASGIRequest

from ..asking import ask
from ..cluster import MODEL, Cluster, poll_until
from ..golden import Golden, make_prompt

REFUSAL_DEADLINE_S = 1.0
REPLICA_METHOD = "/ray.serve.ASGIService/HandleRequest"
QUESTION = "What is the capital of France?"


def test_probes_and_metrics(pair: Cluster, client: openai.OpenAI) -> None:
    """Alive, ready, and counters that count: tokens generated = delivered + discarded."""
    assert pair.http.get("/healthz").json() == {"status": "ok"}
    ready = pair.http.get("/readyz")
    assert ready.status_code == 200 and ready.json()["status"] == "ready"
    names = ("kopir_requests_total", "kopir_delivered_tokens_total", "kopir_time_to_first_delta_seconds_count")
    ask(client, prompt=make_prompt(60, 10), max_tokens=1)  # A counter with labels appears when it first counts.
    pair.wait_idle()
    before = [pair.metric(name) for name in names]
    ask(client, prompt=make_prompt(60, 10), max_tokens=5)
    pair.wait_idle()
    after = [pair.metric(name) for name in names]
    assert [new - old for new, old in zip(after, before, strict=True)] == [1, 5, 1]
    generated = pair.metric("kopir_accounted_generated_tokens_total")
    assert generated >= pair.metric("kopir_accounted_delivered_tokens_total")


def test_journal_of_a_request(pair: Cluster, client: openai.OpenAI) -> None:
    """Phases, the attempt with both workers, what was delivered."""
    answer = ask(client, prompt=make_prompt(61, 30), max_tokens=6, stream=True)
    pair.wait_idle()
    record = pair.record(answer.request_id)
    assert record["phase"] == "finished" and record["first_delta_sent"] and record["interruption"] is None
    assert record["delivered_output_tokens"] == 6 and record["prompt_tokens"] == 30
    (attempt,) = record["attempts"]
    assert attempt["end_reason"] == "length" and attempt["fenced"]
    assert attempt["received_tokens"] == attempt["generated_tokens"] == 6
    assert attempt["prefill"]["worker_id"] == "prefill-0" and attempt["decode"]["worker_id"] == "decode-0"
    moments = [event["at_ns"] for event in record["events"]]
    assert moments == sorted(moments)


def test_blocks_moved_over_the_transport(pair: Cluster, client: openai.OpenAI) -> None:
    """Every block of a prompt goes from prefill to decode over UCX, verified, and none fails."""
    before = pair.workers()
    ask(client, prompt=make_prompt(59, 70), max_tokens=2)
    pair.wait_idle()
    after = pair.workers()
    received = [workers["decode-0"]["counters"]["ucx_received_blocks"] for workers in (before, after)]
    sent = [workers["prefill-0"]["counters"]["ucx_sent_blocks"] for workers in (before, after)]
    assert received[1] - received[0] == sent[1] - sent[0] == 5
    assert after["decode-0"]["counters"]["blocks_corrupt"] == after["decode-0"]["counters"]["blocks_failed"] == 0


def test_command_line(pair: Cluster, client: openai.OpenAI, golden: Golden) -> None:
    """``status``, ``request``, ``doctor`` and ``chat`` find the cluster by themselves."""
    status = pair.kopir("status", "--json")
    assert status.returncode == 0, status.stderr
    assert {worker["id"] for worker in json.loads(status.stdout)["workers"]} == {"prefill-0", "decode-0"}
    assert "prefill-0" in pair.kopir("status").stdout

    answer = ask(client, prompt=make_prompt(63, 10), max_tokens=2)
    request = pair.kopir("request", answer.request_id, "--json")
    assert request.returncode == 0, request.stderr
    assert json.loads(request.stdout)["request_id"] == answer.request_id
    assert pair.kopir("request", answer.request_id).returncode == 0
    unknown = pair.kopir("request", "req-unknown")
    assert unknown.returncode != 0 and len(unknown.stderr.splitlines()) == 1

    doctor = pair.kopir("doctor", "--json")
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
    assert json.loads(doctor.stdout)["ok"] is True

    chat = pair.kopir("chat", "--message", QUESTION, "--max-tokens", "40", "--temperature", "0")
    assert chat.returncode == 0, chat.stderr
    expected = golden.run(golden.chat_prompt([{"role": "user", "content": QUESTION}]), 40)
    assert chat.stdout.strip() == expected.text


class Marker:
    """Unpickling this makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


def own_ports(pid: int) -> set[int]:
    """Returns the ports on which a process listens on loopback; Ray's own listen on every interface."""
    connections = psutil.Process(pid).net_connections(kind="tcp")
    return {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.ip == "127.0.0.1"}


@pytest.mark.parametrize("part", ["decode-0", "store-node-0", "ingress-0"])
def test_f60_noise_at_our_ports_is_refused_and_counted(
    pair: Cluster, client: openai.OpenAI, golden: Golden, tmp_path: Path, part: str
) -> None:
    """Noise, a pickle, a frame of 2^63-1 bytes, a frame of the wrong kind: closed, counted, nothing runs or grows."""
    marker = tmp_path / "marker"
    wrong = b"\x82\xa1t\xa5Hello\xa5proof\xc4\x20" + bytes(32)
    noises = [
        os.urandom(1024),
        pickle.dumps(Marker(marker)),
        struct.pack("<Q", 2**63 - 1) + b"x" * 16,
        struct.pack("<I", len(wrong)) + wrong,
    ]
    process = psutil.Process(pair.pids()[part])
    ports = own_ports(process.pid)
    assert ports
    rss_before = process.memory_info().rss
    rejected_before = rejected(pair, part)
    for port in ports:
        for noise in noises:
            assert refuses(port, noise)
    poll_until(
        lambda: rejected(pair, part) - rejected_before >= len(noises) * len(ports),
        deadline_s=10,
        what=f"{part} counts its refusals",
    )
    assert not marker.exists()
    assert process.is_running() and process.memory_info().rss - rss_before < 32 << 20
    assert pair.pids()[part] == process.pid
    prompt = make_prompt(64, 20)
    assert ask(client, prompt=prompt, max_tokens=2).text == golden.run(prompt, 2).text


def rejected(pair: Cluster, part: str) -> int:
    """Returns how many connections a part has refused."""
    if part == "ingress-0":
        return int(pair.metric("kopir_rejected_connections"))
    if part == "store-node-0":
        return int(pair.status()["store"][0]["counters"]["rejected_connections"])
    return int(pair.workers()[part]["counters"]["rejected_connections"])


def refuses(port: int, noise: bytes) -> bool:
    """Sends noise; returns whether the other side closed, cleanly or by a reset."""
    with socket.create_connection(("127.0.0.1", port), timeout=REFUSAL_DEADLINE_S) as connection:
        try:
            connection.sendall(noise)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass
        except TimeoutError:
            return False
        except (ConnectionResetError, BrokenPipeError):
            pass
        return True


def test_f60_nothing_of_ours_listens_beyond_loopback(pair: Cluster) -> None:
    """Listeners on a named address are ours (Ray's take every address): loopback only, and none where none is due."""
    assert own_ports(pair.pids()["prefill-0"]) == set(), "it dials; nobody dials it"
    for part in ("decode-0", "prefill-0", "store-node-0", "ingress-0"):
        connections = psutil.Process(pair.pids()[part]).net_connections(kind="tcp")
        addresses = {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}
        assert addresses <= {"127.0.0.1", "::1", "::", "0.0.0.0"}, (part, addresses)


def call_replica(port: int, payload: bytes, metadata: list[tuple[str, str]]) -> grpc.StatusCode:
    """Calls Serve's own method at a port as its proxy does; returns the error that comes back."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        handle = channel.unary_unary(REPLICA_METHOD, request_serializer=ASGIRequest.SerializeToString)
        try:
            handle(ASGIRequest(pickled_request_metadata=payload), metadata=metadata, timeout=10)
        except grpc.RpcError as error:
            return error.code()  # type: ignore[no-any-return, attr-defined]
    raise AssertionError("a pickle of a marker is no request")


def test_f60_serve_asks_for_the_token_before_it_unpickles(pair: Cluster, tmp_path: Path) -> None:
    """A replica's port for the proxy is on every interface and takes pickles: only from who has Ray's token."""
    connections = psutil.Process(pair.pids()["ingress-0"]).net_connections(kind="tcp")
    wide = {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.ip in ("::", "0.0.0.0")}
    token = pair.place.environment["RAY_AUTH_TOKEN"]
    known, unknown = tmp_path / "known", tmp_path / "unknown"
    payload = pickle.dumps(Marker(unknown))
    wrong = token.translate(str.maketrans("0123456789abcdef", "123456789abcdef0"))
    refusals = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED)  # The latter by Ray's own port.
    for metadata in ([], [("authorization", f"Bearer {wrong}")]):
        codes = [call_replica(port, payload, metadata) for port in wide]
        assert grpc.StatusCode.UNAUTHENTICATED in codes and set(codes) <= set(refusals), codes
    assert not unknown.exists()
    # With the token one of them unpickles: without this, the test could not tell a refusal from a port that is none.
    for port in wide:
        call_replica(port, pickle.dumps(Marker(known)), [("authorization", f"Bearer {token}")])
    assert known.exists()


def test_served_model_is_listed(pair: Cluster) -> None:
    """``GET /v1/models`` in OpenAI's shape."""
    (model,) = pair.http.get("/v1/models").json()["data"]
    assert model["id"] == MODEL and model["object"] == "model" and model["max_model_len"] == 1024
