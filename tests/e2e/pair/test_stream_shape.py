"""The raw bytes of streams: schema of every chunk, and the moment of the first byte."""

from __future__ import annotations

import re
import select
import socket
import time
from typing import Any

import pytest

from ..asking import events, raw_body
from ..cluster import POLL_S, Cluster
from ..golden import make_prompt

FIRST_BYTE_DEADLINE_S = 30.0


@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize("include_usage", [False, True])
def test_f42_every_chunk_has_its_keys(pair: Cluster, kind: str, include_usage: bool) -> None:
    """Role first and once, finish_reason null until the last, constant id, one [DONE] at the end."""
    path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
    prompt: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "Count."}]} if kind == "chat" else {"prompt": make_prompt(42, 20)}
    )
    options = {"stream_options": {"include_usage": True}} if include_usage else {}
    answer = pair.http.post(path, content=raw_body(stream=True, max_tokens=20, ignore_eos=True, **prompt, **options))
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert len(answer.headers.get_list("x-request-id")) == 1
    *chunks, done = events(answer.content)
    assert done == "[DONE]" and "[DONE]" not in chunks
    for name in ("id", "model", "created", "object"):
        assert len({chunk[name] for chunk in chunks}) == 1, name
    assert chunks[0]["object"] == ("chat.completion.chunk" if kind == "chat" else "text_completion")
    usage = chunks.pop() if include_usage else None
    for chunk in chunks:
        assert ("usage" in chunk) == include_usage and chunk.get("usage") is None
        (choice,) = chunk["choices"]
        assert choice["index"] == 0 and "finish_reason" in choice and "logprobs" in choice
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    if kind == "chat":
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert all(set(delta) == {"content"} and delta["content"] for delta in deltas[1:-1])
        assert deltas[-1] == {}
    if usage is not None:
        assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 20


def test_no_byte_before_the_first_delta(pair: Cluster) -> None:
    """While the prompt is computed the socket is silent; when it speaks, the boundary has been crossed.

    Each look at the socket comes before the look at the status, so a byte that is there during prefill is always seen.
    """
    body = raw_body(prompt=make_prompt(43, 1000), max_tokens=4, stream=True)
    silent_phases: set[str] = set()
    with socket.create_connection(("127.0.0.1", pair.port)) as connection:
        connection.sendall(_head("/v1/completions", len(body)) + body)
        deadline_s = time.monotonic() + FIRST_BYTE_DEADLINE_S
        while not select.select([connection], [], [], POLL_S)[0]:
            assert time.monotonic() < deadline_s, "no answer"
            silent_phases |= {stream["phase"] for stream in pair.status()["streams"]}
        speaks = [stream["phase"] for stream in pair.status()["streams"]]
        received = _read_all(connection)
    assert "prefilling" in silent_phases, silent_phases
    assert set(speaks) <= {"delivering", "finished"}, speaks
    head, _, rest = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert rest.index(b'"text":"') < rest.index(b"[DONE]")
    request_id = re.search(rb"x-request-id: (\S+)", head)
    assert request_id is not None
    record = pair.record(request_id[1].decode())
    assert record["first_delta_sent"] and record["phase"] == "finished"
    assert record["delivered_output_tokens"] == 4


def _head(path: str, length: int) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {length}\r\nconnection: close\r\n\r\n"
    ).encode()


def _read_all(connection: socket.socket) -> bytes:
    connection.settimeout(FIRST_BYTE_DEADLINE_S)
    parts = []
    while data := connection.recv(65536):
        parts.append(data)
    return b"".join(parts)
