"""Fixtures of the component tests: a tiny model once, clusters that are closed at the end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from mini_cluster import MiniCluster, write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of three layers."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
async def make_cluster(tiny_model: Path) -> AsyncIterator[Callable[..., MiniCluster]]:
    """Returns ``make(**settings)``; whatever was started is closed at the end."""
    clusters: list[MiniCluster] = []

    def make(**settings: Any) -> MiniCluster:
        clusters.append(MiniCluster(tiny_model, **settings))
        return clusters[-1]

    yield make
    for cluster in clusters:
        await cluster.close()
