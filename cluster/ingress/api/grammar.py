"""From what a client asks for to the grammar that its answer must follow.

Owns the text form of grammars (of the llguidance library) for JSON answers and tool calls. JSON is written on one line
with one space behind commas and colons: a model that may write white space freely can write nothing else for ever.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Final

from llguidance import LLMatcher
from msgspec import Struct

from cluster.ingress.api.errors import InvalidRequest
from cluster.ingress.api.number_bounds import unkept_bound
from cluster.ingress.api.tool_format import ToolFormat
from kvstore.core.messages import MAX_GRAMMAR_CHARS

_SPACING: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NO_PARAMETERS: Final = {"type": "object", "properties": {}, "additionalProperties": False}


class Function(Struct, frozen=True, kw_only=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolRules(Struct, frozen=True, kw_only=True):
    """Which calls an answer may, or must, have."""

    functions: tuple[Function, ...]
    is_required: bool = False
    """The answer is calls and nothing else."""
    is_single: bool = False
    """At most one call."""


def any_json_object() -> str:
    """Returns the grammar of a JSON object."""
    return json_schema({"type": "object"})


def json_schema(schema: dict[str, Any], *, param: str = "response_format.json_schema.schema") -> str:
    """Returns the grammar of JSON that fits a schema. Raises: InvalidRequest naming ``param``."""
    keyword = unkept_bound(schema)
    if keyword is not None:
        raise InvalidRequest(f"{param}: the schema cannot be used: {_unkept(keyword)}.", param=param)
    return LLMatcher.grammar_from_json_schema(schema, overrides=_SPACING)  # type: ignore[arg-type]


def tool_calls(rules: ToolRules, form: ToolFormat) -> str:
    """Returns the grammar of an answer with tool calls, in the form that the model was shown.

    With free choice, text runs until the trigger of a call appears; from there on the call's form is binding.
    """
    # The trigger begins every call, so what follows it starts behind it.
    bodies = [
        f"{_text(form.begin(function.name)[len(form.trigger) :])} %json {_parameters(function)} {_text(form.end)}"
        for function in rules.functions
    ]
    names = [f"body_{number}" for number in range(len(bodies))]
    lines = ["%llguidance {}"]
    if rules.is_required:
        call = f"{_text(form.trigger)} body"
        lines.append(f"start: {call}" if rules.is_single else f'start: {call} ("\\n" {call})*')
    elif rules.is_single:
        lines.append("start: TEXT | head body")
    else:
        lines.append("start: (head body)* TEXT")
    if not rules.is_required:
        lines += [f"head[lazy]: TEXT {_text(form.trigger)}", r"TEXT: /(.|\n)*/"]
    lines.append("body: " + " | ".join(names))
    lines += [f"{name}: {body}" for name, body in zip(names, bodies, strict=True)]
    return "\n".join(lines) + "\n"


async def checked(grammar: str, *, param: str) -> str:
    """Returns the grammar if it compiles; tried on a thread, because that can take long.

    Raises: InvalidRequest naming ``param``.
    """
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(f"{param}: the schema has more than {MAX_GRAMMAR_CHARS} characters.", param=param)
    problem = await asyncio.to_thread(LLMatcher.validate_grammar, grammar)
    if problem and not problem.startswith("WARNING"):
        raise InvalidRequest(f"{param}: the schema cannot be used: {_first_line(problem)}.", param=param)
    return grammar


def _parameters(function: Function) -> str:
    schema = _NO_PARAMETERS if function.parameters is None else function.parameters
    return json.dumps(schema | {"x-guidance": _SPACING})


def _text(literal: str) -> str:
    return json.dumps(literal)


def _first_line(problem: str) -> str:
    return " ".join(problem.split())[:200].rstrip(".")


def find_unusable(functions: Sequence[Function]) -> tuple[int, str] | None:
    """Returns (index, why) of the first function whose parameters cannot be arguments, or None."""
    for index, function in enumerate(functions):
        if function.parameters is not None and function.parameters.get("type", "object") != "object":
            return index, "the parameters of a function are an object"
        keyword = unkept_bound(function.parameters)
        if keyword is not None:
            return index, _unkept(keyword)
    return None


def _unkept(keyword: str) -> str:
    return f"{keyword} of a whole number is not supported with another bound less than one from it"
