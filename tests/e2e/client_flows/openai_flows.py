"""What users of the official client do, as a program of its own: python openai_flows.py URL MODEL; prints JSON.

Imports nothing of ours, so that it runs beside any version of the library.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import openai
from pydantic import BaseModel, Field

URL, MODEL = sys.argv[1:3]
ASKED: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 24,
}


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=1, le=99)


ABOUT_A_PERSON: dict[str, Any] = {
    **ASKED,
    "messages": [{"role": "user", "content": "Give me the name and the age of a person."}],
    "max_tokens": 80,
}
PARAMETERS = Person.model_json_schema() | {"additionalProperties": False}
TOOLS: Any = [{"type": "function", "function": {"name": "save_person", "parameters": PARAMETERS}}]


def in_order(client: openai.OpenAI) -> dict[str, Any]:
    """The synchronous client."""
    found: dict[str, Any] = {"models": [model.id for model in client.models.list()]}
    found["whole"] = client.chat.completions.create(**ASKED).choices[0].message.content
    chunks = list(client.chat.completions.create(**ASKED, stream=True, stream_options={"include_usage": True}))
    found["streamed"] = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    found["usage"] = chunks[-1].usage is not None and chunks[-1].usage.completion_tokens > 0
    with client.chat.completions.stream(**ASKED) as stream:
        kinds = {event.type for event in stream}
        found["helper"] = stream.get_final_completion().choices[0].message.content
    found["helper_events"] = sorted(kinds)
    parsed = client.chat.completions.parse(**ABOUT_A_PERSON, response_format=Person).choices[0].message.parsed
    found["parsed"] = isinstance(parsed, Person)
    found["tool"] = use_tool(client)
    found["completion"] = client.completions.create(model=MODEL, prompt="One two", max_tokens=4).choices[0].text
    try:
        client.chat.completions.create(**{**ASKED, "model": "another"})
    except openai.NotFoundError as error:
        found["unknown_model"] = error.code
    try:
        client.chat.completions.create(**{**ASKED, "temperature": 9})
    except openai.BadRequestError as error:
        found["bad_value"] = error.param
    try:
        client.embeddings.create(model=MODEL, input="x")
    except openai.NotFoundError as error:
        found["embeddings"] = error.code
    return found


def use_tool(client: openai.OpenAI) -> dict[str, Any]:
    """One call, its result sent back, an answer; the same call streamed."""
    asked = {**ABOUT_A_PERSON, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    answer = client.chat.completions.create(**asked).choices[0]
    (call,) = answer.message.tool_calls or ()
    with client.chat.completions.stream(**asked) as stream:
        (again,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "saved"}
    told = [*asked["messages"], answer.message.model_dump(exclude_none=True), result]
    after = client.chat.completions.create(**{**asked, "messages": told, "tool_choice": "none", "max_tokens": 8})
    return {
        "name": call.function.name,
        "fits": Person.model_validate_json(call.function.arguments).age > 0,
        "same_when_streamed": again.function.arguments == call.function.arguments,
        "reason": answer.finish_reason,
        "after": after.choices[0].finish_reason,
    }


async def at_once(client: openai.AsyncOpenAI) -> dict[str, Any]:
    """The asynchronous client: several at once, streamed and whole, and one that is left early."""

    async def streamed() -> str:
        async with await client.chat.completions.create(**ASKED, stream=True) as chunks:
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async def whole() -> str:
        return (await client.chat.completions.create(**ASKED)).choices[0].message.content or ""

    texts = await asyncio.gather(streamed(), whole(), streamed(), whole())
    async with await client.chat.completions.create(**{**ASKED, "max_tokens": 500}, stream=True) as chunks:
        await anext(aiter(chunks))
    await client.close()
    return {"texts": texts}


if __name__ == "__main__":
    result = {"version": openai.__version__, **in_order(openai.OpenAI(base_url=URL, api_key="none", max_retries=0))}
    result |= asyncio.run(at_once(openai.AsyncOpenAI(base_url=URL, api_key="none", max_retries=0)))
    print(json.dumps(result))
