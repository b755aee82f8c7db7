"""The simulator on its own: ``python -m cluster.sim run --seeds 0:200``, ``replay FILE``, ``mutants``.

Exit status 1 when a checker found a violation (``mutants``: when a planted bug was not found).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

from cluster.sim.mutants import MUTANTS, hunt
from cluster.sim.run import SimReport, replay_file, run_scenario, run_seeds, save_scenario
from cluster.sim.scenario import make_scenario
from cluster.sim.shrink import shrink
from kvstore.errors import BadInput

PROGRESS_EVERY = 500


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m cluster.sim", description=__doc__)
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="run seeds")
    run.add_argument("--seeds", default="0:200", metavar="A:B")
    run.add_argument("--save", type=Path, metavar="FOLDER", help="write failing seeds, shrunk, as files to replay")
    run.set_defaults(call=_run)
    replay = commands.add_parser("replay", help="run a recorded scenario again")
    replay.add_argument("file", type=Path)
    replay.set_defaults(call=lambda options: _report(replay_file(options.file), as_json=options.json))
    trace = commands.add_parser("trace", help="print the event log of one seed")
    trace.add_argument("seed", type=int)
    trace.set_defaults(call=_trace)
    mutants = commands.add_parser("mutants", help="run the planted bugs")
    mutants.add_argument("names", nargs="*", metavar="NAME")
    mutants.add_argument("--seeds-max", type=int, default=1000)
    mutants.set_defaults(call=_mutants)
    for command in (run, replay, trace, mutants):
        command.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    try:
        return int(options.call(options))
    except BadInput as error:
        sys.stderr.write(f"{error}\n")
        return 2


def _run(options: argparse.Namespace) -> int:
    first, _, end = options.seeds.partition(":")
    if not first.isdigit() or not (end or "0").isdigit():
        raise BadInput("--seeds", options.seeds, "expected A:B with whole numbers")
    low, high = int(first), int(end) if end else int(first) + 1
    report = run_seeds(low, high, progress=None if options.json else _progress)
    if options.save is not None:
        options.save.mkdir(parents=True, exist_ok=True)
        for seed in report.failed_seeds:
            save_scenario(shrink(make_scenario(seed)), options.save / f"seed-{seed}.json")
    return _report(report, as_json=options.json)


def _trace(options: argparse.Namespace) -> int:
    result, world = run_scenario(make_scenario(options.seed))
    for now_ns, *what in world.kernel.log:
        _say(f"{now_ns / 1e6:12.3f}", *what)
    for violation in result.violations:
        _say(violation)
    return 1 if result.violations else 0


def _mutants(options: argparse.Namespace) -> int:
    missed = 0
    found: dict[str, Any] = {}
    for name in options.names or MUTANTS:
        violation = hunt(name, seeds_max=options.seeds_max)
        found[name] = str(violation) if violation is not None else None
        missed += violation is None
        if not options.json:
            _say(f"{name}: {found[name] or 'NOT FOUND'}")
    if options.json:
        _say(msgspec.json.encode(found).decode())
    return 1 if missed else 0


def _report(report: SimReport, *, as_json: bool) -> int:
    if as_json:
        _say(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        _say(
            f"{report.seeds} seeds, {report.events} events in {report.seconds:.1f} s "
            f"({report.events_per_s} events/s), {len(report.failed_seeds)} seeds failed"
        )
        for cell, count in report.coverage.items():
            _say(f"  {cell:32} {count}")
        for violation in report.violations:
            _say("violation:", violation)
    return 1 if report.violations else 0


def _say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def _progress(num_done: int) -> None:
    if num_done % PROGRESS_EVERY == 0:
        sys.stderr.write(f"{num_done} seeds\n")


if __name__ == "__main__":
    sys.exit(main())
