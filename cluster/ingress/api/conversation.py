"""The messages and tools of a chat request, as templates and grammars take them.

Owns the checks of what a conversation says about tools. Never tokenises and never looks at the model.
"""

from __future__ import annotations

from typing import Any

import msgspec

from cluster.ingress.api.errors import InvalidRequest, echo
from cluster.ingress.api.grammar import Function, ToolRules, find_unusable
from cluster.ingress.api.schema import AssistantMessage, ChatRequest, Message, NamedTool, TextPart, Tool, ToolCall


def tool_rules(request: ChatRequest) -> ToolRules | None:
    """Returns which calls the answer may have; None when it may have none.

    Raises: InvalidRequest for a choice that does not go with the tools.
    """
    choice = request.tool_choice
    functions = tuple(
        Function(name=tool.function.name, description=tool.function.description, parameters=tool.function.parameters)
        for tool in request.tools or ()
    )
    if not functions:
        if choice is not None and choice != "none":
            raise InvalidRequest("tool_choice: needs tools.", param="tool_choice")
        return None
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        raise InvalidRequest("tools: two tools have the same name.", param="tools")
    if (unusable := find_unusable(functions)) is not None:
        param = f"tools[{unusable[0]}].function.parameters"
        raise InvalidRequest(f"{param}: {unusable[1]}.", param=param)
    if choice == "none":
        return None
    is_single = request.parallel_tool_calls is False
    if isinstance(choice, NamedTool):
        chosen = tuple(function for function in functions if function.name == choice.function.name)
        if not chosen:
            message = f"tool_choice: there is no tool {echo(choice.function.name)}."
            raise InvalidRequest(message, param="tool_choice")
        return ToolRules(functions=chosen, is_required=True, is_single=True)
    return ToolRules(functions=functions, is_required=choice == "required", is_single=is_single)


def plain_message(message: Message, index: int) -> dict[str, Any]:
    """Returns a message as chat templates expect it; a developer message is a system message to every template."""
    role = str(message.__struct_config__.tag)
    content = "" if message.content is None else _text(message.content)
    rendered: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": content}
    for name in ("name", "tool_call_id"):
        if value := getattr(message, name, None):
            rendered[name] = value
    if isinstance(message, AssistantMessage):
        if message.tool_calls:
            rendered["tool_calls"] = [
                _tool_call(call, f"messages[{index}].tool_calls[{number}].function.arguments")
                for number, call in enumerate(message.tool_calls)
            ]
        elif message.content is None:
            param = f"messages[{index}].content"
            raise InvalidRequest(f"{param}: this field is required without tool calls.", param=param)
    return rendered


def _tool_call(call: ToolCall, param: str) -> dict[str, Any]:
    """Templates write arguments as JSON themselves, so they get the value."""
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        raise InvalidRequest(f"{param}: not valid JSON.", param=param) from None
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def plain_tool(tool: Tool) -> dict[str, Any]:
    function = {
        "name": tool.function.name,
        "description": tool.function.description or "",
        "parameters": tool.function.parameters or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


def _text(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
