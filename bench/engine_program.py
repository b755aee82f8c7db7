"""Our engine as a program of its own, asked over its standard streams like the peers of ``kopir bench engine``.

    python -m bench.engine_program MODEL MAX_MODEL_LEN THREADS

Answers ``{"prompts": [...], "tokens": N}`` with the time to the first tokens, the time of each step after them, and
the tokens. With ``"cached": true`` the first prompt's blocks stay in the pool from the question before, as a prefix
cache would leave them. Every answer carries what the program has used of memory so far.
"""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bench.peers.protocol import answer
from workers.engine import Engine, SeqChunk
from workers.kv_pool import KvPool
from workers.model.decoder import load_decoder

BLOCK_TOKENS = 16
CHUNK_TOKENS = 512
MAX_BATCH = 16
PRODUCT_ROWS = 512
PRODUCT_REPEATS = 30


def main(model: str, max_model_len: int, threads: int) -> None:
    """Loads the engine, warms it up and answers until the input ends."""
    weights_bytes = sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
    decoder = load_decoder(Path(model), dtype="bfloat16", max_positions=max_model_len)
    layout = decoder.config.kv_layout(BLOCK_TOKENS, "bfloat16")
    pool = KvPool(layout, MAX_BATCH * -(-max_model_len // BLOCK_TOKENS) // 4)
    pool.tensor.zero_()
    engine = Engine(decoder, pool, threads=threads)
    engine.warm_up(batch_sizes=(1, 2, 4, 8, MAX_BATCH))

    def run(question: dict[str, Any]) -> dict[str, Any]:
        if question.get("products"):
            return {"gflops": products_gflops(threads), "kernels": decoder.kernels}
        prompts, num_tokens = question["prompts"], question["tokens"]
        tables = _tables(prompts, num_tokens)
        began = time.perf_counter()
        # The last token of a cached prompt is computed again: its logits are in no cache.
        start = len(prompts[0]) - 1 if question.get("cached") else 0
        tokens = [[_prefill(engine, prompt, table, start)] for prompt, table in zip(prompts, tables, strict=True)]
        first_s = time.perf_counter() - began
        steps_s = []
        for _ in range(num_tokens - 1):
            before = time.perf_counter()
            chunks = [
                SeqChunk((line[-1],), len(prompt) + len(line) - 1, table)
                for prompt, line, table in zip(prompts, tokens, tables, strict=True)
            ]
            for line, token in zip(tokens, engine.forward(chunks).argmax(-1).tolist(), strict=True):
                line.append(token)
            steps_s.append(time.perf_counter() - before)
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {
            "first_s": first_s,
            "steps_s": steps_s,
            "tokens": tokens,
            "peak_bytes": peak_kib * 1024,
            "pool_bytes": pool.size_bytes,
            "weights_bytes": weights_bytes,
        }

    answer(run)  # type: ignore[no-untyped-call]


def products_gflops(threads: int) -> float:
    """Returns the best rate of torch's large matrix products here, in float32 or bfloat16, whichever is faster.

    Multiplications and additions, 1e9 per second.
    """
    torch.set_num_threads(threads)
    best_s = float("inf")
    for dtype in (torch.float32, torch.bfloat16):
        left, right = torch.randn(PRODUCT_ROWS, 576).to(dtype), torch.randn(3072, 576).to(dtype)
        for _ in range(PRODUCT_REPEATS):
            before = time.perf_counter()
            torch.nn.functional.linear(left, right)
            best_s = min(best_s, time.perf_counter() - before)
    return 2.0 * left.shape[0] * right.numel() / best_s / 1e9


def _tables(prompts: list[list[int]], num_tokens: int) -> list[range]:
    tables, first = [], 0
    for prompt in prompts:
        num_blocks = -(-(len(prompt) + num_tokens) // BLOCK_TOKENS)
        tables.append(range(first, first + num_blocks))
        first += num_blocks
    return tables


def _prefill(engine: Engine, prompt: list[int], table: range, start: int) -> int:
    """Returns the first token of one prompt."""
    for step in engine.prefill(prompt, table, start=start, chunk_tokens=CHUNK_TOKENS):
        logits = step.logits
    assert logits is not None
    return int(torch.argmax(logits))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
