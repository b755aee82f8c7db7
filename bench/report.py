"""The output of every bench: one JSON document, one table, targets that a script can check.

Owns the shape that all benches share (see ``docs/transport.md`` for one of them): a ``Report`` is started, rows and
targets are added, then it is shown, written and checked. It measures nothing itself.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cluster.cli.common import make_console, make_table, write
from cluster.machine import memory_bytes

ENV_PACKAGES = ("torch", "ray", "ucxx-cu12", "ucxx-cu13", "numpy", "transformers", "msgspec", "xxhash", "nixl-cu12")
"""Packages whose versions explain a figure; those that are not installed are left out."""
GIT_TIMEOUT_S = 10.0

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Target:
    """A figure that somebody asked for, compared with its reference from the same run.

    ``ratio`` is always better-is-larger. ``ok`` is None when it could not be measured; ``reason`` then says why.
    """

    id: str
    ours: float | None
    reference: float | None
    unit: str
    ratio: float | None
    at_least: float
    ok: bool | None
    reason: str | None = None


def make_target(
    id: str, *, ours: float, reference: float, unit: str, at_least: float, smaller_is_better: bool = False
) -> Target:
    """Returns a measured target. ``ours`` and ``reference`` are positive and in ``unit``.

    Raises: ValueError if a figure is not positive: such a ratio would say nothing.
    """
    if ours <= 0 or reference <= 0:
        raise ValueError(f"target {id}: figures must be positive, got ours={ours} reference={reference}")
    ratio = reference / ours if smaller_is_better else ours / reference
    return Target(id, _rounded(ours), _rounded(reference), unit, _rounded(ratio), at_least, ratio >= at_least)


def make_unmeasured(id: str, *, unit: str, at_least: float, reason: str) -> Target:
    """Returns a target that could not be measured here, with the reason."""
    return Target(id, None, None, unit, None, at_least, None, reason)


@dataclass(slots=True)
class Report:
    """One run of one bench. Life cycle: ``start`` -> rows and targets are appended -> ``show``, ``write_json``."""

    bench: str
    seed: int
    started_at: str
    commit: str | None
    dirty: bool | None
    env: Row
    rows: list[Row] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def start(cls, bench: str, *, seed: int) -> Report:
        """Returns an empty report with the facts of this machine and of the checked-out code."""
        commit, dirty = checkout_state(Path(__file__).resolve().parent)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(bench, seed, now, commit, dirty, environment())

    def to_dict(self) -> Row:
        """Returns the document that ``--json`` writes."""
        return {
            "bench": self.bench,
            "commit": self.commit,
            "dirty": self.dirty,
            "seed": self.seed,
            "started_at": self.started_at,
            "env": self.env,
            "notes": self.notes,
            "rows": self.rows,
            "targets": [_target_dict(target) for target in self.targets],
        }

    def write_json(self, path: Path) -> None:
        """Writes the document to ``path``, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        partial.replace(path)

    def show(self, title: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Prints ``rows`` (default: all rows) as a table of the named columns; a missing value is a dash."""
        cells = [[row.get(name) for name in columns] for row in (self.rows if rows is None else rows)]
        make_console().print(make_table(title, list(columns), cells))

    def show_targets(self) -> None:
        """Prints the targets, and the notes below them."""
        columns = ["id", "ours", "reference", "unit", "ratio", "at_least", "ok", "reason"]
        rows = [_target_dict(target) for target in self.targets]
        self.show("Targets", columns if any("reason" in row for row in rows) else columns[:-1], rows)
        for note in self.notes:
            write(f"note: {note}")

    def failed(self) -> list[Target]:
        """Returns the targets that are not ok; one that could not be measured has failed as well."""
        return [target for target in self.targets if target.ok is not True]


def finish(report: Report, *, json_path: Path | None, check: bool) -> int:
    """Shows the targets, writes the JSON file and returns the exit status: 1 if ``check`` finds a target not ok."""
    report.show_targets()
    if json_path is not None:
        report.write_json(json_path)
        write(f"wrote {json_path}")
    failed = report.failed() if check else []
    for target in failed:
        write(f"not ok: {target.id}" + (f" ({target.reason})" if target.reason else ""))
    return 1 if failed else 0


def environment() -> Row:
    """Returns what a figure depends on: processor, usable cores, memory, kernel, Python and package versions."""
    total_bytes, _available = memory_bytes()
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": total_bytes,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": _package_versions(),
    }


def checkout_state(directory: Path) -> tuple[str | None, bool | None]:
    """Returns (commit, dirty) of the checkout around ``directory``; (None, None) outside of one."""
    commit = _git(directory, "rev-parse", "HEAD")
    if commit is None:
        return None, None
    changed = _git(directory, "status", "--porcelain", "--untracked-files=no")
    return commit.strip(), None if changed is None else bool(changed.strip())


def quantile(values: Sequence[float], fraction: float) -> float:
    """Returns the smallest value that at least ``fraction`` of ``values`` do not exceed (nearest rank).

    Raises: ValueError if ``values`` is empty or ``fraction`` is outside (0, 1].
    """
    if not values or not 0 < fraction <= 1:
        raise ValueError(f"no {fraction} quantile of {len(values)} values")
    rank = -int(-len(values) * fraction // 1)
    return sorted(values)[rank - 1]


def _target_dict(target: Target) -> Row:
    row: Row = {
        "id": target.id,
        "ours": target.ours,
        "reference": target.reference,
        "unit": target.unit,
        "ratio": target.ratio,
        "at_least": target.at_least,
        "ok": target.ok,
    }
    return row if target.reason is None else row | {"reason": target.reason}


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _package_versions() -> dict[str, str]:
    versions = {}
    for name in ENV_PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments],
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
