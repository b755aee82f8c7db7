"""One streamed chat answer: text pieces as they come, then exactly one honest ending.

Owns the HTTP stream while it runs. An answer counts as complete only with ``[DONE]``: an error event, a cut and an
end without ``[DONE]`` are told apart and never look like success.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from cluster.cli.common import EndpointError, error_message, make_client, mapped_errors
from cluster.cli.sse import SseDecoder
from kvstore.errors import EnvironmentProblem


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How an answer ended. ``kind`` ``complete`` is the only success."""

    kind: Literal["complete", "interrupted", "cut"]
    detail: str = ""
    finish_reason: str | None = None
    request_id: str | None = None
    delivered_output_tokens: int | None = None
    usage: dict[str, Any] | None = None


class ChatClient:
    """Talks to one endpoint. Life cycle: made -> ``stream`` any number of times, one at a time -> ``close``."""

    def __init__(self, base: str, *, model: str | None = None, api_key: str | None = None) -> None:
        """Raises: EnvironmentProblem or EndpointError if no model was named and the endpoint does not list one."""
        self.base = base
        self._client = make_client(base, api_key=api_key, timeout_s=None)
        try:
            self.model = model or self._first_model()
        except BaseException:
            self._client.close()
            raise
        self.ending: Ending | None = None
        """How the last answer ended; None while one runs or after it was broken off here."""

    def close(self) -> None:
        """Closes the connection; safe to call twice."""
        self._client.close()

    def stream(self, messages: Sequence[dict[str, str]], *, options: dict[str, Any] | None = None) -> Iterator[str]:
        """Yields the pieces of the answer. Afterwards ``ending`` says how it ended. Closing the iterator cancels.

        Raises: EndpointError if the endpoint refuses; EnvironmentProblem if it cannot be reached.
        """
        self.ending = None
        body = {"model": self.model, "messages": list(messages), "stream": True, **(options or {})}
        body["stream_options"] = {"include_usage": True}
        seen_any = False
        try:
            with mapped_errors(self.base), self._client.stream("POST", "/v1/chat/completions", json=body) as answer:
                if answer.status_code >= 400:
                    raise EndpointError(answer.status_code, error_message(answer.read()))
                reader = _AnswerReader(answer.headers.get("x-request-id"))
                decoder = SseDecoder()
                seen_any = True
                for chunk in answer.iter_bytes():
                    for data in decoder.feed(chunk):
                        yield from reader.read(data)
        except (EnvironmentProblem, ValueError) as error:
            if not seen_any:
                raise
            self.ending = Ending(kind="cut", detail=str(error), request_id=reader.request_id)
            return
        self.ending = reader.ending()

    def _first_model(self) -> str:
        with mapped_errors(self.base):
            answer = self._client.get("/v1/models", timeout=10.0)
        if answer.status_code >= 400:
            raise EndpointError(answer.status_code, error_message(answer.content))
        try:
            return str(answer.json()["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise EndpointError(answer.status_code, f"{self.base} lists no model; is it Kopir?") from error


class _AnswerReader:
    """Reads the events of one answer."""

    def __init__(self, request_id: str | None) -> None:
        self.request_id = request_id
        self._is_done = False
        self._error: dict[str, Any] | None = None
        self._finish_reason: str | None = None
        self._usage: dict[str, Any] | None = None

    def read(self, data: str) -> Iterator[str]:
        """Yields the text of one event, if it has any. Raises: ValueError if it is no JSON object."""
        if data == "[DONE]":
            self._is_done = True
            return
        event = json.loads(data)
        if not isinstance(event, dict):
            raise ValueError("an event is not a JSON object")
        if event.get("error") is not None:
            error = event["error"]
            self._error = error if isinstance(error, dict) else {"message": str(error)}
            return
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices") or []:
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            text = (choice.get("delta") or {}).get("content")
            if text:
                yield text

    def ending(self) -> Ending:
        """Returns how the answer ended, once the stream has ended cleanly."""
        if self._error is not None:
            code = self._error.get("reason") or self._error.get("code")
            return Ending(
                kind="interrupted",
                detail=": ".join(str(part) for part in (code, self._error.get("message")) if part),
                request_id=self._error.get("request_id") or self.request_id,
                delivered_output_tokens=self._error.get("delivered_output_tokens"),
                usage=self._usage,
            )
        if not self._is_done:
            detail = "the stream ended without [DONE]"
            return Ending(kind="cut", detail=detail, request_id=self.request_id, usage=self._usage)
        return Ending(kind="complete", finish_reason=self._finish_reason, request_id=self.request_id, usage=self._usage)
