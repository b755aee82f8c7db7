"""What every end-to-end test shares: clusters that end clean, and the answers that are right."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from .cluster import Cluster, Place
from .golden import Golden, Reference

RunCluster = Callable[[Mapping[str, Any]], contextlib.AbstractContextManager[Cluster]]


TINY_HOST_BYTES = 8 * 737_280
"""Eight blocks of the packaged model in float32, sixteen in bfloat16."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--store``: the same tests over another store than they ask for."""
    parser.addoption(
        "--store",
        choices=("asked", "tiny", "full-disk"),
        default="asked",
        help="tiny: a slab of a few blocks above a disk; full-disk: a disk tier on a file system without room",
    )


@pytest.fixture(scope="session")
def store_settings(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    """What ``--store`` lays over the section ``kv`` of every cluster."""
    kind = request.config.getoption("--store", default="asked")
    if kind == "asked":
        yield {}
        return
    folder = tmp_path_factory.mktemp("store")
    if kind == "tiny":
        below = {"host_bytes": TINY_HOST_BYTES, "disk_path": str(folder), "disk_bytes": "512MiB"}
        yield below | {"device_cache": False}
        return
    with mounted_tmpfs(folder, "1m"):
        yield {"disk_path": str(folder), "disk_bytes": "512MiB", "device_cache": False}


@contextlib.contextmanager
def mounted_tmpfs(folder: Path, size: str) -> Iterator[None]:
    """Mounts a small file system for a with block; skips the test where that is not permitted."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, timeout=20)
    except FileNotFoundError:
        pytest.skip("no mount program here")
    if done.returncode != 0:
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=20)


@pytest.fixture(scope="session")
def run_cluster(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory, store_settings: dict[str, Any]
) -> RunCluster:
    """Returns ``run(config)``: a cluster for a with block, stopped and checked at its end.

    The logs of all its processes stay in pytest's folder of temporary files (``cluster-logs*``).
    """

    @contextlib.contextmanager
    def run(config: Mapping[str, Any]) -> Iterator[Cluster]:
        place = Place()
        try:
            cluster = Cluster(place, {**config, "kv": {**config.get("kv", {}), **store_settings}})
            try:
                yield cluster
            except BaseException:
                cluster.kill()
                raise
            if cluster.process.poll() is None or place.processes():
                cluster.stop()
        finally:
            place.keep_logs(tmp_path_factory.mktemp("cluster-logs"))
            place.close()

    return run


@pytest.fixture(scope="session")
def golden(model_folder: Path) -> Golden:
    """Our engine in this process, float32."""
    return Golden(model_folder, "float32")


@pytest.fixture(scope="session")
def reference(model_folder: Path) -> Reference:
    """Transformers in this process, float32."""
    return Reference(model_folder)
