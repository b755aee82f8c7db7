"""One worker that does both, float32."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from ..cluster import Cluster
from ..conftest import RunCluster

CONFIG = {
    "dtype": "float32",
    "max_model_len": 1024,
    "workers": {
        "prefill": {"replicas": 0},
        "decode": {"replicas": 0},
        "combined": {"replicas": 1, "pool_blocks": 512, "chunk_tokens": 64},
    },
    "kv": {"host_bytes": "128MiB"},
}


@pytest.fixture(scope="package")
def combined(run_cluster: RunCluster) -> Iterator[Cluster]:
    """The cluster; idle at its end."""
    with run_cluster(CONFIG) as cluster:
        yield cluster
        cluster.wait_idle()


@pytest.fixture
def client(combined: Cluster) -> Iterator[openai.OpenAI]:
    """The official client."""
    with combined.client() as client:
        yield client
