"""One prefill and one decode worker in float32, for every test of this package."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from ..cluster import Cluster
from ..conftest import RunCluster

CONFIG = {
    "dtype": "float32",
    "max_model_len": 1024,
    "workers": {"prefill": {"pool_blocks": 512}, "decode": {"pool_blocks": 1024}},
    "kv": {"host_bytes": "512MiB"},
}
OBJECTS_MAX = 8
"""Serve itself may store a few small objects of its own; a single KV block would be beyond ``OBJECT_BYTES_MAX``."""
OBJECT_BYTES_MAX = 256 * 1024


@pytest.fixture(scope="package")
def pair(run_cluster: RunCluster) -> Iterator[Cluster]:
    """The cluster. At its end: everything idle, the same processes, nothing went through Ray's object store."""
    with run_cluster(CONFIG) as cluster:
        before = cluster.object_store()
        pids = cluster.pids()
        yield cluster
        cluster.wait_idle()
        assert cluster.pids() == pids, "a process was replaced"
        after = cluster.object_store()
        created_bytes = after.created_bytes - before.created_bytes - cluster.large_body_bytes
        assert created_bytes <= OBJECT_BYTES_MAX, (before, after, cluster.large_body_bytes)
        assert after.created_objects - before.created_objects <= OBJECTS_MAX, (before, after)


@pytest.fixture
def client(pair: Cluster) -> Iterator[openai.OpenAI]:
    """The official client."""
    with pair.client() as client:
        yield client
