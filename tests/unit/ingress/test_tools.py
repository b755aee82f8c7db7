"""Tools and response formats through the endpoint: what workers get, what clients get."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import AsyncOpenAI

from cluster.ingress.api.backend import Ended
from cluster.ingress.api.chat_template import ChatTemplate
from cluster.ingress.api.parse import parse
from cluster.ingress.api.plan import AnswerPlan, ModelFacts, Planner
from cluster.ingress.api.schema import ChatRequest
from cluster.ingress.api.tokenizer import TokenizerBundle
from cluster.ingress.api.tool_format import BARE, TAGGED

from .conftest import World
from .fakes import MODEL_ID, batches, make_tokenizer
from .test_plan import BUNDLE, EOS
from .test_stream import events

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Says it.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time"}},
]
USER = {"role": "user", "content": "hi"}
CALL = TAGGED.call("weather", {"city": "Bonn"})


async def chat(*messages: Any, **body: Any) -> AnswerPlan:
    """Plans a chat request in a context that has room for tools."""
    facts = ModelFacts(model_id="m", max_model_len=4096, vocab_size=len(BUNDLE.table))
    request = {"model": "m", "messages": list(messages)} | body
    return await Planner(facts, BUNDLE, random_seed=lambda: 1).chat(parse(json.dumps(request).encode(), ChatRequest))


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


async def test_what_binds_an_answer() -> None:
    """Each way to ask has its grammar, ended by the model's end token; without one there is none."""
    assert (await chat(USER)).spec.grammar is None
    assert (await chat(USER, response_format={"type": "text"})).spec.grammar is None
    assert (await chat(USER, tools=TOOLS, tool_choice="none")).spec.grammar is None
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
    for body in (
        {"response_format": {"type": "json_object"}},
        {"response_format": wanted},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
        {"tools": TOOLS, "tool_choice": named("time")},
        {"tools": TOOLS, "tool_choice": "none", "response_format": {"type": "json_object"}},
    ):
        got = await chat(USER, **body, max_tokens=5)
        assert got.spec.grammar is not None and got.spec.grammar.eos_token_id == EOS
        assert (got.tools is not None) == ("tools" in body and body.get("tool_choice") != "none")
    assert got.spec.grammar != (await chat(USER, response_format=wanted)).spec.grammar


async def test_a_template_without_tools_gets_them_as_text() -> None:
    """The system tells them; earlier calls are shown in the form that is asked for."""
    messages = [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": None, "tool_calls": [named("weather") | {"id": "c"}]},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
    ]
    messages[2]["tool_calls"][0]["function"]["arguments"] = '{"city": "Bonn"}'  # type: ignore[index]
    bundle = BUNDLE
    text = bundle.table.decode((await chat(*messages, tools=TOOLS)).spec.prompt_token_ids)
    assert "Be brief.\n\nYou may call" in text
    assert '"name": "weather"' in text and '"description": "Says it."' in text
    assert f"assistant\n{CALL}" in text
    assert text.count("Be brief.") == 1


def test_formats_of_templates() -> None:
    """Known by their marks; a template that writes calls in another way has no format, and tools are refused."""
    assert ChatTemplate("{{ messages }}", {}).tool_format is TAGGED
    assert ChatTemplate("{% if tools %}<tool_call>{% endif %}", {}).tool_format is TAGGED
    assert ChatTemplate('{% if tools %}{"name": x, "parameters": y}{% endif %}', {}).tool_format is BARE
    mistral = ChatTemplate("{% if tools %}[TOOL_CALLS]{% endif %}", {})
    assert mistral.tool_format is None
    assert TokenizerBundle(make_tokenizer(), template=mistral).tool_format is None
    knowing = ChatTemplate("{{ tools | tojson }}", {})
    assert json.loads(knowing.render([USER], TOOLS)) == TOOLS
    assert json.loads(knowing.render([USER])) is None


async def test_marks_that_are_no_text_mean_no_tools() -> None:
    """When the trigger is a control token, calls could not be found in the text."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens(["<tool_call>"])
    assert TokenizerBundle(tokenizer, template=ChatTemplate("x", {})).tool_format is None


def play(world: World, text: str, finish: str = "stop") -> list[int]:
    token_ids = world.encode(text)
    world.backend.script = [*batches(token_ids), Ended(finish)]
    return token_ids


@pytest.fixture(autouse=True)
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts with tools are longer than the 256 tokens of the other tests."""
    from . import fakes

    make = fakes.FakeBackend.__init__

    def make_roomy(self: Any, *, vocab_size: int) -> None:
        make(self, vocab_size=vocab_size, max_model_len=4096)

    monkeypatch.setattr(fakes.FakeBackend, "__init__", make_roomy)


