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
import jinja2.sandbox

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
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise EnvironmentProblem(f"the model's chat template does not compile: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Returns the prompt, ending where the assistant begins to speak.

        Raises: BadInput when the template cannot render these messages (for example: roles must alternate).
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, OverflowError) as error:
            raise BadInput("messages", len(messages), f"the model's chat template refuses them: {error}") from error


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Plain JSON; Jinja's own filter would escape HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
