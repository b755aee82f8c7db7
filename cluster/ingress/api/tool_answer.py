"""An answer for which the gateway itself calls tools: rounds of generation with calls between them.

Owns the rounds. Text is shown as it comes, in all rounds, a blank line between those that have some; the calls are not:
the client has nothing to run. Each round is a generation of its own, with its own attempts; there is one boundary for
all of them: after the first delta of any, nothing runs again. Until then a lost round is repeated, and a lost gateway's
request can be asked for again with its key: calls that are recorded are not made a second time.

While recorded calls are still to come, text is held back: nobody is shown a run that may turn out to be another one.
"""

from __future__ import annotations

import asyncio
from typing import Any

from cluster.core.tool_events import NextRound, call_id_of
from cluster.ingress.api.answer import Answer, Send
from cluster.ingress.api.backend import GenerationEvent, Interrupted, InterruptReason, TokenBatch
from cluster.ingress.api.choice import Choice, Merge
from cluster.ingress.api.errors import ApiError
from cluster.ingress.api.shapes import joined_calls
from cluster.ingress.api.stream import StreamedAnswer
from cluster.ingress.api.whole import WholeAnswer
from cluster.ingress.api.wire import Piece, PromptTokensDetails, Usage
from cluster.ingress.tools.runner import ToolStopped, WantedCall
from cluster.ingress.tools.service import ToolSession

MAX_ROUNDS = 65
"""More than the configuration allows."""
_REASONS: dict[str | None, InterruptReason] = {
    "deadline_exceeded": "deadline",
    "request_cancelled": "cancelled",
    "tool_outcome_unknown": "tool_outcome_unknown",
}
"""Why a stream breaks, by error code; everything else is ``engine_fault`` with its own words."""


