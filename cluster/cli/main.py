"""The command ``kopir``: gathers the commands and turns every failure into one line and an exit status.

Exit status: 0 success, 1 failure, 2 wrong usage, 130 interrupted. ``--debug`` anywhere before ``--`` shows the trace.
Groups of other packages plug in by the entry point group ``kopir.commands`` and are loaded only when called.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import sys
import traceback
from contextlib import suppress
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from cluster.cli import apply, chat, config, doctor, down, keys, model, policy, request, serve, sim, status, store
from cluster.cli.common import say_error, write
from kvstore.errors import BadInput, EnvironmentProblem, KopirError

ENTRY_POINT_GROUP = "kopir.commands"
EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130

_PLUGIN_HELP = {"bench": "Measure block transfers and serving on this machine."}


class PluginGroup(TyperGroup):
    """The root group: knows the names of plug-ins from package metadata and imports one only when it is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Returns the names of own commands, then of plug-ins."""
        names = super().list_commands(ctx)
        return names + sorted(name for name in _plugins() if name not in names)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns a command; for a plug-in only its name and one line of help."""
        found = super().get_command(ctx, cmd_name)
        if found is None and cmd_name in _plugins():
            return TyperGroup(name=cmd_name, help=_PLUGIN_HELP.get(cmd_name, "Commands of an installed package."))
        return found

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Returns (name, command, rest); loads the plug-in if it is one. Raises: EnvironmentProblem if it is broken."""
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None and name not in self.commands and name in _plugins():
            command = _load_plugin(name)
        return name, command, rest


def _plugins() -> dict[str, importlib.metadata.EntryPoint]:
    return {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}


def _load_plugin(name: str) -> Any:
    try:
        return typer.main.get_command(_plugins()[name].load())
    except (ImportError, AttributeError) as error:
        raise EnvironmentProblem(f"the command group {name!r} cannot be loaded: {error}") from error


app = typer.Typer(
    name="kopir",
    cls=PluginGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    help="Kopir serves language models with prefill and decode apart, a shared KV cache and honest fail-over.",
    epilog="Start with: kopir doctor, then kopir serve. Example: kopir serve --port 9000 --debug",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        write(f"kopir {importlib.metadata.version('kopir')}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", is_eager=True, callback=_show_version, help="Print the version."),
    debug: bool = typer.Option(False, "--debug", help="Show the full trace of an error; allowed anywhere."),
) -> None:
    del version, debug  # Both have done their work before this function is called.


for _module in (serve, chat, status, request, apply, down, doctor):
    _module.register(app)
app.add_typer(model.app, name="model")
app.add_typer(config.app, name="config")
app.add_typer(policy.app, name="policy")
app.add_typer(keys.app, name="keys")
app.add_typer(sim.app, name="sim")
app.add_typer(store.app, name="store")


def run(arguments: list[str]) -> int:
    """Runs one command line (without the program name) and returns its exit status. Never raises."""
    arguments, debug = _take_debug(arguments)
    try:
        result = typer.main.get_command(app).main(arguments, prog_name="kopir", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        _trace(debug)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has seen enough; stdout is closed quietly.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    except typer.TyperException as error:
        return _usage_error(error, debug)
    except KopirError as error:
        _trace(debug)
        say_error(str(error))
        return EXIT_USAGE if isinstance(error, BadInput) else EXIT_FAILURE
    except Exception as error:
        _trace(debug)
        say_error(f"internal error: {type(error).__name__}: {error}" + ("" if debug else " (--debug shows the trace)"))
        return EXIT_FAILURE


def main() -> None:
    """Entry point of the ``kopir`` script."""
    code = run(sys.argv[1:])
    if "ray" in sys.modules:
        # Taking an interpreter with Ray in it apart takes seconds on a busy machine, and a serve that has stopped
        # has nothing left to take apart: whoever waits for its end should not wait for that.
        _end_at_once(code)
    sys.exit(code)


def _end_at_once(code: int) -> NoReturn:
    """Ends the process with what it has said written out and nothing else."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # Its reader is gone, or it was closed.
            stream.flush()
    os._exit(code)


def _take_debug(arguments: list[str]) -> tuple[list[str], bool]:
    """Returns the arguments without ``--debug`` and whether it stood there (before ``--``)."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    kept = [argument for argument in arguments[:end] if argument != "--debug"]
    return kept + arguments[end:], len(kept) < end


def _usage_error(error: typer.TyperException, debug: bool) -> int:
    _trace(debug)
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()  # type: ignore[attr-defined]
        return EXIT_USAGE
    context = getattr(error, "ctx", None)
    hint = f"; see `{context.command_path} --help`" if context is not None else ""
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    say_error(message.rstrip(".") + hint)
    return EXIT_USAGE


def _trace(debug: bool) -> None:
    if debug:
        traceback.print_exc()
