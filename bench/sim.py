"""Many seeds of the simulator, once: violations, cells reached, events per second, and the planted bugs.

The simulator is its own measure: nothing here depends on how busy the machine is but the time it takes.
"""

from __future__ import annotations

import os
from pathlib import Path

from bench.report import Report, Target, finish, make_target
from cluster.sim.coverage import AT_LEAST, CELLS, table, why_not
from cluster.sim.mutants import MUTANTS, SEEDS_MAX, hunt
from cluster.sim.run import SimReport, run_seeds

EVENTS_PER_S = 50_000.0
CI_SEEDS = 3000
"""As many as CI runs; the coverage that is asked for is that of this many."""


def run_sim(*, num_seeds: int, processes: int, mutants: bool, json_path: Path | None, check: bool) -> int:
    """Runs seeds [0, num_seeds), prints the tables and returns the exit status; 1 for a violation in any case."""
    report = Report.start("sim", seed=0)
    simulated = run_seeds(0, num_seeds, processes=processes)
    columns, rows = table(simulated.coverage)
    report.rows += [dict(zip(columns, row, strict=True)) for row in rows]
    report.rows.append(_facts(simulated, processes))
    report.show(f"Contract section 6: how often {simulated.seeds} seeds reached each cell", columns, report.rows[:-1])
    report.show("Simulator, level 1", ("seeds", "events", "events_per_s", "violations"), report.rows[-1:])
    report.targets += _targets(simulated)
    if mutants:
        report.targets += [_mutant(name) for name in MUTANTS]
    report.notes += [*why_not(), *simulated.violations]
    status = finish(report, json_path=json_path, check=check)
    return 1 if simulated.violations else status


def _facts(simulated: SimReport, processes: int) -> dict[str, object]:
    return {
        "seeds": simulated.seeds,
        "events": simulated.events,
        "events_min_per_seed": simulated.events_min,
        "seconds": simulated.seconds,
        "cpu_seconds": simulated.cpu_seconds,
        "processes": processes,
        "niceness": os.nice(0),
        "events_per_s": simulated.events_per_s,
        "violations": len(simulated.violations),
        "failed_seeds": simulated.failed_seeds,
    }


def _targets(simulated: SimReport) -> list[Target]:
    worst = min(CELLS, key=lambda cell: simulated.coverage.get(cell, 0))
    reached = simulated.coverage.get(worst, 0) * CI_SEEDS / simulated.seeds
    num_failed = len(simulated.failed_seeds)
    return [
        Target(
            "seeds_without_violation",
            ours=simulated.seeds - num_failed,
            reference=simulated.seeds,
            unit="seeds",
            ratio=None,
            at_least=1,
            ok=not num_failed,
        ),
        make_target(
            "events_per_core_second", ours=simulated.events_per_s, reference=EVENTS_PER_S, unit="events/s", at_least=1.0
        ),
        make_target("smallest_seed", ours=simulated.events_min, reference=200, unit="events", at_least=1.0),
        make_target(
            f"rarest_cell_in_{CI_SEEDS}_seeds", ours=max(reached, 1e-9), reference=AT_LEAST, unit="times", at_least=1.0
        ),
    ]


def _mutant(name: str) -> Target:
    found = hunt(name, seeds_max=SEEDS_MAX)
    num_seeds = found.seed + 1 if found is not None else None
    ok = num_seeds is not None
    return Target(f"mutant_{name}", num_seeds, SEEDS_MAX, "seeds", None, 1, ok, None if ok else "not caught")
