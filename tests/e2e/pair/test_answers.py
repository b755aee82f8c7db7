"""What comes back is what the model says: against the engine called directly and against transformers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from kvstore.core.messages import SamplingParams

from ..asking import ask
from ..cluster import MODEL, Cluster
from ..golden import Golden, Reference, make_prompt

SYSTEM = "You are a careful assistant who explains things in short, plain sentences and never guesses. " * 3
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.mark.parametrize("number", [31, 32, 33])
def test_greedy_answer_equals_engine_and_transformers(
    client: openai.OpenAI, golden: Golden, reference: Reference, number: int
) -> None:
    """Cold, over the whole path: token for token what the engine gives, and what transformers chooses but for ties."""
    prompt = make_prompt(number, 40 + 30 * (number - 31))
    expected = golden.run(prompt, 24)
    answer = ask(client, prompt=prompt, max_tokens=24)
    assert (answer.text, answer.finish_reason) == (expected.text, expected.finish_reason)
    assert answer.completion_tokens == len(expected.token_ids)
    assert reference.first_difference(prompt, expected.token_ids) is None


def test_chat_goes_through_the_template_and_ends_at_end_of_sequence(client: openai.OpenAI, golden: Golden) -> None:
    """The prompt is the rendered chat; the end-of-sequence token counts and is no text."""
    prompt = golden.chat_prompt(FRANCE)
    expected = golden.run(prompt, 60)
    assert expected.finish_reason == "stop"
    answer = ask(client, messages=FRANCE, max_tokens=60)
    assert answer.content == (expected.text, "stop", len(prompt), len(expected.token_ids))


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_stream_and_whole_answer_are_equal(client: openai.OpenAI, kind: str) -> None:
    """Joined deltas, finish reason and usage equal the answer in one piece."""
    body = {"messages": FRANCE} if kind == "chat" else {"prompt": make_prompt(34, 50)}
    for options in ({}, {"temperature": 1.0, "seed": 7, "top_p": 0.9}):
        whole = ask(client, max_tokens=20, **body, **options)
        streamed = ask(client, max_tokens=20, stream=True, **body, **options)
        assert streamed.content == whole.content, options
        assert len(streamed.pieces) > 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 16, 17])
def test_f26_budget_counts_the_first_token_once(
    client: openai.OpenAI, golden: Golden, num_tokens: int, stream: bool
) -> None:
    """Prefill's token is counted, and counted once."""
    prompt = make_prompt(18, 40)
    expected = golden.run(prompt, 17)
    answer = ask(client, prompt=prompt, max_tokens=num_tokens, stream=stream)
    text = golden.text(list(expected.token_ids[:num_tokens]))
    assert answer.content == (text, "length", 40, num_tokens)


def test_seed_makes_sampling_repeatable(client: openai.OpenAI, golden: Golden) -> None:
    """Equal seeds give equal answers, equal to the engine's; other seeds give others."""
    prompt = golden.encode("The most surprising thing about the sea is")
    texts = {}
    for seed in (1, 2, 3):
        first = ask(client, prompt=prompt, max_tokens=16, temperature=1.0, seed=seed)
        again = ask(client, prompt=prompt, max_tokens=16, temperature=1.0, seed=seed)
        direct = golden.run(prompt, 16, SamplingParams(temperature=1.0, seed=seed))
        assert first.content == again.content
        assert first.text == direct.text
        texts[seed] = first.text
    assert len(set(texts.values())) == 3, texts


