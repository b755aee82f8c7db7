"""One of the answers to a request: its generation, its text, its log-probabilities and its counts.

A request has ``n`` choices; each is a generation of its own, with its own attempts and its own seed. Owns what belongs
to one of them; what is written, and when, belongs to ``answer``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Literal

from msgspec import UNSET, UnsetType

from cluster.ingress.api.backend import Generation, GenerationEvent, TokenBatch
from cluster.ingress.api.errors import ApiError
from cluster.ingress.api.plan import AnswerPlan
from cluster.ingress.api.shapes import ScoredToken
from cluster.ingress.api.text import AnswerText
from cluster.ingress.api.tool_format import ToolCallParser
from cluster.ingress.api.wire import FinishReason, Piece
from cluster.ingress.detokenize import TokenTable
from kvstore.errors import ProtocolError


class Choice:
    """One answer while it runs. ``generation`` is set once it was submitted."""

    def __init__(
        self,
        index: int,
        plan: AnswerPlan,
        table: TokenTable,
        *,
        call_ids: Callable[[int], str],
        action_keys: Callable[[str], str | UnsetType] = lambda call_id: UNSET,
    ) -> None:
        """``call_ids(n)`` names the n-th tool call of this choice, ``action_keys(id)`` the action of a call."""
        self.index = index
        self.generation: Generation | None = None
        self.finish: FinishReason | None = None
        """Why it is complete; None while it runs."""
        self.is_over = False
        """The generation needs no cancel any more."""
        self.is_marked = False
        """Its boundary is crossed: nothing of it may be repeated."""
        self._plan = plan
        self._table = table
        self._call_ids = call_ids
        self._action_keys = action_keys
        self._text = self._fresh_text()
        self._parser = self._fresh_parser()
        self._num_shown = 0
        """Tokens delivered when the parser last held nothing back."""
        self._scored: deque[ScoredToken] = deque()
        self._num_scored = 0
        """Tokens whose logprobs were given out."""

    @property
    def started(self) -> Generation:
        """The generation, once it was submitted."""
        assert self.generation is not None, f"choice {self.index} has no generation"
        return self.generation

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string ended the text."""
        return self._text.stopped

    @property
    def num_tokens(self) -> int:
        """Tokens taken so far, the stop token included."""
        return self._text.num_tokens

    @property
    def num_delivered(self) -> int:
        """Leading tokens whose text was given out whole."""
        return self._text.num_delivered if self._parser is None else self._num_shown

    def take(self, batch: TokenBatch) -> Piece:
        """Takes the next tokens in; returns what may be shown now.

        Raises: ProtocolError when they do not continue what came before.
        """
        num_before = self._text.num_tokens
        if batch.first_index != num_before:
            raise ProtocolError(f"tokens continue at {batch.first_index}, expected {num_before}")
        visible_before = self._text.num_visible_tokens
        text = self._text.push(batch.token_ids)
        if batch.logprobs is not None and self._plan.num_logprobs is not None:
            num_visible = self._text.num_visible_tokens - visible_before
            self._scored.extend(zip(batch.token_ids[:num_visible], batch.logprobs[:num_visible], strict=True))
        return self._parsed(text)

    def end(self, reason: Literal["stop", "length"]) -> Piece:
        """The generation is complete: returns what was held back. Modifies: ``finish``."""
        piece = self._parsed(self._text.finish())
        if self._parser is not None:
            rest = self._parser.finish()
            piece = Piece(piece.text + rest.text, piece.calls)
            self._num_shown = self._text.num_delivered
        has_calls = self._parser is not None and self._parser.num_complete > 0
        self.finish = "tool_calls" if has_calls and reason == "stop" else reason
        return piece

    def _parsed(self, text: str) -> Piece:
        if self._parser is None:
            return Piece(text)
        piece = self._parser.push(text)
        if not self._parser.holds_text:
            self._num_shown = self._text.num_delivered
        return piece

    def take_scored(self) -> list[ScoredToken]:
        """Returns the logprobs of tokens whose text is out, once each."""
        if not self._scored:
            return []
        num_due = min(self.num_delivered, self._text.num_visible_tokens) - self._num_scored
        due = [self._scored.popleft() for _ in range(min(num_due, len(self._scored)))]
        self._num_scored += len(due)
        return due

    @property
    def has_whole_calls(self) -> bool:
        """Whether its answer asks for calls, and none was cut off."""
        parser = self._parser
        return self.finish == "tool_calls" and parser is not None and parser.num_calls == parser.num_complete

    def mark_first_delta(self) -> None:
        """Crosses the boundary, once."""
        if not self.is_marked:
            self.started.mark_first_delta()
            self.is_marked = True

    def restart(self) -> int:
        """A new attempt begins: all text is void. Returns how many tokens are.

        Raises: ProtocolError after the boundary.
        """
        if self.is_marked:
            raise ProtocolError("an attempt was repeated after the first delta")
        num_void = self._text.num_tokens
        self._text, self._parser, self._num_shown = self._fresh_text(), self._fresh_parser(), 0
        self._scored.clear()
        return num_void

    def _fresh_parser(self) -> ToolCallParser | None:
        if self._plan.tools is None:
            return None
        names = [function.name for function in self._plan.tools.functions]
        return ToolCallParser(self._plan.tool_format, names, make_id=self._call_ids, make_key=self._action_keys)

    def _fresh_text(self) -> AnswerText:
        return AnswerText(self._table, stop_token_ids=frozenset(self._plan.spec.stop_token_ids), stops=self._plan.stops)


class Merge:
    """The events of several choices, one at a time, as they come. A choice is asked only while somebody waits here."""

    def __init__(self) -> None:
        self._choices: list[Choice] = []
        self._asked: dict[asyncio.Task[GenerationEvent], Choice] = {}

    def add(self, choice: Choice) -> None:
        """Takes in a choice that was submitted."""
        self._choices.append(choice)

    def remove(self, choice: Choice) -> None:
        """Asks a choice no more."""
        self._choices.remove(choice)

    async def next(self) -> tuple[Choice, GenerationEvent]:
        """Waits for the next event of any choice. Raises what a generation raises; then that choice is over."""
        if len(self._choices) == 1 and not self._asked:
            choice = self._choices[0]
            return choice, await self._ask(choice)
        waiting = set(self._asked.values())
        for choice in self._choices:
            if choice not in waiting:
                self._asked[asyncio.ensure_future(self._ask(choice))] = choice
        done, _ = await asyncio.wait(self._asked, return_when=asyncio.FIRST_COMPLETED)
        task = min(done, key=lambda task: self._asked[task].index)
        return self._asked.pop(task), task.result()

    async def close(self) -> None:
        """Takes back every question that is still open."""
        tasks, self._asked = list(self._asked), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, choice: Choice) -> GenerationEvent:
        try:
            return await choice.started.next()
        except ApiError:
            choice.is_over = True  # the backend ended it by itself
            raise
