"""``kopir store serve``: one store node as a process of its own, without Ray.

Owns the node's process and its run file. Life cycle: checks -> slab and disk -> listening -> ready line -> waits for a
signal -> closes what it opened. The run file (``store-<pid>.json`` beside those of ``kopir serve``) holds no secret.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from cluster import runfile
from cluster.config import Config
from cluster.secret import cluster_secret
from kvstore.errors import BadInput, EnvironmentProblem
from kvstore.net.host import new_incarnation
from kvstore.store.host import DiskPlan, StoreHost


class StoreRunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One running ``kopir store serve``."""

    host: str
    port: int
    pid: int
    start_ticks: int
    secret_file: str
    incarnation: str


def serve_store(
    config: Config, *, block_bytes: int, host: str, port: int, on_ready: Callable[[StoreRunInfo], None]
) -> int:
    """Serves until SIGINT or SIGTERM; returns 0. Raises: BadInput, EnvironmentProblem; nothing is left then."""
    if config.auth.cluster_secret_file is None:
        raise BadInput("auth.cluster_secret_file", None, "a store on its own needs a secret that its clients know too")
    secret = cluster_secret(config)
    num_blocks = config.kv.host_bytes // block_bytes
    if num_blocks < 1:
        raise BadInput("kv.host_bytes", config.kv.host_bytes, f"one block needs {block_bytes} bytes")
    disk = None
    if config.kv.disk_path is not None:
        disk = DiskPlan(Path(config.kv.disk_path).absolute(), config.kv.disk_bytes, config.kv.disk_sync)
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    incarnation = new_incarnation()
    node = StoreHost(
        node=f"standalone-{os.getpid()}",
        incarnation=incarnation,
        secret=secret,
        block_bytes=block_bytes,
        num_blocks=num_blocks,
        host_identity=config.kv.host_identity,
        disk=disk,
        eviction=config.kv.eviction,
    )
    try:
        address = node.start(host, port)
    except OSError as error:
        raise EnvironmentProblem(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    try:
        info = _write_run_file(*address, secret_file=config.auth.cluster_secret_file, incarnation=incarnation)
        on_ready(info)
        stopped.wait()
    finally:
        _run_file(os.getpid()).unlink(missing_ok=True)
        node.close()
    return 0


def find_store() -> StoreRunInfo | None:
    """Returns the newest running ``kopir store serve`` of this user. Files of dead ones are removed."""
    running = []
    for path in sorted(runfile.run_folder().glob("store-*.json")):
        try:
            info = msgspec.json.decode(path.read_bytes(), type=StoreRunInfo)
        except (OSError, msgspec.DecodeError):
            continue
        if runfile.start_ticks(info.pid) == info.start_ticks:
            running.append(info)
        else:
            path.unlink(missing_ok=True)
    return max(running, key=lambda info: info.start_ticks, default=None)


def _write_run_file(host: str, port: int, *, secret_file: str, incarnation: str) -> StoreRunInfo:
    pid = os.getpid()
    info = StoreRunInfo(
        host=host,
        port=port,
        pid=pid,
        start_ticks=runfile.start_ticks(pid) or 0,
        secret_file=str(Path(secret_file).absolute()),
        incarnation=incarnation,
    )
    path = _run_file(pid)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_bytes(msgspec.json.encode(info))
        partial.replace(path)
    except OSError as error:
        raise EnvironmentProblem(f"cannot write {path}: {error.strerror}") from error
    return info


def _run_file(pid: int) -> Path:
    return runfile.run_folder() / f"store-{pid}.json"
