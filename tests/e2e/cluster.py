"""One ``kopir serve`` in a process of its own, as a user runs it, and everything that is its own.

Owns the process, its folders (run file, Ray's files, log) and the mark by which every process that it starts can be
found again. Life cycle: ``start`` -> ready -> requests, kills -> ``stop``, which asserts that nothing is left.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import yaml

READY_DEADLINE_S = 90.0
STOP_DEADLINE_S = 5.0
POLL_S = 0.02
MARK = "KOPIR_TEST_CLUSTER"
SHARED_MEMORY = Path("/dev/shm")
KOPIR = Path(sys.executable).with_name("kopir")
MODEL = "smollm2-135m-instruct"

Status = dict[str, Any]

_OBJECT_STORE = """
import json, sys
from ray._private import internal_api
state = internal_api.get_state_from_address(sys.argv[1])
node = next(node for node in state.node_table() if node["Alive"])
stats = internal_api.node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], False).store_stats
print(json.dumps([stats.cumulative_created_objects, stats.cumulative_created_bytes]))
"""


@dataclass(frozen=True)
class ObjectStore:
    """Everything that was ever put into Ray's object store: it never goes down, so nothing passes unseen."""

    created_objects: int
    created_bytes: int


class Place:
    """Folders, token and mark of one cluster. Removed by ``close``."""

    def __init__(self) -> None:
        # Not pytest's own folder: Ray puts Unix sockets there, whose paths must stay short.
        self.folder = Path(tempfile.mkdtemp(prefix="kt-"))
        self.mark = secrets.token_hex(16)
        self.log = self.folder / "serve.log"
        runtime = self.folder / "run"
        runtime.mkdir(mode=0o700)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "KOPIR_"))}
        self.environment = kept | {
            "TMPDIR": str(self.folder),
            "XDG_RUNTIME_DIR": str(runtime),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            MARK: self.mark,
        }

    def write_config(self, config: Mapping[str, Any]) -> Path:
        """Writes a configuration file and returns its path."""
        path = self.folder / "kopir.yaml"
        ledger = {"ledger": {"url": f"sqlite:///{self.folder / 'kopir.db'}"}}
        path.write_text(yaml.safe_dump(ledger | dict(config)), encoding="utf-8")
        return path

    def processes(self) -> dict[int, str]:
        """Returns {pid: command line} of every process that was started from here and is not a zombie."""
        found: dict[int, str] = {}
        needles = (f"{MARK}={self.mark}".encode(), str(self.folder).encode())
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                text = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX" and any(needle in text for needle in needles):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
            except (OSError, IndexError):
                continue  # It ended while we looked.
        return found

    def keep_logs(self, folder: Path) -> None:
        """Copies the log of the serve and those of its processes, for whoever has to find out what happened."""
        shutil.copy(self.log, folder)
        for path in self.folder.glob("kopir-ray-*/session_2*/logs"):
            shutil.copytree(path, folder / path.parent.name, dirs_exist_ok=True, ignore_dangling_symlinks=True)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def abandoned_files() -> set[str]:
    """Returns the names of Kopir's files in shared memory whose owner, who keeps them locked, is gone."""
    names = set()
    for path in SHARED_MEMORY.glob("kopir*"):
        try:
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            names.add(path.name)
        except (BlockingIOError, FileNotFoundError):
            continue  # It belongs to somebody who lives, or it went away just now.
    return names


