"""The bodies that clients may send, as typed structs.

Owns names, types and ranges of every parameter of the two generation endpoints. A field of type ``None`` is known to
OpenAI's API but not served: null is accepted, anything else is refused with the reason in ``UNSUPPORTED``. A field that
is not listed at all is refused as unknown. Decoding and messages: ``parse``; checks that need the model: ``plan``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from cluster.ingress.stop import MAX_STOP_CHARS, MAX_STOP_STRINGS

MAX_MESSAGES = 16_384
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 16
MAX_REPETITION_PENALTY = 10.0
MAX_STOP_TOKEN_IDS = 64
MAX_LABEL_CHARS = 512

MAX_TOOLS = 128
MAX_DESCRIPTION_CHARS = 16_384

FunctionName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
Description = Annotated[str, Meta(max_length=MAX_DESCRIPTION_CHARS)]
Label = Annotated[str, Meta(max_length=MAX_LABEL_CHARS)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Stop = StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
PositiveInt = Annotated[int, Meta(ge=1)]
TokenIds = Annotated[list[int], Meta(max_length=MAX_STOP_TOKEN_IDS)]
LogitBias = Annotated[dict[str, Annotated[float, Meta(ge=-100.0, le=100.0)]], Meta(max_length=MAX_LOGIT_BIAS_ENTRIES)]

UNSUPPORTED: dict[str, str] = {
    "best_of": "only best_of=1 is supported",
    "echo": "echo is not supported",
    "suffix": "suffix is not supported",
    "functions": "functions are not supported; use tools",
    "function_call": "functions are not supported; use tools",
    "audio": "audio is not supported",
    "modalities": "only the modality 'text' is supported",
    "prediction": "prediction is not supported",
    "reasoning_effort": "reasoning_effort is not supported",
    "verbosity": "verbosity is not supported",
    "web_search_options": "web search is not supported",
    "service_tier": "only the service tiers 'auto' and 'default' are supported",
    "include_obfuscation": "stream obfuscation is not supported",
    "image_url": "only text content is supported",
    "refusal": "refusal is not supported",
    "annotations": "annotations are not supported",
}
"""Why a known parameter is refused, by its last name."""


class TextPart(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """One part of a message."""

    text: str


Content = str | Annotated[list[TextPart], Meta(min_length=1)]


class SystemMessage(Struct, forbid_unknown_fields=True, tag_field="role", tag="system"):
    """Instructions of the application."""

    content: Content
    name: Label | None = None


class DeveloperMessage(Struct, forbid_unknown_fields=True, tag_field="role", tag="developer"):
    """The newer name of a system message."""

    content: Content
    name: Label | None = None


class UserMessage(Struct, forbid_unknown_fields=True, tag_field="role", tag="user"):
    """What the user said."""

    content: Content
    name: Label | None = None


class FunctionCall(Struct, forbid_unknown_fields=True):
    """Whom an earlier answer called, and with what."""

    name: FunctionName
    arguments: str
    """JSON, as the answer had it."""


class ToolCall(Struct, forbid_unknown_fields=True, tag_field="type", tag="function"):
    """A call in an earlier answer."""

    id: Label
    function: FunctionCall
    index: int | None = None
    idempotency_key: Label | None = None
    """As an answer of this server had it; nothing is read from it."""


class AssistantMessage(Struct, forbid_unknown_fields=True, tag_field="role", tag="assistant"):
    """An earlier answer; a message taken from an earlier response may be sent back as it came."""

    content: Content | None = None
    name: Label | None = None
    refusal: None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_TOOLS)] | None = None
    function_call: None = None
    audio: None = None
    annotations: None = None


class ToolMessage(Struct, forbid_unknown_fields=True, tag_field="role", tag="tool"):
    """The result of a tool that the client ran."""

    content: Content
    tool_call_id: Label


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class TextFormat(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Free text."""


class JsonObjectFormat(Struct, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    """Any JSON object."""


class JsonSchema(Struct, forbid_unknown_fields=True):
    """A JSON schema; it binds the answer whether ``strict`` is set or not."""

    name: FunctionName
    schema: dict[str, Any] | None = None
    description: Description | None = None
    strict: bool | None = None


class JsonSchemaFormat(Struct, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """JSON that fits a schema."""

    json_schema: JsonSchema


class FunctionDefinition(Struct, forbid_unknown_fields=True):
    """What a function is called, what it is for, and the JSON schema of its arguments."""

    name: FunctionName
    description: Description | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, forbid_unknown_fields=True, tag_field="type", tag="function"):
    """A function that the model may call."""

    function: FunctionDefinition


class NamedFunction(Struct, forbid_unknown_fields=True):
    """The name of a tool."""

    name: FunctionName


class NamedTool(Struct, forbid_unknown_fields=True, tag_field="type", tag="function"):
    """The tool that must be called."""

    function: NamedFunction


class GenerationRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Parameters common to both endpoints.

    ``top_k``, ``min_p``, ``repetition_penalty``, ``stop_token_ids`` and ``ignore_eos`` are extensions.
    """

    model: str
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    """1 when absent; 0 is greedy."""
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    """0 and -1 keep every token."""
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: Stop | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    max_tokens: PositiveInt | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=MAX_REPETITION_PENALTY)] | None = None
    logit_bias: LogitBias | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default"] | None = None


class ChatRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    modalities: Annotated[list[Literal["text"]], Meta(min_length=1, max_length=1)] | None = None
    tools: Annotated[list[Tool], Meta(min_length=1, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    server_tools: Annotated[list[FunctionName], Meta(min_length=1, max_length=MAX_TOOLS)] | None = None
    """Names of tools that this server runs itself; an extension (see docs/tools.md)."""
    functions: None = None
    function_call: None = None
    audio: None = None
    prediction: None = None
    reasoning_effort: None = None
    verbosity: None = None
    web_search_options: None = None


class CompletionRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/completions``."""

    prompt: str | list[int | str | list[int]]
    """A text, a token array, or a list of exactly one of these."""
    max_completion_tokens: PositiveInt | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: Literal[1] | None = None
    echo: bool | None = None
    suffix: None = None
