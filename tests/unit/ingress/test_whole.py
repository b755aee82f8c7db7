"""Answers in one JSON document."""

from __future__ import annotations

import pytest

from cluster.ingress.api.backend import Ended, Interrupted
from cluster.ingress.api.errors import NotReady, Overloaded, UpstreamFailed
from kvstore.errors import BadInput, NoCapacity

from .conftest import World
from .fakes import batches


async def test_chat_answer_has_every_key(world: World) -> None:
    """The whole document, key by key."""
    token_ids = world.play("hello world")
    response = await world.chat()
    body = response.json()
    prompt = len(world.backend.specs[0].prompt_token_ids)
    assert body == {
        "id": "chatcmpl-" + response.headers["x-request-id"].removeprefix("req-"),
        "object": "chat.completion",
        "created": body["created"],
        "model": "tiny-test-model",
        "system_fingerprint": "fp-test",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello world", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": len(token_ids),
            "total_tokens": prompt + len(token_ids),
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    assert world.backend.last.calls == ["mark_first_delta", ("delivered", len(token_ids)), "completed"]


async def test_completion_answer_keeps_its_leading_space(world: World) -> None:
    """An answer continues a prompt: its first space is part of it."""
    world.play(" world")
    assert (await world.complete()).json()["choices"][0]["text"] == " world"


async def test_stop_string_ends_the_text(world: World) -> None:
    """F48, not streamed: same text and reason as streamed."""
    world.play("the quick brown fox jumps")
    body = (await world.chat(stop="brown")).json()
    assert body["choices"][0]["message"]["content"] == "the quick "
    assert body["choices"][0]["finish_reason"] == "stop"
    assert "finish_stop" in world.backend.last.calls


async def test_logprobs_of_a_whole_answer(world: World) -> None:
    """Every visible token once, the stop token not at all."""
    word = world.encode("the fox")
    stop_id = world.bundle.eos_token_ids[0]
    world.play_steps([*batches([*word, stop_id], logprobs=True), Ended("stop")])
    body = (await world.chat(logprobs=True)).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == "the fox"
    assert body["usage"]["completion_tokens"] == len(word) + 1


async def test_logprobs_end_where_the_text_ends(world: World) -> None:
    """Tokens of a stop string have no logprobs in the answer: they are no part of it."""
    world.play("the quick brown fox", logprobs=True)
    choice = (await world.chat(logprobs=True, stop=" brown")).json()["choices"][0]
    assert choice["message"]["content"] == "the quick"
    assert "the quick".startswith("".join(entry["token"] for entry in choice["logprobs"]["content"]))


@pytest.mark.parametrize(
    ("error", "status", "code", "headers"),
    [
        (BadInput("max_tokens", 9, "never fits the pools"), 400, "invalid_value", {}),
        (NoCapacity("all blocks are taken"), 503, "no_capacity", {"retry-after": "1"}),
        (NotReady("no decode worker", retry_after_s=500), 503, "not_ready", {"retry-after": "119"}),
        (Overloaded("queue is full", retry_after_s=7), 429, "queue_full", {"retry-after": "7"}),
        (UpstreamFailed("worker lost"), 502, "upstream_failed", {"x-should-retry": "false"}),
        (RuntimeError("a secret inside"), 500, "internal_error", {}),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_submit_errors_become_http_errors(
    world: World, error: Exception, status: int, code: str, headers: dict[str, str], stream: bool
) -> None:
    """Contract 4: status, code and retry advice; the inside of an unexpected error stays inside."""
    world.backend.submit_steps = [error]
    response = await world.chat(stream=stream)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert "secret" not in response.text
    assert response.headers["x-request-id"].startswith("req-")
    assert headers.items() <= dict(response.headers).items()


async def test_interruption_of_a_whole_answer_is_a_502(world: World) -> None:
    """Nothing was written, so nothing is half delivered."""
    world.play_steps([*batches(world.encode("fox")), Interrupted("engine_fault", "att-1", "engine stopped")])
    response = await world.chat()
    assert (response.status_code, response.json()["error"]["message"]) == (502, "engine stopped")
