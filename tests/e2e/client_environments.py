"""Environments of other people's clients: made on demand by ``scripts/clients.sh``, apart from the product's.

A test is skipped in one case only, that the package index cannot be reached; everything else that goes wrong fails it.
"""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SET_UP_DEADLINE_S = 600.0
UNREACHABLE = 75
FOLDERS = {"libraries": ".venv-clients", "load": ".venv-load"}


@functools.cache
def programs_of(kind: str) -> Path:
    """Returns the folder of the programs of an environment, ``libraries`` or ``load``, made where it is not there."""
    done = subprocess.run(
        ["bash", ROOT / "scripts" / "clients.sh", kind],
        capture_output=True,
        text=True,
        timeout=SET_UP_DEADLINE_S,
        check=False,
    )
    if done.returncode == UNREACHABLE:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr[-4000:]
    return ROOT / FOLDERS[kind] / "bin"


def foreign_environment() -> dict[str, str]:
    """Returns the variables for a program that must not see our packages."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
