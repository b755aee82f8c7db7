"""The packaged model in our engine against the reference library."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvstore.core.messages import SamplingParams
from tests.model.conftest import MakeEngine, token_prompt
from workers.engine import Engine, SeqChunk
from workers.sampling import sample

pytestmark = [pytest.mark.model, pytest.mark.timeout(400)]

NEW_TOKENS = 12
TIE_GAP = 1e-3
BATCH = 16
GREEDY = SamplingParams()


def generate_greedily(engine: Engine, prompts: Sequence[list[int]], blocks_each: int = 8) -> list[list[int]]:
    """Returns ``NEW_TOKENS`` greedy tokens of each prompt, decoded as one batch."""
    tables = [list(range(i * blocks_each, (i + 1) * blocks_each)) for i in range(len(prompts))]
    logits = engine.forward([SeqChunk(prompt, 0, table) for prompt, table in zip(prompts, tables, strict=True)])
    outputs = [[sample(row, GREEDY, len(prompt), ())[0]] for row, prompt in zip(logits, prompts, strict=True)]
    for _ in range(NEW_TOKENS - 1):
        positions = [len(prompt) + len(output) - 1 for prompt, output in zip(prompts, outputs, strict=True)]
        rows = engine.decode_step([(o[-1], p, t) for o, p, t in zip(outputs, positions, tables, strict=True)])
        for row, output, position in zip(rows, outputs, positions, strict=True):
            output.append(sample(row, GREEDY, position + 1, ())[0])
    return outputs


def test_float32_greedy_tokens_are_those_of_the_reference(
    make_engine: MakeEngine,
    load_reference: Callable[[torch.dtype], PreTrainedModel],
    text_prompts: list[list[int]],
) -> None:
    """Over 200 prompts every greedy token is the reference's argmax after the same tokens.

    By induction this is the reference's own greedy output, up to a position where its two best logits lie closer than
    1e-3; there either is accepted and the comparison goes on along our tokens.
    """
    prompts = [*text_prompts, *(token_prompt(seed, 4 + seed % 37) for seed in range(1, 91))]
    prompts.sort(key=len)
    assert len(prompts) >= 200
    engine = make_engine("float32", num_blocks=8 * BATCH)
    reference = load_reference(torch.float32)
    num_ties = 0
    for start in range(0, len(prompts), BATCH):
        batch = prompts[start : start + BATCH]
        outputs = generate_greedily(engine, batch)
        sequences = [prompt + output for prompt, output in zip(batch, outputs, strict=True)]
        # Padded on the right: a causal model's earlier positions do not see it.
        longest = max(map(len, sequences))
        with torch.no_grad():
            theirs = reference(torch.tensor([s + [0] * (longest - len(s)) for s in sequences])).logits
        for row, prompt, output in zip(theirs, batch, outputs, strict=True):
            logits = row[len(prompt) - 1 : len(prompt) - 1 + len(output)]
            best = logits.topk(2, -1)
            for index, token_id in enumerate(output):
                gap = float(best.values[index, 0] - best.values[index, 1])
                if token_id != int(best.indices[index, 0]):
                    assert gap < TIE_GAP, f"prompt {prompt[:8]}..., token {index}: gap {gap}"
                    num_ties += 1
    assert num_ties <= 3, "so many near ties are no accident"


def test_bfloat16_tokens_are_within_two_ulps_of_the_reference(
    make_engine: MakeEngine,
    load_reference: Callable[[torch.dtype], PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    text_prompts: list[list[int]],
) -> None:
    """Teacher-forced over more than 2,000 positions, our token's reference logit is within 2 bf16 ulps of the best."""
    english = [token for prompt in text_prompts[:70] for token in prompt][:1500]
    sequences = [english, token_prompt(21, 400), *text_prompts[70:80]]
    assert sum(map(len, sequences)) >= 2000
    engine = make_engine("bfloat16", num_blocks=128)
    reference = load_reference(torch.bfloat16)
    worst = 0.0
    for tokens in sequences:
        ours = all_logits(engine, tokens).argmax(-1)
        with torch.no_grad():
            theirs = reference(torch.tensor([tokens])).logits[0].float()
        best = theirs.max(-1).values
        ulp = torch.exp2(torch.floor(torch.log2(best.abs())) - 7)
        distance = (best - theirs.gather(-1, ours[:, None])[:, 0]) / ulp
        worst = max(worst, float(distance.max()))
    assert math.isfinite(worst)
    assert worst <= 2.0


def all_logits(engine: Engine, tokens: list[int]) -> torch.Tensor:
    """Returns the logits after every position, by batches of single tokens.

    Rows of one batch may follow each other in a sequence: a layer writes all keys before any row reads them.
    """
    table = range(-(-len(tokens) // 16))
    chunks = [SeqChunk((token,), position, table) for position, token in enumerate(tokens)]
    return torch.cat([engine.forward(chunks[first : first + 64]) for first in range(0, len(chunks), 64)])


def test_chat_template_tokenizer_and_stop_token_survive_the_conversion(
    tokenizer: PreTrainedTokenizerBase, make_engine: MakeEngine
) -> None:
    """The template opens an assistant turn, every script round-trips, and the model knows its end token."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    for sample_text in ("  two spaces", "e\u0301 👩\u200d👩\u200d👧 你好\r\n\t12345", "hello , world 's"):
        assert tokenizer.decode(tokenizer.encode(sample_text, add_special_tokens=False)) == sample_text
    engine = make_engine("float32")
    assert engine.model.config.eos_token_ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
