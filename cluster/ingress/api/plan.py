"""From a typed request to a plan: the spec that workers get, and how the answer is to be shown.

Owns every check that needs the model: vocabulary, context length, chat template. One plan per request, immutable.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from cluster.ingress.api.conversation import plain_message, plain_tool, tool_rules
from cluster.ingress.api.errors import InvalidRequest, NotFound, echo
from cluster.ingress.api.grammar import ToolRules, any_json_object, checked, json_schema, tool_calls
from cluster.ingress.api.schema import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
)
from cluster.ingress.api.tokenizer import TokenizerBundle
from cluster.ingress.api.tool_format import TAGGED, ToolFormat
from kvstore.core.messages import GenerationSpec, Grammar, SamplingParams

DEFAULT_TEMPERATURE = 1.0
LOWEST_TEMPERATURE = 1e-5
"""Below this a temperature is greedy: dividing logits by it would overflow."""

SEED_SPACE = 1 << 63


class ModelFacts(Struct, frozen=True, kw_only=True):
    """What the checks need to know of the served model."""

    model_id: str
    max_model_len: int
    vocab_size: int


class AnswerPlan(Struct, frozen=True, kw_only=True):
    """Everything about one request that is known before it starts."""

    kind: Literal["chat", "completion"]
    spec: GenerationSpec
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    num_logprobs: int | None
    """As in ``SamplingParams``."""
    num_choices: int = 1
    tools: ToolRules | None = None
    """None: the answer is text, whatever it looks like."""
    tool_format: ToolFormat = TAGGED
    cache_key: str | None = None
    """The client says that requests with this key begin alike: a hint for routing."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.spec.prompt_token_ids)

    def spec_of(self, index: int) -> GenerationSpec:
        """Returns the spec of one choice: the first has the request's seed, each other one a seed made from it."""
        if index == 0:
            return self.spec
        digest = hashlib.blake2b(f"{self.spec.sampling.seed}:{index}".encode(), digest_size=8).digest()
        sampling = msgspec.structs.replace(self.spec.sampling, seed=int.from_bytes(digest, "big") % SEED_SPACE)
        return msgspec.structs.replace(self.spec, sampling=sampling)


