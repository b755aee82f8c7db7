"""``kopir chat``: the answer as it streams, and the truth about how it ended."""

from __future__ import annotations

import io
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.cli import chat, sse
from cluster.cli import main as cli
from cluster.cli.sse import SseDecoder

from .conftest import Endpoint, answer_json, answer_stream, delta

PATH = "/v1/chat/completions"
INTERRUPTION = {
    "error": {
        "message": "decode worker exited",
        "type": "upstream_error",
        "code": "upstream_decode_interrupted",
        "reason": "worker_exited",
        "request_id": "req-9",
        "attempt_id": "a1",
        "partial_output": True,
        "delivered_output_tokens": 37,
        "retryable": False,
    }
}


def ask(endpoint: Endpoint, *arguments: str) -> int:
    return cli.run(["chat", "--url", endpoint.url, "-m", "Hi", *arguments])


def test_a_complete_answer_is_printed(endpoint: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    """Pieces in order on stdout, nothing on stderr, exit 0; model, options and key are sent."""
    endpoint.scripts[PATH] = answer_stream(delta(), delta("Hé"), delta("llo 👩‍👩‍👧"), delta(finish="stop"), "[DONE]")
    assert ask(endpoint, "--system", "S", "--max-tokens", "5", "--temperature", "0", "--api-key", "k") == 0
    captured = capsys.readouterr()
    assert captured.out == "Héllo 👩‍👩‍👧\n"
    assert captured.err == ""
    _, _, body, headers = endpoint.requests[-1]
    sent = json.loads(body)
    assert sent["model"] == "tiny"
    assert sent["messages"] == [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}]
    assert (sent["max_tokens"], sent["temperature"], sent["stream"]) == (5, 0.0, True)
    assert {name.lower(): value for name, value in headers.items()}["authorization"] == "Bearer k"


