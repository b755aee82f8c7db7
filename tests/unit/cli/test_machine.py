"""Probes of this machine, the refusal to start, and the findings of ``kopir doctor``."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import machine
from cluster.cli import doctor
from cluster.cli import main as cli
from cluster.config import load
from kvstore.errors import EnvironmentProblem

GIB = 1 << 30


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        yield server.getsockname()[1]


def test_a_taken_port_is_seen(taken_port: int) -> None:
    """Taken, free, any, an address that is not ours, a name that is none."""
    assert machine.port_error("127.0.0.1", taken_port) == "Address already in use"
    assert machine.port_error("127.0.0.1", 0) is None
    assert machine.port_error("192.0.2.1", 0) is not None
    assert machine.port_error("no.such.host.invalid", 0) is not None


def test_cross_memory_attach_is_tried_for_real() -> None:
    """Either the bytes arrive, or the system's reason is given."""
    reason = machine.cma_error()
    assert reason is None or reason.startswith("E")


def test_facts_are_plausible() -> None:
    """Totals are positive and not below what is free."""
    total, available = machine.memory_bytes()
    assert 0 < available <= total
    shared_total, shared_free = machine.shared_memory_bytes()
    assert 0 <= shared_free <= shared_total
    assert machine.shared_memory_bytes(Path("/no/such/place")) == (0, 0)
    assert machine.usable_cores() >= 1


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1000, "1000 bytes"),
        (1024, "1 KiB"),
        (3 * GIB, "3 GiB"),
        (3 * GIB + 7, "3 GiB"),
        (1500, "1.5 KiB"),
    ],
)
def test_sizes_for_people(size: int, text: str) -> None:
    """The largest unit that leaves at least 1, one decimal at most."""
    assert machine.readable_bytes(size) == text


def test_preflight_refuses_with_advice(taken_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Port, shared memory and memory: one line each that says what to do."""
    free = load(values={"server.port": 0})
    machine.preflight(load(values={"server.port": 0, "kv.host_bytes": 4096}))
    with pytest.raises(EnvironmentProblem, match=rf"cannot listen on 127.0.0.1:{taken_port}: Address.*--port"):
        machine.preflight(load(values={"server.port": taken_port}))
    monkeypatch.setattr(machine, "shared_memory_bytes", lambda: (2 * GIB, GIB // 2))
    with pytest.raises(EnvironmentProblem, match=r"512 MiB free of 2 GiB, but kv\.host_bytes asks for 1 GiB; lower"):
        machine.preflight(free)
    monkeypatch.setattr(machine, "shared_memory_bytes", lambda: (2 * GIB, 2 * GIB))
    monkeypatch.setattr(machine, "memory_bytes", lambda: (4 * GIB, 2 * GIB))
    machine.preflight(free)
    with pytest.raises(EnvironmentProblem, match=r"not enough memory: .* needed .* 2 GiB available; lower workers"):
        machine.preflight(free, block_bytes=368_640, weight_bytes=270 << 20)


def test_needed_memory_counts_every_worker() -> None:
    """Pools and weights per worker, one slab."""
    config = load(
        None, ["workers.prefill.replicas=2", "workers.prefill.pool_blocks=10", "workers.decode.pool_blocks=20"]
    )
    assert machine.needed_bytes(config, block_bytes=100, weight_bytes=7) == 2 * (1000 + 7) + (2000 + 7) + GIB


@pytest.mark.parametrize(
    ("finding", "status", "words"),
    [
        (doctor.check_python((3, 11)), "ok", ""),
        (doctor.check_python((3, 14)), "fail", "3.11, 3.12 or 3.13"),
        (doctor.check_memory((24 * GIB, 20 * GIB), 2), "ok", ""),
        (doctor.check_memory((4 * GIB, 2 * GIB), 2), "warn", "pool_blocks"),
        (doctor.check_shared_memory((64 << 20, 64 << 20), GIB), "fail", "--shm-size"),
        (doctor.check_shared_memory((2 * GIB, 2 * GIB), GIB), "ok", ""),
        (doctor.check_cma(None, 1), "ok", ""),
        (doctor.check_cma("EPERM: x", 1), "warn", "ptrace_scope=0"),
        (doctor.check_cma("EPERM: x", None), "warn", "SYS_PTRACE"),
        (doctor.check_memlock(None, True), "ok", ""),
        (doctor.check_memlock(8 << 20, False), "ok", ""),
        (doctor.check_memlock(8 << 20, True), "warn", "ulimit -l"),
        (doctor.check_port("h", 8, None, []), "ok", ""),
        (doctor.check_port("h", 8, "in use", ["http://h:8"]), "ok", ""),
        (doctor.check_port("h", 8, "in use", ["http://h:18"]), "fail", "--port"),
        (doctor.check_ray_token("local", {}, Path("/none")), "ok", ""),
        (doctor.check_ray_token("local", {"RAY_AUTH_MODE": "disabled"}, Path("/none")), "warn", "unset RAY_AUTH_MODE"),
        (doctor.check_ray_token("h:1", {}, Path("/none")), "warn", "RAY_AUTH_MODE=token"),
        (doctor.check_ray_token("h:1", {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "t"}, Path("/none")), "ok", ""),
        (doctor.check_gpu(None, [], "2.13.0+cpu"), "ok", ""),
        (doctor.check_gpu(None, [], None), "fail", "make setup"),
        (doctor.check_gpu("580.1", ["H200"], "2.13.0+cpu"), "warn", "make setup"),
        (doctor.check_gpu("470.1", ["T4"], "2.13.0"), "warn", "525"),
        (doctor.check_gpu("580.1", ["H200"], "2.13.0"), "ok", ""),
        (doctor.check_ucx((), "no ucxx"), "fail", "make setup"),
        (doctor.check_ucx(("self", "posix"), ""), "fail", "UCX_TLS"),
        (doctor.check_ucx(("tcp", "self"), ""), "warn", "CMA"),
        (doctor.check_ucx(("tcp", "posix", "cma"), ""), "ok", ""),
        (doctor.check_native_decoder(None), "ok", ""),
        (doctor.check_native_decoder("no C++ compiler in PATH"), "warn", "torch"),
        (doctor.check_model("m", ["m"]), "ok", ""),
        (doctor.check_model("m", []), "warn", "kopir model pull m"),
    ],
)
def test_findings(finding: doctor.Finding, status: str, words: str) -> None:
    """Each check says ok, warn or fail, and what to do unless it is ok."""
    assert finding.status == status
    assert words in finding.advice
    assert bool(finding.advice) == (status != "ok")


def test_doctor_fails_when_a_check_fails(
    taken_port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Exit status 1 with a failing check, 0 without; --json says the same."""
    monkeypatch.setattr(doctor, "_cached_models", list)
    monkeypatch.setattr(machine, "ucx_transports", lambda: (("tcp", "posix", "cma"), ""))
    file = tmp_path / "kopir.yaml"
    file.write_text(f"server: {{port: {taken_port}}}\nkv: {{host_bytes: 4096}}\n")
    assert cli.run(["doctor", "--config", str(file), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False
    assert [check["check"] for check in document["checks"] if check["status"] == "fail"] == ["port"]
    file.write_text("server: {port: 0}\nkv: {host_bytes: 4096}\n")
    assert cli.run(["doctor", "--config", str(file)]) == 0
    assert "0 fail" in capsys.readouterr().out
