"""What the answer must be: our engine called directly, and the reference model library.

Owns one loaded model of each in the test's process. ``Golden`` runs one sequence without cache, batch, transfer or
relay; between it and the product's paths no difference is allowed. ``Reference`` is transformers in float32.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from cluster.ingress.api.tokenizer import TokenizerBundle
from kvstore.core.messages import SamplingParams
from workers.engine import Engine
from workers.kv_pool import KvPool
from workers.model.decoder import load_decoder
from workers.sampling import sample

BLOCK_TOKENS = 16
MAX_TOKENS = 1024
TIE_GAP = 1e-3
"""A position counts only where the reference's two best logits are at least this far apart."""


def make_prompt(number: int, num_tokens: int) -> list[int]:
    """Returns T(number, num_tokens) of the cases: token ids that share no block with any other number's."""

    def token(index: int) -> int:
        digest = hashlib.sha256(f"{number}:{index}".encode()).digest()
        return 100 + int.from_bytes(digest[:4], "big") % 48000

    return [token(index) for index in range(num_tokens)]


@dataclass(frozen=True)
class Run:
    """One generation: the text without the stop token, and why it ended."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


class Golden:
    """Our engine, one sequence at a time from an empty pool."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self.bundle = TokenizerBundle.from_folder(folder)
        self.tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        model = load_decoder(folder, dtype=dtype, max_positions=MAX_TOKENS)
        num_blocks = MAX_TOKENS // BLOCK_TOKENS
        self._engine = Engine(model, KvPool(model.config.kv_layout(BLOCK_TOKENS, dtype), num_blocks))
        self._table = tuple(range(num_blocks))
        self._runs: dict[object, Run] = {}

    def run(self, prompt: list[int], max_tokens: int, params: SamplingParams | None = None, **kwargs: bool) -> Run:
        """Returns the answer of ``max_tokens`` or up to the end-of-sequence token. Greedy unless told otherwise."""
        key = (tuple(prompt), max_tokens, repr(params), tuple(kwargs.items()))
        if key not in self._runs:
            self._runs[key] = self._run(prompt, max_tokens, params or SamplingParams(), **kwargs)
        return self._runs[key]

    def _run(self, prompt: list[int], max_tokens: int, params: SamplingParams, *, ignore_eos: bool = False) -> Run:
        stops = () if ignore_eos else self.bundle.eos_token_ids
        *_, last = self._engine.prefill(prompt, self._table)
        logits = last.logits
        assert logits is not None
        output: list[int] = []
        while True:
            position = len(prompt) + len(output)
            token_id, _ = sample(logits, params, position, output)
            output.append(token_id)
            if token_id in stops:
                return Run(tuple(output), self.text(output[:-1]), "stop")
            if len(output) == max_tokens:
                return Run(tuple(output), self.text(output), "length")
            logits = self._engine.decode_step([(token_id, position, self._table)])[0]

    def text(self, token_ids: list[int]) -> str:
        """Decodes with the tokenizer library itself, all at once."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text as ``/v1/completions`` makes them."""
        return list(self.tokenizer.encode(text, add_special_tokens=True).ids)

    def chat_prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """Returns the token ids of a chat."""
        return self.bundle.encode_now(self.bundle.render(messages))


class Reference:
    """The model in transformers, float32."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def first_difference(self, prompt: list[int], output: tuple[int, ...]) -> str | None:
        """Runs prompt and answer in one pass; returns where ours is not the reference's choice, None if nowhere."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([[*prompt, *output[:-1]]])).logits[0, len(prompt) - 1 :]
        for index, (row, ours) in enumerate(zip(logits, output, strict=True)):
            gap = float(row.max() - row[ours])
            if gap >= TIE_GAP:
                return f"index {index}: ours {ours}, reference {int(row.argmax())}, {gap:.4f} above"
        return None
