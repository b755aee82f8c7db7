"""An answer in one JSON document. The boundary is the first byte of the body; until then all may be repeated."""

from __future__ import annotations

from typing import Any

from cluster.ingress.api.answer import Answer, Send
from cluster.ingress.api.backend import FinishReason, Interrupted


class WholeAnswer(Answer):
    """Gathers the text and writes it once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pieces: list[str] = []

    def _restart(self) -> None:
        super()._restart()
        self._pieces.clear()

    async def _piece(self, send: Send, text: str) -> None:
        if text:
            self._pieces.append(text)

    async def _finish(self, send: Send, text: str, reason: FinishReason) -> None:
        generation = self._generation
        assert generation is not None, "an answer without a generation"
        body = self._shape.body("".join(self._pieces) + text, self._take_scored(), reason, self._usage())
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        self._mark_started(generation)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})
        generation.delivered(self._text.num_delivered)
        generation.completed()

    async def _interrupt(self, send: Send, event: Interrupted) -> None:
        """Leaves the body short of its announced length, which no client takes for an answer."""
        self._services.metrics.interruptions.labels(event.reason).inc()
