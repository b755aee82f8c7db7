"""Runs scenarios and gathers what the checkers found. One seed, one result, the same everywhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import msgspec
from msgspec import Struct

from cluster.sim import checkers
from cluster.sim.parts import Parts
from cluster.sim.scenario import Scenario, make_scenario
from cluster.sim.witness import Witness
from cluster.sim.world import World
from kvstore.errors import BadInput

VIOLATIONS_KEPT_MAX = 100
CHUNK_SEEDS = 50
"""Seeds that a process takes at a time."""


class Violation(Struct, frozen=True, kw_only=True):
    """One breach of one claim."""

    seed: int
    checker: str
    at_ns: int
    text: str

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.checker} at {self.at_ns / 1e6:.1f} ms: {self.text}"


class RunResult(Struct, frozen=True, kw_only=True):
    """One scenario, run."""

    num_events: int
    log_hash: str
    violations: tuple[Violation, ...]
    coverage: dict[str, int]
    num_attempts: int


class SimReport(Struct, kw_only=True):
    """Many scenarios, run. ``log_hash`` is that of the seed when there is only one."""

    seeds: int = 0
    events: int = 0
    events_min: int = 0
    """Events of the smallest seed."""
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    """Of all processes together."""
    events_per_s: int = 0
    """Of one core, while it works."""
    failed_seeds: list[int] = []
    violations: list[str] = []
    coverage: dict[str, int] = {}
    log_hash: str | None = None


def run_scenario(
    scenario: Scenario, parts: Parts | None = None, *, level: int | None = None
) -> tuple[RunResult, World]:
    """Runs one scenario; every exception of a core or model counts as a breach. Returns the world as well."""
    witnesses: list[Witness] = [make() for make in checkers.ALL]
    world = World(scenario, parts or Parts(), witnesses, level=level or scenario.level)
    violations: list[Violation] = []
    try:
        world.run()
    except Exception as error:
        world.end()
        text = f"{type(error).__name__}: {error}"
        violations.append(Violation(seed=scenario.seed, checker="NoException", at_ns=world.kernel.now_ns, text=text))
    for witness in witnesses:
        name = type(witness).__name__
        violations += [
            Violation(seed=scenario.seed, checker=name, at_ns=at_ns, text=text) for at_ns, text in witness.found
        ]
    result = RunResult(
        num_events=world.kernel.num_events,
        log_hash=world.kernel.log_hash(),
        violations=tuple(violations),
        coverage=world.coverage,
        num_attempts=world.num_attempts,
    )
    return result, world


def run_seeds(
    first: int,
    end: int,
    *,
    progress: Callable[[int], None] | None = None,
    parts: Parts | None = None,
    processes: int = 1,
    level: int = 1,
) -> SimReport:
    """Runs seeds [first, end), spread over ``processes``. ``progress`` is called with the number of seeds done.

    Level 1 runs the cores alone; level 2 runs the product's request driver on a loop under virtual time.
    ``parts`` is for one process only: planted bugs are run by ``hunt``.
    """
    started_s = time.perf_counter()
    report = SimReport()
    if processes == 1:
        _run_here(report, (first, end, level), parts, progress)
    else:
        assert parts is None, "planted bugs run in one process"
        starts = range(first, end, CHUNK_SEEDS)
        # Spawned: what is set up in this process, such as threads, must not be copied into the workers.
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            for part in pool.map(_run_chunk, ((start, min(start + CHUNK_SEEDS, end), level) for start in starts)):
                _merge(report, part)
                if progress is not None:
                    progress(report.seeds)
    _finish(report, started_s)
    return report


def _run_chunk(seeds: tuple[int, int, int]) -> SimReport:
    report = SimReport()
    _run_here(report, seeds, None, None)
    return report


def _run_here(
    report: SimReport, seeds: tuple[int, int, int], parts: Parts | None, progress: Callable[[int], None] | None
) -> None:
    first, end, level = seeds
    started_s = time.process_time()
    for seed in range(first, end):
        _add(report, seed, run_scenario(make_scenario(seed), parts, level=level)[0])
        if progress is not None:
            progress(report.seeds)
    report.cpu_seconds += time.process_time() - started_s


def replay_file(path: Path) -> SimReport:
    """Runs a recorded scenario again. Raises: BadInput when the file holds none."""
    from cluster.sim.mutants import MUTANTS

    try:
        scenario = msgspec.json.decode(path.read_bytes(), type=Scenario)
    except msgspec.DecodeError as error:
        raise BadInput("FILE", str(path), f"not a recorded scenario: {error}") from error
    report = SimReport()
    started_s, cpu_s = time.perf_counter(), time.process_time()
    parts = MUTANTS[scenario.mutant].parts if scenario.mutant is not None else None
    _add(report, scenario.seed, run_scenario(scenario, parts)[0])
    report.cpu_seconds = time.process_time() - cpu_s
    _finish(report, started_s)
    return report


def save_scenario(scenario: Scenario, path: Path) -> None:
    """Writes a scenario so that ``replay_file`` runs it again."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(scenario), indent=1) + b"\n")


def _add(report: SimReport, seed: int, result: RunResult) -> None:
    report.seeds += 1
    report.events += result.num_events
    report.events_min = min(report.events_min or result.num_events, result.num_events)
    report.log_hash = result.log_hash if report.seeds == 1 else None
    if result.violations:
        report.failed_seeds.append(seed)
        _keep(report, [str(violation) for violation in result.violations])
    _count(report, result.coverage)


def _merge(report: SimReport, part: SimReport) -> None:
    report.log_hash = part.log_hash if not report.seeds else None
    report.seeds += part.seeds
    report.events += part.events
    report.events_min = min(report.events_min or part.events_min, part.events_min)
    report.cpu_seconds += part.cpu_seconds
    report.failed_seeds += part.failed_seeds
    _keep(report, part.violations)
    _count(report, part.coverage)


def _keep(report: SimReport, violations: list[str]) -> None:
    report.violations += violations[: max(0, VIOLATIONS_KEPT_MAX - len(report.violations))]


def _count(report: SimReport, coverage: dict[str, int]) -> None:
    for cell, count in coverage.items():
        report.coverage[cell] = report.coverage.get(cell, 0) + count


def _finish(report: SimReport, started_s: float) -> None:
    report.seconds = round(time.perf_counter() - started_s, 3)
    report.cpu_seconds = round(report.cpu_seconds, 3)
    report.events_per_s = int(report.events / max(report.cpu_seconds, 1e-9))
    report.coverage = dict(sorted(report.coverage.items()))
