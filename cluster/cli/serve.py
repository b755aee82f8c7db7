"""``kopir serve``: reads the configuration and hands over to ``cluster.serve``, which owns every process it starts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from cluster.cli.common import write


def serve(
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML file; see `kopir config reference`.")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="M", help="Packaged name, folder or hub id.")] = None,
    prefill: Annotated[int | None, typer.Option(metavar="N", help="Number of prefill workers.")] = None,
    decode: Annotated[int | None, typer.Option(metavar="N", help="Number of decode workers.")] = None,
    host: Annotated[str | None, typer.Option(metavar="HOST", help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(metavar="P", help="TCP port; 0 takes any free port.")] = None,
    address: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Join this Ray cluster instead of starting one.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any key of the configuration; repeatable.")
    ] = None,
) -> int:
    """Serve a model: local cluster, workers, store and endpoint. Ctrl-C stops all of it at once; SIGTERM lets what
    runs finish first (server.drain_s)."""
    from cluster.config import load

    options = {
        "model": model,
        "workers.prefill.replicas": prefill,
        "workers.decode.replicas": decode,
        "server.host": host,
        "server.port": port,
        "cluster.address": address,
    }
    values = {key: value for key, value in options.items() if value is not None}
    settings = load(config, overrides or (), values=values)

    from cluster.serve import run

    code: int = run(
        settings,
        on_ready=partial(_announce, has_keys=settings.auth.keys_file is not None),
        on_drain=_announce_drain,
    )
    return code


def _announce_drain(drain_s: float) -> None:
    write(f"Stopping: what runs has {drain_s:g} s to finish, nothing new is taken. Ctrl-C ends it now.")


def _announce(url: str, *, has_keys: bool) -> None:
    base = url.rstrip("/").removesuffix("/v1")
    write(f"Kopir is ready at {base}/v1 - talk to it with `kopir chat`; Ctrl-C stops it.")
    if not has_keys:
        write("No API keys are configured (auth.keys_file): it listens on loopback only and answers everybody there.")


def register(app: typer.Typer) -> None:
    """Adds the command to the root group."""
    app.command(
        epilog="Example: kopir serve --model smollm2-135m-instruct --port 9000 --set workers.decode.pool_blocks=512"
    )(serve)
