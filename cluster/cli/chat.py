"""``kopir chat``: talk to the endpoint in the terminal, or send one message from a script.

On a terminal: several turns, ``/reset`` and ``/exit``, Ctrl-C stops the answer under way. Otherwise one prompt from
``--message`` or stdin, the answer on stdout, exit status 1 unless it came complete.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from cluster.cli.common import JsonOption, KeyOption, UrlOption, find_url, say_error, write, write_json
from kvstore.errors import BadInput, KopirError

MAX_MESSAGE_CHARACTERS = 4 * 1024 * 1024


def chat(
    url: UrlOption = None,
    message: Annotated[str | None, typer.Option("--message", "-m", help="Send this, print the answer, end.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    model: Annotated[str | None, typer.Option(help="Model name. Default: the first one listed.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of an answer.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 always takes the likeliest token.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
) -> int:
    """Talk to the model, streaming. Without a terminal one prompt is read from stdin."""
    from cluster.cli.chat_client import ChatClient

    options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    options = {key: value for key, value in options.items() if value is not None}
    history = [{"role": "system", "content": system}] if system else []
    is_conversation = message is None and sys.stdin.isatty()
    if not is_conversation and message is None:
        message = _read_stdin()
    client = ChatClient(find_url(url), model=model, api_key=api_key)
    try:
        if is_conversation:
            return _converse(client, history, options)
        return _ask_once(client, [*history, {"role": "user", "content": message or ""}], options, as_json=as_json)
    finally:
        client.close()


def _read_stdin() -> str:
    text = sys.stdin.read(MAX_MESSAGE_CHARACTERS + 1)
    if len(text) > MAX_MESSAGE_CHARACTERS:
        raise BadInput("stdin", f"{len(text)} characters", f"more than {MAX_MESSAGE_CHARACTERS} characters")
    if not text.strip():
        raise BadInput("stdin", text, "no prompt; give one on stdin or with --message")
    return text.rstrip("\n")


def _ask_once(client: Any, messages: list[dict[str, str]], options: dict[str, Any], *, as_json: bool) -> int:
    pieces: list[str] = []
    for piece in client.stream(messages, options=options):
        pieces.append(piece)
        if not as_json:
            sys.stdout.write(piece)
            sys.stdout.flush()
    ending = client.ending
    if as_json:
        import msgspec

        write_json({"text": "".join(pieces), **msgspec.to_builtins(ending)})
    else:
        write()
    if ending.kind != "complete":
        say_error(describe(ending))
        return 1
    return 0


def _converse(client: Any, history: list[dict[str, str]], options: dict[str, Any]) -> int:
    """Runs turns until /exit, Ctrl-D or Ctrl-C at the prompt."""
    import contextlib

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (line editing and history for input())
    write(f"{client.model} at {client.base} - /reset forgets, /exit or Ctrl-D ends, Ctrl-C stops an answer.")
    start = len(history)
    while True:
        try:
            text = input("\n> ").strip()
        except (EOFError, KeyboardInterrupt):
            write()
            return 0
        if text in ("/exit", "/quit"):
            return 0
        if text == "/reset":
            del history[start:]
            write("Forgotten.")
        elif text.startswith("/"):
            write("Commands: /reset, /exit")
        elif text:
            _turn(client, history, text, options)


def _turn(client: Any, history: list[dict[str, str]], text: str, options: dict[str, Any]) -> None:
    """One question and its answer; both join the history unless nothing was answered.

    Modifies: ``history``.
    """
    history.append({"role": "user", "content": text})
    pieces: list[str] = []
    answer = client.stream(history, options=options)
    try:
        for piece in answer:
            pieces.append(piece)
            sys.stdout.write(piece)
            sys.stdout.flush()
        write()
        if client.ending.kind != "complete":
            write(f"[{describe(client.ending)}]")
        elif client.ending.finish_reason == "length":
            write("[the answer stops here: limit of tokens reached]")
    except KeyboardInterrupt:
        write("\n[stopped by you; the answer is incomplete]")
    except KopirError as error:
        say_error(str(error))
    finally:
        answer.close()  # Closing the connection makes the server stop and free what the answer held.
    if pieces:
        history.append({"role": "assistant", "content": "".join(pieces)})
    else:
        history.pop()


def describe(ending: Any) -> str:
    """Returns in words what happened to an answer that did not come complete."""
    words = "the answer was interrupted" if ending.kind == "interrupted" else "the connection broke off"
    if ending.detail:
        words += f" ({ending.detail})"
    if ending.delivered_output_tokens is not None:
        words += f"; {ending.delivered_output_tokens} tokens were delivered"
    words += "; the text above is incomplete and is not repeated by itself"
    if ending.request_id:
        words += f"; see `kopir request {ending.request_id}`"
    return words


def register(app: typer.Typer) -> None:
    """Adds the command to the root group."""
    app.command(epilog='Example: kopir chat    or: echo "What is a KV cache?" | kopir chat --max-tokens 60')(chat)
