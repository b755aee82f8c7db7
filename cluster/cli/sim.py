"""``kopir sim``: run simulated failures from seeds, replay one event log."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.cli.common import JsonOption, make_console, make_table, write, write_json
from kvstore.errors import BadInput

MAX_SEEDS = 1_000_000

app = typer.Typer(
    help="Simulate failures: one seed, one event log.",
    no_args_is_help=True,
    epilog="Example: kopir sim run --seeds 0:100",
)


@app.command(epilog="Example: kopir sim run --seeds 0:100 --json")
def run(
    seeds: Annotated[str, typer.Option(metavar="A:B", help="Seeds from A up to, not including, B; or one seed.")],
    as_json: JsonOption = False,
) -> int:
    """Run the simulator over a range of seeds. Exit status 1 if a checker found a violation."""
    first, end = parse_seeds(seeds)
    from cluster.sim import run_seeds

    return _report(run_seeds(first, end), as_json=as_json)


@app.command(epilog="Example: kopir sim replay failure.jsonl")
def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="Recorded case.")],
    as_json: JsonOption = False,
) -> int:
    """Run a recorded case again. Exit status 1 if a checker found a violation."""
    from cluster.sim import replay_file

    return _report(replay_file(file), as_json=as_json)


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
