"""Text at its edges: stop strings, half characters, odd tokens."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from kvstore.core.messages import SamplingParams

from ..asking import ask, events, raw_body
from ..cluster import Cluster
from ..golden import Golden, make_prompt

REPLACEMENT = "�"


def stop_in_the_middle(golden: Golden, token_ids: tuple[int, ...]) -> tuple[str, str]:
    """Returns (text before, stop): seven characters over at least three tokens, starting inside one.

    The first such place whose stop text does not occur earlier.
    """
    text = golden.text(list(token_ids))
    ends = [len(golden.text(list(token_ids[: index + 1]))) for index in range(len(token_ids))]
    for start in range(8, len(text) - 8):
        inside = start not in ends
        touched = sum(1 for end in ends if start < end < start + 7) + 1
        if inside and touched >= 3 and text.find(text[start : start + 7]) == start:
            return text[:start], text[start : start + 7]
    raise AssertionError(f"no place for a stop in {text!r}")


@pytest.mark.parametrize("stream", [False, True])
def test_f48_no_fragment_of_a_stop_string_gets_out(client: openai.OpenAI, golden: Golden, stream: bool) -> None:
    """The text ends right before the stop, wherever token borders are; a near miss is flushed at the end."""
    prompt = golden.encode("Once upon a time there was a little")
    expected = golden.run(prompt, 40)
    before, stop = stop_in_the_middle(golden, expected.token_ids)

    answer = ask(client, prompt=prompt, max_tokens=40, stop=stop, stream=stream)
    assert (answer.text, answer.finish_reason) == (before, "stop")
    assert answer.completion_tokens < 40

    both = ask(client, prompt=prompt, max_tokens=40, stop=[stop, stop[:4]], stream=stream)
    assert (both.text, both.finish_reason) == (expected.text[: expected.text.find(stop[:4])], "stop")

    near = stop[:-1] + ("x" if stop[-1] != "x" else "y")
    missed = ask(client, prompt=prompt, max_tokens=40, stop=near, stream=stream)
    assert (missed.text, missed.finish_reason) == (expected.text, expected.finish_reason)


@pytest.mark.parametrize("stream", [False, True])
def test_f48_held_text_is_flushed_when_the_budget_ends(client: openai.OpenAI, golden: Golden, stream: bool) -> None:
    """A text that ends with the beginning of a stop string is given out whole."""
    prompt = make_prompt(21, 32)
    expected = golden.run(prompt, 40)
    stop = expected.text[-5:] + "!!"
    answer = ask(client, prompt=prompt, max_tokens=40, stop=stop, stream=stream)
    assert (answer.text, answer.finish_reason) == (expected.text, "length")


@pytest.mark.parametrize("char", ["🎉", "日本語", "👩‍🚀"], ids=["emoji", "cjk", "zwj"])
def test_characters_arrive_whole(client: openai.OpenAI, golden: Golden, char: str) -> None:
    """Characters made of several tokens are held back until they are complete; a half one at the end is flushed."""
    prompt = golden.encode(char * 8)
    expected = golden.run(prompt, 24)
    assert char in expected.text, "the model does not go on with what it was shown"
    streamed = ask(client, prompt=prompt, max_tokens=24, stream=True)
    assert streamed.text == expected.text == ask(client, prompt=prompt, max_tokens=24).text
    assert REPLACEMENT not in streamed.text
    assert len(streamed.pieces) < streamed.completion_tokens, "nothing was held back"

    cut = next(n for n in range(20, 0, -1) if golden.text(list(expected.token_ids[:n])).endswith(REPLACEMENT))
    whole = ask(client, prompt=prompt, max_tokens=cut)
    streamed = ask(client, prompt=prompt, max_tokens=cut, stream=True)
    assert streamed.content == whole.content
    assert whole.text.endswith(REPLACEMENT)
    assert REPLACEMENT not in "".join(streamed.pieces[:-1]), "half a character went out early"


def test_broken_sequences_become_replacement_characters(pair: Cluster, client: openai.OpenAI, golden: Golden) -> None:
    """Bytes that are no UTF-8 in any order: the same text streamed, whole and directly, and never a surrogate."""
    half, letter = golden.encode("🎉")[0], golden.encode("a")[0]
    bias = {half: 100.0, letter: 100.0}
    params = {"temperature": 1.5, "seed": 3}
    body = {"prompt": make_prompt(40, 20), "max_tokens": 40, "logit_bias": {str(k): v for k, v in bias.items()}}
    expected = golden.run(make_prompt(40, 20), 40, SamplingParams(logit_bias=bias, temperature=1.5, seed=3))
    assert REPLACEMENT in expected.text
    whole = ask(client, **body, **params)
    streamed = ask(client, stream=True, **body, **params)
    assert streamed.content == whole.content
    assert whole.text == expected.text
    raw = pair.http.post("/v1/completions", content=raw_body(stream=True, **{**body, **params})).content
    assert "".join(event["choices"][0]["text"] for event in events(raw)[:-1]) == whole.text
    assert b"\\ud" not in raw.lower(), "a lone surrogate"


@pytest.mark.parametrize("seed", range(1, 13))
def test_f46_odd_token_sequences_never_break_a_request(client: openai.OpenAI, seed: int) -> None:
    """At temperature 2 anything comes: every request finishes, streamed and whole alike."""
    body = {"prompt": make_prompt(46 + seed, 32), "max_tokens": 50, "temperature": 2.0, "seed": seed}
    with ThreadPoolExecutor(2) as pool:
        whole, streamed = pool.map(lambda stream: ask(client, stream=stream, **body), (False, True))
    assert streamed.content == whole.content
    assert whole.completion_tokens == 50 or whole.finish_reason == "stop"
