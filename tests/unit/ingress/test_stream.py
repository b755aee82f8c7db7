"""Raw bytes of streamed answers: order, shape and the moment of the first byte."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from cluster.ingress.api.backend import Ended, Interrupted, Restarted
from cluster.ingress.api.errors import UpstreamFailed

from .conftest import World
from .fakes import Gate, batches


def events(data: bytes) -> list[Any]:
    """Splits a body into events; every event is one data line and a blank line."""
    parts = data.decode().split("\n\n")
    assert parts.pop() == "", "the body ends inside an event"
    for part in parts:
        assert part.startswith("data: "), part
        assert "\n" not in part, part
    return [part if part == "data: [DONE]" else json.loads(part[6:]) for part in parts]


def walk(chunks: list[Any], *, kind: str) -> str:
    """F42: checks every key of every chunk and returns the joined text."""
    assert chunks[-1] == "data: [DONE]"
    assert chunks.count("data: [DONE]") == 1
    body = chunks[:-1]
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in body}) == 1
    assert body[0]["object"] == ("chat.completion.chunk" if kind == "chat" else "text_completion")
    choices = [choice for chunk in body for choice in chunk["choices"]]
    assert all("finish_reason" in choice and choice["index"] == 0 for choice in choices)
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    assert choices[-1]["finish_reason"] in ("stop", "length")
    if kind == "completion":
        return "".join(choice["text"] for choice in choices)
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in choice["delta"] for choice in choices[1:])
    assert choices[-1]["delta"] == {}
    return "".join(choice["delta"].get("content", "") for choice in choices)


@pytest.mark.parametrize("kind", ["chat", "completion"])
async def test_schema_walk_of_a_stream(world: World, kind: str) -> None:
    """F42: roles, finish reasons, constant fields and one [DONE], on both endpoints."""
    token_ids = world.play("hello world, the quick brown fox")
    response = await (world.chat if kind == "chat" else world.complete)(stream=True)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response.content)
    assert walk(chunks, kind=kind) == "hello world, the quick brown fox"
    assert all("usage" not in chunk for chunk in chunks[:-1])
    assert world.backend.last.calls[0] == "mark_first_delta"
    assert world.backend.last.calls[-2:] == [("delivered", len(token_ids)), "completed"]


async def test_usage_chunk_only_if_asked_and_null_before(world: World) -> None:
    """The usage chunk has no choices, comes last before [DONE], and counts cached tokens."""
    world.backend.cached_tokens = 5
    token_ids = world.play("hello")
    response = await world.chat(stream=True, stream_options={"include_usage": True})
    *others, usage, done = events(response.content)
    assert done == "data: [DONE]"
    assert all(chunk["usage"] is None for chunk in others)
    prompt = len(world.backend.specs[0].prompt_token_ids)
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": len(token_ids),
        "total_tokens": prompt + len(token_ids),
        "prompt_tokens_details": {"cached_tokens": 5},
    }


async def test_nothing_is_written_before_the_first_text(world: World) -> None:
    """A token that is half a character writes nothing; the boundary is crossed with the first whole one."""
    gate = Gate()
    snowman = world.encode("☃")
    assert len(snowman) >= 2, "the test needs a character of several tokens"
    world.play_steps([*batches(snowman[:1]), gate, *batches(snowman[1:], first_index=1), Ended("length")])
    pending = asyncio.create_task(world.chat(stream=True))
    await gate.reached.wait()
    assert world.backend.last.calls == []
    gate.open.set()
    assert walk(events((await pending).content), kind="chat") == "☃"
    assert world.backend.last.calls[0] == "mark_first_delta"


async def test_failure_before_the_first_text_is_an_http_error(world: World) -> None:
    """Contract 3 and 4: 502 in OpenAI's shape, with the advice not to retry, and no byte of a stream."""
    error = UpstreamFailed("decode-0 is gone", code="upstream_failed")
    world.play_steps([*batches(world.encode("☃")[:1]), error])
    response = await world.chat(stream=True)
    assert response.status_code == 502
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-should-retry"] == "false"
    assert response.json()["error"]["code"] == "upstream_failed"
    assert "mark_first_delta" not in world.backend.last.calls


async def test_deadline_before_the_first_text_is_504(world: World) -> None:
    """The status is the backend's."""
    world.play_steps([UpstreamFailed("too late", code="deadline_exceeded", status=504)])
    response = await world.chat(stream=True)
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")


@pytest.mark.parametrize("stream", [True, False])
async def test_restart_before_the_first_text_leaves_no_trace(world: World, stream: bool) -> None:
    """A3: tokens of the first attempt that were held back do not show up in the answer."""
    snowman, word = world.encode("☃"), world.encode("fox")
    world.play_steps([*batches(snowman[:1]), Restarted("att-2"), *batches(word), Ended("length")])
    response = await world.chat(stream=stream)
    if stream:
        assert walk(events(response.content), kind="chat") == "fox"
    else:
        assert response.json()["choices"][0]["message"]["content"] == "fox"
        assert response.json()["usage"]["completion_tokens"] == len(word)


@pytest.mark.parametrize("include_usage", [True, False])
async def test_interruption_after_the_first_text(world: World, include_usage: bool) -> None:
    """Contract 3: the error event ends a clean body without [DONE] or finish_reason; held text is not delivered."""
    word, snowman = world.encode("fox"), world.encode("☃")
    steps = [*batches([*word, *snowman[:1]]), Interrupted("worker_exited", "att-7", "decode-0 exited")]
    world.play_steps(steps)
    options = {"stream_options": {"include_usage": True}} if include_usage else {}
    response = await world.chat(stream=True, **options)
    assert response.status_code == 200
    chunks = events(response.content)
    error = chunks.pop()["error"]
    assert error == {
        "message": "decode-0 exited",
        "type": "upstream_error",
        "param": None,
        "code": "upstream_decode_interrupted",
        "reason": "worker_exited",
        "request_id": response.headers["x-request-id"],
        "attempt_id": "att-7",
        "partial_output": True,
        "delivered_output_tokens": len(word),
        "retryable": False,
    }
    if include_usage:
        usage = chunks.pop()
        assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], len(word) + 1)
    assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "fox"
    assert world.backend.last.calls[-1] == ("delivered", len(word)), "neither completed nor cancelled"


