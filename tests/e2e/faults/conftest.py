"""Two prefill workers and one decode worker in the default number type, for tests that kill."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from ..cluster import Cluster
from ..conftest import RunCluster
from ..golden import Golden

CONFIG = {
    "max_model_len": 2048,
    "workers": {"prefill": {"replicas": 2, "pool_blocks": 192}, "decode": {"pool_blocks": 256}},
    "kv": {"host_bytes": "256MiB"},
}


@pytest.fixture(scope="package")
def prey(run_cluster: RunCluster) -> Iterator[Cluster]:
    """The cluster that gets killed at; the last test of the package ends it."""
    with run_cluster(CONFIG) as cluster:
        yield cluster


@pytest.fixture
def whole(prey: Cluster) -> Iterator[Cluster]:
    """The cluster with every worker up and at rest, before and after the test."""
    prey.wait_ready()
    prey.wait_idle()
    yield prey
    prey.wait_ready()
    prey.wait_idle()


@pytest.fixture
def client(prey: Cluster) -> Iterator[openai.OpenAI]:
    """The official client."""
    with prey.client() as client:
        yield client


@pytest.fixture(scope="package")
def golden_bf16(model_folder: Path) -> Golden:
    """Our engine in this process, in the default number type."""
    return Golden(model_folder, "bfloat16")
