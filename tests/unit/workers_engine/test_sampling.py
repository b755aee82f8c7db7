"""The sampler: known answers, exact candidate sets, and a state of (seed, position) alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kvstore.core.messages import SamplingParams
from kvstore.errors import FatalError
from workers.sampling import philox4x32, sample, uniform


def make_logits(values: list[float]) -> torch.Tensor:
    """Builds one row."""
    return torch.tensor(values, dtype=torch.float32)


def drawn(logits: torch.Tensor, params: SamplingParams, count: int = 400) -> set[int]:
    """Returns the tokens that ``count`` positions draw."""
    return {sample(logits, params, position, [])[0] for position in range(count)}


def test_philox_gives_the_published_words() -> None:
    """Known answers of the Random123 distribution for Philox4x32-10."""
    assert philox4x32((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    assert philox4x32((ones,) * 4, (ones,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    counter, key = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    assert philox4x32(counter, key) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


def test_uniform_uses_all_of_seed_and_position() -> None:
    """Every half of seed and position matters; values lie in [0, 1) and are spread evenly."""
    numbers = {uniform(s, p) for s in (0, 1, 1 << 32, (1 << 63) - 1) for p in (0, 1, 1 << 32)}
    assert len(numbers) == 12
    values = np.array([uniform(7, position) for position in range(4000)])
    assert values.min() >= 0.0 and values.max() < 1.0
    counts, _ = np.histogram(values, bins=10, range=(0, 1))
    assert counts.min() > 320 and counts.max() < 480


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    """Exact ties go to the lowest id, whatever the seed."""
    logits = make_logits([0.0, 2.0, 2.0, 1.0])
    assert sample(logits, SamplingParams(seed=5), 3, []) == (1, None)


def test_a_draw_follows_the_distribution() -> None:
    """20,000 positions draw three tokens with their probabilities, within four standard deviations."""
    probabilities = [0.6, 0.3, 0.1]
    logits = make_logits([math.log(p) for p in probabilities])
    params = SamplingParams(temperature=1.0, seed=11)
    counts = np.bincount([sample(logits, params, p, [])[0] for p in range(20_000)], minlength=3)
    for count, probability in zip(counts, probabilities, strict=True):
        assert abs(count - 20_000 * probability) < 4 * math.sqrt(20_000 * probability * (1 - probability))


def test_limits_keep_exactly_the_right_tokens() -> None:
    """top_k, top_p and min_p each cut where their definition says; together the strictest wins."""
    logits = make_logits([math.log(p) for p in (0.05, 0.4, 0.3, 0.15, 0.1)])
    hot = {"temperature": 1.0, "seed": 1}
    assert drawn(logits, SamplingParams(**hot)) == {0, 1, 2, 3, 4}
    assert drawn(logits, SamplingParams(**hot, top_k=2)) == {1, 2}
    assert drawn(logits, SamplingParams(**hot, top_k=1)) == {1}
    assert drawn(logits, SamplingParams(**hot, top_p=0.6)) == {1, 2}
    assert drawn(logits, SamplingParams(**hot, top_p=0.8)) == {1, 2, 3}
    assert drawn(logits, SamplingParams(**hot, top_p=0.01)) == {1}
    assert drawn(logits, SamplingParams(**hot, min_p=0.3)) == {1, 2, 3}
    assert drawn(logits, SamplingParams(**hot, min_p=1.0)) == {1}
    assert drawn(logits, SamplingParams(**hot, top_k=4, top_p=0.9, min_p=0.3)) == {1, 2, 3}


def test_top_p_over_a_flat_vocabulary_looks_beyond_its_head() -> None:
    """When the best 1,024 tokens do not reach top_p, the whole vocabulary is considered."""
    tokens = drawn(torch.zeros(5000), SamplingParams(temperature=1.0, top_p=0.5, seed=2), count=600)
    assert max(tokens) < 2500, "of equals the lowest ids are kept"
    assert max(tokens) > 1500


def test_temperature_sharpens_and_a_tiny_one_is_greedy() -> None:
    """A low temperature prefers the best token; one near zero always takes it, without overflow."""
    logits = make_logits([1.0, 0.0, 0.5])
    cool, hot = (
        [sample(logits, SamplingParams(temperature=t, seed=3), p, [])[0] for p in range(500)] for t in (0.3, 2.0)
    )
    assert cool.count(0) > hot.count(0) + 100
    assert drawn(logits, SamplingParams(temperature=1e-300)) == {0}


def test_penalties_count_the_output() -> None:
    """Presence is charged once, frequency per occurrence; the prompt is not counted."""
    logits = make_logits([3.0, 2.5, 2.0])
    assert sample(logits, SamplingParams(presence_penalty=0.4), 0, [0, 0, 0])[0] == 0
    assert sample(logits, SamplingParams(presence_penalty=0.6), 0, [0])[0] == 1
    assert sample(logits, SamplingParams(frequency_penalty=0.2), 0, [0, 0])[0] == 0
    assert sample(logits, SamplingParams(frequency_penalty=0.2), 0, [0, 0, 0])[0] == 1
    assert sample(logits, SamplingParams(frequency_penalty=-2.0), 0, [2])[0] == 2


def test_the_repetition_penalty_counts_prompt_and_output() -> None:
    """Positive logits are divided, others multiplied, once per token; below 1 it rewards."""
    logits = make_logits([3.0, 2.5, -1.0, -1.1])
    assert sample(logits, SamplingParams(repetition_penalty=1.1), 0, [], prompt_token_ids=[0])[0] == 0
    assert sample(logits, SamplingParams(repetition_penalty=1.3), 0, [], prompt_token_ids=[0, 0])[0] == 1
    assert sample(logits, SamplingParams(repetition_penalty=1.3), 0, [0])[0] == 1
    assert sample(logits, SamplingParams(repetition_penalty=1.3), 0, [0], prompt_token_ids=[1])[0] == 0
    assert sample(logits, SamplingParams(repetition_penalty=0.5), 0, [1])[0] == 1
    negative = make_logits([-1.0, -1.1])
    assert sample(negative, SamplingParams(repetition_penalty=1.2), 0, [0])[0] == 1


def test_a_mask_is_applied_before_the_choice() -> None:
    """Greedy and drawn tokens stay inside the mask; probabilities stay the model's; an empty mask is a fault."""
    logits = make_logits([3.0, 2.5, 2.0])
    allowed = np.array([False, True, True])
    assert sample(logits, SamplingParams(num_logprobs=0), 0, [], allowed=allowed)[0] == 1
    hot = SamplingParams(temperature=2.0, seed=4, top_k=2, top_p=0.999)
    assert {sample(logits, hot, p, [], allowed=allowed)[0] for p in range(200)} == {1, 2}
    assert sample(logits, SamplingParams(logit_bias={0: 100.0}), 0, [], allowed=allowed)[0] == 1
    with pytest.raises(FatalError, match="leaves no token for position 7"):
        sample(logits, SamplingParams(), 7, [], allowed=np.zeros(3, dtype=bool))


