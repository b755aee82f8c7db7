"""The decoder against the reference library, and against itself in other company."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from kvstore.errors import BadInput
from workers.engine import Engine, SeqChunk
from workers.kv_pool import KvPool
from workers.model.decoder import Decoder, load_decoder
from workers.model.numerics import probe

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"num_key_value_heads": 6}),
    ("llama", {"num_attention_heads": 1, "num_key_value_heads": 1}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
    ("llama", {"rope_parameters": LLAMA3_ROPE}),
    ("mistral", {}),
    ("qwen2", {}),
    ("qwen3", {}),
]


def make_engine(model: Decoder, *, num_blocks: int = 64, block_tokens: int = 16, dtype: str = "float32") -> Engine:
    """Builds a single-threaded engine over a fresh pool."""
    layout = model.config.kv_layout(block_tokens, "bfloat16" if dtype == "bfloat16" else "float32")
    return Engine(model, KvPool(layout, num_blocks), threads=1)


def make_tokens(seed: int, count: int) -> list[int]:
    """Returns ``count`` token ids of the tiny vocabulary."""
    chooser = random.Random(seed)
    return [chooser.randrange(160) for _ in range(count)]


@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_logits_follow_the_reference(make_checkpoint, family: str, changes: dict) -> None:
    """Prefill and decode logits of every family are the reference's, up to float32 rounding."""
    folder, reference = make_checkpoint(family, **changes)
    engine = make_engine(load_decoder(folder, dtype="float32"))
    tokens = make_tokens(1, 90)
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0]
    table = list(range(10, 20))
    got = [engine.forward([SeqChunk(tokens[:80], 0, table)])[0]]
    got += [engine.decode_step([(tokens[p], p, table)])[0] for p in range(80, 90)]
    scale = expected.std()
    assert scale > 0.1, "a flat reference would prove nothing"
    torch.testing.assert_close(torch.stack(got), expected[79:90], rtol=0, atol=float(scale) * 1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("block_tokens", [8, 16])
@pytest.mark.parametrize(("family", "changes"), [VARIANTS[0], VARIANTS[3], VARIANTS[9]])
def test_bits_do_not_depend_on_chunks_or_company(
    make_checkpoint, family: str, changes: dict, dtype: str, compute: str, block_tokens: int
) -> None:
    """However a sequence is cut and whoever computes beside it, its logits and its KV have the same bits."""
    folder, _ = make_checkpoint(family, **changes)
    model = load_decoder(folder, dtype=dtype, compute=compute)
    engine = make_engine(model, num_blocks=200, block_tokens=block_tokens, dtype=dtype)
    length = 150
    blocks_each = -(-length // block_tokens)
    tokens = make_tokens(3, length)
    whole = list(range(blocks_each))
    expected = engine.forward([SeqChunk(tokens, 0, whole)])[0].clone()
    expected_kv = engine.pool.bytes_view[whole].copy()
    chooser = random.Random(5)
    for trial in range(12):
        table = chooser.sample(range(blocks_each, 150), blocks_each)
        for slot in table:
            engine.pool.zero_block(slot)
        logits = _run_randomly(engine, tokens, table, chooser)
        assert torch.equal(logits, expected), f"trial {trial}"
        assert (engine.pool.bytes_view[table] == expected_kv).all(), f"trial {trial}"


def _run_randomly(engine: Engine, tokens: list[int], table: list[int], chooser: random.Random) -> torch.Tensor:
    """Runs a sequence in random chunks, each beside up to three chunks of other sequences."""
    per_other = 16
    others = [list(range(150 + i * per_other, 150 + (i + 1) * per_other)) for i in range(3)]
    position = 0
    while True:
        end = min(position + chooser.choice([1, 1, 2, 3, 16, 40, 64, 100]), len(tokens))
        mine = SeqChunk(tokens[position:end], position, table)
        batch = [
            SeqChunk(make_tokens(position, chooser.choice([1, 1, 5, 33])), chooser.randrange(60), other)
            for other in others[: chooser.randrange(4)]
        ]
        place = chooser.randrange(len(batch) + 1)
        logits = engine.forward([*batch[:place], mine, *batch[place:]])
        position = end
        if position == len(tokens):
            return logits[place]


def test_blocks_of_a_prefix_can_be_copied_from_elsewhere(make_checkpoint) -> None:
    """A cached prefix, moved as bytes into another pool, gives the logits of a cold run bit by bit."""
    folder, _ = make_checkpoint("llama")
    model = load_decoder(folder, dtype="bfloat16")
    source, target = (make_engine(model, dtype="bfloat16") for _ in range(2))
    tokens = make_tokens(9, 100)
    expected = source.forward([SeqChunk(tokens, 0, list(range(7)))])[0]
    for block in range(6):
        target.pool.block_bytes_view(20 + block)[:] = source.pool.block_bytes_view(block)
    steps = list(target.prefill(tokens, list(range(20, 27)), start=96, chunk_tokens=3))
    assert [(step.start, step.end) for step in steps] == [(96, 99), (99, 100)]
    assert steps[-1].logits is not None
    assert torch.equal(steps[-1].logits, expected)


def test_prefill_says_which_blocks_are_complete(make_checkpoint) -> None:
    """Each chunk names exactly the blocks that it filled; a partial last block is never complete."""
    folder, _ = make_checkpoint("llama")
    engine = make_engine(load_decoder(folder, dtype="float32"))
    steps = engine.prefill(make_tokens(2, 45), [5, 6, 7], start=16, chunk_tokens=20)
    assert [(s.start, s.end, list(s.completed_blocks)) for s in steps] == [(16, 20, []), (20, 40, [1]), (40, 45, [])]


def test_logits_come_in_order_for_those_who_ask(make_checkpoint) -> None:
    """Chunks that want no logits take no row; when none wants any the result is empty."""
    folder, _ = make_checkpoint("llama")
    engine = make_engine(load_decoder(folder, dtype="float32"))
    alone = [engine.forward([SeqChunk(make_tokens(i, 5), 0, [i])])[0] for i in range(3)]
    chunks = [SeqChunk(make_tokens(i, 5), 0, [10 + i], want_logits=i != 1) for i in range(3)]
    together = engine.forward(chunks)
    assert together.shape == (2, 160)
    assert torch.equal(together[0], alone[0])
    assert torch.equal(together[1], alone[2])
    assert engine.forward([SeqChunk([1], 0, [0], want_logits=False)]).shape == (0, 160)


@pytest.mark.parametrize(
    ("chunk", "field"),
    [
        (SeqChunk([], 0, [0]), "token_ids"),
        (SeqChunk([160], 0, [0]), "token_ids"),
        (SeqChunk([-1], 0, [0]), "token_ids"),
        (SeqChunk([1], -1, [0]), "start_position"),
        (SeqChunk([1], 512, list(range(33))), "end_position"),
        (SeqChunk([1], 16, [0]), "block_table"),
        (SeqChunk([1], 0, [64]), "block_table"),
        (SeqChunk([1], 0, [-1]), "block_table"),
    ],
)
def test_a_chunk_outside_its_sequence_is_refused(make_checkpoint, chunk: SeqChunk, field: str) -> None:
    """Nothing is computed for a chunk that would read or write elsewhere, and the field is named."""
    folder, _ = make_checkpoint("llama")
    engine = make_engine(load_decoder(folder, dtype="float32"))
    with pytest.raises(BadInput) as caught:
        engine.forward([SeqChunk([1], 0, [3]), chunk])
    assert caught.value.field == field
    assert not engine.pool.bytes_view.any()


def test_warm_up_leaves_the_pool_clean(make_checkpoint) -> None:
    """Warm-up works in pools smaller than a chunk too and leaves only zeros."""
    folder, _ = make_checkpoint("llama")
    engine = make_engine(load_decoder(folder, dtype="float32"), num_blocks=3)
    engine.warm_up(chunk_tokens=512, batch_sizes=(1, 3))
    assert not engine.pool.bytes_view.any()


def test_the_probe_tells_models_apart(make_checkpoint) -> None:
    """The numerics probe is repeatable, finds this machine invariant, and depends on weights and KV type."""
    folder, reference = make_checkpoint("llama")
    model = load_decoder(folder, dtype="float32")
    first = probe(model, block_tokens=16, dtype="float32", threads=1)
    assert first.is_batch_invariant
    assert first == probe(load_decoder(folder, dtype="float32"), block_tokens=16, dtype="float32", threads=2)
    assert first.digest != probe(model, block_tokens=16, dtype="bfloat16").digest
    with torch.no_grad():
        reference.model.layers[1].mlp.down_proj.weight.mul_(1.01)
    reference.save_pretrained(folder)
    changed = probe(load_decoder(folder, dtype="float32"), block_tokens=16, dtype="float32")
    assert changed.digest != first.digest


def test_a_checkpoint_with_a_missing_or_odd_tensor_is_refused(make_checkpoint, tmp_path: Path) -> None:
    """A tensor that is missing, misshapen or not mentioned by the configuration stops the load, by name."""
    from safetensors.torch import load_file, save_file

    folder, _ = make_checkpoint("llama")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    for broken in (
        {key: value for key, value in tensors.items() if key != name},
        {**tensors, name: tensors[name][:-1].clone()},
        {**tensors, "model.layers.0.self_attn.q_proj.bias": torch.zeros(96)},
    ):
        save_file(broken, path)
        with pytest.raises(BadInput):
            load_decoder(folder, dtype="float32")
    path.write_bytes(b"nothing")
    with pytest.raises(BadInput):
        load_decoder(folder, dtype="float32")
    path.unlink()
    with pytest.raises(BadInput):
        load_decoder(folder, dtype="float32")
