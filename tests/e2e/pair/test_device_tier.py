"""What both workers keep in their pools: found there, sent only where it is missing, and nothing else is changed."""

from __future__ import annotations

from typing import Any

import openai

from ..asking import Answer, ask
from ..cluster import Cluster
from ..golden import Golden, make_prompt

BLOCK_TOKENS = 16
BLOCK_BYTES = 737_280
"""16 tokens in float32."""


def pushed_blocks(pair: Cluster) -> int:
    """Returns how many blocks prefill has sent to decode so far, counted in bytes."""
    counters = pair.workers()["prefill-0"]["counters"]
    assert counters["pushed_bytes"] % BLOCK_BYTES == 0, counters
    return int(counters["pushed_bytes"]) // BLOCK_BYTES


def by_tier(pair: Cluster, answer: Answer) -> dict[str, int]:
    return dict(pair.record(answer.request_id)["cached_tokens_by_tier"])


def test_what_decode_has_does_not_travel(
    pair: Cluster, client: openai.OpenAI, golden: Golden, store_settings: dict[str, Any]
) -> None:
    """C5: cold all blocks travel; again only that of the token that is computed; half known, the other half."""
    keeps = store_settings.get("device_cache", True)
    prompt = make_prompt(700, 320)
    other = prompt[:160] + make_prompt(701, 160)
    plans = [(prompt, 0, 20), (prompt, 319, 1 if keeps else 20), (other, 160, 10 if keeps else 20)]
    for asked, num_cached, num_blocks in plans:
        pair.wait_idle()
        before = pushed_blocks(pair)
        answer = ask(client, prompt=asked, max_tokens=12)
        assert answer.text == golden.run(asked, 12).text
        pair.wait_idle()
        assert pushed_blocks(pair) - before == num_blocks
        if keeps:
            assert answer.cached_tokens == num_cached
            assert by_tier(pair, answer) == ({"device": num_cached} if num_cached else {})
            # Idle means that nothing is used: what is cached is room.
            assert all(0 < worker["cached_blocks"] <= worker["pool_blocks"] for worker in pair.workers().values())


def test_the_next_turn_finds_the_answer(
    pair: Cluster, client: openai.OpenAI, golden: Golden, store_settings: dict[str, Any]
) -> None:
    """Complete blocks of an answer are cached like those of a prompt; decode has them, so that they do not travel."""
    prompt = make_prompt(702, 100)
    answer = list(golden.run(prompt, 60, ignore_eos=True).token_ids)
    assert ask(client, prompt=prompt, max_tokens=60, ignore_eos=True).completion_tokens == len(answer) == 60
    pair.wait_idle()
    before = pushed_blocks(pair)
    follow = [*prompt, *answer, *make_prompt(703, 20)]
    again = ask(client, prompt=follow, max_tokens=8)
    assert again.text == golden.run(follow, 8).text
    if store_settings.get("device_cache", True):
        # 159 of the 160 tokens have KV. Prefill has the prompt in its pool and the answer's blocks from the store.
        assert again.cached_tokens == 144
        assert by_tier(pair, again) == {"device": 96, "host": 48}
        pair.wait_idle()
        assert pushed_blocks(pair) - before == 12 - 9
