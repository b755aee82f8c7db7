"""The decoder: Llama-shaped transformer layers over a paged KV pool.

Owns the packed weights of one model. A forward pass takes a flat batch of rows (tokens of any sequences at any
positions), writes their keys and values into the pool and returns logits for the rows that ask. Products run over
all rows together, attention runs per sequence. Activations are float32; the pool keeps the layout's type.

Batch invariance: every step works on rows independently, so a row's bits depend on its own sequence alone. It never
allocates blocks, samples or keeps anything between two passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model.attention import Attention, SingleGroup, Span
from workers.model.config import ModelConfig, read_config
from workers.model.linear import Compute, Linear, best_compute, padded_rows
from workers.model.rope import RopeTable, rotate
from workers.model.weights import Checkpoint


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass. ``rows`` real rows come first; tensors are padded to ``padded_rows(rows)``.

    ``token_ids``, ``positions``: int64, padded. ``slots``, ``offsets``: int64, (rows,): where each row's KV goes.
    ``logit_rows``: int64 rows whose logits are wanted, in order; None for none.
    """

    num_rows: int
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    offsets: Tensor
    spans: tuple[Span, ...]
    singles: tuple[SingleGroup, ...]
    logit_rows: Tensor | None


@dataclass(frozen=True, slots=True)
class Layer:
    """Packed weights of one layer. Norm weights are float32; q_norm and k_norm exist in Qwen3 only."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """A loaded model. ``compute``: the number format of the weight products."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, *, max_positions: int, compute: Compute) -> None:
        self.config = config
        self.compute: Compute = compute
        self.max_positions = max_positions
        self._embedding = checkpoint.get("model.embed_tokens.weight", (config.vocab_size, config.hidden_size)).clone()
        self._layers = [_load_layer(config, checkpoint, index, compute) for index in range(config.num_layers)]
        self._norm = checkpoint.get("model.norm.weight", (config.hidden_size,)).float()
        head_shape = (config.vocab_size, config.hidden_size)
        head = self._embedding if config.tie_word_embeddings else checkpoint.get("lm_head.weight", head_shape)
        self._head = Linear(head, compute=compute)
        self._rope = RopeTable(config.rope, head_size=config.head_size, num_positions=max_positions)
        self._attention = Attention(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
        )
        self._eps = torch.tensor(config.rms_norm_eps)

    def forward(self, batch: Batch, pool: Tensor) -> Tensor | None:
        """Runs one batch and returns float32 logits (len(logit_rows), vocab_size), or None when none are wanted.

        Modifies: ``pool`` at the batch's slots. ``pool``: (num_blocks, num_layers, 2, kv_heads, tokens, head).
        """
        hidden = self._embedding.index_select(0, batch.token_ids).float()
        cos, sin = self._rope.at(batch.positions)
        for index, layer in enumerate(self._layers):
            normed = self._rms_norm(hidden, layer.input_norm)
            attended = self._attend(layer, index, normed, (cos, sin), batch, pool)
            hidden = hidden.add_(layer.output(attended))
            normed = self._rms_norm(hidden, layer.mlp_norm)
            gate, up = layer.gate_up(normed).chunk(2, -1)
            hidden = hidden.add_(layer.down(F.silu(gate).mul_(up)))
        if batch.logit_rows is None:
            return None
        return self._logits(hidden.index_select(0, batch.logit_rows))

    def _logits(self, hidden: Tensor) -> Tensor:
        num_rows = hidden.shape[0]
        padded = F.pad(hidden, (0, 0, 0, padded_rows(num_rows) - num_rows))
        return self._head(self._rms_norm(padded, self._norm))[:num_rows]

    def _attend(
        self,
        layer: Layer,
        index: int,
        normed: Tensor,
        rotation: tuple[Tensor, Tensor],
        batch: Batch,
        pool: Tensor,
    ) -> Tensor:
        """Returns the attention outputs of all rows, (padded rows, num_heads * head_size). Modifies: ``pool``."""
        config = self.config
        num_q, num_kv, rows = config.num_heads, config.num_kv_heads, batch.num_rows
        qkv = layer.qkv(normed).view(-1, num_q + 2 * num_kv, config.head_size)
        if layer.q_norm is not None and layer.k_norm is not None:
            qkv[:, :num_q] = self._rms_norm(qkv[:, :num_q].contiguous(), layer.q_norm)
            qkv[:, num_q : num_q + num_kv] = self._rms_norm(qkv[:, num_q : num_q + num_kv].contiguous(), layer.k_norm)
        qkv[:, : num_q + num_kv] = rotate(qkv[:, : num_q + num_kv], *rotation)
        # Keys and values go to the pool first: a row reads all it sees, its own included, as the pool rounded it.
        fresh = qkv[:rows, num_q:].view(rows, 2, num_kv, config.head_size)
        pool[:, index].permute(0, 3, 1, 2, 4)[batch.slots, batch.offsets] = fresh.to(pool.dtype)
        queries = qkv[:, :num_q]
        out = torch.zeros(qkv.shape[0], num_q, config.head_size)
        for span in batch.spans:
            part = slice(span.first_row, span.end_row)
            out[part] = self._attention.run_span(queries[part], pool, index, span)
        for group in batch.singles:
            if group.rows is None:
                out[:rows] = self._attention.run_singles(queries[:rows], pool, index, group)
            else:
                chosen = queries.index_select(0, group.rows)
                out.index_copy_(0, group.rows, self._attention.run_singles(chosen, pool, index, group))
        return out.view(-1, num_q * config.head_size)

    def _rms_norm(self, rows: Tensor, weight: Tensor) -> Tensor:
        # Fewer passes than torch's own, which is put together from seven operations on a CPU.
        norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps, norm, norm, value=1.0 / rows.shape[-1]).rsqrt_()
        return scale.mul(rows).mul_(weight)


