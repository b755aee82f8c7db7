"""What every command shares: options, the way to the running endpoint, output, one clear line for an error.

Owns no state. Heavy imports (httpx, rich) happen inside functions, so that ``kopir --help`` stays fast.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from kvstore.errors import EnvironmentProblem, KopirError

if TYPE_CHECKING:
    import httpx
    from rich.console import Console
    from rich.table import Table

REQUEST_TIMEOUT_S = 10.0
MAX_ERROR_CHARACTERS = 2000

UrlOption = Annotated[
    str | None, typer.Option("--url", metavar="URL", help="Endpoint, such as http://127.0.0.1:8000. Default: found.")
]
KeyOption = Annotated[
    str | None, typer.Option("--api-key", envvar="KOPIR_API_KEY", metavar="KEY", help="Key, where the endpoint asks.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for a script.")]


class EndpointError(KopirError):
    """The endpoint answered with an error; ``status`` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = message

    def __str__(self) -> str:
        return f"{self.message} (HTTP {self.status})"


def fail(message: str, *, code: int = 1) -> NoReturn:
    """Ends the command with one line on stderr and exit status ``code``."""
    say_error(message)
    raise typer.Exit(code)


def say_error(message: str) -> None:
    """Writes one line to stderr; line breaks inside ``message`` become spaces."""
    sys.stderr.write("kopir: error: " + " ".join(message.split()) + "\n")
    sys.stderr.flush()


def write(text: str = "") -> None:
    """Writes a line to stdout, plain."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def write_json(value: object, *, indent: int | None = 2) -> None:
    """Writes ``value`` as one JSON document."""
    write(json.dumps(value, indent=indent, ensure_ascii=False))


def find_url(url: str | None) -> str:
    """Returns the base URL of the endpoint, without ``/v1`` and trailing slash.

    Raises: EnvironmentProblem if none was given and no serve of this user is running.
    """
    if url is None:
        from cluster import runfile

        running = runfile.find()
        if running is None:
            raise EnvironmentProblem("no running cluster found; start one with `kopir serve`, or name one with --url")
        url = running.url
    url = url if "://" in url else f"http://{url}"
    return url.rstrip("/").removesuffix("/v1")


def make_client(base: str, *, api_key: str | None = None, timeout_s: float | None = REQUEST_TIMEOUT_S) -> httpx.Client:
    """Returns an HTTP client for the endpoint at ``base``; ``timeout_s`` None waits as long as it takes."""
    import httpx

    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    is_local = (httpx.URL(base).host or "") in ("localhost", "127.0.0.1", "::1")
    # A proxy set for the outside must not catch what stays on this machine, and a certificate need not name loopback.
    return httpx.Client(
        base_url=base,
        headers=headers,
        timeout=httpx.Timeout(timeout_s, connect=5.0),
        trust_env=not is_local,
        verify=not is_local,
    )


def get_json(base: str, path: str, *, api_key: str | None = None) -> dict[str, Any]:
    """Returns the JSON object at ``base + path``.

    Raises: EnvironmentProblem if nothing answers there; EndpointError if the answer is an error or no JSON object.
    """
    with make_client(base, api_key=api_key) as client, mapped_errors(base):
        answer = client.get(path)
    if answer.status_code >= 400:
        raise EndpointError(answer.status_code, error_message(answer.content))
    try:
        value = json.loads(answer.content)
    except ValueError as error:
        raise EndpointError(answer.status_code, f"{base}{path} did not answer with JSON; is it Kopir?") from error
    if not isinstance(value, dict):
        raise EndpointError(answer.status_code, f"{base}{path} did not answer with a JSON object; is it Kopir?")
    return value


@contextlib.contextmanager
def mapped_errors(base: str) -> Iterator[None]:
    """Turns errors of the HTTP client into ours, with the address. Raises: EnvironmentProblem."""
    import httpx

    try:
        yield
    except httpx.TimeoutException as error:
        raise EnvironmentProblem(f"{base} does not answer in time") from error
    except httpx.ConnectError as error:
        raise EnvironmentProblem(f"nothing answers at {base}; start it with `kopir serve`") from error
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise EnvironmentProblem(f"{base} is not a usable URL: {error}") from error
    except httpx.HTTPError as error:
        raise EnvironmentProblem(f"the connection to {base} broke: {error or type(error).__name__}") from error


def error_message(body: bytes) -> str:
    """Returns the message of an error answer in OpenAI's shape, or its text, bounded."""
    text = body[: 4 * MAX_ERROR_CHARACTERS].decode("utf-8", errors="replace")
    try:
        error = json.loads(body)["error"]
        text = str(error["message"])
        if error.get("param"):
            text += f" [{error['param']}]"
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    return text[:MAX_ERROR_CHARACTERS].strip() or "no explanation"


def make_console() -> Console:
    """Returns a console on stdout; no colours when stdout is not a terminal."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=False)


def make_table(title: str, columns: list[str], rows: list[list[object]]) -> Table:
    """Returns a table of plain cells; None is shown as a dash. Cells are text, never markup."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text("-" if cell is None else cell_text(cell)) for cell in row))
    return table


def cell_text(value: object) -> str:
    """Returns a value of a JSON document as a short cell."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={cell_text(inner)}" for key, inner in value.items() if inner is not None)
    if isinstance(value, list | tuple):
        return ", ".join(cell_text(inner) for inner in value)
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    return str(value)
