"""The root command: exit status, one line for an error, plug-ins, help of every command."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from cluster.cli import main as cli
from kvstore.errors import EnvironmentProblem

CLI_PAGE = Path(__file__).parents[3] / "docs" / "cli.md"


def fake_serve(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    """Puts a ``cluster.serve`` with these functions in place."""
    module = types.ModuleType("cluster.serve")
    for name, function in functions.items():
        setattr(module, name, function)
    monkeypatch.setitem(sys.modules, "cluster.serve", module)


def commands(command: Any = None, path: str = "kopir") -> Iterator[tuple[str, Any]]:
    """Yields (path, command) of every command of our own, groups included."""
    command = command or typer.main.get_command(cli.app)
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, f"{path} {name}")


def test_every_command_has_help_with_an_example() -> None:
    """Help says what the command does and shows a command line to copy."""
    found = dict(commands())
    assert {"kopir serve", "kopir chat", "kopir model pull", "kopir sim replay", "kopir config show"} <= set(found)
    for path, command in found.items():
        assert command.help, path
        assert "Example: kopir" in (command.epilog or ""), path


def test_the_page_of_commands_names_every_command() -> None:
    """docs/cli.md leaves no command out."""
    page = CLI_PAGE.read_text()
    assert [path for path, _ in commands() if f"`{path}" not in page] == []


def test_importing_the_command_line_is_light() -> None:
    """Help must not wait for Ray, torch or an HTTP client."""
    heavy = ["ray", "torch", "transformers", "httpx", "fastapi", "numpy", "yaml", "psutil"]
    code = f"import sys, cluster.cli.main; print([n for n in {heavy!r} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["serv"], 2, "No such command 'serv'. Did you mean 'serve'?; see `kopir --help`"),
        (["serve", "--nope"], 2, "No such option"),
        (["serve", "--port", "x"], 2, "Invalid value for '--port'"),
        (["serve", "--port", "70000"], 2, "server.port: expected int <= 65535, got 70000"),
        (["serve", "--set", "server.prot=1"], 2, "did you mean server.port?"),
        (["serve", "--config", "missing.yaml"], 2, "missing.yaml: cannot be read: No such file or directory"),
        (["request"], 2, "Missing argument 'ID'"),
        (["request", "../x"], 2, "ID: not a request id"),
        (["status"], 1, "no running cluster found; start one with `kopir serve`"),
        (["status", "--url", "127.0.0.1:1"], 1, "nothing answers at http://127.0.0.1:1; start it with `kopir serve`"),
        (["status", "--url", "ftp://x"], 1, "not a usable URL"),
        (["sim", "run", "--seeds", "5:1"], 2, "--seeds: expected 0 <= A < B"),
    ],
)
def test_a_failure_is_one_line_and_an_exit_status(
    arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """stdout stays empty, stderr has exactly one line that begins alike."""
    assert cli.run(arguments) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("kopir: error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_an_unexpected_error_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trace comes only with --debug, which is allowed before and behind the command."""

    def down(_address: str | None, *, now: bool) -> bool:
        raise ZeroDivisionError("a\nb")

    fake_serve(monkeypatch, down=down)
    assert cli.run(["down"]) == 1
    assert capsys.readouterr().err == (
        "kopir: error: internal error: ZeroDivisionError: a b (--debug shows the trace)\n"
    )
    for arguments in (["--debug", "down"], ["down", "--debug"]):
        assert cli.run(arguments) == 1
        assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_ends_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An interrupt is neither success nor an internal error."""

    def down(_address: str | None, *, now: bool) -> bool:
        raise KeyboardInterrupt

    fake_serve(monkeypatch, down=down)
    assert cli.run(["down"]) == 130
    assert "internal error" not in capsys.readouterr().err


def test_version_and_help_succeed(capsys: pytest.CaptureFixture[str]) -> None:
    """--version and --help print to stdout and end with 0; no arguments shows the help and is wrong usage."""
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("kopir 0.")
    assert cli.run(["serve", "--help"]) == 0
    assert "--set" in capsys.readouterr().out
    assert cli.run([]) == 2


class FakePoint:
    """An entry point that counts its loads."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.num_loads = 0

    def load(self) -> Any:
        self.num_loads += 1
        if isinstance(self.target, Exception):
            raise self.target
        return self.target


def test_a_plugin_is_listed_without_loading_and_loaded_when_called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Help shows its name; only a call imports it; own commands cannot be taken over."""
    extra = typer.Typer()

    @extra.command()
    def hello() -> None:
        typer.echo("hello from the plug-in")

    @extra.command()
    def other() -> None:
        raise AssertionError

    point, thief = FakePoint(extra), FakePoint(AssertionError("loaded"))
    monkeypatch.setattr(cli, "_plugins", lambda: {"extra": point, "serve": thief})
    assert cli.run(["--help"]) == 0
    assert "extra" in capsys.readouterr().out
    assert point.num_loads == 0
    assert cli.run(["extra", "hello"]) == 0
    assert capsys.readouterr().out == "hello from the plug-in\n"
    assert point.num_loads == 1
    assert cli.run(["serve", "--help"]) == 0
    assert thief.num_loads == 0


def test_a_broken_plugin_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A plug-in that cannot be imported breaks its own commands only."""
    monkeypatch.setattr(cli, "_plugins", lambda: {"extra": FakePoint(ImportError("no module x"))})
    assert cli.run(["extra", "hello"]) == 1
    assert "the command group 'extra' cannot be loaded: no module x" in capsys.readouterr().err
    assert cli.run(["--help"]) == 0


def test_serve_hands_over_the_configuration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Options win over --set, --set over the file; the URL is printed when ready; the status is passed on."""
    seen: list[Any] = []

    def run(config: Any, *, on_ready: Any, on_drain: Any) -> int:
        seen.append(config)
        on_ready("http://127.0.0.1:9000")
        return 3

    fake_serve(monkeypatch, run=run)
    file = tmp_path / "kopir.yaml"
    file.write_text("server: {port: 1, drain_s: 7}\nmodel: a\n")
    arguments = ["serve", "--config", str(file), "--set", "server.port=2", "--set", "model=b", "--port", "9000"]
    assert cli.run([*arguments, "--prefill", "2", "--decode", "3", "--address", "h:1"]) == 3
    (config,) = seen
    assert (config.server.port, config.server.drain_s, config.model) == (9000, 7.0, "b")
    assert (config.workers.prefill.replicas, config.workers.decode.replicas) == (2, 3)
    assert config.cluster.address == "h:1"
    assert "Kopir is ready at http://127.0.0.1:9000/v1" in capsys.readouterr().out


def test_serve_reports_what_the_machine_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An environment problem is shown in its own words."""

    def run(_config: Any, *, on_ready: Any, on_drain: Any) -> int:
        raise EnvironmentProblem("port 8000 is taken")

    fake_serve(monkeypatch, run=run)
    assert cli.run(["serve"]) == 1
    assert capsys.readouterr().err == "kopir: error: port 8000 is taken\n"


def test_down_says_whether_something_ran(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Both outcomes are successes."""
    answers = iter([True, False])
    fake_serve(monkeypatch, down=lambda _address, now: next(answers))
    assert cli.run(["down"]) == cli.run(["down"]) == 0
    assert capsys.readouterr().out == "Stopped.\nNothing was running.\n"
