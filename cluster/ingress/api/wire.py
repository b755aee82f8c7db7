"""The JSON of answers, field by field, as OpenAI's clients read them.

Owns structs and their encoding, nothing else. ``UNSET`` leaves a key out; None writes null. ``finish_reason`` is a key
of every choice, ``role`` only of the first delta.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

FinishReason = Literal["stop", "length", "tool_calls"]


class FunctionDelta(Struct, frozen=True, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(Struct, frozen=True, kw_only=True):
    """A piece of a tool call: id, type and name come with the first one of an index and never again."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta
    idempotency_key: str | UnsetType = UNSET
    """For the action that the client takes; with the first piece only."""

    @classmethod
    def first(cls, index: int, call_id: str, name: str, key: str | UnsetType = UNSET) -> ToolCallDelta:
        function = FunctionDelta(name=name, arguments="")
        return cls(index=index, id=call_id, type="function", function=function, idempotency_key=key)

    @classmethod
    def more(cls, index: int, arguments: str) -> ToolCallDelta:
        return cls(index=index, function=FunctionDelta(arguments=arguments))


class FunctionCall(Struct, frozen=True):
    name: str
    arguments: str


class ToolCall(Struct, frozen=True, kw_only=True):
    """A whole tool call."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    idempotency_key: str | UnsetType = UNSET


class Piece(Struct, frozen=True):
    """New output of one choice that may be shown: text, then pieces of tool calls."""

    text: str = ""
    calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.calls)


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int


class Usage(Struct, frozen=True):
    """Token counts; ``completion_tokens`` includes the stop token."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class Delta(Struct, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatMessage(Struct, frozen=True):
    role: str
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class CompletionChoice(Struct, frozen=True):
    """A choice of ``text_completion``, streamed or not."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None


class AnswerBody(Struct, frozen=True, kw_only=True):
    """A whole answer or one chunk of it; ``object`` says which."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[Any]
    usage: Usage | UnsetType | None = UNSET


class Model(Struct, frozen=True, kw_only=True):
    """One entry of ``/v1/models``."""

    id: str
    created: int
    object: str = "model"
    owned_by: str = "kopir"
    max_model_len: int


class ModelList(Struct, frozen=True, kw_only=True):
    data: list[Model]
    object: str = "list"


class InterruptionError(Struct, frozen=True, kw_only=True):
    """The one event that ends a broken stream (contract section 3)."""

    message: str
    type: str = "upstream_error"
    param: None = None
    code: str = "upstream_decode_interrupted"
    reason: str
    request_id: str
    attempt_id: str
    partial_output: bool = True
    delivered_output_tokens: int
    retryable: bool = False


class StartedError(Struct, frozen=True, kw_only=True):
    """The one event of a stream whose headers were out and that failed before its first delta."""

    message: str
    type: str
    param: str | None
    code: str | None
    request_id: str
    partial_output: bool = False
    delivered_output_tokens: int = 0


_encoder = msgspec.json.Encoder()


def encode_json(value: Any) -> bytes:
    """Returns JSON in which U+2028 and U+2029, line ends to some readers of event streams, are escaped."""
    data = _encoder.encode(value)
    if b"\xe2\x80" in data:
        data = data.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    return data


def event(value: Any) -> bytes:
    """Returns one whole server-sent event."""
    return b"data: %b\n\n" % encode_json(value)


def error_event(error: InterruptionError | StartedError) -> bytes:
    """Returns the event that ends a broken stream; nothing follows it."""
    return event({"error": error})


DONE_EVENT = b"data: [DONE]\n\n"
