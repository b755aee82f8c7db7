"""What every end-to-end test shares: clusters that end clean, and the answers that are right."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from .cluster import Cluster, Place
from .golden import Golden, Reference

RunCluster = Callable[[Mapping[str, Any]], contextlib.AbstractContextManager[Cluster]]


@pytest.fixture(scope="session")
def run_cluster(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> RunCluster:
    """Returns ``run(config)``: a cluster for a with block, stopped and checked at its end.

    The logs of all its processes stay in pytest's folder of temporary files (``cluster-logs*``).
    """

    @contextlib.contextmanager
    def run(config: Mapping[str, Any]) -> Iterator[Cluster]:
        place = Place()
        try:
            cluster = Cluster(place, config)
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
