"""How an answer looks on each of the two endpoints.

Owns the constant part of every chunk (id, created, model). A shape is made for one request and never writes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from cluster.ingress.api.backend import FinishReason
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
    TopLogprob,
    Usage,
    encode_json,
    event,
)
from cluster.ingress.detokenize import TokenTable
from kvstore.core.messages import TokenLogprobs

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

    @classmethod
    def of(cls, plan: AnswerPlan) -> type[AnswerShape]:
        return ChatShape if plan.kind == "chat" else CompletionShape

    @abstractmethod
    def opening(self) -> bytes:
        """Returns the events that come before the first content."""

    @abstractmethod
    def delta(self, text: str, scored: Sequence[ScoredToken]) -> bytes:
        """Returns the event of one piece of text."""

    @abstractmethod
    def finish(self, reason: FinishReason) -> bytes:
        """Returns the finish event."""

    @abstractmethod
    def body(self, text: str, scored: Sequence[ScoredToken], reason: FinishReason, usage: Usage) -> bytes:
        """Returns the whole answer as one JSON document."""

    def usage(self, usage: Usage) -> bytes:
        """Returns the usage event."""
        return event(AnswerBody(object=self.chunk_object, choices=[], usage=usage, **self._constant))

    def _chunk(self, choice: Any) -> bytes:
        return event(AnswerBody(object=self.chunk_object, choices=[choice], usage=self._chunk_usage, **self._constant))

    def _whole(self, choice: Any, usage: Usage) -> bytes:
        return encode_json(AnswerBody(object=self.body_object, choices=[choice], usage=usage, **self._constant))

    def _name(self, token_id: int) -> str:
        """Returns the token as text; bytes that are no text by themselves are spelled out."""
        data = self._table.token_bytes(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class ChatShape(AnswerShape):
    """``/v1/chat/completions``."""

    chunk_object = "chat.completion.chunk"
    body_object = "chat.completion"
    id_prefix = "chatcmpl-"

    def opening(self) -> bytes:
        return self._chunk(ChatChunkChoice(0, Delta(role="assistant", content="")))

    def delta(self, text: str, scored: Sequence[ScoredToken]) -> bytes:
        return self._chunk(ChatChunkChoice(0, Delta(content=text), self._logprobs(scored) if scored else None))

    def finish(self, reason: FinishReason) -> bytes:
        return self._chunk(ChatChunkChoice(0, Delta(), None, reason))

    def body(self, text: str, scored: Sequence[ScoredToken], reason: FinishReason, usage: Usage) -> bytes:
        logprobs = None if self._num_top is None else self._logprobs(scored)
        return self._whole(ChatChoice(0, ChatMessage("assistant", text), logprobs, reason), usage)

    def _logprobs(self, scored: Sequence[ScoredToken]) -> ChatLogprobs:
        return ChatLogprobs([self._logprob(token_id, logprobs) for token_id, logprobs in scored])

    def _logprob(self, token_id: int, logprobs: TokenLogprobs) -> ChatLogprob:
        top = [TopLogprob(self._name(other), value, self._bytes(other)) for other, value in logprobs.top]
        return ChatLogprob(self._name(token_id), logprobs.logprob, self._bytes(token_id), top)

    def _bytes(self, token_id: int) -> list[int]:
        return list(self._table.token_bytes(token_id))


class CompletionShape(AnswerShape):
    """``/v1/completions``. Remembers how much text went out, for ``text_offset``."""

    chunk_object = "text_completion"
    body_object = "text_completion"
    id_prefix = "cmpl-"

    _num_offset_chars = 0

    def opening(self) -> bytes:
        return b""

    def delta(self, text: str, scored: Sequence[ScoredToken]) -> bytes:
        return self._chunk(CompletionChoice(0, text, self._logprobs(scored) if scored else None))

    def finish(self, reason: FinishReason) -> bytes:
        return self._chunk(CompletionChoice(0, "", None, reason))

    def body(self, text: str, scored: Sequence[ScoredToken], reason: FinishReason, usage: Usage) -> bytes:
        logprobs = None if self._num_top is None else self._logprobs(scored)
        return self._whole(CompletionChoice(0, text, logprobs, reason), usage)

    def _logprobs(self, scored: Sequence[ScoredToken]) -> CompletionLogprobs:
        names = [self._name(token_id) for token_id, _ in scored]
        offsets = []
        for token_id, _ in scored:
            offsets.append(self._num_offset_chars)
            self._num_offset_chars += len(self._table.decode([token_id]))
        top = None
        if self._num_top:
            top = [{self._name(other): value for other, value in logprobs.top} for _, logprobs in scored]
        return CompletionLogprobs(names, [logprobs.logprob for _, logprobs in scored], top, offsets)
