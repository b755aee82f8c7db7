"""A combined worker answers what a prefill and a decode worker answer together.

Both are compared with the engine called directly, so that equal here and equal there is equal to each other. The
chunks differ on purpose (64 tokens here, 512 there).
"""

from __future__ import annotations

import openai
import pytest

from kvstore.core.messages import SamplingParams

from ..asking import ask
from ..cluster import Cluster
from ..golden import Golden, make_prompt
from ..leaving import send, stream_in

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 16, 17])
def test_f26_budget_is_the_same(client: openai.OpenAI, golden: Golden, num_tokens: int, stream: bool) -> None:
    """As with prefill and decode apart."""
    prompt = make_prompt(18, 40)
    expected = golden.run(prompt, 17)
    answer = ask(client, prompt=prompt, max_tokens=num_tokens, stream=stream)
    assert answer.content == (golden.text(list(expected.token_ids[:num_tokens])), "length", 40, num_tokens)


@pytest.mark.parametrize("limit", [{}, {"max_tokens": None}, {"max_completion_tokens": 40}])
def test_f64_absent_limit_is_the_same(client: openai.OpenAI, golden: Golden, limit: dict[str, int | None]) -> None:
    """As with prefill and decode apart."""
    expected = golden.run(golden.chat_prompt(FRANCE), 60)
    answer = ask(client, messages=FRANCE, **limit)
    assert (answer.text, answer.finish_reason) == (expected.text, "stop")


def test_chunks_cache_and_sampling_change_nothing(combined: Cluster, client: openai.OpenAI, golden: Golden) -> None:
    """A prompt of four chunks, cold and from the store, greedy and sampled."""
    prompt = make_prompt(22, 200)
    greedy = golden.run(prompt, 16)
    sampled = golden.run(prompt, 16, SamplingParams(temperature=1.0, seed=5))
    stored = combined.stored_blocks()
    cold = ask(client, prompt=prompt, max_tokens=16)
    combined.wait_stored(above=stored)
    warm = ask(client, prompt=prompt, max_tokens=16)
    drawn = ask(client, prompt=prompt, max_tokens=16, temperature=1.0, seed=5, stream=True)
    assert (cold.cached_tokens, warm.cached_tokens, drawn.cached_tokens) == (0, 192, 192)
    assert cold.text == warm.text == greedy.text
    assert drawn.text == sampled.text


def test_client_that_leaves_frees_everything(combined: Cluster) -> None:
    """Prefill computes in the blocks of decode's reservation: they come back once, after the chunk under way."""
    combined.wait_idle()
    with send(combined, prompt=make_prompt(73, 1000), max_tokens=16):
        request_id = stream_in(combined, "prefilling")
    combined.wait_idle(5.0)
    record = combined.record(request_id)
    assert record["phase"] == "cancelled" and not record["first_delta_sent"]
