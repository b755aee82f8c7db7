"""Tiny random checkpoints, one of each family, written the way users have them on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from workers.guide import GuideFactory

MakeCheckpoint = Callable[..., tuple[Path, PreTrainedModel]]

CLASSES: dict[str, tuple[type[Any], type[Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
SIZES = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> MakeCheckpoint:
    """Returns ``make(family, **config)`` -> (folder, reference model in fp32)."""

    def make(family: str, **changes: Any) -> tuple[Path, PreTrainedModel]:
        config_class, model_class = CLASSES[family]
        if family == "mistral":
            changes.setdefault("sliding_window", None)
        torch.manual_seed(len(family))
        model = model_class(config_class(**{**SIZES, **changes})).eval()
        # Random biases and norms, or a decoder that forgets them would pass.
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias") or "norm" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.3)
                else:
                    parameter.mul_(4.0)
        folder = tmp_path / family
        model.save_pretrained(folder)
        return folder, model

    return make


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """350 tokens: every byte, and pieces of JSON."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=350,
        special_tokens=["<a>", "<b>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(['{"city": "Bonn"}', "<tool_call> name arguments"] * 5, trainer)
    return made


@pytest.fixture(scope="session")
def factory(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> GuideFactory:
    """Guides over that tokenizer, for a model whose vocabulary is padded to 400."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save(str(folder / "tokenizer.json"))
    return GuideFactory(folder, 400)
