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
    """Returns the journal for people: the facts, one line per attempt, then the timeline in order of time."""
    from rich.console import Group

    facts = [[_title(name), value] for name, value in journal.items() if name not in _APART]
    parts: list[Any] = [make_table("Request", ["field", "value"], facts)]
    attempts = journal.get("attempts") or []
    if attempts:
        parts.append(make_table("Attempts", list(_ATTEMPT_COLUMNS), [_attempt_row(attempt) for attempt in attempts]))
    events = journal.get("events") or []
    if events:
        parts.append(make_table("Timeline", ["ms", "event", "what"], [_event_row(event) for event in events]))
    rows: list[list[object]]
    for number, part in enumerate(journal.get("rounds") or [], 1):
        rows = [_event_row(event) for event in part.get("events") or []]
        parts.append(make_table(f"Timeline of round {number}", ["ms", "event", "what"], rows))
    calls = journal.get("tool_calls") or []
    if calls:
        rows = [[call.get(name) for name in _CALL_FIELDS] for call in calls]
        parts.append(make_table("Tool calls", [_title(name) for name in _CALL_FIELDS], rows))
    if journal.get("interruption"):
        rows = [[_title(name), value] for name, value in journal["interruption"].items()]
        parts.append(make_table("Interruption", ["field", "value"], rows))
    return Group(*parts)


_APART = frozenset({"attempts", "events", "interruption", "choices", "rounds", "tool_calls"})
_CALL_FIELDS = ("round", "name", "state", "is_error", "tries", "tool_call_id", "recorded_by", "why")
_ATTEMPT_COLUMNS = ("epoch", "attempt", "prefill", "decode", "from ms", "to ms", "end", "tokens", "fenced")
_NOT_SHOWN = frozenset({"at_ns", "event", "attempt_id"})


def _attempt_row(attempt: dict[str, Any]) -> list[object]:
    return [
        attempt.get("epoch"),
        str(attempt.get("attempt_id", ""))[:12],
        _worker(attempt.get("prefill")),
        _worker(attempt.get("decode")),
        _ms(attempt.get("started_ns")),
        _ms(attempt.get("ended_ns")),
        attempt.get("end_reason"),
        attempt.get("received_tokens"),
        attempt.get("fenced"),
    ]


def _event_row(event: dict[str, Any]) -> list[object]:
    parts = []
    for name, value in event.items():
        if name in _NOT_SHOWN or value in (None, "", {}):
            continue
        if name == "spans_ns":
            parts.append(", ".join(f"{_title(span)} {_ms(spent)} ms" for span, spent in value.items()))
        elif name in ("prefill", "decode"):
            parts.append(f"{name} {_worker(value)}")
        elif name in ("phase", "end"):
            parts.append(str(value))
        else:
            parts.append(f"{_title(name)} {cell_text(value)}")
    return [_ms(event.get("at_ns")), _title(str(event.get("event"))), ", ".join(parts)]


def _worker(worker: Any) -> str:
    if not isinstance(worker, dict):
        return "-" if worker is None else str(worker)
    return f"{worker.get('worker_id')} (pid {worker.get('pid')}, life {str(worker.get('incarnation'))[:8]})"


def _ms(nanoseconds: Any) -> str:
    return "-" if nanoseconds is None else f"{nanoseconds / 1e6:.1f}"


def _title(name: str) -> str:
    return name.replace("_", " ")


def register(app: typer.Typer) -> None:
    """Adds the command to the root group."""
    app.command(epilog="Example: kopir request req-0f3a    or: kopir request req-0f3a --json")(request)
