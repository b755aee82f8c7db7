"""Malformed requests (F62): each is refused in OpenAI's shape, names its field, starts nothing, and hurts nobody."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .conftest import MAX_BODY_BYTES, World
from .fakes import MODEL_ID, make_tokenizer

VOCAB_SIZE = make_tokenizer().get_vocab_size()
USER = {"role": "user", "content": "hi"}
DEEP = '{"x":' * 2000 + "1" + "}" * 2000


def TOOL(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f"} | function}


def CALLED(arguments: Any) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def SCHEMA(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


CHAT_FAMILIES: list[tuple[dict[str, Any], str | None]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [USER, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, None),
    ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages[0].colour"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].id"),
    ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, "messages[0].content"),
    ({"messages": [CALLED("{")]}, "messages[0].tool_calls[0].function.arguments"),
    ({"messages": [CALLED(5)]}, "messages[0].tool_calls[0].function.arguments"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"model": None}, "model"),
    ({"model": 7}, "model"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 10**9}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 17}, "n"),
    ({"n": 1.5}, "n"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 11}, "repetition_penalty"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"seed": 1 << 63}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": ""}, "stop"),
    ({"stop": ["x"] * 1000}, "stop"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop": "x" * 5000}, "stop"),
    ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [10**18]}, "stop_token_ids"),
    ({"stop_token_ids": ["1"]}, "stop_token_ids[0]"),
    ({"logit_bias": {str(VOCAB_SIZE): 5}}, "logit_bias"),
    ({"logit_bias": {"-1": 5}}, "logit_bias"),
    ({"logit_bias": {"²": 5}}, "logit_bias"),
    ({"logit_bias": {"٥": 5}}, "logit_bias"),
    ({"logit_bias": {"1" * 5000: 5}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias[...]"),
    ({"logit_bias": {"5": None}}, "logit_bias[...]"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"logprobs": 5}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"tools": []}, "tools"),
    ({"tools": [{"type": "retrieval"}]}, None),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "x" * 65}}]}, "tools[0].function.name"),
    ({"tools": [TOOL(), TOOL()]}, "tools"),
    ({"tools": [TOOL(parameters={"type": "array"})]}, "tools[0].function.parameters"),
    ({"tools": [TOOL(parameters={"type": "object", "properties": {"a": {"type": "objekt"}}})]}, "tools"),
    ({"tools": [TOOL(parameters={"type": "object", "properties": {"a": {"$ref": "http://h/x"}}})]}, "tools"),
    ({"tools": [TOOL()], "tool_choice": "maybe"}, "tool_choice"),
    ({"tools": [TOOL()], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tools": [TOOL()], "parallel_tool_calls": "yes"}, "parallel_tool_calls"),
    ({"tools": [TOOL()], "ignore_eos": True}, "ignore_eos"),
    ({"tools": [TOOL()], "response_format": {"type": "json_object"}}, "response_format"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"response_format": {"type": "grammar"}}, "response_format"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
    ({"response_format": SCHEMA(None)}, "response_format.json_schema.schema"),
    ({"response_format": SCHEMA([1])}, "response_format.json_schema.schema"),
    ({"response_format": SCHEMA({"type": "objekt"})}, "response_format.json_schema.schema"),
    ({"response_format": SCHEMA({"type": "string", "pattern": "("})}, "response_format.json_schema.schema"),
    ({"response_format": SCHEMA({"not": {"type": "string"}})}, "response_format.json_schema.schema"),
    ({"modalities": ["audio"]}, None),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"metadata": {"a": 1}}, "metadata[...]"),
    ({"colour": "red"}, "colour"),
    ({"beste_of": 1}, "beste_of"),
]

COMPLETION_FAMILIES: list[tuple[dict[str, Any], str | None]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [VOCAB_SIZE]}, "prompt"),
    ({"prompt": [10**18]}, "prompt"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": [[1], [2]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"best_of": 2}, "best_of"),
    ({"echo": True}, "echo"),
    ({"suffix": "x"}, "suffix"),
    ({"messages": [USER]}, "messages"),
]

BODIES: list[tuple[str, bytes]] = [
    ("empty", b""),
    ("not JSON", b"hello"),
    ("cut off", b'{"model": "tiny'),
    ("NaN", b'{"model":"m","messages":[],"temperature":NaN}'),
    ("Infinity", b'{"model":"m","temperature":Infinity}'),
    ("huge float", b'{"model":"m","temperature":1e999}'),
    ("invalid UTF-8", b'{"model":"\xff\xfe"}'),
    ("encoded surrogate", b'{"model":"\xed\xa0\x80"}'),
    ("lone surrogate", b'{"model":"\\ud800"}'),
    ("array", b"[]"),
    ("text", b'"x"'),
    ("null", b"null"),
    ("deep object", DEEP.encode()),
    ("deep array", b"[" * 2000 + b"]" * 2000),
    ("deep value", b'{"model":"m","metadata":' + DEEP.encode() + b"}"),
    ("deep message", b'{"model":"m","messages":[{"role":"user","content":' + DEEP.encode() + b"}]}"),
    ("trailing", b"{}{}"),
    ("byte order mark", b"\xef\xbb\xbf{}"),
    ("UTF-16", '{"model":"m"}'.encode("utf-16")),
]


def check_refusal(response: Any, *, statuses: tuple[int, ...] = (400,)) -> dict[str, Any]:
    assert response.status_code in statuses, (response.status_code, response.text)
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"].startswith("req-")
    error = response.json()["error"]
    assert set(response.json()) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert len(response.content) < 2000, "an error grows with the request"
    return error


async def check_alive(world: World) -> None:
    world.play("hello")
    assert (await world.chat()).json()["choices"][0]["message"]["content"] == "hello"


async def test_chat_families_are_refused_by_name(world: World) -> None:
    """Every family of wrong chat parameters: 400, the field named in param and message, nothing submitted."""
    for stream in (True, False):
        for change, param in CHAT_FAMILIES:
            error = check_refusal(await world.chat(**({"stream": stream} | change)))
            if param is not None:
                assert error["param"] == param, (change, error)
                assert error["message"].startswith(param.split("[")[0].split(".")[0]), error
    assert world.backend.specs == []
    await check_alive(world)


async def test_completion_families_are_refused_by_name(world: World) -> None:
    """The same for completions."""
    for change, param in COMPLETION_FAMILIES:
        assert check_refusal(await world.complete(**change))["param"] == param, change
    assert world.backend.specs == []
    await check_alive(world)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_malformed_bodies_are_refused(world: World, path: str) -> None:
    """Every malformed body: 400; the server goes on."""
    for name, body in BODIES:
        response = await world.http.post(path, content=body)
        assert check_refusal(response)["message"], name
    assert world.backend.specs == []
    await check_alive(world)


@pytest.mark.parametrize("num_bytes", [MAX_BODY_BYTES + 1, 10 << 20])
@pytest.mark.parametrize("chunked", [True, False])
async def test_body_above_the_limit_is_413(world: World, num_bytes: int, chunked: bool) -> None:
    """Announced or not, and the client gets to read the answer."""

    async def parts() -> Any:
        for _ in range(0, num_bytes, 65536):
            yield b"x" * 65536

    content: Any = parts() if chunked else b"x" * num_bytes
    response = await world.http.post("/v1/completions", content=content)
    assert check_refusal(response, statuses=(413,))["code"] == "body_too_large"
    await check_alive(world)


async def test_body_at_the_limit_is_read(world: World) -> None:
    """Exactly the limit is not too large (its prompt is too long for the context instead)."""
    head = f'{{"model":"{MODEL_ID}","prompt":"'
    body = head + "x" * (MAX_BODY_BYTES - len(head) - 2) + '"}'
    assert len(body) == MAX_BODY_BYTES
    error = check_refusal(await world.http.post("/v1/completions", content=body))
    assert error["code"] == "context_length_exceeded"


async def test_compressed_body_is_refused(world: World) -> None:
    """Content-encoding is refused by name, not read as noise."""
    response = await world.http.post("/v1/completions", content=b"\x1f\x8b", headers={"content-encoding": "gzip"})
    assert check_refusal(response)["param"] == "content-encoding"


@pytest.mark.parametrize("num_tokens", [256, 257, 5000])
async def test_prompt_beyond_the_context(world: World, num_tokens: int) -> None:
    """At least one token of room is needed; the code is OpenAI's."""
    error = check_refusal(await world.complete(prompt=[1] * num_tokens))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    error = check_refusal(await world.chat(messages=[{"role": "user", "content": "a b" * num_tokens}]))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