def test_an_interruption_is_a_failure_and_says_so(endpoint: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    """The text that came is shown; the reason, the count and the request are on stderr; exit 1."""
    endpoint.scripts[PATH] = answer_stream(delta("Half"), INTERRUPTION)
    assert ask(endpoint) == 1
    captured = capsys.readouterr()
    assert captured.out == "Half\n"
    assert "interrupted (worker_exited: decode worker exited); 37 tokens were delivered" in captured.err
    assert "kopir request req-9" in captured.err


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (answer_stream(delta("Half"), delta(finish="stop")), "the stream ended without [DONE]"),
        (answer_stream(delta("Half"), is_clean=False), "the connection to http"),
        (answer_stream(delta("Half"), "{not json"), "the connection broke off"),
        (answer_stream(delta("Half"), "[1]"), "an event is not a JSON object"),
    ],
)
def test_an_answer_without_a_proper_end_is_never_success(
    endpoint: Endpoint, capsys: pytest.CaptureFixture[str], script: object, message: str
) -> None:
    """A clean end without [DONE], a cut and nonsense all end with exit 1."""
    endpoint.scripts[PATH] = script  # type: ignore[assignment]
    assert ask(endpoint) == 1
    captured = capsys.readouterr()
    assert captured.out == "Half\n"
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_an_error_before_the_stream_names_field_and_status(
    endpoint: Endpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    """OpenAI's error shape is read."""
    error = {"error": {"message": "too long", "type": "invalid_request_error", "param": "messages", "code": None}}
    endpoint.scripts[PATH] = answer_json(error, status=400)
    assert ask(endpoint) == 1
    assert capsys.readouterr().err == "kopir: error: too long [messages] (HTTP 400)\n"


def test_json_holds_text_and_ending(endpoint: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    """A script gets one document, also when the answer was interrupted."""
    usage = {"choices": [], "usage": {"completion_tokens": 2}}
    endpoint.scripts[PATH] = answer_stream(delta("a"), delta("b", finish="length"), usage, "[DONE]")
    assert ask(endpoint, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["text"], document["kind"], document["finish_reason"]) == ("ab", "complete", "length")
    assert document["usage"] == {"completion_tokens": 2}
    assert document["request_id"] == "req-7"
    endpoint.scripts[PATH] = answer_stream(delta("a"), INTERRUPTION)
    assert ask(endpoint, "--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["text"], document["kind"], document["delivered_output_tokens"]) == ("a", "interrupted", 37)


def test_without_a_terminal_the_prompt_comes_from_stdin(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of stdin is one prompt; an empty one is refused."""
    endpoint.scripts[PATH] = answer_stream(delta("ok"), "[DONE]")
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines\n"))
    assert cli.run(["chat", "--url", f"{endpoint.url}/v1/"]) == 0
    assert json.loads(endpoint.requests[-1][2])["messages"] == [{"role": "user", "content": "two\nlines"}]
    monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
    assert cli.run(["chat", "--url", endpoint.url]) == 2
    assert "no prompt" in capsys.readouterr().err


def converse(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, *lines: str) -> int:
    """Runs a conversation on a pretended terminal, ending with Ctrl-D."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    inputs = iter(lines)

    def read(_prompt: str) -> str:
        try:
            return next(inputs)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", read)
    return cli.run(["chat", "--url", endpoint.url])


def test_a_conversation_keeps_its_turns(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers, also partial ones, join the history; /reset forgets; /exit ends before the rest is read."""
    endpoint.scripts[PATH] = answer_stream(delta("Half"), INTERRUPTION)
    assert converse(endpoint, monkeypatch, "one", "two", "/reset", "", "/what", "three", "/exit", "four") == 0
    sent = [json.loads(body)["messages"] for _, path, body, _ in endpoint.requests if path == PATH]
    assert [[message["content"] for message in messages] for messages in sent] == [
        ["one"],
        ["one", "Half", "two"],
        ["three"],
    ]


def test_a_refused_turn_leaves_no_trace(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A question without an answer would confuse every later turn."""
    endpoint.scripts[PATH] = answer_json({"error": {"message": "no capacity"}}, status=503)
    assert converse(endpoint, monkeypatch, "one", "two") == 0
    assert json.loads(endpoint.requests[-1][2])["messages"] == [{"role": "user", "content": "two"}]
    assert "no capacity (HTTP 503)" in capsys.readouterr().err


def test_ctrl_c_stops_the_answer_and_closes_the_stream(capsys: pytest.CaptureFixture[str]) -> None:
    """The generator is closed (which hangs up), the piece that came is kept, the conversation goes on."""
    closed: list[bool] = []

    class Client:
        ending = None

        def stream(self, _messages: object, *, options: object) -> object:
            try:
                yield "Half"
                raise KeyboardInterrupt
            finally:
                closed.append(True)

    history: list[dict[str, str]] = []
    chat._turn(Client(), history, "one", {})
    assert closed == [True]
    assert history[-1] == {"role": "assistant", "content": "Half"}
    assert "stopped by you" in capsys.readouterr().out


def test_no_model_listed_is_named(endpoint: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    """Talking to something that is not Kopir ends with a clear line."""
    endpoint.scripts["/v1/models"] = answer_json({"data": []})
    assert ask(endpoint) == 1
    assert "lists no model; is it Kopir?" in capsys.readouterr().err


@given(
    events=st.lists(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n")), min_size=1, max_size=3)),
    cuts=st.lists(st.integers(0, 400)),
    newline=st.sampled_from(["\n", "\r\n"]),
)
def test_events_do_not_depend_on_how_bytes_arrive(events: list[list[str]], cuts: list[int], newline: str) -> None:
    """Any cutting of the bytes, comments between, LF or CRLF: the same events."""
    text = "".join(
        f": ping{newline}" + "".join(f"data: {line}{newline}" for line in event) + newline for event in events
    )
    data = text.encode()
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    decoder = SseDecoder()
    got = [event for start, end in itertools.pairwise(places) for event in decoder.feed(data[start:end])]
    assert got == ["\n".join(event) for event in events]


def test_an_event_without_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that never ends a line, or never ends an event, cannot fill the memory."""
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    with pytest.raises(ValueError, match="larger than 100 bytes"):
        list(SseDecoder().feed(b"x" * 101))
    with pytest.raises(ValueError, match="larger than 100 bytes"):
        list(SseDecoder().feed(b"data: 0123456789\n" * 10))