async def test_a_whole_answer_with_calls(world: World) -> None:
    """Content null, calls with ids, finish reason tool_calls."""
    token_ids = play(world, CALL + "\n" + TAGGED.call("time", {}))
    body = (await world.chat(tools=TOOLS)).json()
    message = body["choices"][0]["message"]
    assert message["content"] is None
    assert [(c["type"], c["function"]) for c in message["tool_calls"]] == [
        ("function", {"name": "weather", "arguments": '{"city": "Bonn"}'}),
        ("function", {"name": "time", "arguments": "{}"}),
    ]
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2 and all(call_id.startswith("call_") for call_id in ids)
    request_id = world.backend.request_ids[-1]
    keys = [call["idempotency_key"] for call in message["tool_calls"]]
    assert keys == [f"default:{request_id}:{call_id}" for call_id in ids], "one for each action of the client's"
    play(world, "fine")
    told = [{"role": "tool", "tool_call_id": call_id, "content": "ok"} for call_id in ids]
    again = await world.chat(messages=[USER, message, *told], tools=TOOLS)
    assert again.status_code == 200, "a message may come back as it went out"
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    assert body["usage"]["completion_tokens"] == len(token_ids)


async def test_a_streamed_answer_with_calls_as_the_client_library_reads_it(world: World) -> None:
    """The official client joins the deltas to the calls; each event has one delta of one call."""
    play(world, "I look. " + CALL)
    response = await world.chat(tools=TOOLS, stream=True)
    deltas = [c["delta"] for e in events(response.content)[:-1] for c in e["choices"]]
    calls = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert all(len(one) == 1 and one[0]["index"] == 0 for one in calls)
    assert {"id", "type", "index", "function", "idempotency_key"} == set(calls[0][0])
    request_id, call_id = response.headers["x-request-id"], calls[0][0]["id"]
    assert calls[0][0]["idempotency_key"] == f"default:{request_id}:{call_id}"
    assert all(set(one[0]) == {"index", "function"} for one in calls[1:])
    assert "".join(delta.get("content", "") for delta in deltas) == "I look."
    play(world, CALL)
    client = AsyncOpenAI(base_url=f"{world.url}/v1", api_key="none", max_retries=0)
    async with client.chat.completions.stream(model=MODEL_ID, messages=[USER], tools=TOOLS) as stream:  # type: ignore[list-item]
        final = await stream.get_final_completion()
    choice = final.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    assert choice.message.tool_calls[0].function.name == "weather"
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Bonn"}
    await client.close()


async def test_text_with_tools_is_text(world: World) -> None:
    """No call: content as it is, finish reason stop; nothing is left held back."""
    play(world, "just <b>text</b>  ")
    for stream in (False, True):
        play(world, "just <b>text</b>  ")
        response = await world.chat(tools=TOOLS, stream=stream)
        if stream:
            chunks = events(response.content)[:-1]
            text = "".join(c["delta"].get("content", "") for e in chunks for c in e["choices"])
            finish = chunks[-1]["choices"][0]["finish_reason"]
        else:
            text = response.json()["choices"][0]["message"]["content"]
            finish = response.json()["choices"][0]["finish_reason"]
        assert (text, finish) == ("just <b>text</b>  ", "stop")
    assert world.backend.last.calls[-2] == ("delivered", len(world.encode("just <b>text</b>  ")))


async def test_a_call_that_was_cut_off_says_length(world: World) -> None:
    """The arguments so far, and the reason."""
    play(world, CALL[:-30], finish="length")
    choice = (await world.chat(tools=TOOLS, max_tokens=9)).json()["choices"][0]
    assert choice["finish_reason"] == "length"


async def test_the_same_text_without_tools_is_content(world: World) -> None:
    """Only who asked for tools gets calls."""
    play(world, CALL)
    message = (await world.chat()).json()["choices"][0]["message"]
    assert message["content"] == CALL
    assert "tool_calls" not in message


async def test_a_server_without_tools_of_its_own_says_so(world: World) -> None:
    """400 that names the field; nothing is generated."""
    response = await world.chat(server_tools=["book"])
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "server_tools", "unsupported_parameter")
    assert not world.backend.specs
