"""``kopir apply``: other numbers and sizes of workers for a running serve, without cutting a stream."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cluster.cli.common import JsonOption, write, write_json
from kvstore.errors import EnvironmentProblem


def apply(
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The whole new configuration. Default: what runs, changed.")
    ] = None,
    prefill: Annotated[int | None, typer.Option(metavar="N", help="Number of prefill workers.")] = None,
    decode: Annotated[int | None, typer.Option(metavar="N", help="Number of decode workers.")] = None,
    address: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Ray address or URL of the serve. Default: the running one.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any key below workers; repeatable.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Change the workers of a running serve. New ones serve first, then the others finish what they have and go; when
    one does not come up, nothing changes."""
    from cluster import control, runfile

    running = [info for info in runfile.find_all() if address is None or address in (info.ray_address, info.url)]
    if not running:
        raise EnvironmentProblem("no running cluster of this user found; start one with `kopir serve`")
    numbers = {"workers.prefill.replicas": prefill, "workers.decode.replicas": decode}
    wanted = [*(overrides or ()), *(f"{key}={number}" for key, number in numbers.items() if number is not None)]
    answer = control.ask(running[0], config, wanted)
    if as_json:
        write_json(answer)
        return 0
    for name in answer["started"]:
        write(f"{name} serves.")
    for name in answer["taken_back"]:
        write(f"{name} was leaving and serves again.")
    for name in answer["leaving"]:
        write(f"{name} takes nothing new; it stops when its requests have finished.")
    if not any(answer.values()):
        write("Nothing to change.")
    return 0


def register(app: typer.Typer) -> None:
    """Adds the command to the root group."""
    app.command(epilog="Example: kopir apply --decode 3    or: kopir apply --set workers.decode.pool_blocks=512")(apply)