async def test_unknown_model_is_404(world: World) -> None:
    """OpenAI's code, and the name of what is served."""
    response = await world.chat(model="gpt-99")
    error = check_refusal(response, statuses=(404,))
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert MODEL_ID in error["message"]


async def test_null_is_accepted_for_every_optional_parameter(world: World) -> None:
    """F64 and others: clients that send null mean absent."""
    from cluster.ingress.api.schema import ChatRequest, CompletionRequest

    world.play("hello")
    nulls = {name: None for name in ChatRequest.__struct_fields__ if name not in ("model", "messages")}
    assert (await world.chat(**nulls)).status_code == 200
    nulls = {name: None for name in CompletionRequest.__struct_fields__ if name not in ("model", "prompt")}
    assert (await world.complete(**nulls)).status_code == 200


async def test_harmless_parameters_are_accepted(world: World) -> None:
    """What changes nothing about the answer passes."""
    world.play("hello")
    harmless = {
        "n": 1,
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "stop": [],
        "top_k": -1,
        "prompt_cache_key": "k",
        "stream": False,
        "logprobs": False,
    }
    assert (await world.chat(**harmless)).status_code == 200


async def test_error_messages_do_not_echo_large_values(world: World) -> None:
    """A long unknown name comes back cut."""
    body = json.dumps({"model": MODEL_ID, "prompt": "x", "y" * 100_000: 1})
    response = await world.http.post("/v1/completions", content=body)
    check_refusal(response)
