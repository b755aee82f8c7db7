"""What workers get for a request: every honoured parameter arrives, absent ones have their documented value."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import json

from cluster.ingress.api.parse import parse
from cluster.ingress.api.plan import AnswerPlan, ModelFacts, Planner
from cluster.ingress.api.schema import ChatRequest, CompletionRequest

from .fakes import make_bundle

BUNDLE = make_bundle()
FACTS = ModelFacts(model_id="m", max_model_len=100, vocab_size=len(BUNDLE.table))
PLANNER = Planner(FACTS, BUNDLE, random_seed=lambda: 4711)
EOS = BUNDLE.eos_token_ids[0]


async def plan(**body: Any) -> AnswerPlan:
    request = {"model": "m", "prompt": [1, 2, 3]} | body
    return await PLANNER.completion(parse(json.encode(request), CompletionRequest))


async def chat(*messages: Any, **body: Any) -> AnswerPlan:
    request = {"model": "m", "messages": list(messages)} | body
    return await PLANNER.chat(parse(json.encode(request), ChatRequest))


async def test_absent_parameters() -> None:
    """Temperature 1, the server's own seed, the whole context, end-of-sequence ids as stop tokens."""
    got = await plan()
    sampling = got.spec.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    assert (sampling.seed, sampling.num_logprobs, sampling.logit_bias) == (4711, None, {})
    assert got.spec.max_tokens == 97
    assert got.spec.stop_token_ids == (EOS,)
    assert (got.stops, got.stream, got.include_usage) == ((), False, False)


async def test_every_honoured_parameter_arrives() -> None:
    """One value each, none of them the default."""
    got = await plan(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        seed=99,
        stop=["a", "b"],
        stop_token_ids=[5, 6, 5],
        max_tokens=4,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        repetition_penalty=1.25,
        logit_bias={"5": 1.5, "6": -100},
        logprobs=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    sampling = got.spec.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 7, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.25, -0.5, 1.25)
    assert (sampling.seed, sampling.num_logprobs, sampling.logit_bias) == (99, 2, {5: 1.5, 6: -100.0})
    assert (got.spec.max_tokens, got.spec.stop_token_ids) == (4, (EOS, 5, 6))
    assert (got.stops, got.stream, got.include_usage) == (("a", "b"), True, True)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, 97),
        ({"max_tokens": None}, 97),
        ({"max_completion_tokens": 7}, 7),
        ({"max_tokens": 7}, 7),
        ({"max_tokens": 7, "max_completion_tokens": 7}, 7),
        ({"max_tokens": 7, "max_completion_tokens": None}, 7),
        ({"max_tokens": 100}, 97),
        ({"max_tokens": 1}, 1),
    ],
)
async def test_max_tokens(body: dict[str, Any], expected: int) -> None:
    """F64: absent and null mean the rest of the context; more than fits is cut to it."""
    assert (await plan(**body)).spec.max_tokens == expected


@pytest.mark.parametrize(("seed", "expected"), [(0, 0), (-1, (1 << 63) - 1), ((1 << 63) - 1, (1 << 63) - 1)])
async def test_seeds_of_clients_fit_the_sampler(seed: int, expected: int) -> None:
    """Negative seeds are valid for clients; each maps to one 63-bit seed."""
    assert (await plan(seed=seed)).spec.sampling.seed == expected


async def test_tiny_temperature_is_greedy() -> None:
    """Dividing logits by 1e-9 would overflow."""
    assert (await plan(temperature=1e-9)).spec.sampling.temperature == 0.0


async def test_ignore_eos_leaves_only_the_clients_stop_tokens() -> None:
    """Load generators ask for exactly max_tokens tokens."""
    assert (await plan(ignore_eos=True, stop_token_ids=[9])).spec.stop_token_ids == (9,)


@pytest.mark.parametrize("prompt", ["hi", ["hi"]])
async def test_text_prompts(prompt: Any) -> None:
    """A text, or a list of one text."""
    expected = await BUNDLE.encode("hi", add_special_tokens=True)
    assert list((await plan(prompt=prompt)).spec.prompt_token_ids) == expected


@pytest.mark.parametrize("prompt", [[1, 2], [[1, 2]]])
async def test_token_prompts(prompt: Any) -> None:
    """A token array, or a list of one, is taken as it is."""
    assert (await plan(prompt=prompt)).spec.prompt_token_ids == (1, 2)


async def test_chat_roles_and_text_parts() -> None:
    """Developer is system to a template; parts of a message are joined; the assistant's turn is opened."""
    got = await chat(
        {"role": "developer", "content": "A"},
        {"role": "user", "content": [{"type": "text", "text": "B"}, {"type": "text", "text": "C"}]},
        {"role": "assistant", "content": "D", "refusal": None, "tool_calls": None},
        {"role": "tool", "content": "E", "tool_call_id": "call-1"},
    )
    expected = (
        "<|im_start|>system\nA<|im_end|>\n<|im_start|>user\nBC<|im_end|>\n"
        "<|im_start|>assistant\nD<|im_end|>\n<|im_start|>tool\nE<|im_end|>\n<|im_start|>assistant\n"
    )
    assert list(got.spec.prompt_token_ids) == await BUNDLE.encode(expected, add_special_tokens=False)


async def test_long_text_is_tokenised_like_short_text() -> None:
    """The thread that takes long texts changes nothing."""
    text = "hello world " * 1000
    assert await BUNDLE.encode(text, add_special_tokens=False) == BUNDLE.encode_now(text)
