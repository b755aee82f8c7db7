"""Reading a checkpoint's configuration: what is taken, what is refused and by which name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import BadInput
from workers.model.config import parse_config, read_config


def make_raw(**changes: Any) -> dict[str, Any]:
    """Builds the content of a Llama config.json."""
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rope_theta": 5000.0,
        "eos_token_id": [7, 8],
    }
    return {**raw, **changes}


def test_old_and_new_files_say_the_same() -> None:
    """rope_theta beside rope_scaling, or both in rope_parameters: one meaning."""
    scaling = {"rope_type": "linear", "factor": 2.0}
    old = parse_config(make_raw(rope_scaling=scaling))
    new = parse_config(make_raw(rope_theta=None, rope_parameters={**scaling, "rope_theta": 5000.0}))
    assert old == new
    assert (old.head_size, old.group_size, old.rope.factor) == (16, 2, 2.0)


def test_generation_config_decides_the_end_tokens() -> None:
    """The ids of generation_config.json replace those of config.json; a single id becomes a tuple."""
    assert parse_config(make_raw()).eos_token_ids == (7, 8)
    assert parse_config(make_raw(), {"eos_token_id": 9}).eos_token_ids == (9,)
    assert parse_config(make_raw(eos_token_id=None)).eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures"),
        ({"architectures": None}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 128}, "sliding_window"),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 128, "use_sliding_window": True}, "sliding_window"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    """A feature that would be ignored silently stops the load."""
    with pytest.raises(BadInput) as caught:
        parse_config(make_raw(**changes))
    assert caught.value.field == field


def test_windows_that_change_nothing_are_taken() -> None:
    """A window as long as the context, or one that Qwen has switched off, is full attention."""
    assert parse_config(make_raw(architectures=["MistralForCausalLM"], sliding_window=256)).family == "mistral"
    assert parse_config(make_raw(architectures=["Qwen2ForCausalLM"], sliding_window=16)).qkv_bias


def test_a_folder_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """Missing and broken files are named."""
    with pytest.raises(BadInput, match="cannot be read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(BadInput, match="not valid JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(BadInput, match="JSON object"):
        read_config(tmp_path)
