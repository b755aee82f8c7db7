"""A streamed answer: server-sent events, one for each batch that brings text.

Owns the order of events and the moment of the first byte: not even the headers go out before the first text is in
hand (or the end, when there is none), so that every failure up to there is an ordinary HTTP error.
"""

from __future__ import annotations

from cluster.ingress.api.answer import Answer, Send
from cluster.ingress.api.backend import FinishReason, Interrupted
from cluster.ingress.api.wire import DONE_EVENT, InterruptionError, error_event

_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ],
}


class StreamedAnswer(Answer):
    """Writes events as text comes in."""

    _last_event_s = 0.0

    async def _piece(self, send: Send, text: str) -> None:
        if text:
            await self._write(send, self._shape.delta(text, self._take_scored()), more=True)
            self._observe_gap()
        if self._started:
            # Tokens without text of their own count once everything before them is out.
            self._report_delivered()

    async def _finish(self, send: Send, text: str, reason: FinishReason) -> None:
        scored = self._take_scored()
        events = [self._shape.delta(text, scored)] if text or scored else []
        events.append(self._shape.finish(reason))
        if self._plan.include_usage:
            events.append(self._shape.usage(self._usage()))
        events.append(DONE_EVENT)
        await self._write(send, b"".join(events), more=False)
        self._report_delivered()
        if self._generation is not None:
            self._generation.completed()

    async def _interrupt(self, send: Send, event: Interrupted) -> None:
        self._services.metrics.interruptions.labels(event.reason).inc()
        error = InterruptionError(
            message=event.message,
            reason=event.reason,
            request_id=self._request_id,
            attempt_id=event.attempt_id,
            delivered_output_tokens=self._text.num_delivered,
        )
        usage = self._shape.usage(self._usage()) if self._plan.include_usage else b""
        await self._write(send, usage + error_event(error), more=False)

    async def _write(self, send: Send, data: bytes, *, more: bool) -> None:
        if not self._started and self._generation is not None:
            data = self._shape.opening() + data
            self._mark_started(self._generation)
            await send(_START)
        await send({"type": "http.response.body", "body": data, "more_body": more})

    def _report_delivered(self) -> None:
        if self._generation is not None:
            self._generation.delivered(self._text.num_delivered)

    def _observe_gap(self) -> None:
        now_s = self._services.monotonic_s()
        if self._last_event_s:
            self._services.metrics.gap.observe(now_s - self._last_event_s)
        self._last_event_s = now_s
