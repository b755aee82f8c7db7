"""``kopir config``: check a file, show what is in force, write the reference page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cluster.cli.common import JsonOption, write, write_json

app = typer.Typer(
    help="Check and show the configuration.", no_args_is_help=True, epilog="Example: kopir config check kopir.yaml"
)

OverridesOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any key of the configuration; repeatable.")
]


@app.command(epilog="Example: kopir config check kopir.yaml")
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML file.")],
    overrides: OverridesOption = None,
) -> None:
    """Check a file, and the tools file that it names, without starting anything. Exit status 2 and one line if not."""
    from cluster.config import load

    settings = load(file, overrides or ())
    if settings.tools.file is not None:
        from cluster.tools_source import load_tools

        load_tools(settings.tools.file)
    write(f"{file}: ok")


@app.command(epilog="Example: kopir config show --config kopir.yaml --set server.port=9000")
def show(
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="YAML file.")] = None,
    overrides: OverridesOption = None,
    threads: Annotated[bool, typer.Option("--threads", help="Print the threads of each role instead.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the configuration in force, defaults included, as YAML (or JSON)."""
    import msgspec
    import yaml

    from cluster.config import dump, load, thread_budget
    from cluster.machine import usable_cores

    settings = load(config, overrides or ())
    if threads:
        budget = thread_budget(usable_cores(), settings)
        write_json(budget) if as_json else write(yaml.safe_dump(budget, sort_keys=False).rstrip())
    elif as_json:
        write_json(msgspec.to_builtins(settings))
    else:
        write(dump(settings).rstrip())


@app.command(epilog="Example: kopir config reference > configuration.md")
def reference(
    target: Annotated[Path | None, typer.Option("--write", metavar="FILE", help="Write here, not to stdout.")] = None,
) -> None:
    """Print the reference page of the configuration as Markdown."""
    from cluster.config_reference import render_reference

    page = render_reference()
    if target is None:
        write(page.rstrip())
    else:
        target.write_text(page, encoding="utf-8")
        write(f"wrote {target}")
