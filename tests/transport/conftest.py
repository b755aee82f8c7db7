"""Fixtures of the transport tests: pairs of connected sides over each backend."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pairs import InprocPair, Pair, UcxPair

from bench.network import Place, cable
from bench.report import Report
from kvstore.errors import EnvironmentProblem

UCX_PATHS = [pytest.param(path, marks=pytest.mark.ucx, id=path) for path in ("ucx-local", "ucx-copied", "ucx-network")]
DEFAULT_REPEATS = 4
LINKED_PATHS = [path for path in UCX_PATHS if path.id != "ucx-copied"]
"""The paths that links take unless memory cannot be read."""
BACKENDS = ["inproc", *UCX_PATHS]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--repeats", type=int, default=DEFAULT_REPEATS, help="repetitions of each soak test")
    parser.addoption("--log-faults", type=Path, default=None, help="where a soak writes what it did, as JSON")


@pytest.fixture
def repeats(request: pytest.FixtureRequest) -> int:
    """How often a soak test repeats: a slice by default, all of it with ``pytest tests/transport --repeats 200``."""
    # Without the default, the option is unknown when this folder was not named on the command line.
    return int(request.config.getoption("--repeats", DEFAULT_REPEATS))


@pytest.fixture(scope="session")
def soak_log(request: pytest.FixtureRequest) -> Iterator[list[dict[str, Any]]]:
    """One entry per soak test and path; written with ``--log-faults FILE``, together with what was tested."""
    path: Path | None = request.config.getoption("--log-faults", None)
    report = Report.start("transport-soak", seed=0)
    yield report.rows
    if path is not None and report.rows:
        report.write_json(path)


@pytest.fixture
def soaked(request: pytest.FixtureRequest, soak_log: list[dict[str, Any]]) -> Iterator[Counter[str]]:
    """Counts what a soak test did to its pair and what came of it; kept only if the test passes."""
    counts: Counter[str] = Counter()
    began = time.monotonic()
    failed_before = request.session.testsfailed
    yield counts
    if request.session.testsfailed == failed_before:
        seconds = round(time.monotonic() - began, 1)
        soak_log.append({"test": request.node.name, "seconds": seconds, **dict(sorted(counts.items()))})


@contextmanager
def linked(backend: str) -> Iterator[Pair]:
    pair: Pair = InprocPair() if backend == "inproc" else UcxPair(backend)
    try:
        assert pair.link() == ("ok", "ok")
        yield pair
    finally:
        pair.end()


@pytest.fixture(scope="module", params=BACKENDS)
def shared_pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A linked pair that the tests of a module share; they leave it as they found it and take tags from ``tags``."""
    with linked(request.param) as pair:
        yield pair


@pytest.fixture(params=BACKENDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A linked pair of this test alone, which may stop, kill and replace its far side."""
    with linked(request.param) as fresh:
        yield fresh


@pytest.fixture(params=LINKED_PATHS)
def ucx_pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Two linked processes: one reads the other's memory, and over TCP as between hosts."""
    with linked(request.param) as fresh:
        yield fresh


@pytest.fixture(params=UCX_PATHS)
def soak_pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """As ``ucx_pair``, and by UCX's own copies."""
    with linked(request.param) as fresh:
        yield fresh


@pytest.fixture
def tags() -> Callable[[int], list[int]]:
    """Gives tags that no other test has."""
    return take_tags


_next_tag = 1


def take_tags(count: int) -> list[int]:
    global _next_tag
    first, _next_tag = _next_tag, _next_tag + count
    return list(range(first, first + count))


@pytest.fixture
def cable_ends() -> Iterator[tuple[Place, Place]]:
    """A cable between two network namespaces."""
    try:
        with cable() as made:
            yield made
    except EnvironmentProblem as error:
        pytest.skip(str(error))
