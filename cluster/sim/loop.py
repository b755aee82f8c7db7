"""An asyncio event loop under virtual time: what real drivers run on in level 2.

Owns nothing but the way from asyncio's calls to events of the kernel. Every callback is an event of one life, so that a
paused process runs none of them until it goes on, and a dead one never again. Time is that life's own clock. There are
no sockets, threads or signals here: a driver that asks for them fails at once.
"""

from __future__ import annotations

import asyncio
import asyncio.events
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

from cluster.sim.kernel import PPM, Kernel, Life

DRIFT_PPM_MAX = 1000


class LifeLoop(asyncio.AbstractEventLoop):
    """The event loop of one life."""

    def __init__(self, kernel: Kernel, life: Life) -> None:
        self._kernel = kernel
        self._life = life
        self.is_over = False
        """Set when the run is over: what is left of coroutines is thrown away without a word."""
        self.failures: list[BaseException] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    # --- callbacks --------------------------------------------------------------------------------------------

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._kernel.at(0, self._life, self._run, handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        # A clock that runs slow must have come to ``when`` by then, as a real loop's has.
        wait_ns = max(0, int((when - self.time()) * 1e9))
        self._kernel.at(wait_ns + wait_ns * DRIFT_PPM_MAX // PPM, self._life, self._run, handle)
        return handle

    def _run(self, handle: asyncio.Handle) -> None:
        if handle.cancelled():
            return
        asyncio.events._set_running_loop(self)
        try:
            handle._run()
        finally:
            asyncio.events._set_running_loop(None)
        if self.failures:
            raise self.failures.pop()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Its event is skipped when it comes."""

    # --- tasks ------------------------------------------------------------------------------------------------

    def time(self) -> float:
        return self._kernel.clock_ns(self._life) / 1e9

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name, context=context)
        # Held to the end: what a dead process had not finished must not unwind as if it still ran.
        self._tasks.add(task)
        return task

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return asyncio.events._get_running_loop() is self

    def is_closed(self) -> bool:
        return self.is_over

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not self.is_over and not self._life.dead and isinstance(error, BaseException):
            self.failures.append(error)
