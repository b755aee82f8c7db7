"""A cluster of Kopir, or another server, for the time of a bench: started, waited for, stopped."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.peers.tied import end_group, tied
from kvstore.errors import EnvironmentProblem

STOP_DEADLINE_S = 15.0
START_DEADLINE_S = 180.0
POLL_S = 0.05
MIB = 1 << 20
POOL_BLOCKS = 512


@dataclass(frozen=True, slots=True)
class Running:
    """A server that is ready. ``ready_s``: seconds from its start to the first moment at which it would answer."""

    url: str
    ready_s: float
    pid: int


@contextlib.contextmanager
def kopir_cluster(settings: Sequence[str] = ()) -> Iterator[Running]:
    """Runs ``kopir serve`` with small pools, and ``settings`` over them. Raises: EnvironmentProblem."""
    defaults = [
        "server.port=0",
        f"workers.prefill.pool_blocks={POOL_BLOCKS}",
        f"workers.decode.pool_blocks={POOL_BLOCKS}",
        f"workers.combined.pool_blocks={POOL_BLOCKS}",
        f"kv.host_bytes={512 * MIB}",
    ]
    command = [str(Path(sys.executable).with_name("kopir")), "serve"]
    for setting in (*defaults, *settings):
        command += ["--set", setting]
    started = time.monotonic()
    # A serve that loses its bench stops as for a Ctrl-C.
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=tied(signal.SIGINT)
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "Kopir is ready at" in line:
                url = line.split("ready at ")[1].split("/v1")[0]
                yield Running(url, time.monotonic() - started, process.pid)
                return
        raise EnvironmentProblem(f"kopir serve ended with {process.wait()}: {process.communicate()[1][-2000:]}")
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(STOP_DEADLINE_S)


@contextlib.contextmanager
def other_server(command: Sequence[str], variables: dict[str, str], health_path: str) -> Iterator[Running]:
    """Runs another server with ``--port N`` added; ready is when ``health_path`` answers 200.

    Raises: EnvironmentProblem when it ends, or is not ready within ``START_DEADLINE_S``.
    """
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    url, started = f"http://127.0.0.1:{port}", time.monotonic()
    process = subprocess.Popen(
        [*command, "--port", str(port)],
        env=variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        preexec_fn=tied(signal.SIGKILL),
    )
    try:
        while not _answers(url + health_path):
            if process.poll() is not None:
                raise EnvironmentProblem(f"{command[0]} ended with {process.returncode}")
            if time.monotonic() - started > START_DEADLINE_S:
                raise EnvironmentProblem(f"{command[0]} was not ready within {START_DEADLINE_S:.0f} s")
            time.sleep(POLL_S)
        yield Running(url, time.monotonic() - started, process.pid)
    finally:
        process.terminate()
        try:
            process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            end_group(process)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=1.0).status_code == 200
    except httpx.HTTPError:
        return False
