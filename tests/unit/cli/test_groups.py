"""``kopir model``, ``kopir config`` and ``kopir sim``."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import msgspec
import pytest

import cluster.sim
import workers.model
from cluster.cli import main as cli
from cluster.cli.sim import parse_seeds
from cluster.config import Config, load
from cluster.config_reference import render_reference
from kvstore.errors import BadInput


class Entry(msgspec.Struct):
    name: str
    path: Path


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A hub that knows one model."""
    module = types.ModuleType("workers.model.hub")

    def pull(name: str, cache_dir: Path | None = None, progress: Any = None) -> Path:
        if progress is not None:
            progress("download", 1, 2)
            progress("download", 2, 2)
        return Path("/cache") / name

    module.pull = pull  # type: ignore[attr-defined]
    module.ls = lambda: [Entry(name="tiny", path=Path("/cache/tiny"))]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "workers.model.hub", module)
    monkeypatch.setattr(workers.model, "hub", module, raising=False)
    return module


def test_model_pull_prints_the_folder(hub: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """The path is on stdout, for scripts."""
    assert cli.run(["model", "pull", "tiny"]) == 0
    assert capsys.readouterr().out == "/cache/tiny\n"


def test_model_pull_shows_progress_on_a_terminal(
    hub: types.ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bar goes to stderr and leaves stdout alone."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert cli.run(["model", "pull", "tiny"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "/cache/tiny\n"
    assert "download" in captured.err


def test_model_ls(hub: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """A table, JSON, and what to do when the cache is empty."""
    assert cli.run(["model", "ls"]) == 0
    assert "/cache/tiny" in capsys.readouterr().out
    assert cli.run(["model", "ls", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"models": [{"name": "tiny", "path": "/cache/tiny"}]}
    hub.ls = list  # type: ignore[attr-defined]
    assert cli.run(["model", "ls"]) == 0
    assert "kopir model pull" in capsys.readouterr().out


def test_config_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """check accepts and refuses, show prints a file that reads back, reference writes the page."""
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("server: {port: 5}\n")
    bad.write_text("server: {prot: 5}\n")
    assert cli.run(["config", "check", str(good)]) == 0
    assert cli.run(["config", "check", str(bad)]) == 2
    captured = capsys.readouterr()
    assert captured.out == f"{good}: ok\n"
    assert "bad.yaml:1: server.prot: unknown key; did you mean server.port?" in captured.err
    assert cli.run(["config", "show", "--config", str(good)]) == 0
    shown = tmp_path / "shown.yaml"
    shown.write_text(capsys.readouterr().out)
    assert load(shown) == load(good) != Config()
    assert cli.run(["config", "show", "--set", "kv.block_tokens=8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kv"]["block_tokens"] == 8
    assert cli.run(["config", "show", "--threads", "--set", "workers.decode.threads=7"]) == 0
    assert "decode: 7" in capsys.readouterr().out
    assert cli.run(["config", "reference", "--write", str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text() == render_reference()


@pytest.mark.parametrize(("text", "seeds"), [("0:3", (0, 3)), ("7", (7, 8))])
def test_seeds_are_read(text: str, seeds: tuple[int, int]) -> None:
    """A range without its end, or one seed."""
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "a:b", "3:3", "5:1", "-1:2", "0:99999999", ":", "1:2:3"])
def test_bad_seeds_are_refused(text: str) -> None:
    """Nothing runs on a range that says nothing or never ends."""
    with pytest.raises(BadInput, match="--seeds"):
        parse_seeds(text)


def test_sim_fails_when_a_checker_found_something(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Exit status 1 and the violation in words; 0 without; JSON is the result as it is."""
    results = {"seeds": 2, "violations": ["seed 1: two attempts published"]}
    monkeypatch.setattr(cluster.sim, "run_seeds", lambda first, end, **_: {**results, "seeds": end - first})
    monkeypatch.setattr(cluster.sim, "replay_file", lambda _path: {"seeds": 1, "violations": []}, raising=False)
    assert cli.run(["sim", "run", "--seeds", "0:2"]) == 1
    assert "violation: seed 1: two attempts published" in capsys.readouterr().out
    assert cli.run(["sim", "run", "--seeds", "0:2", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == results
    case = tmp_path / "case.jsonl"
    case.write_text("")
    assert cli.run(["sim", "replay", str(case)]) == 0
    assert cli.run(["sim", "replay", str(tmp_path / "none")]) == 2


def test_sim_says_after_how_many_seeds_a_planted_bug_is_caught(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 1 when it is not caught within the limit, 2 for a name that is none."""
    assert cli.run(["sim", "mutants", "budget_not_charged", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["budget_not_charged"]
    assert 1 <= found["seeds"] <= 1000 and found["checker"] == "RetryOnlyUnsent"
    assert cli.run(["sim", "mutants", "quarantine_skipped", "--seeds-max", "1"]) == 1
    assert "not caught within 1 seeds: quarantine_skipped" in capsys.readouterr().out
    assert cli.run(["sim", "mutants", "no_such_bug"]) == 2
    assert "no_lease_check" in capsys.readouterr().err


def test_sim_shows_what_the_seeds_reach(capsys: pytest.CaptureFixture[str]) -> None:
    """One row for each state; exit status 1 when a cell was reached less often than asked."""
    assert cli.run(["sim", "coverage", "--seeds", "0:4", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {row["state"] for row in shown["cells"]} >= {"reserving", "handing_off", "delivering"}
    assert cli.run(["sim", "coverage", "--seeds", "0:4", "--at-least", "1000"]) == 1
    assert "reached only" in capsys.readouterr().out


def test_sim_traces_one_seed(capsys: pytest.CaptureFixture[str]) -> None:
    """One line for each event."""
    assert cli.run(["sim", "trace", "0"]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 200