def test_bias_forces_and_forbids_and_leaves_the_row_alone() -> None:
    """logit_bias moves the choice; ids outside the vocabulary are ignored; the caller's logits do not change."""
    logits = make_logits([3.0, 2.5, 2.0])
    before = logits.clone()
    assert sample(logits, SamplingParams(logit_bias={2: 100.0}), 0, [])[0] == 2
    assert sample(logits, SamplingParams(logit_bias={0: -100.0, 77: 100.0, -1: 100.0}), 0, [])[0] == 1
    assert torch.equal(logits, before)


def test_logprobs_are_those_of_the_model() -> None:
    """Temperature, bias and penalties do not change reported probabilities; the best come first, ties by id."""
    logits = make_logits([math.log(p) for p in (0.1, 0.4, 0.1, 0.4)])
    params = SamplingParams(num_logprobs=3, temperature=2.0, top_k=1, logit_bias={0: 100.0})
    token_id, found = sample(logits, params, 0, [])
    assert token_id == 0 and found is not None
    assert found.logprob == pytest.approx(math.log(0.1), abs=1e-6)
    assert [index for index, _ in found.top] == [1, 3, 0]
    assert [value for _, value in found.top] == pytest.approx([math.log(0.4), math.log(0.4), math.log(0.1)], abs=1e-6)
    assert sample(logits, SamplingParams(num_logprobs=0), 0, [])[1].top == ()  # type: ignore[union-attr]


def test_a_choice_depends_on_seed_and_position_alone() -> None:
    """The same row, seed and position give the same token whatever was drawn before; others differ."""
    logits = torch.randn(300, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=1.0, seed=9)
    forward = [sample(logits, params, p, [])[0] for p in range(40)]
    backward = [sample(logits, params, p, [])[0] for p in reversed(range(40))]
    assert forward == backward[::-1]
    assert forward != [sample(logits, SamplingParams(temperature=1.0, seed=10), p, [])[0] for p in range(40)]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_a_fault(bad: float) -> None:
    """A broken model must not look like an answer."""
    with pytest.raises(FatalError, match="position 4"):
        sample(make_logits([0.0, bad]), SamplingParams(), 4, [])
