"""``kopir down``: stops what a serve started, detached actors included, also when the serve itself has died."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.cli.common import write


def down(
    address: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Ray address of the cluster. Default: the running one.")
    ] = None,
    now: Annotated[bool, typer.Option("--now", help="End what runs at once, instead of after server.drain_s.")] = False,
) -> int:
    """Stop everything that `kopir serve` started, once what runs has finished. Succeeds if nothing runs."""
    from cluster.serve import down as stop_cluster

    stopped = stop_cluster(address, now=now)
    write("Stopped." if stopped else "Nothing was running.")
    return 0


def register(app: typer.Typer) -> None:
    """Adds the command to the root group."""
    app.command(epilog="Example: kopir down")(down)