class Planner:
    """Makes plans for one model. ``random_seed`` gives a number in ``[0, 2**63)`` for requests without a seed."""

    def __init__(self, facts: ModelFacts, tokenizer: TokenizerBundle, *, random_seed: Callable[[], int]) -> None:
        self._facts = facts
        self._tokenizer = tokenizer
        self._random_seed = random_seed

    async def chat(self, request: ChatRequest, *, unix_s: float | None = None) -> AnswerPlan:
        """``unix_s`` is the time that the template sees, None: now. Raises: InvalidRequest, NotFound."""
        self._check_model(request)
        if request.top_logprobs is not None and not request.logprobs:
            raise InvalidRequest("top_logprobs: needs logprobs to be true.", param="top_logprobs")
        rules = tool_rules(request)
        form = self._tokenizer.tool_format
        if request.tools and form is None:
            message = "tools: the way in which this model's template writes tool calls is not supported."
            raise InvalidRequest(message, param="tools", code="unsupported_parameter")
        messages = [plain_message(message, index) for index, message in enumerate(request.messages)]
        # With tool_choice "none" the model still sees the tools: earlier calls make sense to it.
        tools = [plain_tool(tool) for tool in request.tools or ()]
        text = self._tokenizer.render(messages, tools, unix_s=unix_s)
        token_ids = await self._encode(text, param="messages", add_special_tokens=False)
        num_logprobs = (request.top_logprobs or 0) if request.logprobs else None
        grammar = await self._grammar(request, rules, form)
        plan = self._plan("chat", request, token_ids, num_logprobs, grammar)
        if rules is None or form is None:
            return plan
        return msgspec.structs.replace(plan, tools=rules, tool_format=form)

    async def _grammar(self, request: ChatRequest, rules: ToolRules | None, form: ToolFormat | None) -> Grammar | None:
        """Returns what binds the answer; tools, when they may be called, come before the response format."""
        match request.response_format:
            case JsonObjectFormat():
                text, param = any_json_object(), "response_format"
            case JsonSchemaFormat(json_schema=wanted):
                param = "response_format.json_schema.schema"
                if wanted.schema is None:
                    raise InvalidRequest(f"{param}: this field is required.", param=param)
                text = json_schema(wanted.schema)
            case _:
                text, param = "", ""
        if rules is not None and form is not None:
            if text:
                message = "response_format: cannot be combined with tools that may be called."
                raise InvalidRequest(message, param="response_format")
            text, param = tool_calls(rules, form), "tools"
        if not text:
            return None
        if request.ignore_eos:
            raise InvalidRequest(f"ignore_eos: cannot be combined with {param.split('.')[0]}.", param="ignore_eos")
        if not self._tokenizer.eos_token_ids:
            message = f"{param}: this model has no end token, so no grammar can end."
            raise InvalidRequest(message, param=param.split(".")[0], code="unsupported_parameter")
        return Grammar(text=await checked(text, param=param), eos_token_id=self._tokenizer.eos_token_ids[0])

    async def completion(self, request: CompletionRequest) -> AnswerPlan:
        """Raises: InvalidRequest, NotFound."""
        self._check_model(request)
        if request.echo:
            raise InvalidRequest("echo: echo is not supported.", param="echo", code="unsupported_parameter")
        token_ids = await self._completion_prompt(request.prompt)
        return self._plan("completion", request, token_ids, request.logprobs)

    async def _completion_prompt(self, prompt: str | list[int | str | list[int]]) -> Sequence[int]:
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]  # type: ignore[assignment]
        if isinstance(prompt, str):
            return await self._encode(prompt, param="prompt", add_special_tokens=True)
        if any(not isinstance(token_id, int) for token_id in prompt):
            raise InvalidRequest("prompt: one text or one token array per request is supported.", param="prompt")
        return prompt  # type: ignore[return-value]

    async def _encode(self, text: str, *, param: str, add_special_tokens: bool) -> Sequence[int]:
        # Text that no tokenisation could make fit is refused before the work of tokenising it.
        if len(text) > self._facts.max_model_len * self._tokenizer.table.longest_token_bytes:
            raise self._too_long(f"more than {self._facts.max_model_len}", param)
        return await self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _plan(
        self,
        kind: Literal["chat", "completion"],
        request: ChatRequest | CompletionRequest,
        token_ids: Sequence[int],
        num_logprobs: int | None,
        grammar: Grammar | None = None,
    ) -> AnswerPlan:
        self._check_prompt(token_ids, "messages" if kind == "chat" else "prompt")
        eos = () if request.ignore_eos else self._tokenizer.eos_token_ids
        options = request.stream_options
        if options is not None and not request.stream:
            raise InvalidRequest("stream_options: needs stream to be true.", param="stream_options")
        if options is not None and options.include_obfuscation:
            name = "stream_options.include_obfuscation"
            raise InvalidRequest(f"{name}: not supported.", param=name, code="unsupported_parameter")
        spec = GenerationSpec(
            prompt_token_ids=tuple(token_ids),
            max_tokens=self._max_tokens(request, len(token_ids)),
            stop_token_ids=tuple(dict.fromkeys((*eos, *self._stop_token_ids(request)))),
            sampling=self._sampling(request, num_logprobs),
            grammar=grammar,
        )
        stop = request.stop or ()
        return AnswerPlan(
            kind=kind,
            spec=spec,
            stops=(stop,) if isinstance(stop, str) else tuple(stop),
            stream=bool(request.stream),
            include_usage=options is not None and bool(options.include_usage),
            num_logprobs=num_logprobs,
            num_choices=request.n or 1,
            cache_key=request.prompt_cache_key,
        )

    def _check_model(self, request: GenerationRequest) -> None:
        if request.model != self._facts.model_id:
            message = f"The model {echo(request.model)} does not exist; this server has '{self._facts.model_id}'."
            raise NotFound(message, param="model", code="model_not_found")

    def _check_prompt(self, token_ids: Sequence[int], param: str) -> None:
        if not token_ids:
            raise InvalidRequest(f"{param}: the prompt is empty.", param=param)
        if len(token_ids) >= self._facts.max_model_len:
            raise self._too_long(str(len(token_ids)), param)
        for token_id in token_ids:
            if not 0 <= token_id < self._facts.vocab_size:
                raise self._no_such_token(token_id, param)

    def _too_long(self, num_tokens: str, param: str) -> InvalidRequest:
        limit = self._facts.max_model_len
        message = f"This model's context is {limit} tokens; the prompt has {num_tokens} and leaves no room to answer."
        return InvalidRequest(message, param=param, code="context_length_exceeded")

    def _no_such_token(self, token_id: object, param: str) -> InvalidRequest:
        last = self._facts.vocab_size - 1
        return InvalidRequest(f"{param}: token ids are 0 to {last} (got {echo(token_id)}).", param=param)

    def _max_tokens(self, request: ChatRequest | CompletionRequest, num_prompt_tokens: int) -> int:
        """Returns how many tokens may be generated: what was asked, at most what the context has room for."""
        param, asked = "max_tokens", request.max_tokens
        if request.max_completion_tokens is not None:
            if asked is not None and asked != request.max_completion_tokens:
                message = "max_tokens: differs from max_completion_tokens; send one of them."
                raise InvalidRequest(message, param="max_tokens")
            param, asked = "max_completion_tokens", request.max_completion_tokens
        limit = self._facts.max_model_len
        if asked is not None and asked > limit:
            message = f"{param}: this model's context is {limit} tokens (got {echo(asked)})."
            raise InvalidRequest(message, param=param, code="context_length_exceeded")
        room = limit - num_prompt_tokens
        return room if asked is None else min(asked, room)

    def _stop_token_ids(self, request: GenerationRequest) -> Sequence[int]:
        for token_id in request.stop_token_ids or ():
            if not 0 <= token_id < self._facts.vocab_size:
                raise self._no_such_token(token_id, "stop_token_ids")
        return request.stop_token_ids or ()

    def _sampling(self, request: GenerationRequest, num_logprobs: int | None) -> SamplingParams:
        temperature = DEFAULT_TEMPERATURE if request.temperature is None else request.temperature
        return SamplingParams(
            temperature=0.0 if temperature < LOWEST_TEMPERATURE else temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=min(max(0, request.top_k or 0), self._facts.vocab_size),
            min_p=request.min_p or 0.0,
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
            logit_bias=self._logit_bias(request),
            seed=(self._random_seed() if request.seed is None else request.seed) % SEED_SPACE,
            num_logprobs=num_logprobs,
        )

    def _logit_bias(self, request: GenerationRequest) -> dict[int, float]:
        bias = {}
        for name, value in (request.logit_bias or {}).items():
            # isdecimal() alone would let digits of other scripts through.
            if not (name.isascii() and name.isdecimal() and len(name) <= 10 and int(name) < self._facts.vocab_size):
                raise self._no_such_token(name, "logit_bias")
            bias[int(name)] = value
        return bias
