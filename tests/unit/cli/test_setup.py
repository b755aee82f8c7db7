"""The set-up script: what it refuses, and how it tells a CUDA build of torch from a CPU build."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
SOURCES = ["pyproject.toml", "constraints.txt", "constraints-cuda12.txt", "constraints-cuda13.txt", "scripts/setup.sh"]


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("names", "needs"),
    [
        (["torch", "nvidia-cublas", "triton"], True),
        (["torch", "NVIDIA-cudnn-cu13"], True),
        (["torch", "nvidia-ml-py"], False),
        (["torch", "numpy"], False),
        ([], False),
    ],
)
def test_cuda_wheels_are_seen_in_a_pip_report(names: list[str], needs: bool) -> None:
    """Only NVIDIA's run-time libraries count."""
    report = {"install": [{"metadata": {"name": name}} for name in names]}
    assert load_script("needs_cuda_wheels").needs_cuda_wheels(report) is needs


def set_up(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a copy of the script in ``folder``."""
    (folder / "scripts").mkdir()
    for source in SOURCES:
        shutil.copy(ROOT / source, folder / source)
    arguments = ["bash", "scripts/setup.sh"]
    return subprocess.run(
        arguments, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"PYTHON": "/no/such/python"}, "no Python 3.11 to 3.13 found; install one"),
        ({"PYTHON": "false"}, "no Python 3.11 to 3.13 found"),
        ({"KOPIR_ACCELERATOR": "tpu"}, "KOPIR_ACCELERATOR must be cpu, cuda12 or cuda13, not tpu"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_made(
    tmp_path: Path, environment: dict[str, str], message: str
) -> None:
    """One line that says what to do; no half-made environment stays behind."""
    done = set_up(tmp_path, **environment)
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stderr.count("error:") == 1
    assert not (tmp_path / ".venv").exists()


def test_python_without_venv_is_named(tmp_path: Path) -> None:
    """Debian's python3 without python3-venv is common; the package to install is named."""
    fake = tmp_path / "python"
    # Says yes to the version check and no to the import of venv.
    fake.write_text('#!/bin/sh\ncase "$2" in *ensurepip*) exit 1;; *) exit 0;; esac\n')
    fake.chmod(0o755)
    done = set_up(tmp_path, PYTHON=str(fake))
    assert done.returncode == 1
    assert "apt install python3-venv" in done.stderr


def test_every_constraint_is_one_exact_pin() -> None:
    """No local version, no range, no name twice, and CUDA-specific pins stay out of the common file."""
    pins: list[str] = []
    for name in ("constraints.txt", "constraints-cuda12.txt"):
        lines = (ROOT / name).read_text().splitlines()
        pins.extend(line for line in lines if line and not line.startswith("#"))
    assert all(pin.count("==") == 1 and "+" not in pin and ";" not in pin for pin in pins)
    names = [pin.split("==")[0].lower().replace("_", "-") for pin in pins]
    assert sorted(names) == sorted(set(names))
    common = (ROOT / "constraints.txt").read_text()
    assert "cuda-bindings==" not in common
    assert "-cu12==" not in common
