"""The decoder: Llama-shaped transformer layers over a paged KV pool.

Owns the packed weights of one model. A forward pass takes a flat batch of rows (tokens of any sequences at any
positions), writes their keys and values into the pool and returns logits for the rows that ask. Products run over
all rows together, attention runs per sequence. Activations are float32; the pool keeps the layout's type.

Batch invariance: every step works on rows independently, so a row's bits depend on its own sequence alone. It never
allocates blocks, samples or keeps anything between two passes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kvstore.errors import EnvironmentProblem
from workers.core.sequence import SeqChunk
from workers.kv_pool import KvPool
from workers.model.attention import Attention, products_are_invariant
from workers.model.batch import Batch, make_batch
from workers.model.config import ModelConfig, read_config
from workers.model.linear import Compute, Linear, best_compute, has_onednn, padded_rows
from workers.model.native.library import Library, NoLibrary, load_library
from workers.model.native_decoder import NativeDecoder, refusal
from workers.model.rope import RopeTable, rotate
from workers.model.weights import Checkpoint

logger = logging.getLogger(__name__)


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

    builds_kernels = True

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

    @property
    def kernels(self) -> str:
        """A readable name of the code that computes: number format, library, instruction set, version."""
        library = "onednn" if has_onednn() else "tiled"
        instructions = torch.backends.cpu.get_cpu_capability().lower()
        return f"{self.compute}-{library}-{instructions}-torch{torch.__version__.split('+')[0]}"

    def sums_are_invariant(self) -> bool:
        """Tries the products of attention, whose bits are the library's affair."""
        return products_are_invariant(self.config.head_size)

    def run(self, chunks: Sequence[SeqChunk], pool: KvPool, *, threads: int) -> Tensor | None:
        """Runs checked chunks as one batch; see ``workers.model.model.Model``. ``Engine`` has set torch's threads."""
        del threads
        return self.forward(make_batch(chunks, pool.layout.block_tokens), pool.tensor)

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
    folder: Path,
    *,
    dtype: str,
    max_positions: int | None = None,
    compute: Compute | None = None,
    native: bool | None = None,
) -> Decoder | NativeDecoder:
    """Loads a checkpoint folder. ``dtype``: ``bfloat16`` or ``float32``, the type of weights and KV.

    ``max_positions`` cuts the context (None: all that the model has). ``compute`` None picks the fastest on this
    machine. ``native`` None takes the native decoder where there is one for this machine, type and model; True insists,
    False refuses it. Raises BadInput for a folder, feature or tensor that cannot be used, EnvironmentProblem when
    ``native`` insists in vain.
    """
    config = read_config(folder)
    limit = config.max_positions if max_positions is None else min(max_positions, config.max_positions)
    library = None if native is False else _native_library(config, dtype, compute, is_wanted=bool(native))
    with torch.inference_mode(), Checkpoint(folder) as checkpoint:
        if library is None:
            return Decoder(config, checkpoint, max_positions=limit, compute=compute or best_compute(dtype))
        native_compute = compute or ("bfloat16" if library.has_bf16 else "float32")
        return NativeDecoder(config, checkpoint, max_positions=limit, compute=native_compute, library=library)


def _native_library(config: ModelConfig, dtype: str, compute: Compute | None, *, is_wanted: bool) -> Library | None:
    """Returns the native library if this model can be computed with it."""
    reason: str | None
    if dtype != "bfloat16":
        reason = f"it computes bfloat16 models, not {dtype}"
    else:
        try:
            library = load_library()
        except NoLibrary as error:
            reason = str(error)
        else:
            reason = refusal(config, compute or "float32", library)
            if reason is None:
                return library
        logger.warning("native_decoder_missing reason=%s", reason)
    if is_wanted:
        raise EnvironmentProblem(f"no native decoder: {reason}")
    return None


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
