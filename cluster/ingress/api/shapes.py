"""How an answer looks on each of the two endpoints.

Owns the constant part of every chunk (id, created, model). A shape is made for one request and never writes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from cluster.ingress.api.plan import AnswerPlan
from cluster.ingress.api.wire import (
    AnswerBody,
    ChatChoice,
    ChatChunkChoice,
    ChatLogprob,
    ChatLogprobs,
    ChatMessage,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    FinishReason,
    FunctionCall,
    Piece,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
    Usage,
    encode_json,
    event,
)
from cluster.ingress.detokenize import TokenTable
from kvstore.core.messages import TokenLogprobs

_MARK = "\ue000text\ue000"
"""Stands for the text when the constant parts of an event are worked out."""

ScoredToken = tuple[int, TokenLogprobs]
"""(token id, its logprobs)."""


class AnswerShape(ABC):
    """Encodes one answer, whole or as events."""

    chunk_object: str
    body_object: str
    id_prefix: str

    def __init__(
        self, plan: AnswerPlan, table: TokenTable, *, request_id: str, created: int, model: str, fingerprint: str | None
    ) -> None:
        self._table = table
        self._num_top = plan.num_logprobs
        self._constant: dict[str, Any] = {
            "id": self.id_prefix + request_id.removeprefix("req-"),
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._chunk_usage: UnsetType | None = None if plan.include_usage else UNSET
        self._around: dict[int, tuple[bytes, bytes]] = {}
        """Choice -> what comes before and after the text of an event that has nothing else."""

    @classmethod
    def of(cls, plan: AnswerPlan) -> type[AnswerShape]:
        return ChatShape if plan.kind == "chat" else CompletionShape

    @abstractmethod
    def opening(self, num_choices: int) -> bytes:
        """Returns the events that come before the first content."""

    @abstractmethod
    def delta(self, index: int, piece: Piece, scored: Sequence[ScoredToken]) -> bytes:
        """Returns the event of one piece of choice ``index``."""

    @abstractmethod
    def finish(self, index: int, reason: FinishReason) -> bytes:
        """Returns the finish event of a choice."""

    @abstractmethod
    def whole(
        self, index: int, pieces: Sequence[Piece], scored: Sequence[ScoredToken], reason: FinishReason | None
    ) -> Any:
        """Returns a choice with all of its output."""

    def body(self, choices: list[Any], usage: Usage) -> AnswerBody:
        """Returns the whole answer as one document."""
        return AnswerBody(object=self.body_object, choices=choices, usage=usage, **self._constant)

    def usage(self, usage: Usage) -> bytes:
        """Returns the usage event."""
        return event(AnswerBody(object=self.chunk_object, choices=[], usage=usage, **self._constant))

    def _chunk(self, choice: Any) -> bytes:
        return event(AnswerBody(object=self.chunk_object, choices=[choice], usage=self._chunk_usage, **self._constant))

    @abstractmethod
    def _text_chunk(self, index: int, text: str) -> bytes:
        """Returns the event of a piece of text without anything else."""

    def _text_event(self, index: int, text: str) -> bytes:
        """Returns what ``_text_chunk`` returns; all but the text is encoded once in a stream's life."""
        around = self._around.get(index)
        if around is None:
            before, mark, after = self._text_chunk(index, _MARK).partition(encode_json(_MARK))
            assert mark, "an event without its text"
            around = self._around[index] = (before, after)
        return around[0] + encode_json(text) + around[1]

    def _name(self, token_id: int) -> str:
        """Returns the token as text; bytes that are no text by themselves are spelled out."""
        data = self._table.token_bytes(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def joined_calls(pieces: Sequence[Piece]) -> list[ToolCall]:
    """Returns the whole calls that the pieces make up, by index."""
    heads: list[ToolCallDelta] = []
    arguments: list[list[str]] = []
    for delta in (delta for piece in pieces for delta in piece.calls):
        if delta.index == len(heads):
            heads.append(delta)
            arguments.append([])
        arguments[delta.index].append(delta.function.arguments)
    return [
        ToolCall(
            id=str(head.id),
            function=FunctionCall(str(head.function.name), "".join(parts)),
            idempotency_key=head.idempotency_key,
        )
        for head, parts in zip(heads, arguments, strict=True)
    ]


class ChatShape(AnswerShape):
    """``/v1/chat/completions``."""

    chunk_object = "chat.completion.chunk"
    body_object = "chat.completion"
    id_prefix = "chatcmpl-"

    def opening(self, num_choices: int) -> bytes:
        first = Delta(role="assistant", content="")
        return b"".join(self._chunk(ChatChunkChoice(index, first)) for index in range(num_choices))

    def _text_chunk(self, index: int, text: str) -> bytes:
        return self._chunk(ChatChunkChoice(index, Delta(content=text)))

    def delta(self, index: int, piece: Piece, scored: Sequence[ScoredToken]) -> bytes:
        if not piece.calls and not scored:
            return self._text_event(index, piece.text)
        logprobs = self._logprobs(scored) if scored else None
        events = []
        if piece.text or not piece.calls:
            events.append(self._chunk(ChatChunkChoice(index, Delta(content=piece.text), logprobs)))
            logprobs = None
        # One call to an event: there are clients that look at the first of a list only.
        for call in piece.calls:
            events.append(self._chunk(ChatChunkChoice(index, Delta(tool_calls=[call]), logprobs)))
            logprobs = None
        return b"".join(events)

    def finish(self, index: int, reason: FinishReason) -> bytes:
        return self._chunk(ChatChunkChoice(index, Delta(), None, reason))

    def whole(
        self, index: int, pieces: Sequence[Piece], scored: Sequence[ScoredToken], reason: FinishReason | None
    ) -> ChatChoice:
        logprobs = None if self._num_top is None else self._logprobs(scored)
        text = "".join(piece.text for piece in pieces)
        calls = joined_calls(pieces)
        message = ChatMessage("assistant", text or None, tool_calls=calls) if calls else ChatMessage("assistant", text)
        return ChatChoice(index, message, logprobs, reason)

    def _logprobs(self, scored: Sequence[ScoredToken]) -> ChatLogprobs:
        return ChatLogprobs([self._logprob(token_id, logprobs) for token_id, logprobs in scored])

    def _logprob(self, token_id: int, logprobs: TokenLogprobs) -> ChatLogprob:
        top = [TopLogprob(self._name(other), value, self._bytes(other)) for other, value in logprobs.top]
        return ChatLogprob(self._name(token_id), logprobs.logprob, self._bytes(token_id), top)

    def _bytes(self, token_id: int) -> list[int]:
        return list(self._table.token_bytes(token_id))


class CompletionShape(AnswerShape):
    """``/v1/completions``. Remembers how much text of each choice went out, for ``text_offset``."""

    chunk_object = "text_completion"
    body_object = "text_completion"
    id_prefix = "cmpl-"

    def __init__(self, plan: AnswerPlan, *args: Any, **kwargs: Any) -> None:
        super().__init__(plan, *args, **kwargs)
        self._num_offset_chars = [0] * plan.num_choices

    def opening(self, num_choices: int) -> bytes:
        return b""

    def _text_chunk(self, index: int, text: str) -> bytes:
        return self._chunk(CompletionChoice(index, text))

    def delta(self, index: int, piece: Piece, scored: Sequence[ScoredToken]) -> bytes:
        if not scored:
            return self._text_event(index, piece.text)
        return self._chunk(CompletionChoice(index, piece.text, self._logprobs(index, scored)))

    def finish(self, index: int, reason: FinishReason) -> bytes:
        return self._chunk(CompletionChoice(index, "", None, reason))

    def whole(
        self, index: int, pieces: Sequence[Piece], scored: Sequence[ScoredToken], reason: FinishReason | None
    ) -> CompletionChoice:
        logprobs = None if self._num_top is None else self._logprobs(index, scored)
        return CompletionChoice(index, "".join(piece.text for piece in pieces), logprobs, reason)

    def _logprobs(self, index: int, scored: Sequence[ScoredToken]) -> CompletionLogprobs:
        names = [self._name(token_id) for token_id, _ in scored]
        offsets = []
        for token_id, _ in scored:
            offsets.append(self._num_offset_chars[index])
            self._num_offset_chars[index] += len(self._table.decode([token_id]))
        top = None
        if self._num_top:
            top = [{self._name(other): value for other, value in logprobs.top} for _, logprobs in scored]
        return CompletionLogprobs(names, [logprobs.logprob for _, logprobs in scored], top, offsets)
