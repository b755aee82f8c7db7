"""The packaged model and its reference, loaded once. A missing model is an error, not a skip."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from workers.engine import Engine
from workers.kv_pool import KvPool
from workers.model import hub
from workers.model.decoder import Decoder, load_decoder

NAME = "smollm2-135m-instruct"
CONTEXT = 2048

MakeEngine = Callable[..., Engine]


def token_prompt(seed: int, count: int) -> list[int]:
    """Returns the reproducible prompt T(seed, count): ids from SHA-256 of "seed:index", in [100, 48100)."""
    digests = (hashlib.sha256(f"{seed}:{index}".encode()).digest() for index in range(count))
    return [100 + int.from_bytes(digest[:4], "big") % 48000 for digest in digests]


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The folder of the packaged model."""
    return hub.resolve(NAME)


@pytest.fixture(scope="session")
def tokenizer(model_path: Path) -> PreTrainedTokenizerBase:
    """The model's tokenizer."""
    return AutoTokenizer.from_pretrained(model_path)


@pytest.fixture(scope="session")
def decoders(model_path: Path) -> dict[str, Decoder]:
    """Our decoder in both types."""
    return {dtype: load_decoder(model_path, dtype=dtype, max_positions=CONTEXT) for dtype in ("float32", "bfloat16")}


@pytest.fixture
def make_engine(decoders: dict[str, Decoder]) -> MakeEngine:
    """Returns ``make(dtype, num_blocks, threads)`` -> an engine over a fresh pool."""

    def make(dtype: str, num_blocks: int = 128, threads: int = 2) -> Engine:
        layout = decoders[dtype].config.kv_layout(16, "bfloat16" if dtype == "bfloat16" else "float32")
        return Engine(decoders[dtype], KvPool(layout, num_blocks), threads=threads)

    return make


@pytest.fixture(scope="session")
def load_reference(model_path: Path) -> Callable[[torch.dtype], PreTrainedModel]:
    """Returns ``load(dtype)`` -> the reference library's model."""
    return lambda dtype: AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype).eval()


@pytest.fixture(scope="session")
def text_prompts(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """120 chat prompts over many subjects and scripts."""
    subjects = [
        "the sea", "a bicycle", "prime numbers", "bread", "the moon", "rust", "ink", "volcanoes", "chess", "wool",
        "rivers", "glass", "the heart", "salt", "birds", "maps", "sleep", "iron", "tea", "music",
    ]  # fmt: skip
    questions = [
        "What is {}?",
        "Write one sentence about {}.",
        "List three facts about {}.",
        "Why do people like {}? Answer briefly.",
        "用一句话介绍 {}。",
        "Explain {} to a child 🙂",
    ]
    texts = [question.format(subject) for subject in subjects for question in questions]
    return [
        tokenizer.encode(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            ),
            add_special_tokens=False,
        )
        for text in texts
    ]
