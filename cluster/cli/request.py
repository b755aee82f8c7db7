"""``kopir request``: the journal of one request as a timeline."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from cluster.cli.common import (
    JsonOption,
    KeyOption,
    UrlOption,
    cell_text,
    find_url,
    get_json,
    make_console,
    make_table,
    write_json,
)
from kvstore.errors import BadInput

_ID = re.compile(r"[A-Za-z0-9._:-]{1,256}")


def request(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="Request id, as in the x-request-id header.")],
    url: UrlOption = None,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what happened to one request: phases, attempts, workers, ending."""
    if not _ID.fullmatch(request_id):
        raise BadInput("ID", request_id, "not a request id")
    journal = get_json(find_url(url), f"/v1/requests/{request_id}", api_key=api_key)
    if as_json:
        write_json(journal)
    else:
        make_console().print(render(journal))


def render(journal: dict[str, Any]) -> Any:
    """Returns the journal: single facts first, then a table for each list of records, nested facts last."""
    from rich.console import Group

    facts = [[name, value] for name, value in journal.items() if not _is_records(value) and not isinstance(value, dict)]
    parts: list[Any] = [make_table("Request", ["field", "value"], facts)]
    parts.extend(_table(name, value) for name, value in journal.items() if _is_records(value))
    for name, value in journal.items():
        if isinstance(value, dict):
            rows: list[list[object]] = [
                [key, cell_text(inner) if inner is not None else None] for key, inner in value.items()
            ]
            parts.append(make_table(_title(name), ["field", "value"], rows))
    return Group(*parts)


def _table(name: str, records: list[dict[str, Any]]) -> Any:
    columns = list(dict.fromkeys(key for record in records for key in record))
    return make_table(_title(name), columns, [[record.get(column) for column in columns] for record in records])


def _is_records(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _title(name: str) -> str:
    return name.replace("_", " ").capitalize()


def register(app: typer.Typer) -> None:
    """Adds the command to the root group."""
    app.command(epilog="Example: kopir request req-0f3a    or: kopir request req-0f3a --json")(request)
