"""Builders for tests of the HTTP layer: a small byte-level tokenizer and a backend that plays a script."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from cluster.ingress.api.backend import Backend, Ended, Generation, GenerationEvent, ReadyState, Restarted, TokenBatch
from cluster.ingress.api.chat_template import ChatTemplate
from cluster.ingress.api.tokenizer import TokenizerBundle
from kvstore.core.messages import GenerationSpec, TokenLogprobs

MODEL_ID = "tiny-test-model"
CORPUS = ["hello world, the quick brown fox jumps over the lazy dog", "stop STOP END ### Grüße 你好 😀 " * 3]
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer() -> Tokenizer:
    """A byte-level BPE of about 300 entries, with two special tokens and one added token that is text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool ☃>", normalized=False)])
    return tokenizer


def make_bundle(tokenizer: Tokenizer | None = None) -> TokenizerBundle:
    tokenizer = tokenizer or make_tokenizer()
    template = ChatTemplate(TEMPLATE, {"eos_token": "<|im_end|>"})
    return TokenizerBundle(tokenizer, eos_token_ids=(tokenizer.token_to_id("<|im_end|>"),), template=template)


class Gate:
    """A step of a script that waits: ``reached`` is set when the script stands here, ``open`` lets it go on."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.open = asyncio.Event()


Step = GenerationEvent | Exception | Gate


class FakeGeneration(Generation):
    """Plays a script and writes down every call."""

    def __init__(self, request_id: str, script: Sequence[Step], cached_tokens: int) -> None:
        self._request_id = request_id
        self._script = list(script)
        self._cached_tokens = cached_tokens
        self.calls: list[Any] = []
        self.notes: list[tuple[str, dict[str, Any]]] = []
        self.is_late_restart = False
        self.over = asyncio.Event()
        """Set by completed, cancel, or an interruption that was handed out."""

    @property
    def request_id(self) -> str:
        return self._request_id

    @property
    def attempt_id(self) -> str:
        return "att-" + "1" * 32

    @property
    def cached_tokens(self) -> int:
        return self._cached_tokens

    @property
    def has_more(self) -> bool:
        return bool(self._script) and isinstance(self._script[0], TokenBatch | Ended)

    async def next(self) -> GenerationEvent:
        while True:
            assert self._script, "asked for more than the script has"
            step = self._script[0]
            if isinstance(step, Gate):
                step.reached.set()
                await step.open.wait()
                self._script.pop(0)
                continue
            self._script.pop(0)
            if isinstance(step, Exception):
                raise step
            return step

    @property
    def has_restarted(self) -> bool:
        return any(isinstance(step, Restarted) for step in self._script) and self.is_late_restart

    def restart_now(self, *script: Step) -> None:
        """Its attempt is lost at this moment: what was not taken yet is void, ``script`` is the new attempt's."""
        self._script = [Restarted(self.attempt_id), *script]
        self.is_late_restart = True

    def mark_first_delta(self) -> None:
        assert not self.has_restarted, "a delta of a lost attempt"
        self.calls.append("mark_first_delta")

    def delivered(self, num_tokens: int) -> None:
        self.calls.append(("delivered", num_tokens))

    def completed(self, *, rest: str = "") -> None:
        self.calls.append(("completed", rest) if rest else "completed")
        self.over.set()

    def note(self, event: str, **fields: Any) -> None:
        self.notes.append((event, fields))

    async def finish_stop(self) -> None:
        self.calls.append("finish_stop")

    async def cancel(self, reason: str) -> None:
        self.calls.append(("cancel", reason))
        self.over.set()


class FakeBackend(Backend):
    """Gives every request the same script; ``scripts`` by request order comes first."""

    def __init__(self, *, vocab_size: int, max_model_len: int = 256) -> None:
        self.model_id = MODEL_ID
        self.created = 1_700_000_000
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.system_fingerprint = "fp-test"
        self.state = ReadyState(True)
        self.script: list[Step] = [Ended("stop")]
        self.scripts: list[list[Step]] = []
        """One per request to come; ``script`` when used up."""
        self.submit_errors: list[Exception | None] = []
        """One per request to come."""
        self.cached_tokens = 0
        self.submit_steps: list[Step] = []
        """Gates and errors before ``submit`` returns."""
        self.submit_cancelled = asyncio.Event()
        self.specs: list[GenerationSpec] = []
        self.labels: list[str | None] = []
        self.request_ids: list[str] = []
        self.client_retries: list[int] = []
        self.generations: list[FakeGeneration] = []
        self.cache_keys: list[str | None] = []
        self.records: dict[str, dict[str, Any]] = {}
        self.num_refreshed = 0

    async def refresh_metrics(self) -> None:
        self.num_refreshed += 1

    def ready(self) -> ReadyState:
        return self.state

    async def submit(
        self,
        spec: GenerationSpec,
        *,
        request_id: str,
        stream: bool,
        label: str | None,
        tenant: str,
        client_retries: int = 0,
        cache_key: str | None = None,
        waited_s: float = 0.0,
    ) -> Generation:
        self.client_retries.append(client_retries)
        self.cache_keys.append(cache_key)
        self.specs.append(spec)
        self.labels.append(label)
        self.request_ids.append(request_id)
        try:
            for step in self.submit_steps:
                if isinstance(step, Gate):
                    step.reached.set()
                    await step.open.wait()
                elif isinstance(step, Exception):
                    raise step
        except asyncio.CancelledError:
            self.submit_cancelled.set()
            raise
        if self.submit_errors and (error := self.submit_errors.pop(0)) is not None:
            raise error
        script = self.scripts.pop(0) if self.scripts else self.script
        generation = FakeGeneration(request_id, script, self.cached_tokens)
        self.generations.append(generation)
        return generation

    async def request_record(self, request_id: str, *, tenant: str) -> dict[str, Any] | None:
        record = self.records.get(request_id)
        return None if record is None or record.get("tenant", tenant) != tenant else record

    async def cancel(self, request_id: str, *, tenant: str) -> dict[str, Any] | None:
        record = await self.request_record(request_id, tenant=tenant)
        return None if record is None else record | {"phase": "cancelled"}

    @property
    def last(self) -> FakeGeneration:
        return self.generations[-1]


def batches(
    token_ids: Sequence[int], *, size: int = 1, first_index: int = 0, logprobs: bool = False
) -> list[TokenBatch]:
    """Cuts ids into batches of ``size`` that continue each other."""
    cut = []
    for start in range(0, len(token_ids), size):
        ids = tuple(token_ids[start : start + size])
        scores = tuple(TokenLogprobs(logprob=-0.5, top=((token_id, -0.5),)) for token_id in ids) if logprobs else None
        cut.append(TokenBatch(first_index + start, ids, scores))
    return cut
