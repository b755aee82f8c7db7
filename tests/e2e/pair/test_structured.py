"""Choices, JSON and tool calls of the real model over the whole path, as the official client sees them."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from ..asking import ask
from ..cluster import MODEL, Cluster

QUESTION = [{"role": "user", "content": "Give me the name and the age of a person."}]
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "save_person", "description": "Saves a person.", "parameters": PERSON}}
]


def test_an_answer_fits_its_schema(client: openai.OpenAI, pair: Cluster) -> None:
    """Greedy, cold and from the cache, streamed and whole: the same JSON, which fits."""
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    whole = ask(client, messages=QUESTION, response_format=wanted, max_tokens=60)
    value = json.loads(whole.text)
    assert set(value) == {"name", "age"} and 1 <= value["age"] <= 99 and len(value["name"]) <= 20
    assert whole.finish_reason == "stop"
    assert ask(client, messages=QUESTION, response_format=wanted, max_tokens=60, stream=True).content == whole.content
    # A model of this size may write a long object: then it is cut off, but it is the start of one.
    text = ask(client, messages=QUESTION, response_format={"type": "json_object"}, max_tokens=60).text
    assert text.startswith("{")
    pair.wait_idle()


def test_a_tool_must_be_called(client: openai.OpenAI, pair: Cluster) -> None:
    """Required: one call with arguments that fit, streamed as well; its result can be sent back."""
    asked: dict[str, Any] = {
        "model": MODEL, "messages": QUESTION, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False,
        "temperature": 0.0, "max_tokens": 80,
    }  # fmt: skip
    answer = client.chat.completions.create(**asked).choices[0]
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
    (call,) = answer.message.tool_calls or ()
    assert call.function.name == "save_person"
    assert set(json.loads(call.function.arguments)) == {"name", "age"}
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert [c.function for c in streamed.message.tool_calls or ()]
    assert streamed.message.tool_calls[0].function.arguments == call.function.arguments  # type: ignore[index]
    told = [
        *QUESTION,
        answer.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "saved"},
    ]
    after = ask(client, messages=told, tools=TOOLS, tool_choice="none", max_tokens=8)
    assert after.completion_tokens >= 1
    pair.wait_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices_by_seed(client: openai.OpenAI, pair: Cluster, stream: bool) -> None:
    """n=3: the first is what n=1 gives, all come again with the same seed, and they differ from each other."""
    body: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 1.0, "seed": 11, "max_tokens": 12}
    one = client.chat.completions.create(**body).choices[0].message.content

    def texts() -> list[str]:
        if not stream:
            return [str(c.message.content) for c in client.chat.completions.create(**body, n=3).choices]
        found = ["", "", ""]
        for chunk in client.chat.completions.create(**body, n=3, stream=True):
            for choice in chunk.choices:
                found[choice.index] += choice.delta.content or ""
        return found

    first = texts()
    assert first[0] == one
    assert len(set(first)) == 3
    assert texts() == first
    pair.wait_idle()
