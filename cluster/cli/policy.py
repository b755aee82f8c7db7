"""``kopir policy``: check a policy file, show one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cluster.cli.common import JsonOption, write, write_json

app = typer.Typer(
    help="Check and show the router's policy on failures.",
    no_args_is_help=True,
    epilog="Example: kopir policy check policy.yaml",
)


@app.command(epilog="Example: kopir policy check policy.yaml --json")
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML file of the policy.")],
    as_json: JsonOption = False,
) -> None:
    """Check a policy file as a serve would. Exit status 2 and one line, with the place, if it cannot be used."""
    from cluster.config import ConfigError
    from cluster.policy_source import load_policy

    try:
        policy = load_policy(file)
    except ConfigError as error:
        if not as_json:
            raise
        write_json({"ok": False, "where": error.where, "field": error.field, "why": error.why})
        raise typer.Exit(2) from error
    if as_json:
        write_json({"ok": True, "version": policy.version, "digest": policy.digest})
    else:
        write(f"{file}: ok, version {policy.version or '(unnamed)'}, digest {policy.digest}")


@app.command(epilog="Example: kopir policy show > policy.yaml")
def show(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="YAML file. Default: the policy without a file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print a whole policy, defaults included: a file to start from."""
    import msgspec

    from cluster.config import dump
    from cluster.core.policy import Policy
    from cluster.policy_source import load_policy

    policy = Policy() if file is None else load_policy(file)
    if as_json:
        write_json({**msgspec.to_builtins(policy), "digest": policy.digest})
    else:
        write(dump(policy).rstrip())
