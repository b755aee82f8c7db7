"""The native decoder: what it computes, that company changes no bit of it, and when it is not taken."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from kvstore.errors import BadInput, EnvironmentProblem
from workers.engine import Engine, SeqChunk
from workers.kv_pool import KvPool
from workers.model.config import read_config
from workers.model.decoder import Decoder, load_decoder
from workers.model.native import library as native_library
from workers.model.native.library import INSTRUCTION_SETS, NoLibrary, load_library, processor_flags
from workers.model.native_decoder import NativeDecoder
from workers.model.numerics import probe
from workers.model.weights import Checkpoint

HERE = [name for name, needed in INSTRUCTION_SETS.items() if processor_flags().issuperset(needed)]
PATHS = [(name, compute) for name in HERE for compute in ("float32", "bfloat16")[: 1 + (name == "avx512bf16")]]
VARIANTS = [
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 167}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "hidden_size": 54, "intermediate_size": 82}),
    ("llama", {"head_dim": 80, "num_attention_heads": 4}),
    ("qwen2", {}),
    ("qwen3", {}),
]
BLOCK_TOKENS = 8
LENGTH = 200

pytestmark = pytest.mark.skipif(not HERE, reason="the native decoder needs an x86 processor with AVX2")


def load_native(folder: Path, instruction_set: str, compute: str) -> NativeDecoder:
    """Loads a checkpoint for one instruction set that this processor has."""
    config, library = read_config(folder), load_library(instruction_set)
    with Checkpoint(folder) as checkpoint:
        return NativeDecoder(config, checkpoint, max_positions=config.max_positions, compute=compute, library=library)


def make_engine(model: Decoder | NativeDecoder, threads: int = 1, num_blocks: int = 200) -> Engine:
    """Builds an engine over a fresh pool of bfloat16."""
    return Engine(model, KvPool(model.config.kv_layout(BLOCK_TOKENS, "bfloat16"), num_blocks), threads=threads)


def make_tokens(seed: int, count: int) -> list[int]:
    """Returns ``count`` token ids of the tiny vocabulary."""
    chooser = random.Random(seed)
    return [chooser.randrange(160) for _ in range(count)]


def run_all(engine: Engine, tokens: list[int]) -> torch.Tensor:
    """Returns the logits of every position, the last ones decoded one by one."""
    table = list(range(-(-len(tokens) // BLOCK_TOKENS)))
    rows = [SeqChunk((token,), position, table) for position, token in enumerate(tokens)]
    whole = [engine.forward(rows[:-3])]
    return torch.cat([*whole, *(engine.forward([row]) for row in rows[-3:])])


@pytest.mark.parametrize(("instruction_set", "compute"), PATHS)
@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_logits_are_those_of_the_torch_decoder(
    make_checkpoint, family: str, changes: dict, instruction_set: str, compute: str
) -> None:
    """Over four tiles of keys, logits follow the torch decoder's in float32 as closely as the number format allows."""
    folder, reference = make_checkpoint(family, **changes)
    reference.bfloat16().save_pretrained(folder)
    tokens = make_tokens(1, LENGTH)
    expected = run_all(make_engine(load_decoder(folder, dtype="bfloat16", compute="float32", native=False)), tokens)
    got = run_all(make_engine(load_native(folder, instruction_set, compute), threads=2), tokens)
    error = (got - expected).abs().mean() / expected.std()
    # A key that rounds to its neighbour in the pool moves a logit by about a thousandth.
    assert error < (2e-2 if compute == "bfloat16" else 2e-3), float(error)


