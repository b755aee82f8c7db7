"""What the decoder needs to know about a checkpoint, read from its ``config.json``.

Owns the accepted model families and refuses everything else with the field that stands in the way, because a
feature that is silently ignored gives fluent and wrong text. Immutable once read. It never touches weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from kernels.layout import DType, KVLayout
from kvstore.errors import BadInput

Family = Literal["llama", "mistral", "qwen2", "qwen3"]

FAMILIES: Final[dict[str, Family]] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

ROPE_TYPES: Final = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. ``factor`` stretches positions; the last three fields belong to ``llama3`` only."""

    theta: float
    rope_type: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and features of a decoder-only checkpoint."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    max_positions: int
    rope: RopeConfig
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise BadInput(name, getattr(self, name), "must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise BadInput("num_key_value_heads", self.num_kv_heads, f"must divide {self.num_heads} heads")
        if self.head_size % 2 or self.head_size < 2:
            raise BadInput("head_dim", self.head_size, "must be even")

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    def kv_layout(self, block_tokens: int, dtype: DType) -> KVLayout:
        """Returns the layout of this model's KV blocks."""
        return KVLayout(self.num_layers, self.num_kv_heads, self.head_size, block_tokens, dtype)


def read_config(folder: Path) -> ModelConfig:
    """Reads ``config.json`` and ``generation_config.json`` of a checkpoint folder.

    Raises BadInput naming the field that is missing, wrong or not supported.
    """
    raw = _read_json(folder / "config.json")
    generation_path = folder / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.exists() else {}
    return parse_config(raw, generation)


def parse_config(raw: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    """Builds the configuration from the parsed files; ``generation`` may override the end-of-sequence ids.

    Raises BadInput naming the field that is missing, wrong or not supported.
    """
    family = _family(raw)
    _refuse_unsupported(raw, family)
    num_heads = _whole(raw, "num_attention_heads")
    hidden_size = _whole(raw, "hidden_size")
    bias = bool(raw.get("attention_bias", False))
    eos = (generation or {}).get("eos_token_id", raw.get("eos_token_id"))
    return ModelConfig(
        family=family,
        vocab_size=_whole(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_whole(raw, "intermediate_size"),
        num_layers=_whole(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
        head_size=int(raw.get("head_dim") or hidden_size // num_heads),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        max_positions=_whole(raw, "max_position_embeddings"),
        rope=_rope(raw),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=bias or family == "qwen2",
        output_bias=bias and family != "qwen2",
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        eos_token_ids=_ids(eos),
        bos_token_id=raw.get("bos_token_id"),
    )


def _family(raw: dict[str, Any]) -> Family:
    names = raw.get("architectures") or [None]
    family = FAMILIES.get(str(names[0]))
    if family is None:
        raise BadInput("architectures", names, f"not supported; known are {', '.join(FAMILIES)}")
    return family


def _refuse_unsupported(raw: dict[str, Any], family: Family) -> None:
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise BadInput("hidden_act", raw["hidden_act"], "only silu is supported")
    if raw.get("quantization_config"):
        raise BadInput("quantization_config", raw["quantization_config"], "quantised weights are not supported")
    # Mistral applies its window whenever it is set; the Qwen families only when told to.
    uses_window = raw.get("sliding_window") is not None and (
        family == "mistral" or bool(raw.get("use_sliding_window", False))
    )
    if uses_window and int(raw["sliding_window"]) < _whole(raw, "max_position_embeddings"):
        raise BadInput("sliding_window", raw["sliding_window"], "a window shorter than the context is not supported")
    if any(kind != "full_attention" for kind in raw.get("layer_types") or ()) and uses_window:
        raise BadInput("layer_types", raw["layer_types"], "only full attention is supported")


def _rope(raw: dict[str, Any]) -> RopeConfig:
    # Newer files keep all of it in rope_parameters, older ones split it into rope_theta and rope_scaling.
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise BadInput("rope_type", rope_type, f"not supported; known are {', '.join(ROPE_TYPES)}")
    if float(raw.get("partial_rotary_factor") or scaling.get("partial_rotary_factor") or 1.0) != 1.0:
        raise BadInput("partial_rotary_factor", raw.get("partial_rotary_factor"), "only 1.0 is supported")
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    if rope_type == "default":
        return RopeConfig(theta)
    return RopeConfig(
        theta=theta,
        rope_type=rope_type,
        factor=float(scaling.get("factor", 1.0)),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        original_max_positions=int(
            scaling.get("original_max_position_embeddings") or raw.get("max_position_embeddings", 8192)
        ),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput("model", str(path), "cannot be read") from error
    except ValueError as error:
        raise BadInput("model", str(path), "is not valid JSON") from error
    if not isinstance(content, dict):
        raise BadInput("model", str(path), "must hold a JSON object")
    return content


def _whole(raw: dict[str, Any], field: str) -> int:
    value = raw.get(field)
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadInput(field, value, "must be a whole number in config.json")
    return value


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(item) for item in value) if isinstance(value, list) else (int(value),)
