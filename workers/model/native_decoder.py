"""The decoder as one native call per pass: same model, same layout of the pool, far fewer calls and copies.

Owns the C++ object with its packed bf16 weights and threads; the source is in ``workers/model/native``. Products sum in
the order of the inner dimension and attention in the order of the keys, so that a row's bits depend on its own sequence
alone. The bits are not those of the torch decoder: the fingerprint tells the two apart. Not for use from two threads at
once. It never checks chunks: ``Engine`` does, before it calls.
"""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kvstore.errors import BadInput, EnvironmentProblem
from workers.core.sequence import SeqChunk, num_blocks_for
from workers.kv_pool import KvPool
from workers.model.config import ModelConfig
from workers.model.linear import Compute
from workers.model.native.library import Library
from workers.model.rope import RopeTable
from workers.model.weights import Checkpoint

LANES: Final = 16
"""Head sizes are whole vectors."""

HEAD: Final = -1
"""Stands for "no layer": the final norm and the head."""

QKV, OUTPUT, GATE_UP, DOWN = range(4)
INPUT_NORM, MLP_NORM, Q_NORM, K_NORM = range(4)


class _Shape(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_size",
            "max_positions",
        )),
        ("eps", ctypes.c_float),
        ("uses_bf16", ctypes.c_int32),
    ]  # fmt: skip


class _Batch(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("num_rows", "num_spans", "num_logits", "num_threads", "block_tokens")),
        *((name, ctypes.c_void_p) for name in ("tokens", "spans", "tables", "logit_rows", "pool", "logits")),
    ]


def refusal(config: ModelConfig, compute: Compute, library: Library) -> str | None:
    """Returns why a model cannot be computed by ``library``; None when it can."""
    if config.head_size % LANES:
        return f"head size {config.head_size} is no multiple of {LANES}"
    if config.hidden_size % 2 or config.intermediate_size % 2:
        return f"hidden sizes {config.hidden_size} and {config.intermediate_size} are not both even"
    if compute == "bfloat16" and not library.has_bf16:
        return "the processor has no bf16 instructions"
    return None


