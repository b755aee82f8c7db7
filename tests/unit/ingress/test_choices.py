"""Several answers to one request (``n``), streamed and whole."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.ingress.api.backend import Ended, Interrupted, Restarted
from cluster.ingress.api.errors import Overloaded, UpstreamFailed

from .conftest import World
from .fakes import Gate, batches
from .test_plan import chat, plan
from .test_stream import events


def play_each(world: World, *texts: str, finish: str = "stop") -> list[list[int]]:
    """Scripts one answer per choice; returns their token ids."""
    ids = [world.encode(text) for text in texts]
    world.backend.scripts = [[*batches(token_ids), Ended(finish)] for token_ids in ids]
    return ids


async def test_each_choice_has_its_own_seed() -> None:
    """The first keeps the request's seed, so n=1 is its first choice; the same request gives the same seeds."""
    got = await plan(n=4, seed=7)
    seeds = [got.spec_of(index).sampling.seed for index in range(4)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 4
    assert seeds == [(await plan(n=2, seed=7)).spec_of(index).sampling.seed for index in range(4)]
    assert got.spec_of(3).prompt_token_ids == got.spec.prompt_token_ids
    assert (await chat({"role": "user", "content": "x"}, n=3)).num_choices == 3


@pytest.mark.parametrize("kind", ["chat", "completion"])
async def test_whole_answers_in_order(world: World, kind: str) -> None:
    """Every choice under its index; the prompt counts once, completions add up; each journal id is its own."""
    ids = play_each(world, "hello", "world quick", "fox")
    response = await (world.chat if kind == "chat" else world.complete)(n=3)
    body = response.json()
    texts = [c["message"]["content"] if kind == "chat" else c["text"] for c in body["choices"]]
    assert texts == ["hello", "world quick", "fox"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"]["completion_tokens"] == sum(map(len, ids))
    assert body["usage"]["prompt_tokens"] == len(world.backend.specs[0].prompt_token_ids)
    request_id = response.headers["x-request-id"]
    assert [g.request_id for g in world.backend.generations] == [request_id, f"{request_id}-1", f"{request_id}-2"]
    assert all(g.calls[-1] == "completed" for g in world.backend.generations)


async def test_a_stream_opens_every_index_and_finishes_every_index(world: World) -> None:
    """Role deltas first, index 0 first of all; one finish chunk per index; usage once; one [DONE]."""
    play_each(world, "hello world", "quick brown fox")
    response = await world.chat(n=2, stream=True, stream_options={"include_usage": True})
    *chunks, usage, done = events(response.content)
    assert done == "data: [DONE]"
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [(c["index"], c["delta"]) for c in choices[:2]] == [
        (index, {"role": "assistant", "content": ""}) for index in range(2)
    ]
    texts = ["", ""]
    for choice in choices:
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == ["hello world", "quick brown fox"]
    assert sorted(c["index"] for c in choices if c["finish_reason"]) == [0, 1]
    assert usage["usage"]["completion_tokens"] > 2
    assert all(g.calls[0] == "mark_first_delta" for g in world.backend.generations)


async def test_the_others_start_with_the_first_token(world: World) -> None:
    """The prompt is computed once: nothing else is submitted before the first choice has a token."""
    gate = Gate()
    tokens = world.encode("hello")
    world.backend.scripts = [[gate, *batches(tokens), Ended("stop")], [*batches(tokens), Ended("stop")]]
    asking = asyncio.ensure_future(world.chat(n=2))
    await gate.reached.wait()
    assert len(world.backend.specs) == 1
    gate.open.set()
    assert len((await asking).json()["choices"]) == 2


async def test_one_broken_choice_interrupts_the_answer(world: World) -> None:
    """No half of an answer passes for a whole one; the other choice is cancelled upstream."""
    tokens = world.encode("hello world")
    never = Gate()
    world.backend.scripts = [
        [*batches(tokens[:2]), never],
        [*batches(tokens[:1]), Interrupted("worker_exited", "att-x"), Ended("stop")],
    ]
    response = await world.chat(n=2, stream=True)
    *chunks, error = events(response.content)
    assert error["error"]["reason"] == "worker_exited"
    assert error["error"]["delivered_output_tokens"] == 3 == len(chunks) - 2
    assert ("cancel", "gateway_fault") in world.backend.generations[0].calls


async def test_a_choice_that_is_refused_refuses_the_request(world: World) -> None:
    """Before anything was written: an ordinary error; what had started is cancelled."""
    tokens = world.encode("hello")
    world.backend.scripts = [[*batches(tokens), Ended("stop")]]
    world.backend.submit_errors = [None, Overloaded("full", retry_after_s=1)]
    response = await world.chat(n=2, stream=True)
    assert response.status_code == 429
    assert ("cancel", "gateway_fault") in world.backend.generations[0].calls


async def test_a_choice_that_fails_late_interrupts(world: World) -> None:
    """After the first byte of another choice, an error status is no longer possible."""
    tokens = world.encode("hello world")
    world.backend.scripts = [
        [*batches(tokens), Ended("stop")],
        [Gate(), UpstreamFailed("no worker", code="upstream_failed")],
    ]
    gate: Any = world.backend.scripts[1][0]
    gate.open.set()
    response = await world.chat(n=2, stream=True)
    assert "[DONE]" not in response.text
    assert events(response.content)[-1]["error"]["code"] == "upstream_decode_interrupted"


async def test_a_choice_may_restart_until_its_own_first_delta(world: World) -> None:
    """The other choice's text is out already; this one begins again, and nothing of the old attempt shows."""
    old, new = world.encode("old"), world.encode("new text")
    first = world.encode("hello")
    world.backend.scripts = [
        [*batches(first), Ended("stop")],
        [Restarted("att-2"), *batches(new), Ended("stop")],
    ]
    response = await world.chat(n=2)
    assert [c["message"]["content"] for c in response.json()["choices"]] == ["hello", "new text"]
    world.backend.scripts = [[*batches(old[:1]), Restarted("att-2"), *batches(new), Ended("stop")]]
    assert (await world.chat()).json()["choices"][0]["message"]["content"] == "new text"


async def test_text_offsets_are_per_choice(world: World) -> None:
    """Each choice's logprobs count its own text from 0."""
    ids = [world.encode("hello"), world.encode("fox jumps")]
    world.backend.scripts = [[*batches(i, logprobs=True), Ended("stop")] for i in ids]
    body = (await world.complete(n=2, logprobs=1)).json()
    assert [choice["logprobs"]["text_offset"][0] for choice in body["choices"]] == [0, 0]
    assert [len(choice["logprobs"]["tokens"]) for choice in body["choices"]] == [len(i) for i in ids]


async def test_records_and_cancels_reach_every_choice(world: World) -> None:
    """Under the request's id: its own journal, and those of the other choices."""
    world.backend.records = {"req-7": {"phase": "decoding"}, "req-7-1": {"phase": "decoding"}}
    record = (await world.http.get("/v1/requests/req-7")).json()
    assert record == {"phase": "decoding", "choices": [{"phase": "decoding"}]}
    cancelled = (await world.http.post("/v1/requests/req-7/cancel")).json()
    assert cancelled == {"phase": "cancelled", "choices": [{"phase": "cancelled"}]}
    world.backend.records = {"req-8": {"phase": "decoding"}}
    assert (await world.http.get("/v1/requests/req-8")).json() == {"phase": "decoding"}


async def test_no_choice_runs_again_once_another_has_been_seen(world: World) -> None:
    """n > 1 has one boundary: the stream ends by the error event, and the new attempt's text never shows."""
    world.backend.scripts = [
        [*batches(world.encode("hello")), Ended("stop")],
        [Gate(), Restarted("att-2"), *batches(world.encode("new text")), Ended("stop")],
    ]
    gate: Any = world.backend.scripts[1][0]
    gate.open.set()
    response = await world.chat(n=2, stream=True)
    assert events(response.content)[-1]["error"]["code"] == "upstream_decode_interrupted"
    assert "[DONE]" not in response.text and "new text" not in response.text


@pytest.mark.parametrize("stream", [True, False])
async def test_an_attempt_lost_while_the_others_are_submitted(world: World, stream: bool) -> None:
    """Its token was given and is void by the time the others have their prompts looked up: nothing of it is shown."""
    first, submitting = Gate(), Gate()
    void, tokens = world.encode("void"), world.encode("hello")
    world.backend.scripts = [[first, *batches(void), Ended("stop")], [*batches(tokens), Ended("stop")]]
    asking = asyncio.ensure_future(world.chat(n=2, stream=stream))
    await first.reached.wait()
    world.backend.submit_steps = [submitting]
    first.open.set()
    await submitting.reached.wait()
    world.backend.generations[0].restart_now(*batches(tokens), Ended("stop"))
    submitting.open.set()
    response = await asking
    assert response.status_code == 200, response.text
    if stream:
        choices = [choice for chunk in events(response.content)[:-1] for choice in chunk["choices"]]
        texts = ["".join(c["delta"].get("content") or "" for c in choices if c["index"] == index) for index in (0, 1)]
    else:
        texts = [choice["message"]["content"] for choice in response.json()["choices"]]
    assert texts == ["hello", "hello"]
