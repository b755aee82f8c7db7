"""``kopir status``: workers, store tiers, streams and leases of a running cluster."""

from __future__ import annotations

import threading
from typing import Annotated, Any

import typer

from cluster.cli.common import (
    JsonOption,
    KeyOption,
    UrlOption,
    find_url,
    get_json,
    make_console,
    make_table,
    write_json,
)

STATUS_PATH = "/internal/status"

_WORKER_COLUMNS = ["worker", "state", "pid", "node", "blocks", "fenced", "run", "wait", "life"]
_NARROW_COLUMNS = ["worker", "state", "blocks", "run"]
_WIDE_FROM = 72
"""Terminal columns that the whole table of workers takes; below, it has what matters first."""


def status(
    url: UrlOption = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Refresh until Ctrl-C; with --json one line each time.")
    ] = False,
    interval_s: Annotated[float, typer.Option("--interval", min=0.1, metavar="S", help="Seconds between.")] = 1.0,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show workers, pool blocks, store tiers, streams and leases."""
    base = find_url(url)
    if watch:
        _watch(base, api_key=api_key, interval_s=interval_s, as_json=as_json)
        return
    facts = get_json(base, STATUS_PATH, api_key=api_key)
    if as_json:
        write_json(facts)
    else:
        console = make_console()
        console.print(render(facts, base, width=console.width))


def _watch(base: str, *, api_key: str | None, interval_s: float, as_json: bool) -> None:
    pause = threading.Event()
    if as_json:
        while True:
            write_json(get_json(base, STATUS_PATH, api_key=api_key), indent=None)
            pause.wait(interval_s)
    from rich.live import Live

    console = make_console()
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            facts = get_json(base, STATUS_PATH, api_key=api_key)
            live.update(render(facts, base, width=console.width), refresh=True)
            pause.wait(interval_s)


def render(facts: dict[str, Any], base: str, *, width: int = 80) -> Any:
    """Returns the tables for one answer of the status endpoint, for so many columns of a terminal.

    The sums come first: a watch on a small screen shows its beginning. Missing parts are left out, not invented.
    """
    from rich.console import Group
    from rich.text import Text

    workers = _rows(facts.get("workers"))
    streams = _rows(facts.get("streams"))
    columns = _WORKER_COLUMNS if width >= _WIDE_FROM else _NARROW_COLUMNS
    rows = [dict(zip(_WORKER_COLUMNS, _worker_row(worker), strict=True)) for worker in workers]
    parts: list[Any] = [Text(base), Text(_summary(facts, workers, len(streams)))]
    parts.append(make_table("Workers", columns, [[row[name] for name in columns] for row in rows]))
    for worker in workers:
        if worker.get("state") == "refused":
            fields = worker.get("refused_fields") or worker.get("reason")
            parts.append(Text(f"{worker.get('id')} is refused; it differs in: {_words(fields)}"))
    tiers = [
        [
            node.get("node"),
            node.get("pid"),
            tier.get("name"),
            tier.get("used_blocks"),
            tier.get("blocks"),
            tier.get("bytes"),
            tier.get("state"),
        ]
        for node in _rows(facts.get("store"))
        for tier in _rows(node.get("tiers"))
    ]
    parts.append(make_table("Store", ["node", "pid", "tier", "used", "blocks", "bytes", "state"], tiers))
    ingresses = [[one.get("id"), one.get("pid"), one.get("streams")] for one in _rows(facts.get("ingress"))]
    parts.append(make_table("Ingress", ["id", "pid", "streams"], ingresses))
    names = ["request_id", "phase", "attempt", "epoch", "delivered_output_tokens"]
    if streams:
        parts.append(make_table("Streams", names, [[stream.get(name) for name in names] for stream in streams]))
    return Group(*parts)


def _summary(facts: dict[str, Any], workers: list[dict[str, Any]], num_streams: int) -> str:
    used = sum(worker.get("used_blocks") or 0 for worker in workers)
    cached, quarantined = (
        sum(worker.get(name) or 0 for worker in workers) for name in ("cached_blocks", "quarantined_blocks")
    )
    ready = sum(worker.get("state") == "ready" for worker in workers)
    return (
        f"{ready} of {len(workers)} workers ready, {used} pool blocks used, {cached} cached, "
        f"{quarantined} quarantined, "
        f"{facts.get('leases', 0)} leases, {num_streams} streams"
    )


def _rows(value: Any) -> list[dict[str, Any]]:
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def _worker_row(worker: dict[str, Any]) -> list[object]:
    """One line per worker that fits into 80 columns; --json has everything, the whole incarnation too."""
    used, blocks = worker.get("used_blocks"), worker.get("pool_blocks")
    incarnation = worker.get("incarnation")
    return [
        worker.get("id"),
        worker.get("state"),
        worker.get("pid"),
        worker.get("node"),
        None if blocks is None else f"{'?' if used is None else used}/{blocks}",
        worker.get("quarantined_blocks"),
        worker.get("running"),
        worker.get("waiting"),
        incarnation[:8] if isinstance(incarnation, str) else None,
    ]


def _words(value: Any) -> str:
    return ", ".join(str(item) for item in value) if isinstance(value, list) else str(value or "unknown")


def register(app: typer.Typer) -> None:
    """Adds the command to the root group."""
    app.command(epilog="Example: kopir status    or: kopir status --json | jq .workers")(status)