def free_port() -> int:
    """Returns a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def poll_until(check: Callable[[], Any], *, deadline_s: float, what: str) -> Any:
    """Calls ``check`` until it returns something true, and returns that. Fails when the deadline passes."""
    pause = threading.Event()
    end_s = time.monotonic() + deadline_s
    while True:
        found = check()
        if found:
            return found
        assert time.monotonic() < end_s, f"not within {deadline_s} s: {what}"
        pause.wait(POLL_S)


class Cluster:
    """A running ``kopir serve``."""

    def __init__(self, place: Place, config: Mapping[str, Any], *, port: int | None = None) -> None:
        self.place = place
        self.port = port or free_port()
        server = dict(config.get("server", {}))
        self.certificate: str | None = server.get("tls_cert_file")
        self.url = f"{'http' if self.certificate is None else 'https'}://127.0.0.1:{self.port}"
        self._abandoned_before = abandoned_files()
        path = place.write_config({**config, "server": {**server, "port": self.port}})
        self.verify: Any = True if self.certificate is None else ssl.create_default_context(cafile=self.certificate)
        self.http = httpx.Client(base_url=self.url, timeout=60, verify=self.verify)
        self.large_body_bytes = 0
        """Request bodies beyond Ray's limit for inline messages: Serve's proxy hands them over by the object store."""
        started_s = time.monotonic()
        self._log_start = place.log.stat().st_size if place.log.exists() else 0
        with place.log.open("ab") as log:
            self.process = subprocess.Popen(
                [KOPIR, "--debug", "serve", "--config", path],
                env=place.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            poll_until(self._is_ready, deadline_s=READY_DEADLINE_S, what="kopir serve says that it is ready")
        except AssertionError as error:
            self.kill()
            raise AssertionError(f"{error}\n{self.log_tail()}") from None
        self.seconds_to_ready = time.monotonic() - started_s

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, f"kopir serve ended with {self.process.returncode}"
        return f"Kopir is ready at {self.url}/v1" in self._log()

    # --- asking -----------------------------------------------------------------------------------------------

    def client(self) -> openai.OpenAI:
        """Returns the official client; it repeats nothing by itself."""
        http = None if self.certificate is None else openai.DefaultHttpxClient(verify=self.verify)
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=60, http_client=http)

    def status(self) -> Status:
        """Returns what ``kopir status --json`` shows."""
        answer = self.http.get("/internal/status")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def record(self, request_id: str) -> dict[str, Any]:
        """Returns the journal of one request."""
        answer = self.http.get(f"/v1/requests/{request_id}")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def workers(self) -> dict[str, dict[str, Any]]:
        """Returns the workers' entries of the status by worker id."""
        return {worker["id"]: worker for worker in self.status()["workers"]}

    def pids(self) -> dict[str, int]:
        """Returns the process of each part: workers, store nodes, ingresses, controller."""
        status = self.status()
        parts = {worker["id"]: worker["pid"] for worker in status["workers"]}
        parts |= {f"store-{node['node']}": node["pid"] for node in status["store"]}
        parts |= {f"ingress-{index}": ingress["pid"] for index, ingress in enumerate(status["ingress"])}
        return parts | {"controller": status["controller"]["pid"]}

    def metric(self, name: str) -> float:
        """Returns the sum of a metric of the ingress over its labels."""
        lines = self.http.get("/metrics").text.splitlines()
        values = [float(line.rpartition(" ")[2]) for line in lines if line.split("{")[0].split(" ")[0] == name]
        assert values, f"no metric {name}"
        return sum(values)

    def stored_blocks(self) -> int:
        """Returns how many blocks the store holds."""
        return sum(tier["used_blocks"] for node in self.status()["store"] for tier in node["tiers"])

    def object_store(self) -> ObjectStore:
        """Asks the raylet what was ever put into Ray's object store."""
        run_file = next((self.place.folder / "run" / "kopir").glob("run-*.json"))
        address = json.loads(run_file.read_text())["ray_address"]
        command = [sys.executable, "-c", _OBJECT_STORE, address]
        # Not in our folder's environment mark: this process is no part of the cluster.
        environment = {name: value for name, value in self.place.environment.items() if name != MARK}
        answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert answer.returncode == 0, answer.stderr
        return ObjectStore(*json.loads(answer.stdout.splitlines()[-1]))

    def kopir(self, *arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Runs a command of the command line beside the running cluster."""
        command = [KOPIR, *arguments]
        environment = {name: value for name, value in self.place.environment.items() if name != MARK}
        return subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s
        )

    # --- waiting ----------------------------------------------------------------------------------------------

    def wait_idle(self, deadline_s: float = 10.0) -> Status:
        """Waits until nothing runs and every pool block is free; returns that status."""
        last: list[str] = []

        def idle() -> Status | None:
            status = self.status()
            last[:] = busy(status)
            return None if last else status

        try:
            return dict(poll_until(idle, deadline_s=deadline_s, what="everything is idle"))
        except AssertionError as error:
            raise AssertionError(f"{error}: {'; '.join(last)}") from None

    def wait_ready(self, deadline_s: float = 40.0) -> dict[str, dict[str, Any]]:
        """Waits until every worker is ready and answers; returns the workers."""

        def ready() -> dict[str, dict[str, Any]] | None:
            workers = self.workers()
            is_up = all(w["state"] == "ready" and w["used_blocks"] is not None for w in workers.values())
            return workers if is_up else None

        return dict(poll_until(ready, deadline_s=deadline_s, what="all workers are ready"))

    def wait_stored(self, above: int, deadline_s: float = 10.0) -> int:
        """Waits until the store holds more blocks than ``above`` and nothing is being copied."""
        self.wait_idle(deadline_s)
        return int(
            poll_until(
                lambda: count if (count := self.stored_blocks()) > above else 0,
                deadline_s=deadline_s,
                what=f"more than {above} blocks are stored",
            )
        )

    # --- the end ----------------------------------------------------------------------------------------------

    def stop(self, number: int = signal.SIGTERM) -> float:
        """Stops the cluster by a signal; asserts that it ends well, in time and leaves nothing. Returns seconds."""
        started_s = time.monotonic()
        self.process.send_signal(number)
        try:
            code = self.process.wait(STOP_DEADLINE_S)
            left_s = STOP_DEADLINE_S - (time.monotonic() - started_s)
            poll_until(lambda: not self.place.processes(), deadline_s=max(0.0, left_s), what="every process is gone")
        except (AssertionError, subprocess.TimeoutExpired) as error:
            left = self.place.processes()
            self.kill()
            raise AssertionError(f"{error}; left: {left}\n{self.log_tail()}") from None
        finally:
            self.http.close()
        seconds = time.monotonic() - started_s
        assert code == 0, f"kopir serve ended with {code}\n{self.log_tail()}"
        left_files = abandoned_files() - self._abandoned_before
        assert not left_files, f"left in shared memory: {left_files}"
        assert not list((self.place.folder / "run" / "kopir").glob("*.json")), "a run file is left"
        return seconds

    def kill(self) -> None:
        """Ends everything at once; only for a cluster that failed its test."""
        for pid in self.place.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.kill()
        self.process.wait(STOP_DEADLINE_S)
        self.http.close()
        for name in abandoned_files() - self._abandoned_before:
            (SHARED_MEMORY / name).unlink(missing_ok=True)

    def log_tail(self, num_chars: int = 4000) -> str:
        """Returns the end of what ``kopir serve`` wrote."""
        return self._log()[-num_chars:]

    def _log(self) -> str:
        return self.place.log.read_bytes()[self._log_start :].decode(errors="replace")


def busy(status: Status) -> list[str]:
    """Returns what is not at rest; empty when all pool blocks are free and nothing runs."""
    notes = [f"stream {stream}" for stream in status["streams"]]
    for worker in status["workers"]:
        for name in ("used_blocks", "quarantined_blocks", "running", "waiting", "leases"):
            if worker.get(name) != 0:
                notes.append(f"{worker['id']} {name}={worker.get(name)}")
    for node in status["store"]:
        notes += [f"store {name}={node[name]}" for name in ("writing", "pinned", "quarantined") if node[name]]
    return notes
