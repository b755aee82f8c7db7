"""``kopir keys``: make, list and revoke API keys."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from cluster.cli.common import JsonOption, fail, make_console, make_table, write, write_json

app = typer.Typer(
    help="API keys of tenants. A running serve takes changes at once.",
    no_args_is_help=True,
    epilog="Example: kopir keys new acme --file keys.yaml",
)

DEFAULT_FILE = "keys.yaml"

FileOption = Annotated[
    Path | None, typer.Option("--file", "-f", metavar="FILE", help=f"The keys file. Default: {DEFAULT_FILE}.")
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="Take auth.keys_file of this configuration.")
]


@app.command(epilog="Example: kopir keys new acme --file keys.yaml")
def new(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Name; a tenant that is not there yet is made.")],
    file: FileOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a key, print it once and store its hash."""
    from cluster.keys_source import add_key

    path = _path(file, config)
    try:
        key_id, key = add_key(path, _checked_name(tenant))
    except OSError as error:
        fail(f"{path}: cannot be written: {error.strerror}")
    if as_json:
        write_json({"tenant": tenant, "id": key_id, "key": key, "file": str(path)})
        return
    write(key)
    sys.stderr.write(f"Key {key_id} of {tenant}, its hash is in {path}. The key is shown only now.\n")


@app.command(epilog="Example: kopir keys ls --file keys.yaml")
def ls(file: FileOption = None, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List tenants and key ids."""
    from cluster.keys_source import list_keys

    rows = list_keys(_path(file, config))
    if as_json:
        write_json(rows)
    else:
        cells: list[list[object]] = [[row["tenant"], row["id"], row["revoked"]] for row in rows]
        make_console().print(make_table("Keys", ["tenant", "key", "revoked"], cells))


@app.command(epilog="Example: kopir keys revoke key-0123456789ab")
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="As `kopir keys ls` shows it.")],
    file: FileOption = None,
    config: ConfigOption = None,
) -> None:
    """Revoke a key: whoever sends it is told so (403)."""
    from cluster.keys_source import revoke_key

    path = _path(file, config)
    if not revoke_key(path, key_id):
        fail(f"{path}: no key {key_id}")
    write(f"{key_id} is revoked")


def _path(file: Path | None, config: Path | None) -> Path:
    if file is not None:
        return file
    if config is not None:
        from cluster.config import load

        named = load(config).auth.keys_file
        if named is None:
            fail(f"{config}: auth.keys_file is not set", code=2)
        return Path(named)
    return Path(DEFAULT_FILE)


def _checked_name(tenant: str) -> str:
    import msgspec

    from cluster.keys_source import Name

    try:
        return msgspec.convert(tenant, Name)
    except msgspec.ValidationError:
        fail("TENANT: letters, digits, '.', '_' and '-', at most 64 characters", code=2)
