"""The queue in front of the generation: whoever comes takes its seats, waits for them, or is told when to come back.

Owns the ``AdmissionQueue`` of this ingress and one future per waiting request. Lives on the event loop of the
application; decides nothing itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial

from cluster.core.admission import Refused
from cluster.core.admission_queue import RETRY_AFTER_S_MAX, AdmissionQueue, Started
from cluster.ingress.api.errors import ApiError, InvalidRequest, NotReady, Overloaded, echo
from cluster.ingress.metrics import IngressMetrics

CLASS_HEADER = "x-kopir-class"


class Seats:
    """Gives seats out. ``clock_ns`` is the one that deadlines are counted on."""

    def __init__(
        self,
        queue: AdmissionQueue,
        *,
        deadline_ms: int | None,
        clock_ns: Callable[[], int],
        metrics: IngressMetrics | None = None,
    ) -> None:
        self.queue = queue
        self._deadline_ms = deadline_ms
        self._clock_ns = clock_ns
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._stops_ns: int | None = None
        self._metrics = metrics
        if metrics is not None:
            self._show(metrics)

    def check_class(self, name: str | None) -> str:
        """Returns the class of a request; the first one when it names none. Raises: InvalidRequest."""
        if name is None:
            return next(iter(self.queue.quotas))
        if name not in self.queue.quotas:
            known = ", ".join(self.queue.quotas)
            message = f"{CLASS_HEADER}: no such class; known here: {known} (got {echo(name)})."
            raise InvalidRequest(message, param=CLASS_HEADER)
        return name

    async def take(self, request_id: str, class_name: str, *, num_seats: int) -> float:
        """Returns the seconds that were waited, once the seats are this request's.

        Raises: Overloaded, NotReady. Whatever happens, ``leave`` gives everything back.
        """
        came_ns = self._clock_ns()
        deadline_ns = None if self._deadline_ms is None else came_ns + self._deadline_ms * 1_000_000
        answer = self.queue.enter(request_id, class_name, num_seats=num_seats, now_ns=came_ns, deadline_ns=deadline_ns)
        if isinstance(answer, Started):
            return 0.0
        if isinstance(answer, Refused):
            raise self._error(answer, class_name)
        loop = asyncio.get_running_loop()
        started: asyncio.Future[None] = loop.create_future()
        self._waiting[request_id] = started
        try:
            while True:
                left_s = max(0, answer.until_ns - self._clock_ns()) / 1e9
                done, _ = await asyncio.wait((started,), timeout=left_s)
                if done:
                    started.result()
                    return (self._clock_ns() - came_ns) / 1e9
                refused = self.queue.expire(request_id, now_ns=self._clock_ns())
                if refused is not None:
                    raise self._error(refused, class_name)
        finally:
            self._waiting.pop(request_id, None)

    def leave(self, request_id: str) -> None:
        """Gives back what a request has, a place in the line included, and starts those whose turn it is."""
        self._start(self.queue.leave(request_id, now_ns=self._clock_ns()))

    def resize(self, num_seats: int) -> None:
        """There are more or fewer seats from now on."""
        if num_seats != self.queue.num_seats:
            self._start(self.queue.resize(num_seats, now_ns=self._clock_ns()))

    def _start(self, request_ids: Iterable[str]) -> None:
        for other in request_ids:
            waiting = self._waiting.get(other)
            if waiting is None:
                self.leave(other)  # It was given up in the same moment.
            elif not waiting.done():
                waiting.set_result(None)

    @property
    def is_draining(self) -> bool:
        """True when nobody is let in any more."""
        return self.queue.door.draining

    @property
    def num_open(self) -> int:
        """Requests that are inside, waiting ones included."""
        return len(self.queue.door)

    def drain(self, *, until_ns: int | None = None) -> None:
        """Sends the waiting away and lets nobody in. ``until_ns``: when the server stops at the latest."""
        self._stops_ns = until_ns
        for request_id in self.queue.drain():
            waiting = self._waiting.get(request_id)
            if waiting is not None and not waiting.done():
                waiting.set_exception(NotReady("The server is stopping.", retry_after_s=self.stops_in_s()))

    def stops_in_s(self) -> int:
        """Returns the whole seconds until the server has stopped at the latest: who asks before is sent away again."""
        left_ns = 0 if self._stops_ns is None else self._stops_ns - self._clock_ns()
        return max(1, min(RETRY_AFTER_S_MAX, -(-left_ns // 1_000_000_000)))

    def _error(self, refused: Refused, class_name: str) -> ApiError:
        if self._metrics is not None:
            self._metrics.admission_refused.labels(class_name, refused.code).inc()
        retry_after_s = refused.retry_after_s or 1
        if refused.status == 503:
            return NotReady(f"{refused.why}.", code=refused.code, retry_after_s=self.stops_in_s())
        return Overloaded(f"{refused.why}.", code=refused.code, retry_after_s=retry_after_s)

    def _show(self, metrics: IngressMetrics) -> None:
        for name in self.queue.quotas:
            metrics.admission_waiting.labels(name).set_function(partial(self.queue.num_waiting, name))
            metrics.admission_seats.labels(name).set_function(partial(self.queue.num_seated, name))