class NativeDecoder:
    """A loaded model. ``compute``: the format that rows are rounded to for a product; sums are float32 in both."""

    builds_kernels = False

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, *, max_positions: int, compute: Compute, library: Library
    ) -> None:
        reason = refusal(config, compute, library)
        assert reason is None, reason
        self.config = config
        self.compute: Compute = compute
        self.max_positions = max_positions
        self._library = library
        self._calls = library.calls
        # A copy: a file that changes later must not change the model.
        embedding = checkpoint.get("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        self._embedding = torch.empty_like(embedding, dtype=torch.bfloat16).copy_(embedding)
        del embedding
        rope = RopeTable(config.rope, head_size=config.head_size, num_positions=max_positions)
        # The native code reads these as long as it lives.
        self._kept = (self._embedding, rope.cos.contiguous(), rope.sin.contiguous())
        self._handle = ctypes.c_void_p(self._new())
        weakref.finalize(self, self._calls.kopir_free, self._handle)
        self._load(checkpoint)

    @property
    def kernels(self) -> str:
        """A readable name of the code that computes: number format, instruction set, digest of the sources."""
        return f"{self.compute}-native-{self._library.name}"

    def sums_are_invariant(self) -> bool:
        """True: no sum here is cut anywhere but at fixed positions, which the probe's own runs pass."""
        return True

    def run(self, chunks: Sequence[SeqChunk], pool: KvPool, *, threads: int) -> Tensor | None:
        """Runs checked chunks as one batch; see ``workers.model.model.Model``. Raises BadInput for a float32 pool."""
        if pool.layout.dtype != "bfloat16":
            raise BadInput("kv_dtype", pool.layout.dtype, "the native decoder keeps bfloat16 KV")
        block_tokens = pool.layout.block_tokens
        ends = list(itertools.accumulate(len(chunk.token_ids) for chunk in chunks))
        tables = [chunk.block_table[: num_blocks_for(chunk.end_position, block_tokens)] for chunk in chunks]
        offsets = [0, *itertools.accumulate(map(len, tables))]
        tokens = np.fromiter(itertools.chain.from_iterable(chunk.token_ids for chunk in chunks), np.int32, ends[-1])
        slots = np.fromiter(itertools.chain.from_iterable(tables), np.int32, offsets[-1])
        spans = np.array(
            [
                (end - len(chunk.token_ids), end, chunk.start_position, offset)
                for chunk, end, offset in zip(chunks, ends, offsets, strict=False)
            ],
            np.int32,
        )
        logit_rows = np.array([end - 1 for chunk, end in zip(chunks, ends, strict=True) if chunk.want_logits], np.int32)
        logits = torch.empty(len(logit_rows), self.config.vocab_size)
        batch = _Batch(
            num_rows=ends[-1],
            num_spans=len(chunks),
            num_logits=len(logit_rows),
            num_threads=threads,
            block_tokens=block_tokens,
            tokens=tokens.ctypes.data,
            spans=spans.ctypes.data,
            tables=slots.ctypes.data,
            logit_rows=logit_rows.ctypes.data,
            pool=pool.tensor.data_ptr(),
            logits=logits.data_ptr(),
        )
        self._check(self._calls.kopir_forward(self._handle, ctypes.byref(batch)))
        return logits if len(logit_rows) else None

    def _new(self) -> int:
        config = self.config
        shape = _Shape(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            max_positions=self.max_positions,
            eps=config.rms_norm_eps,
            uses_bf16=self.compute == "bfloat16",
        )
        handle = self._calls.kopir_new(ctypes.byref(shape), *(_pointer(tensor) for tensor in self._kept))
        if handle is None:
            raise EnvironmentProblem("not enough memory for the native decoder")
        return int(handle)

    def _load(self, checkpoint: Checkpoint) -> None:
        config = self.config
        for layer in range(config.num_layers):
            self._load_layer(checkpoint, layer)
            checkpoint.release()
        self._norm(HEAD, 0, checkpoint.get("model.norm.weight", (config.hidden_size,)))
        shape = (config.vocab_size, config.hidden_size)
        tied = config.tie_word_embeddings
        self._pack(HEAD, 0, self._embedding if tied else _bf16(checkpoint.get("lm_head.weight", shape)), None)

    def _load_layer(self, checkpoint: Checkpoint, layer: int) -> None:
        config, prefix = self.config, f"model.layers.{layer}."
        hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_size
        q_size, kv_size = config.num_heads * head, config.num_kv_heads * head

        def pack(kind: int, sizes: dict[str, int], inputs: int, *, bias: bool) -> None:
            parts = [(f"{prefix}{name}", size) for name, size in sizes.items()]
            weights = [_bf16(checkpoint.get(f"{name}.weight", (size, inputs))) for name, size in parts]
            biases = [checkpoint.maybe(f"{name}.bias", (size,), wanted=bias) for name, size in parts]
            joined = torch.cat([part.float() for part in biases if part is not None]) if bias else None
            self._pack(layer, kind, torch.cat(weights), joined)

        attention = {"self_attn.q_proj": q_size, "self_attn.k_proj": kv_size, "self_attn.v_proj": kv_size}
        pack(QKV, attention, hidden, bias=config.qkv_bias)
        pack(OUTPUT, {"self_attn.o_proj": hidden}, q_size, bias=config.output_bias)
        pack(GATE_UP, {"mlp.gate_proj": inner, "mlp.up_proj": inner}, hidden, bias=config.mlp_bias)
        pack(DOWN, {"mlp.down_proj": hidden}, inner, bias=config.mlp_bias)
        self._norm(layer, INPUT_NORM, checkpoint.get(f"{prefix}input_layernorm.weight", (hidden,)))
        self._norm(layer, MLP_NORM, checkpoint.get(f"{prefix}post_attention_layernorm.weight", (hidden,)))
        if config.qk_norm:
            self._norm(layer, Q_NORM, checkpoint.get(f"{prefix}self_attn.q_norm.weight", (head,)))
            self._norm(layer, K_NORM, checkpoint.get(f"{prefix}self_attn.k_norm.weight", (head,)))

    def _pack(self, layer: int, kind: int, weight: Tensor, bias: Tensor | None) -> None:
        pointer = None if bias is None else _pointer(bias)
        status = self._calls.kopir_pack(self._handle, layer, kind, _pointer(weight), pointer, *weight.shape)
        self._check(status)

    def _norm(self, layer: int, kind: int, weight: Tensor) -> None:
        wide = weight.float().contiguous()
        self._check(self._calls.kopir_norm(self._handle, layer, kind, _pointer(wide), len(wide)))

    def _check(self, status: int) -> None:
        if status:
            raise EnvironmentProblem("not enough memory or threads for the native decoder")


def _bf16(weight: Tensor) -> Tensor:
    return weight.to(torch.bfloat16).contiguous()


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
