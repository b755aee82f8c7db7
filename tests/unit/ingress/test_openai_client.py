"""The official client, unmodified, sync and async, against the endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from cluster.ingress.api.backend import Ended, Interrupted
from cluster.ingress.api.errors import NotReady, UpstreamFailed

from .conftest import World
from .fakes import MODEL_ID, batches

USER: Any = {"role": "user", "content": "hi"}
TEXT = "hello 👩‍👩‍👧‍👦 你好 ☃ world"


@pytest_asyncio.fixture
async def client(world: World) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=world.url + "/v1", api_key="none") as client:
        yield client


async def test_chat_streamed_and_whole_agree(world: World, client: openai.AsyncOpenAI) -> None:
    """Same text, same usage, UTF-8 whole in every delta."""
    token_ids = world.play(TEXT, finish="stop")
    whole = await client.chat.completions.create(model=MODEL_ID, messages=[USER])
    assert whole.choices[0].message.content == TEXT
    assert whole.choices[0].finish_reason == "stop"
    stream = await client.chat.completions.create(
        model=MODEL_ID, messages=[USER], stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(deltas) == TEXT
    assert all("\ufffd" not in delta for delta in deltas)
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == len(token_ids)
    assert whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 0


async def test_stream_helper_accumulates(world: World, client: openai.AsyncOpenAI) -> None:
    """The client's ``.stream()`` helper finds roles, content and the finish reason where it wants them."""
    world.play(TEXT, finish="stop")
    async with client.chat.completions.stream(model=MODEL_ID, messages=[USER]) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == TEXT
    assert final.choices[0].finish_reason == "stop"


async def test_completions_of_token_arrays(world: World, client: openai.AsyncOpenAI) -> None:
    """Token-array prompts, streamed and not."""
    world.play(" world")
    whole = await client.completions.create(model=MODEL_ID, prompt=[1, 2, 3], max_tokens=5)
    assert (whole.choices[0].text, whole.usage and whole.usage.prompt_tokens) == (" world", 3)
    stream = await client.completions.create(model=MODEL_ID, prompt=[1, 2, 3], stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == " world"


async def test_sync_client(world: World) -> None:
    """The synchronous client on a thread: stream, whole, models, errors."""
    world.play(TEXT)

    def calls() -> tuple[str, str, list[str]]:
        with openai.OpenAI(base_url=world.url + "/v1", api_key="none", max_retries=0) as client:
            chunks = client.chat.completions.create(model=MODEL_ID, messages=[USER], stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(model=MODEL_ID, messages=[USER], temperature=9)
            assert caught.value.param == "temperature"
            return text, client.models.retrieve(MODEL_ID).id, [model.id for model in client.models.list()]

    assert await asyncio.to_thread(calls) == (TEXT, MODEL_ID, [MODEL_ID])


async def test_interrupted_stream_raises_after_its_deltas(world: World, client: openai.AsyncOpenAI) -> None:
    """F44: the client gets every delta and then APIError, never a silent end."""
    world.play_steps([*batches(world.encode("fox")), Interrupted("worker_exited", "att-1", "decode-0 exited")])
    stream = await client.chat.completions.create(model=MODEL_ID, messages=[USER], stream=True)
    text = ""
    with pytest.raises(openai.APIError) as caught:
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
    assert text == "fox"
    assert caught.value.code == "upstream_decode_interrupted"
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["retryable"] is False


async def test_spent_retry_budget_is_not_retried_by_the_client(world: World, client: openai.AsyncOpenAI) -> None:
    """x-should-retry: false keeps the library from adding its own retries."""
    world.play_steps([UpstreamFailed("decode-0 is gone")])
    with pytest.raises(openai.InternalServerError) as caught:
        await client.chat.completions.create(model=MODEL_ID, messages=[USER])
    assert caught.value.status_code == 502
    assert len(world.backend.specs) == 1


async def test_unknown_model_and_request_id(world: World, client: openai.AsyncOpenAI) -> None:
    """Typed errors, and the id for a support question."""
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(model="nope", messages=[USER])
    assert caught.value.code == "model_not_found"
    assert (caught.value.request_id or "").startswith("req-")


async def test_client_closes_a_stream_early(world: World, client: openai.AsyncOpenAI) -> None:
    """Breaking out of the loop cancels the generation."""
    from .fakes import Gate

    gate = Gate()
    world.play_steps([*batches(world.encode("hello")), gate, Ended("stop")])
    stream = await client.chat.completions.create(model=MODEL_ID, messages=[USER], stream=True)
    async for _ in stream:
        break
    await stream.close()
    await asyncio.wait_for(world.backend.last.over.wait(), 10)
    assert world.backend.last.calls[-1] == ("cancel", "client_gone")


async def test_sixteen_streams_at_once_do_not_mix(world: World) -> None:
    """Each client reads its own answer."""
    async with openai.AsyncOpenAI(base_url=world.url + "/v1", api_key="none") as client:
        world.play(TEXT)

        async def one() -> tuple[str, str]:
            stream = await client.chat.completions.create(model=MODEL_ID, messages=[USER], stream=True)
            chunks = [chunk async for chunk in stream]
            assert len({chunk.id for chunk in chunks}) == 1
            return chunks[0].id, "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

        answers = await asyncio.gather(*(one() for _ in range(16)))
    assert len({answer_id for answer_id, _ in answers}) == 16
    assert {text for _, text in answers} == {TEXT}


async def test_what_the_client_repeats_by_itself_counts_as_attempts(world: World, client: openai.AsyncOpenAI) -> None:
    """The library sends a 503 again and says so; the backend is told how often."""
    world.play("hello")
    world.backend.submit_errors = [NotReady("not yet", retry_after_s=0), None]
    answer = await client.completions.create(model=MODEL_ID, prompt="x")
    assert answer.choices[0].text == "hello"
    assert world.backend.client_retries == [0, 1]


async def test_a_502_of_a_spent_budget_is_not_repeated(world: World, client: openai.AsyncOpenAI) -> None:
    """``x-should-retry: false``: one submission, one error."""
    world.backend.submit_errors = [UpstreamFailed("spent")] * 3
    with pytest.raises(openai.InternalServerError):
        await client.completions.create(model=MODEL_ID, prompt="x")
    assert world.backend.client_retries == [0]