class RoundChoice(Choice):
    """The output of one round; its calls are kept and not shown, and their tokens never count as delivered."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: list[Piece] = []
        self._num_before_calls = 0

    @property
    def num_delivered(self) -> int:
        return self._num_before_calls if self.calls else super().num_delivered

    def take(self, batch: TokenBatch) -> Piece:
        return self._without_calls(super().take(batch))

    def end(self, reason: Any) -> Piece:
        return self._without_calls(super().end(reason))

    def restart(self) -> int:
        self.calls.clear()
        self._num_before_calls = 0
        return super().restart()

    def _without_calls(self, piece: Piece) -> Piece:
        if piece.calls:
            self.calls.append(Piece(calls=piece.calls))
        elif not self.calls:
            self._num_before_calls = super().num_delivered
        return Piece(piece.text)


class ToolAnswer(Answer):
    """The part that streamed and whole answers with tools have in common."""

    def __init__(self, *args: Any, session: ToolSession, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._session = session
        self._round_index = 0
        self._choices = [self._make_choice()]
        self._past_tokens = 0
        self._past_delivered = 0
        self._past_prompt_tokens = 0
        self._past_cached = 0
        self._text = ""
        """Of this round."""
        self._unshown = ""
        """Not shown yet, because recorded calls are still to come."""
        self._unshown_before = ""
        """The same at the start of this round."""
        self._has_text = False
        """Earlier rounds have text."""

    async def _generate(self, send: Send) -> str:
        try:
            while True:
                outcome = await super()._generate(send)
                choice = self._round_choice
                if outcome != "finished" or not choice.has_whole_calls:
                    return outcome
                await self._next_round(send, choice)
        except ApiError as error:
            if not self._started:
                raise
            await self._cancel("gateway_fault")
            reason = _REASONS.get(error.code, "engine_fault")
            await self._interrupt(send, Interrupted(reason, self._attempt_id, error.message))
            return "interrupted"

    async def _next_round(self, send: Send, choice: RoundChoice) -> None:
        """Has the calls of a round made, and begins the next one."""
        calls = joined_calls(choice.calls)
        generation = choice.started
        step = await self._session.runner.round(
            [WantedCall(call.function.name, call.function.arguments) for call in calls],
            note=generation.note,
            may_go_on=lambda: not generation.is_cancelled,
        )
        if generation.is_cancelled:
            raise ToolStopped(
                "the request was cancelled", code="request_cancelled", status=409, reason="cancelled", call=None
            )
        assert isinstance(step, NextRound), step
        left = self._session.max_tokens
        left = None if left is None else left - self._num_tokens
        if left is not None and left <= 0:
            # The calls are made and recorded; there is no token left to tell of them.
            choice.finish = "length"
            await super()._finish(send, choice, self._shown(Piece()))  # type: ignore[safe-super]
            return
        self._close_round(choice)
        self._session.add_turn(self._text, calls, step.results)
        self._plan = await self._session.plan(may_call=step.may_call, max_tokens=left)
        self._has_text |= bool(self._text)
        self._text, self._unshown_before = "", self._unshown
        self._round_index += 1
        self._choices = [self._make_choice()]

    def _close_round(self, choice: RoundChoice) -> None:
        self._past_tokens += choice.num_tokens
        self._past_delivered += choice.num_delivered
        self._past_prompt_tokens += self._plan.num_prompt_tokens
        self._past_cached += choice.started.cached_tokens
        if choice.is_marked:
            choice.started.delivered(choice.num_delivered)
        choice.started.completed(rest="tool_calls")

    def _make_choice(self) -> RoundChoice:
        logical_id, round_index = self._session.runner.row.logical_id, self._round_index
        return RoundChoice(
            0,
            self._plan,
            self._services.tokenizer.table,
            call_ids=lambda number: call_id_of(logical_id, round_index, number),
        )

    # --- output ---------------------------------------------------------------------------------------------

    async def _piece(self, send: Send, choice: Choice, piece: Piece) -> None:
        piece = self._on_new_line(piece)
        if self._session.is_replaying:
            self._unshown += piece.text
            return
        await super()._piece(send, choice, self._shown(piece))  # type: ignore[safe-super]

    def _put_aside(self, choice: Choice, piece: Piece) -> TokenBatch | None:
        """Each piece is looked at by itself: it may belong to a call, or wait for recorded ones."""
        return None

    async def _finish(self, send: Send, choice: Choice, piece: Piece) -> None:
        if choice.has_whole_calls:
            if piece:
                await self._piece(send, choice, piece)
            await self._flush(send, choice)
            return
        if choice.finish == "tool_calls":
            # A stop string cut the last call off: none of this round is made.
            choice.finish = "stop"
        piece = self._on_new_line(piece)
        # Before the last words: an answer that leaves recorded calls out is not told as complete.
        await self._session.runner.round(())
        await super()._finish(send, choice, self._shown(piece))  # type: ignore[safe-super]

    async def _flush(self, send: Send, choice: Choice) -> None:
        """What is on its way to the client is not kept back while tools are called."""

    def _on_new_line(self, piece: Piece) -> Piece:
        """Returns the piece behind a blank line where it begins the text of another round."""
        is_first = self._has_text and not self._text
        self._text += piece.text
        return Piece("\n\n" + piece.text) if is_first and piece.text else piece

    def _shown(self, piece: Piece) -> Piece:
        """Returns the piece behind what was held back."""
        held, self._unshown, self._unshown_before = self._unshown, "", ""
        return Piece(held + piece.text) if held else piece

    def _restarted(self, choice: Choice) -> None:
        self._text, self._unshown = "", self._unshown_before
        super()._restarted(choice)  # type: ignore[safe-super]

    async def _next(self, send: Send, events: Merge) -> tuple[Choice, GenerationEvent]:
        try:
            async with asyncio.timeout(max(0.0, self._session.left_s)):
                return await super()._next(send, events)
        except TimeoutError:
            message = "The deadline of an answer with tools has passed."
            raise ToolStopped(message, code="deadline_exceeded", status=504, reason="deadline", call=None) from None

    # --- counts ---------------------------------------------------------------------------------------------

    def _id_of(self, choice: Choice) -> str:
        return request_id_of_round(self._request_id, self._round_index)

    @property
    def _round_choice(self) -> RoundChoice:
        choice = self._choices[0]
        assert isinstance(choice, RoundChoice), type(choice)
        return choice

    @property
    def used_tokens(self) -> int:
        return self._past_prompt_tokens + super().used_tokens

    @property
    def _num_tokens(self) -> int:
        return self._past_tokens + super()._num_tokens

    @property
    def _num_delivered(self) -> int:
        return self._past_delivered + super()._num_delivered

    def _usage(self) -> Usage:
        """Every round's prompt counts, and what the cache had of each."""
        last = super()._usage()
        num_prompt = self._past_prompt_tokens + last.prompt_tokens
        cached = self._past_cached + last.prompt_tokens_details.cached_tokens
        total = num_prompt + last.completion_tokens
        return Usage(num_prompt, last.completion_tokens, total, PromptTokensDetails(cached))


class StreamedToolAnswer(ToolAnswer, StreamedAnswer):
    """Text of all rounds as events."""

    async def _flush(self, send: Send, choice: Choice) -> None:
        await StreamedAnswer._flush(self, send, choice)


class WholeToolAnswer(ToolAnswer, WholeAnswer):
    """Text of all rounds in one document."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._earlier: list[Piece] = []

    def _close_round(self, choice: RoundChoice) -> None:
        super()._close_round(choice)
        self._earlier += self._pieces[0]
        self._pieces[0] = []

    async def _finish(self, send: Send, choice: Choice, piece: Piece) -> None:
        if not choice.has_whole_calls:
            self._pieces[0] = self._earlier + self._pieces[0]
        await super()._finish(send, choice, piece)


def request_id_of_round(request_id: str, round_index: int) -> str:
    """Returns the id under which a round is journalled: the request's own for the first."""
    return f"{request_id}-r{round_index}" if round_index else request_id