async def test_gap_in_the_tokens_after_the_first_text_is_an_interruption(world: World) -> None:
    """Contract 7: a gap is a fault, never patched. The generation is cancelled."""
    word = world.encode("fox")
    world.play_steps([*batches(word), *batches(word, first_index=len(word) + 1)])
    response = await world.chat(stream=True)
    assert events(response.content)[-1]["error"]["reason"] == "engine_fault"
    assert world.backend.last.calls[-1] == ("cancel", "gateway_fault")


async def test_gap_before_the_first_text_is_a_500(world: World) -> None:
    """The same fault with nothing written: an HTTP error that tells nothing of the inside."""
    world.play_steps(batches(world.encode("fox"), first_index=1))
    response = await world.chat(stream=True)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    assert ("cancel", "gateway_fault") in world.backend.last.calls


async def test_stop_token_first_gives_an_empty_answer(world: World) -> None:
    """F20: role, finish "stop", one completion token, no text."""
    token_id = world.encode("fox")[0]
    world.play_steps([*batches([token_id]), Ended("stop")])
    response = await world.chat(stream=True, stop_token_ids=[token_id], stream_options={"include_usage": True})
    chunks = events(response.content)
    assert walk([chunk for chunk in chunks if chunk == "data: [DONE]" or chunk["choices"]], kind="chat") == ""
    assert chunks[-2]["usage"]["completion_tokens"] == 1
    assert chunks[-3]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("size", [1, 2, 64])
async def test_stop_string_over_several_tokens(world: World, size: int) -> None:
    """F48: the text ends before the stop string, no fragment of it goes out, upstream is told to stop."""
    text = "the quick brown fox jumps"
    token_ids = world.play(text, size=size)
    response = await world.chat(stream=True, stop=["ck brown f"], stream_options={"include_usage": True})
    chunks = events(response.content)
    assert walk([chunk for chunk in chunks if chunk == "data: [DONE]" or chunk["choices"]], kind="chat") == "the qui"
    assert chunks[-3]["choices"][0]["finish_reason"] == "stop"
    num_until_stop = next(n for n in range(99) if "ck brown f" in world.bundle.table.decode(token_ids[:n]))
    assert chunks[-2]["usage"]["completion_tokens"] == num_until_stop
    calls = world.backend.last.calls
    assert "finish_stop" in calls
    assert calls[-1] == "completed"


async def test_near_miss_of_a_stop_string_is_flushed(world: World) -> None:
    """F48: what was held back comes out at the end."""
    world.play("the quick brown fo")
    response = await world.chat(stream=True, stop="brown fox")
    chunks = events(response.content)
    assert walk(chunks, kind="chat") == "the quick brown fo"
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"


async def test_line_separators_are_escaped(world: World) -> None:
    """Contract 2: U+2028 and U+2029 never stand raw in an event."""
    world.play("a\u2028b\u2029c…")
    response = await world.chat(stream=True)
    assert "\u2028" not in response.text
    assert "\u2029" not in response.text
    assert walk(events(response.content), kind="chat") == "a\u2028b\u2029c…"


async def test_incomplete_character_at_the_end_becomes_a_replacement(world: World) -> None:
    """Contract 2: no lone fragments; U+FFFD stands for what was cut off."""
    word, snowman = world.encode("fox"), world.encode("☃")
    world.play_steps([*batches([*word, *snowman[:1]]), Ended("length")])
    response = await world.chat(stream=True)
    assert walk(events(response.content), kind="chat") == "fox\ufffd"
    assert ("delivered", len(word) + 1) in world.backend.last.calls


@pytest.mark.parametrize("kind", ["chat", "completion"])
async def test_streamed_logprobs_cover_each_visible_token_once(world: World, kind: str) -> None:
    """Logprobs travel with the text of their token, bytes included; the stop token has none."""
    word, snowman = world.encode("the fox "), world.encode("☃")
    stop_id = world.bundle.eos_token_ids[0]
    world.play_steps([*batches([*word, *snowman, stop_id], size=2, logprobs=True), Ended("stop")])
    if kind == "chat":
        response = await world.chat(stream=True, logprobs=True, top_logprobs=1)
        found: list[Any] = []
        text = ""
        for chunk in events(response.content)[:-1]:
            text += chunk["choices"][0]["delta"].get("content", "")
            found += (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
            assert sum(len(entry["bytes"]) for entry in found) <= len(text.encode()), "a logprob before its text"
        assert bytes(byte for entry in found for byte in entry["bytes"]) == "the fox ☃".encode()
        assert all(entry["top_logprobs"][0]["bytes"] == entry["bytes"] for entry in found)
        assert len(found) == len(word) + len(snowman)
        return
    response = await world.complete(stream=True, logprobs=1)
    parts = [c["choices"][0]["logprobs"] for c in events(response.content)[:-1] if c["choices"][0]["logprobs"]]
    names = [name for part in parts for name in part["tokens"]]
    offsets = [offset for part in parts for offset in part["text_offset"]]
    assert len(names) == len(word) + len(snowman)
    assert "".join(names[: len(word)]) == "the fox "
    assert offsets[: len(word)] == [len("".join(names[:n])) for n in range(len(word))]
    assert all(name.startswith("bytes:\\x") for name in names[len(word) :])
