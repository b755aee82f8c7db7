"""How a model writes a tool call, and how it is read back out of its text.

Owns the forms of published templates and a parser for text that comes in pieces. What makes up a call is fixed by the
grammar that the answer follows, so the parser only finds its way: text, the head of a call, its arguments, its end.
It never checks arguments against a schema.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Final

from msgspec import UNSET, Struct, UnsetType

from cluster.ingress.api.wire import Piece, ToolCallDelta


class ToolFormat(Struct, frozen=True, kw_only=True):
    """``trigger`` begins every call; ``begin(name)`` stands before the arguments, ``end`` after them."""

    trigger: str
    before_name: str
    before_arguments: str
    end: str

    def begin(self, name: str) -> str:
        """Returns what stands before the arguments of a call to ``name``."""
        return f"{self.before_name}{json.dumps(name)}{self.before_arguments}"

    def call(self, name: str, arguments: Any) -> str:
        """Returns a whole call as the model would write it."""
        return f"{self.begin(name)}{json.dumps(arguments, ensure_ascii=False)}{self.end}"


TAGGED: Final = ToolFormat(
    trigger="<tool_call>",
    before_name='<tool_call>\n{"name": ',
    before_arguments=', "arguments": ',
    end="}\n</tool_call>",
)
"""Of the Hermes and Qwen templates; also shown to models whose template knows no tools."""

BARE: Final = ToolFormat(trigger='{"name": ', before_name='{"name": ', before_arguments=', "parameters": ', end="}")
"""Of the Llama 3 templates."""


class _At(Enum):
    TEXT = "text"
    HEAD = "head"
    ARGUMENTS = "arguments"
    END = "end"


class ToolCallParser:
    """Takes the text of one answer, gives text and calls. ``make_id(n)`` names a call, ``make_key(id)`` its action.

    White space around calls is layout and not shown. Text that may become the trigger is held back.
    """

    def __init__(
        self,
        form: ToolFormat,
        names: Sequence[str],
        *,
        make_id: Callable[[int], str],
        make_key: Callable[[str], str | UnsetType] = lambda call_id: UNSET,
    ) -> None:
        self._form = form
        self._make_key = make_key
        self._heads = {form.begin(name): name for name in names}
        self._make_id = make_id
        self._at = _At.TEXT
        self._held = ""
        """Not yet decided: a start of the trigger, of a head or of the end; or white space behind text."""
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self.num_calls = 0
        """Calls whose name is out."""
        self.num_complete = 0

    @property
    def holds_text(self) -> bool:
        """Whether some of the text taken in is not out yet."""
        return bool(self._held)

    def push(self, text: str) -> Piece:
        """Takes more text in; returns what may be shown of it."""
        self._held += text
        shown: list[str] = []
        calls: list[ToolCallDelta] = []
        while self._step(shown, calls):
            pass
        return Piece("".join(shown), tuple(calls))

    def finish(self) -> Piece:
        """The answer is over: text that was held back is text. A call that was cut off before its name is dropped."""
        held, self._held = self._held, ""
        if self._at is not _At.TEXT or (self.num_calls and not held.strip()):
            return Piece()
        return Piece(held)

    def _step(self, shown: list[str], calls: list[ToolCallDelta]) -> bool:
        """Takes what can be decided from the held text. Returns False when more is needed."""
        match self._at:
            case _At.TEXT:
                return self._text(shown)
            case _At.HEAD:
                return self._head(calls)
            case _At.ARGUMENTS:
                return self._arguments(calls)
            case _At.END:
                return self._end()

    def _text(self, shown: list[str]) -> bool:
        place = self._held.find(self._form.trigger)
        if place >= 0:
            before, self._held = self._held[:place].rstrip(), self._held[place:]
            if before:
                shown.append(before)
            self._at = _At.HEAD
            return True
        num_kept = _overlap(self._held, self._form.trigger)
        text = self._held[: len(self._held) - num_kept]
        # White space may turn out to be the layout of a call.
        text = text.rstrip()
        if not text or (self.num_calls and not text.strip()):
            return False
        shown.append(text)
        self._held = self._held[len(text) :]
        return False

    def _head(self, calls: list[ToolCallDelta]) -> bool:
        for head, name in self._heads.items():
            if self._held.startswith(head):
                self._held = self._held[len(head) :]
                call_id = self._make_id(self.num_calls)
                calls.append(ToolCallDelta.first(self.num_calls, call_id, name, self._make_key(call_id)))
                self.num_calls += 1
                self._at, self._depth, self._in_string, self._is_escaped = _At.ARGUMENTS, 0, False, False
                return True
        return False

    def _arguments(self, calls: list[ToolCallDelta]) -> bool:
        if not self._held:
            return False
        length = self._scan(self._held)
        arguments, self._held = self._held[:length], self._held[length:]
        calls.append(ToolCallDelta.more(self.num_calls - 1, arguments))
        return self._at is _At.END

    def _scan(self, text: str) -> int:
        """Returns how much of ``text`` belongs to the arguments; at their end the state goes on."""
        for position, char in enumerate(text):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._at = _At.END
                    return position + 1
        return len(text)

    def _end(self) -> bool:
        if not self._held.startswith(self._form.end):
            return False
        self._held = self._held[len(self._form.end) :]
        self.num_complete += 1
        self._at = _At.TEXT
        return True


def _overlap(text: str, trigger: str) -> int:
    """Returns the length of the longest end of ``text`` that begins ``trigger``."""
    for length in range(min(len(text), len(trigger) - 1), 0, -1):
        if text.endswith(trigger[:length]):
            return length
    return 0
