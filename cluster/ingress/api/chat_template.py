"""The model's chat template: messages to the text of a prompt.

Owns a sandboxed Jinja environment with the names that published templates use. Importing transformers for this would
cost seconds at each start of an ingress; a test holds the results equal. Never tokenises.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox

from cluster.ingress.api.tool_format import BARE, TAGGED, ToolFormat
from kvstore.errors import BadInput, EnvironmentProblem


class ChatTemplate:
    """One compiled template. ``special_tokens`` are the names it may use, for example ``bos_token``."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Raises: EnvironmentProblem when the template does not compile."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols], autoescape=False
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        self._special_tokens = dict(special_tokens)
        self.tool_format: ToolFormat | None = TAGGED
        """How this template has the model write tool calls; None: in a way that is not supported."""
        try:
            self._template = environment.from_string(source)
            self._knows_tools = "tools" in jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise EnvironmentProblem(f"the model's chat template does not compile: {error}") from error
        if self._knows_tools and TAGGED.trigger not in source:
            self.tool_format = BARE if '"parameters":' in source else None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        unix_s: float | None = None,
    ) -> str:
        """Returns the prompt, ending where the assistant begins to speak.

        A template that knows no tools gets them, and earlier calls, as text of the messages. ``unix_s`` stops the
        template's clock, so that a prompt can be made again as it was.

        Raises: BadInput when the template cannot render these messages (for example: roles must alternate).
        """
        try:
            if not self._knows_tools:
                messages, tools = tools_as_text(messages, tools), ()
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
                **({} if unix_s is None else {"strftime_now": datetime.fromtimestamp(unix_s).strftime}),
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, OverflowError) as error:
            raise BadInput("messages", len(messages), f"the model's chat template refuses them: {error}") from error


_TOOLS_TEXT = """You may call these functions, described as JSON, one to a line:

{functions}

To call one, write its name and its arguments in exactly this form:

{example}

What it returns follows as a message of the role "tool"."""


def tools_as_text(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns messages without tool calls: the functions are told by the system, calls by the assistant."""
    told: list[Mapping[str, Any]] = []
    for message in messages:
        calls = [call["function"] for call in message.get("tool_calls", ())]
        written = [TAGGED.call(call["name"], call["arguments"]) for call in calls]
        content = "\n".join(part for part in (message["content"], *written) if part)
        told.append({**{k: v for k, v in message.items() if k != "tool_calls"}, "content": content})
    if tools:
        functions = "\n".join(_to_json(tool["function"]) for tool in tools)
        example = TAGGED.call("NAME", {"ARGUMENT": "VALUE"})
        text = _TOOLS_TEXT.format(functions=functions, example=example)
        if told and told[0]["role"] == "system":
            told[0] = {**told[0], "content": f"{told[0]['content']}\n\n{text}"}
        else:
            told.insert(0, {"role": "system", "content": text})
    return told


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Plain JSON; Jinja's own filter would escape HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
