"""The fingerprint of a loaded model: everything that decides whether another worker's KV blocks can be used here."""

from __future__ import annotations

from dataclasses import asdict

from kernels.layout import KVLayout
from kvstore.core.identity import Fingerprint, canonical_text
from workers.model.config import ModelConfig
from workers.model.numerics import Numerics


def make_fingerprint(
    config: ModelConfig, layout: KVLayout, *, digests: dict[str, str], numerics: Numerics
) -> Fingerprint:
    """Returns the fingerprint of one model on one numeric path.

    Args:
        digests: ``weights``, ``tokenizer`` and ``chat_template``, as ``hub.model_digests`` gives them.
        numerics: what the probe found; workers whose bits differ would not continue each other's KV exactly.
    """
    return Fingerprint(
        weights_digest=digests["weights"],
        tokenizer_digest=digests["tokenizer"],
        chat_template_digest=digests["chat_template"],
        model_type=config.family,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        attention="full/qk-norm" if config.qk_norm else "full",
        rope=canonical_text(asdict(config.rope)),
        kv_dtype=layout.dtype,
        block_tokens=layout.block_tokens,
        kv_layout=layout.label,
        numerics=canonical_text(numerics.fingerprint()),
    )
