"""An answer in one JSON document. The boundary is the first byte of the body; until then all may be repeated."""

from __future__ import annotations

from typing import Any

from cluster.ingress.api.answer import Answer, Send
from cluster.ingress.api.backend import Interrupted
from cluster.ingress.api.choice import Choice
from cluster.ingress.api.wire import Piece, encode_json


class WholeAnswer(Answer):
    """Gathers the output and writes it once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pieces: list[list[Piece]] = [[] for _ in self._choices]

    def _restarted(self, choice: Choice) -> None:
        self._pieces[choice.index].clear()

    async def _piece(self, send: Send, choice: Choice, piece: Piece) -> None:
        if piece:
            self._pieces[choice.index].append(piece)

    async def _finish(self, send: Send, choice: Choice, piece: Piece) -> None:
        self._pieces[choice.index].append(piece)
        if not self._is_complete:
            return
        for each in self._choices:
            each.mark_first_delta()
        choices = [
            self._shape.whole(each.index, self._pieces[each.index], each.take_scored(), each.finish)
            for each in self._choices
        ]
        body = encode_json(self._shape.body(choices, self._usage()))
        await self._mark_started(self._choices[0], body)
        self._observe_start(self._choices[0])
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})
        for each in self._choices:
            each.started.delivered(each.num_delivered)
            each.started.completed()

    async def _interrupt(self, send: Send, event: Interrupted) -> None:
        """Leaves the body short of its announced length, which no client takes for an answer."""
        self._services.metrics.count_interruption(event.reason)
