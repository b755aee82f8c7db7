"""Requests through the official client, and answers as raw bytes, in one shape for comparison."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import openai

from .cluster import MODEL

EXTENSIONS = ("stop_token_ids", "top_k", "min_p", "ignore_eos")
"""Parameters that the official client passes on only by ``extra_body``."""


@dataclass(frozen=True)
class Answer:
    """A complete answer. ``pieces`` are the texts of the deltas, one text when it was not streamed."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    pieces: tuple[str, ...]
    request_id: str

    @property
    def content(self) -> tuple[str, str, int, int]:
        """Everything that must be equal however the answer was sent."""
        return self.text, self.finish_reason, self.prompt_tokens, self.completion_tokens


def ask(client: openai.OpenAI, *, stream: bool = False, **body: Any) -> Answer:
    """Sends a completion, or a chat when there are ``messages``; greedy unless told otherwise."""
    body = {"model": MODEL, "temperature": 0.0, **body}
    if extra := {name: body.pop(name) for name in EXTENSIONS if name in body}:
        body["extra_body"] = extra
    is_chat = "messages" in body
    api = client.chat.completions if is_chat else client.completions
    if not stream:
        raw = api.with_raw_response.create(**body)
        answer = raw.parse()
        choice = answer.choices[0]
        text = choice.message.content if is_chat else choice.text
        return _answer(text, choice.finish_reason, answer.usage, (text,), raw.headers["x-request-id"])
    raw = api.with_raw_response.create(**body, stream=True, stream_options={"include_usage": True})
    pieces: list[str] = []
    reason, usage = None, None
    with raw.parse() as chunks:
        for chunk in chunks:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                assert reason is None, "a choice after the finish"
                reason = choice.finish_reason
                piece = choice.delta.content if is_chat else choice.text
                if piece:
                    pieces.append(piece)
    return _answer("".join(pieces), reason, usage, tuple(pieces), raw.headers["x-request-id"])


def _answer(text: str, reason: str | None, usage: Any, pieces: tuple[str, ...], request_id: str) -> Answer:
    assert reason is not None, "no finish_reason"
    assert usage is not None, "no usage"
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage
    cached = usage.prompt_tokens_details.cached_tokens
    assert 0 <= cached <= usage.prompt_tokens - 1, usage
    return Answer(text, reason, usage.prompt_tokens, usage.completion_tokens, cached, pieces, request_id)


def raw_body(**body: Any) -> bytes:
    """Returns the JSON of a request."""
    return json.dumps({"model": MODEL, "temperature": 0.0, **body}).encode()


def events(data: bytes) -> list[Any]:
    """Splits a streamed body: every event is one data line and a blank line; ``[DONE]`` stays text."""
    parts = data.decode("utf-8").split("\n\n")
    assert parts.pop() == "", "the body ends inside an event"
    for part in parts:
        assert part.startswith("data: ") and "\n" not in part, part
    return [part[6:] if part == "data: [DONE]" else json.loads(part[6:]) for part in parts]