@pytest.mark.parametrize(("instruction_set", "compute"), PATHS)
@pytest.mark.parametrize(("family", "changes"), [VARIANTS[0], VARIANTS[3], VARIANTS[5]])
def test_bits_do_not_depend_on_chunks_company_or_threads(
    make_checkpoint, family: str, changes: dict, instruction_set: str, compute: str
) -> None:
    """However a sequence is cut, whoever computes beside it, on one thread to three: the same logits and KV."""
    folder, _ = make_checkpoint(family, **changes)
    model = load_native(folder, instruction_set, compute)
    tokens = make_tokens(3, LENGTH)
    blocks_each = -(-LENGTH // BLOCK_TOKENS)
    whole = list(range(blocks_each))
    first = make_engine(model, threads=2)
    expected = first.forward([SeqChunk(tokens, 0, whole)])[0]
    chooser = random.Random(5)
    for trial in range(12):
        engine = make_engine(model, threads=1 + trial % 3)
        table = chooser.sample(range(100), blocks_each)
        assert torch.equal(run_randomly(engine, tokens, table, chooser), expected), f"trial {trial}"
        assert (engine.pool.bytes_view[table] == first.pool.bytes_view[whole]).all(), f"trial {trial}"


def run_randomly(engine: Engine, tokens: list[int], table: list[int], chooser: random.Random) -> torch.Tensor:
    """Runs a sequence in random chunks, each beside up to 20 chunks of other sequences."""
    others = [list(range(100 + i * 5, 105 + i * 5)) for i in range(20)]
    position = 0
    while True:
        end = min(position + chooser.choice([1, 1, 2, 3, 16, 40, 64, 100]), len(tokens))
        mine = SeqChunk(tokens[position:end], position, table)
        batch = [
            SeqChunk(make_tokens(position, chooser.choice([1, 1, 5, 13])), chooser.randrange(27), other)
            for other in others[: chooser.choice([0, 1, 2, 11, 12, 20])]
        ]
        place = chooser.randrange(len(batch) + 1)
        logits = engine.forward([*batch[:place], mine, *batch[place:]])
        position = end
        if position == len(tokens):
            return logits[place]


@pytest.mark.parametrize(("instruction_set", "compute"), PATHS)
def test_a_broken_weight_is_not_computed_away(make_checkpoint, instruction_set: str, compute: str) -> None:
    """Not-a-number in one key weight reaches the logits, where the sampler refuses it."""
    folder, reference = make_checkpoint("llama")
    with torch.no_grad():
        reference.model.layers[1].self_attn.k_proj.weight[3, 7] = float("nan")
    reference.save_pretrained(folder)
    engine = make_engine(load_native(folder, instruction_set, compute))
    assert engine.forward([SeqChunk(make_tokens(2, 70), 0, list(range(9)))]).isnan().all()


def test_the_fingerprint_tells_decoders_apart(make_checkpoint) -> None:
    """Native and torch differ in name and in bits, so that their blocks are never mixed; each proves itself."""
    folder, _ = make_checkpoint("llama")
    models = [load_decoder(folder, dtype="bfloat16", native=native) for native in (True, False)]
    found = [probe(model, block_tokens=16, dtype="bfloat16") for model in models]
    assert found[0].kernels != found[1].kernels
    assert "native" in found[0].kernels
    assert all(numerics.is_batch_invariant for numerics in found)
    assert found[0] == probe(models[0], block_tokens=16, dtype="bfloat16", threads=2)


def test_what_cannot_be_native_takes_torch(make_checkpoint) -> None:
    """float32 models and odd head sizes fall back, unless native was insisted on; a float32 pool is refused."""
    folder, _ = make_checkpoint("llama")
    assert isinstance(load_decoder(folder, dtype="float32"), Decoder)
    with pytest.raises(EnvironmentProblem, match="float32"):
        load_decoder(folder, dtype="float32", native=True)
    model = load_decoder(folder, dtype="bfloat16", native=True)
    engine = Engine(model, KvPool(model.config.kv_layout(8, "float32"), 4), threads=1)
    with pytest.raises(BadInput) as caught:
        engine.forward([SeqChunk((1,), 0, [0])])
    assert caught.value.field == "kv_dtype"
    odd, _ = make_checkpoint("llama", head_dim=24)
    assert isinstance(load_decoder(odd, dtype="bfloat16"), Decoder)
    with pytest.raises(EnvironmentProblem, match="head size 24"):
        load_decoder(odd, dtype="bfloat16", native=True)


def test_without_a_compiler_torch_computes(make_checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler, or one that fails, is told with its reason and costs speed only; what is compiled needs none."""
    folder, _ = make_checkpoint("llama")
    load_library()
    monkeypatch.setattr(native_library, "COMPILERS", ("kopir-no-such-compiler",))
    load_library()
    with pytest.raises(NoLibrary, match="apt install"):
        load_library(cache_dir=tmp_path / "none")
    monkeypatch.setattr(native_library, "COMPILERS", ("false",))
    with pytest.raises(NoLibrary, match="cannot compile"):
        load_library(cache_dir=tmp_path / "broken")
    assert not list((tmp_path / "broken").rglob("*.so"))
    monkeypatch.setenv("KOPIR_CACHE", str(tmp_path / "cache"))
    assert isinstance(load_decoder(folder, dtype="bfloat16"), Decoder)
    with pytest.raises(EnvironmentProblem, match="cannot compile"):
        load_decoder(folder, dtype="bfloat16", native=True)


def test_a_loaded_model_needs_its_files_no_more(make_checkpoint) -> None:
    """What is computed stays the same when the weight file is overwritten in place after the load."""
    folder, _ = make_checkpoint("llama", tie_word_embeddings=True)
    engine = make_engine(load_decoder(folder, dtype="bfloat16", native=True))
    chunk = SeqChunk(make_tokens(4, 20), 0, [0, 1, 2])
    expected = engine.forward([chunk])
    path = folder / "model.safetensors"
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    assert torch.equal(engine.forward([chunk]), expected)
