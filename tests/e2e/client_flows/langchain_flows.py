"""LangChain's ChatOpenAI, as its users write it: python langchain_flows.py URL MODEL; prints JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field, SecretStr

URL, MODEL = sys.argv[1:3]
FRANCE = "What is the capital of France?"


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=1, le=99)


@tool
def save_person(name: str, age: int) -> str:
    """Saves a person."""
    return f"saved {name}, {age}"


def main() -> dict[str, Any]:
    model = ChatOpenAI(base_url=URL, api_key=SecretStr("none"), model=MODEL, temperature=0, max_retries=0)
    short = model.bind(max_tokens=24)
    found: dict[str, Any] = {}
    answer = short.invoke(FRANCE)
    found["whole"] = answer.content
    found["usage"] = answer.usage_metadata is not None and answer.usage_metadata["output_tokens"] > 0
    found["reason"] = answer.response_metadata["finish_reason"]
    found["streamed"] = "".join(str(chunk.content) for chunk in short.stream(FRANCE))
    found["async"] = asyncio.run(short.ainvoke(FRANCE)).content
    found["batch"] = [each.content for each in short.batch([FRANCE, FRANCE])]
    chain = ChatPromptTemplate.from_messages([("system", "You are terse."), ("user", "{question}")]) | short
    found["chain"] = chain.invoke({"question": FRANCE}).content
    found["conversation"] = short.invoke([SystemMessage("You are terse."), HumanMessage(FRANCE)]).content
    person = model.bind(max_tokens=80).bound.with_structured_output(Person)  # type: ignore[attr-defined]
    found["structured"] = isinstance(person.invoke("Give me the name and the age of a person."), Person)
    asked = [HumanMessage("Save a person with a name and an age.")]
    with_tools = model.bind_tools([save_person], tool_choice="required", max_tokens=80)
    call = with_tools.invoke(asked)
    found["tool"] = call.tool_calls[0]["name"]  # type: ignore[attr-defined]
    messages = [*asked, call, *(ToolMessage("saved", tool_call_id=each["id"]) for each in call.tool_calls)]  # type: ignore[attr-defined]
    found["after_tool"] = bool(
        model.bind_tools([save_person], tool_choice="none", max_tokens=8).invoke(messages).content
    )
    return found


if __name__ == "__main__":
    print(json.dumps(main()))
