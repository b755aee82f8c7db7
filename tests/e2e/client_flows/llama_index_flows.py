"""LlamaIndex's OpenAI class for other model names: python llama_index_flows.py URL MODEL; prints JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

URL, MODEL = sys.argv[1:3]
FRANCE = [ChatMessage(role="user", content="What is the capital of France?")]


def save_person(name: str, age: int) -> str:
    """Saves a person."""
    return f"saved {name}, {age}"


def main() -> dict[str, Any]:
    model = OpenAILike(
        model=MODEL,
        api_base=URL,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=1024,
        max_tokens=24,
        temperature=0.0,
        max_retries=0,
    )
    found: dict[str, Any] = {"whole": model.chat(FRANCE).message.content}
    found["streamed"] = "".join(part.delta or "" for part in model.stream_chat(FRANCE))
    found["async"] = asyncio.run(model.achat(FRANCE)).message.content
    found["complete"] = model.complete(str(FRANCE[0].content)).text
    found["complete_streamed"] = "".join(part.delta or "" for part in model.stream_complete(str(FRANCE[0].content)))
    asked = model.chat_with_tools(
        [FunctionTool.from_defaults(save_person)],
        user_msg="Save a person with a name and an age.",
        tool_required=True,
        max_tokens=80,
    )
    calls = model.get_tool_calls_from_response(asked, error_on_no_tool_call=True)
    found["tool"] = calls[0].tool_name
    return found


if __name__ == "__main__":
    print(json.dumps(main()))