def test_company_does_not_change_an_answer(client: openai.OpenAI, golden: Golden) -> None:
    """Eight requests at once, some of them equal: each is what it is alone."""
    prompts = [make_prompt(35 + index % 4, 20 + 17 * (index % 4)) for index in range(8)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: ask(client, prompt=prompt, max_tokens=12), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.text == golden.run(prompt, 12).text


def test_same_system_prompt_is_cached_and_changes_nothing(pair: Cluster, client: openai.OpenAI, golden: Golden) -> None:
    """The second request with the same system prompt loads its blocks and answers the same."""
    first = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Name a colour."}]
    second = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Name an animal."}]
    stored = pair.stored_blocks()
    cold = ask(client, messages=first, max_tokens=12)
    assert cold.cached_tokens == 0
    pair.wait_stored(above=stored)
    warm = ask(client, messages=second, max_tokens=12)
    prompt = golden.chat_prompt(second)
    shared = sum(1 for _ in iter_equal(golden.chat_prompt(first), prompt))
    assert warm.cached_tokens == shared // 16 * 16 > 0
    assert warm.text == golden.run(prompt, 12).text
    again = ask(client, messages=first, max_tokens=12)
    assert again.cached_tokens > 0
    assert again.content == cold.content
    attempt = pair.record(again.request_id)["attempts"][0]
    workers = pair.workers()
    for role in ("prefill", "decode"):
        assert attempt[role]["incarnation"] == workers[f"{role}-0"]["incarnation"]
        assert attempt[role]["pid"] == workers[f"{role}-0"]["pid"]


def iter_equal(left: list[int], right: list[int]) -> list[int]:
    """Returns the common prefix."""
    common = []
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        common.append(one)
    return common


def test_f52_cached_tokens_are_neither_invented_nor_all(pair: Cluster, client: openai.OpenAI) -> None:
    """A first-ever prompt has none, although its blocks were transferred; a known one leaves a token to compute."""
    for number, num_tokens in ((23, 100), (24, 96)):
        prompt = make_prompt(number, num_tokens)
        stored = pair.stored_blocks()
        first = ask(client, prompt=prompt, max_tokens=4)
        assert first.cached_tokens == 0
        pair.wait_stored(above=stored)
        with ThreadPoolExecutor(4) as pool:
            again = list(pool.map(lambda prompt: ask(client, prompt=prompt, max_tokens=4), [prompt] * 4))
        expected = min(num_tokens // 16 * 16, num_tokens - 1)
        assert [answer.cached_tokens for answer in again] == [expected] * 4
        assert {answer.content for answer in again} == {first.content}


@pytest.mark.parametrize("limit", [{}, {"max_tokens": None}, {"max_completion_tokens": 40}])
def test_f64_absent_limit_is_no_limit(client: openai.OpenAI, golden: Golden, limit: dict[str, int | None]) -> None:
    """No max_tokens, null, or only the newer name: the answer ends where the model ends it."""
    expected = golden.run(golden.chat_prompt(FRANCE), 60)
    answer = ask(client, messages=FRANCE, **limit)
    assert (answer.text, answer.finish_reason) == (expected.text, "stop")


def test_f64_both_limits(client: openai.OpenAI) -> None:
    """Equal limits are one limit; different ones are refused by name."""
    assert ask(client, messages=FRANCE, max_tokens=3, max_completion_tokens=3).completion_tokens == 3
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, messages=FRANCE, max_tokens=3, max_completion_tokens=4)
    assert refused.value.param == "max_tokens"


def test_f64_absent_limit_ends_at_the_end_of_the_context(client: openai.OpenAI) -> None:
    """Without a limit the context is one: 1,024 positions, 1,020 of them prompt, leave four tokens."""
    answer = ask(client, prompt=make_prompt(36, 1020), ignore_eos=True)
    assert (answer.completion_tokens, answer.finish_reason) == (4, "length")


@pytest.mark.parametrize("how", ["stop", "stop_token_ids", "logit_bias"])
def test_f20_first_token_may_be_the_last(pair: Cluster, client: openai.OpenAI, golden: Golden, how: str) -> None:
    """An answer that ends with prefill's own token ends at once and leaves no block on either side."""
    prompt = make_prompt(15, 64)
    first = golden.run(prompt, 1).token_ids[0]
    eos = golden.bundle.eos_token_ids[0]
    options = {
        "stop": {"stop": golden.text([first])},
        "stop_token_ids": {"stop_token_ids": [first]},
        "logit_bias": {"logit_bias": {str(eos): 100}},
    }[how]
    for stream in (False, True):
        answer = ask(client.with_options(timeout=2.0), prompt=prompt, max_tokens=50, stream=stream, **options)
        assert (answer.text, answer.finish_reason) == ("", "stop")
        assert answer.completion_tokens == 1
    pair.wait_idle(2.0)


def test_model_name_is_served(client: openai.OpenAI) -> None:
    """The official client finds the model that it then asks for."""
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
