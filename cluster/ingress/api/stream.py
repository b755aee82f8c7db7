"""A streamed answer: server-sent events, one for each batch that brings text.

Owns the order of events and the moment of the first byte: not even the headers go out before the first text is in
hand (or the end, when there is none), so that every failure up to there is an ordinary HTTP error.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from cluster.ingress.api.answer import Answer, Receive, Send
from cluster.ingress.api.backend import GenerationEvent, Interrupted, TokenBatch
from cluster.ingress.api.choice import Choice, Merge
from cluster.ingress.api.errors import ApiError
from cluster.ingress.api.window import STALL_HEADER
from cluster.ingress.api.wire import DONE_EVENT, InterruptionError, Piece, StartedError, error_event

HELD_EVENTS_MAX = 64
HELD_BYTES_MAX = 1 << 16
"""What one write takes along at most, so that no stream keeps the others waiting for long."""

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_START = {"type": "http.response.start", "status": 200, "headers": _HEADERS}


class StreamedAnswer(Answer):
    """Writes events as text comes in."""

    _last_event_s = 0.0
    _has_opening = False
    """The role deltas went out."""
    _written_s = 0.0
    """When the last write began."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: list[bytes] = []
        """Whole events of a started answer that go out with the next one, which is here already."""
        self._num_held_bytes = 0

    async def run(self, receive: Receive, send: Send) -> None:
        try:
            await super().run(receive, send)
        finally:
            if self._has_opening:
                self._services.pace.left()

    async def _next(self, send: Send, events: Merge) -> tuple[Choice, GenerationEvent]:
        """Waits for the next event; until the first output it writes comments meanwhile, where that is switched on."""
        keep_alive = self._services.limits.keep_alive
        if self._has_opening:
            if not await self._has_room():
                await self._cancel("client_stalled")
                return self._choices[0], Interrupted("client_stalled", self._attempt_id, "the client stopped reading")
            if len(self._choices) == 1:
                await self._keep_pace(self._choices[0])
            return await events.next()
        if keep_alive.ping_s <= 0:
            return await events.next()
        waiting = asyncio.ensure_future(events.next())
        try:
            while not (await asyncio.wait((waiting,), timeout=keep_alive.ping_s))[0]:
                await self._ping(send)
            return waiting.result()
        finally:
            waiting.cancel()

    async def _has_room(self) -> bool:
        """Waits until the client has taken enough of what was written; False when it takes nothing any more."""
        return self._window is None or await self._window.room(deadline_s=self._services.limits.client_stall_s)

    async def _keep_pace(self, choice: Choice) -> None:
        """Lets a fast stream gather tokens before the next write. Nothing is taken meanwhile: a cut drops them all."""
        await choice.started.arrived()
        left_s = self._written_s + self._services.pace.pause_s - self._services.monotonic_s()
        if left_s > 0:
            await asyncio.sleep(left_s)

    async def _ping(self, send: Send) -> None:
        await self._write_down()
        await self._open(send)
        # No blank line: some readers take one for an event without data. The next event's ends it.
        await send({"type": "http.response.body", "body": b": ping\n", "more_body": True})

    async def _open(self, send: Send) -> None:
        if not self._is_open:
            self._is_open = True
            await send(_START if self._window is None else self._start_for_edge())

    def _start_for_edge(self) -> dict[str, Any]:
        stall_ms = int(self._services.limits.client_stall_s * 1000)
        return {**_START, "headers": [*_HEADERS, (STALL_HEADER.encode(), str(stall_ms).encode())]}

    async def _fail(self, send: Send, error: ApiError) -> None:
        event = StartedError(
            message=error.message, type=error.type, param=error.param, code=error.code, request_id=self._request_id
        )
        self._interruption = msgspec.to_builtins(event)
        self._services.metrics.count_error(error.status, error.code)
        await send({"type": "http.response.body", "body": error_event(event), "more_body": False})

    def _restarted(self, choice: Choice) -> None:
        """Nothing is gathered here."""

    def _put_aside(self, choice: Choice, piece: Piece) -> TokenBatch | None:
        """One write of many events costs little more than of one. Nothing is awaited until they are written."""
        if (
            not self._has_opening
            or len(self._choices) > 1
            or len(self._held) >= HELD_EVENTS_MAX
            or self._num_held_bytes >= HELD_BYTES_MAX
        ):
            return None
        batch = choice.started.take_ready()
        if batch is not None and piece:
            data = self._shape.delta(choice.index, piece, choice.take_scored())
            self._held.append(data)
            self._num_held_bytes += len(data)
        return batch

    async def _piece(self, send: Send, choice: Choice, piece: Piece) -> None:
        if piece or self._held:
            data = self._shape.delta(choice.index, piece, choice.take_scored()) if piece else b""
            await self._write(send, choice, data, more=True)
            self._observe_gap()
        if choice.is_marked:
            # Tokens without text of their own count once everything before them is out.
            choice.started.delivered(choice.num_delivered)

    async def _flush(self, send: Send, choice: Choice) -> None:
        """Writes what is held. To be awaited where no event of the stream follows for a while."""
        if self._held:
            await self._write(send, choice, b"", more=True)

    async def _finish(self, send: Send, choice: Choice, piece: Piece) -> None:
        assert choice.finish is not None, f"choice {choice.index} has no end"
        scored = choice.take_scored()
        events = [self._shape.delta(choice.index, piece, scored)] if piece or scored else []
        events.append(self._shape.finish(choice.index, choice.finish))
        is_last = self._is_complete
        if is_last:
            if self._plan.include_usage:
                events.append(self._shape.usage(self._usage()))
            events.append(DONE_EVENT)
        await self._write(send, choice, b"".join(events), more=not is_last)
        choice.started.delivered(choice.num_delivered)
        for each in self._choices if is_last else ():
            each.started.completed()

    async def _interrupt(self, send: Send, event: Interrupted) -> None:
        self._services.metrics.count_interruption(event.reason)
        error = InterruptionError(
            message=event.message,
            reason=event.reason,
            request_id=self._request_id,
            attempt_id=event.attempt_id,
            delivered_output_tokens=self._num_delivered,
        )
        self._interruption = msgspec.to_builtins(error)
        usage = self._shape.usage(self._usage()) if self._plan.include_usage else b""
        # Only an error of our own leaves something held; it was taken and is counted, so it goes out.
        data = b"".join((*self._held, usage, error_event(error)))
        self._held.clear()
        await send({"type": "http.response.body", "body": data, "more_body": False})

    async def _write(self, send: Send, choice: Choice, data: bytes, *, more: bool) -> None:
        """Writes output of one choice; the first of all brings the headers and the openings of all choices."""
        await self._mark_started(choice)
        if not self._has_opening:
            self._has_opening = True
            self._services.pace.joined()
            self._observe_start(choice)
            data = self._shape.opening(len(self._choices)) + data
            await self._open(send)
        if self._held:
            data = b"".join((*self._held, data))
            self._held.clear()
            self._num_held_bytes = 0
        self._written_s = self._services.monotonic_s()
        if self._window is not None:
            self._window.sent(len(data))
        await send({"type": "http.response.body", "body": data, "more_body": more})

    def _observe_gap(self) -> None:
        now_s = self._services.monotonic_s()
        if self._last_event_s:
            self._services.metrics.gap.observe(now_s - self._last_event_s)
        self._last_event_s = now_s
