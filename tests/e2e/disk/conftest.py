"""A pair whose host slab holds a few blocks only, above a disk: everything is evicted all the time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from ..cluster import Cluster, Place
from ..conftest import RunCluster

HOST_BLOCKS = 6
BLOCK_BYTES = 737_280
"""16 tokens in float32."""


def make_config(disk: Path | None, disk_bytes: int | str, *, host_blocks: int = HOST_BLOCKS) -> dict[str, Any]:
    # What the pools keep would be found before the tiers below them.
    kv: dict[str, Any] = {"host_bytes": host_blocks * BLOCK_BYTES, "device_cache": False}
    if disk is not None:
        kv |= {"disk_path": str(disk), "disk_bytes": disk_bytes}
    return {
        "dtype": "float32",
        "max_model_len": 1024,
        "workers": {"prefill": {"pool_blocks": 256}, "decode": {"pool_blocks": 512}},
        "kv": kv,
    }


@pytest.fixture(scope="package")
def disk_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="package")
def tiny(run_cluster: RunCluster, disk_folder: Path) -> Iterator[Cluster]:
    """One pair over a slab of six blocks and a disk of 256 MiB."""
    with run_cluster(make_config(disk_folder, "256MiB")) as cluster:
        yield cluster


@pytest.fixture
def client(tiny: Cluster) -> Iterator[openai.OpenAI]:
    with tiny.client() as client:
        yield client


@pytest.fixture
def place() -> Iterator[Place]:
    """Folders that outlive a cluster."""
    place = Place()
    yield place
    place.close()