def load_decoder(
    folder: Path, *, dtype: str, max_positions: int | None = None, compute: Compute | None = None
) -> Decoder:
    """Loads a checkpoint folder. ``dtype``: ``bfloat16`` or ``float32``, the type of weights and KV.

    ``max_positions`` cuts the context (None: all that the model has). ``compute`` None picks the fastest on this
    machine. Raises BadInput for a folder, feature or tensor that cannot be used.
    """
    config = read_config(folder)
    limit = config.max_positions if max_positions is None else min(max_positions, config.max_positions)
    with torch.inference_mode(), Checkpoint(folder) as checkpoint:
        return Decoder(config, checkpoint, max_positions=limit, compute=compute or best_compute(dtype))


def _load_layer(config: ModelConfig, checkpoint: Checkpoint, index: int, compute: Compute) -> Layer:
    prefix = f"model.layers.{index}."
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_size
    q_size, kv_size = config.num_heads * head, config.num_kv_heads * head

    def linear(parts: dict[str, int], inputs: int, *, bias: bool) -> Linear:
        weights = [checkpoint.get(f"{prefix}{name}.weight", (size, inputs)) for name, size in parts.items()]
        biases = [checkpoint.maybe(f"{prefix}{name}.bias", (size,), wanted=bias) for name, size in parts.items()]
        joined = torch.cat([b for b in biases if b is not None]) if bias else None
        return Linear(torch.cat(weights), joined, compute=compute)

    def norm(name: str, size: int) -> Tensor:
        return checkpoint.get(f"{prefix}{name}.weight", (size,)).float()

    qkv = {"self_attn.q_proj": q_size, "self_attn.k_proj": kv_size, "self_attn.v_proj": kv_size}
    return Layer(
        input_norm=norm("input_layernorm", hidden),
        qkv=linear(qkv, hidden, bias=config.qkv_bias),
        q_norm=norm("self_attn.q_norm", head) if config.qk_norm else None,
        k_norm=norm("self_attn.k_norm", head) if config.qk_norm else None,
        output=linear({"self_attn.o_proj": hidden}, q_size, bias=config.output_bias),
        mlp_norm=norm("post_attention_layernorm", hidden),
        gate_up=linear({"mlp.gate_proj": inner, "mlp.up_proj": inner}, hidden, bias=config.mlp_bias),
        down=linear({"mlp.down_proj": hidden}, inner, bias=config.mlp_bias),
    )
