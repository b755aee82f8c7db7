"""``kopir sim``: run simulated failures from seeds, show what they reach and catch, replay one event log."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.cli.common import JsonOption, make_console, make_table, write, write_json
from kvstore.errors import BadInput

if TYPE_CHECKING:
    from cluster.sim import SimReport

MAX_SEEDS = 1_000_000
MAX_PROCESSES = 64

SeedsOption = Annotated[
    str, typer.Option("--seeds", metavar="A:B", help="Seeds from A up to, not including, B; or one seed.")
]
ProcessesOption = Annotated[
    int, typer.Option("--processes", metavar="N", min=1, max=MAX_PROCESSES, help="Processes that share the seeds.")
]

app = typer.Typer(
    help="Simulate failures: one seed, one event log.",
    no_args_is_help=True,
    epilog="Example: kopir sim run --seeds 0:100",
)


@app.command(epilog="Example: kopir sim run --seeds 0:3000 --processes 2 --json")
def run(
    seeds: SeedsOption,
    processes: ProcessesOption = 1,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="DIR", help="Write failing seeds, shrunk, as files to replay.")
    ] = None,
    level: Annotated[
        int, typer.Option("--level", min=1, max=2, help="1: the cores alone. 2: the real request driver over them.")
    ] = 1,
    coverage: Annotated[bool, typer.Option("--coverage", help="Also show what the seeds reached.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Run the simulator over a range of seeds. Exit status 1 if a checker found a violation."""
    first, end = parse_seeds(seeds)
    from cluster.sim import run_seeds

    report = run_seeds(first, end, processes=processes, level=level)
    if save is not None:
        _save_failed(report, save, level)
    if coverage and not as_json:
        _show_coverage(report)
    return _report(report, as_json=as_json)


@app.command(epilog="Example: kopir sim coverage --seeds 0:3000 --processes 2 --at-least 1000")
def coverage(
    seeds: SeedsOption = "0:3000",
    processes: ProcessesOption = 1,
    at_least: Annotated[
        int, typer.Option("--at-least", metavar="N", min=0, help="Exit status 1 if a cell was reached less often.")
    ] = 0,
    as_json: JsonOption = False,
) -> int:
    """Show how often the seeds reach each state of an attempt with each thing that can happen to it."""
    first, end = parse_seeds(seeds)
    from cluster.sim import run_seeds
    from cluster.sim.coverage import short_of, table, why_not

    report = run_seeds(first, end, processes=processes)
    short = short_of(report.coverage, at_least)
    if as_json:
        columns, rows = table(report.coverage)
        cells = [dict(zip(columns, row, strict=True)) for row in rows]
        write_json({"seeds": report.seeds, "cells": cells, "impossible": why_not(), "short_of": short})
    else:
        _show_coverage(report)
        for cell, count in short.items():
            write(f"reached only {count} times: {cell}")
    return 1 if short or report.violations else 0


@app.command(epilog="Example: kopir sim mutants no_lease_check quarantine_skipped")
def mutants(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Default: all of them.")] = None,
    seeds_max: Annotated[int, typer.Option("--seeds-max", metavar="N", min=1, max=MAX_SEEDS)] = 1000,
    as_json: JsonOption = False,
) -> int:
    """Run the planted bugs: after how many seeds each is caught, and by which checker. Exit status 1 if one is not."""
    from cluster.sim.mutants import MUTANTS, hunt

    for name in names or ():
        if name not in MUTANTS:
            raise BadInput("NAME", name, f"no planted bug has this name; there are {', '.join(MUTANTS)}")
    found: dict[str, dict[str, Any]] = {}
    for name in names or MUTANTS:
        violation = hunt(name, seeds_max=seeds_max)
        found[name] = {
            "seeds": violation.seed + 1 if violation is not None else None,
            "checker": violation.checker if violation is not None else None,
            "text": violation.text if violation is not None else None,
        }
    if as_json:
        write_json(found)
    else:
        rows = [[name, facts["seeds"], facts["checker"]] for name, facts in found.items()]
        make_console().print(make_table("Planted bugs", ["planted bug", "caught after seeds", "by"], rows))
    missed = [name for name, facts in found.items() if facts["seeds"] is None]
    if missed and not as_json:
        write(f"not caught within {seeds_max} seeds: {', '.join(missed)}")
    return 1 if missed else 0


@app.command(epilog="Example: kopir sim replay failure.json")
def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="Recorded case.")],
    as_json: JsonOption = False,
) -> int:
    """Run a recorded case again. Exit status 1 if a checker found a violation."""
    from cluster.sim import replay_file

    return _report(replay_file(file), as_json=as_json)


@app.command(epilog="Example: kopir sim trace 16")
def trace(
    seed: Annotated[int, typer.Argument(metavar="SEED", min=0)],
    level: Annotated[int, typer.Option("--level", min=1, max=2)] = 1,
) -> int:
    """Print the event log of one seed, times in milliseconds. Exit status 1 if a checker found a violation."""
    from cluster.sim import run_scenario
    from cluster.sim.scenario import make_scenario

    result, world = run_scenario(make_scenario(seed), level=level)
    for now_ns, *what in world.kernel.log:
        write(f"{now_ns / 1e6:12.3f} " + " ".join(map(str, what)))
    for violation in result.violations:
        write(f"violation: {violation}")
    return 1 if result.violations else 0


def parse_seeds(text: str) -> tuple[int, int]:
    """Returns [first, end) of ``A:B`` or of one seed. Raises: BadInput."""
    first, colon, end = text.partition(":")
    try:
        low = int(first)
        high = int(end) if colon else low + 1
    except ValueError as error:
        raise BadInput("--seeds", text, "expected A:B with whole numbers") from error
    if not 0 <= low < high <= 1 << 63 or high - low > MAX_SEEDS:
        raise BadInput("--seeds", text, f"expected 0 <= A < B with at most {MAX_SEEDS} seeds")
    return low, high


def _save_failed(report: SimReport, folder: Path, level: int) -> None:
    from msgspec.structs import replace

    from cluster.sim import save_scenario
    from cluster.sim.scenario import make_scenario
    from cluster.sim.shrink import shrink

    folder.mkdir(parents=True, exist_ok=True)
    for seed in report.failed_seeds:
        save_scenario(shrink(replace(make_scenario(seed), level=level)), folder / f"seed-{seed}.json")


def _show_coverage(report: SimReport) -> None:
    from cluster.sim.coverage import table, why_not

    columns, rows = table(report.coverage)
    make_console().print(make_table(f"Reached by {report.seeds} seeds", columns, rows))
    for line in why_not():
        write(f"nothing can happen in {line}")


def _report(result: Any, *, as_json: bool) -> int:
    import msgspec

    facts = msgspec.to_builtins(result, enc_hook=str)
    violations = facts.get("violations") or []
    if as_json:
        write_json(facts)
        return 1 if violations else 0
    scalars = {key: value for key, value in facts.items() if not isinstance(value, list | dict)}
    make_console().print(make_table("Simulation", list(scalars), [list(scalars.values())]))
    for violation in violations:
        write(f"violation: {violation}")
    write(f"{len(violations)} violations" if violations else "no violation")
    return 1 if violations else 0
