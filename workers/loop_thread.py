"""An asyncio loop on a thread of its own.

Owns the thread and the loop. Sockets, leases and timers of a worker run here, so that neither the engine's
compute nor the actor runtime delays them. Life cycle: constructed -> ``run`` / ``call`` -> ``close``.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")
CLOSE_DEADLINE_S = 3.0


class LoopThread:
    """Runs coroutines and plain calls on its own event loop, from any thread."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def run(self, coroutine: Coroutine[Any, Any, _T], *, deadline_s: float) -> _T:
        """Runs a coroutine to its end from another thread. Raises: TimeoutError after ``deadline_s``."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(deadline_s)
        except TimeoutError:
            future.cancel()
            raise

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Schedules a plain call on the loop; does nothing once the loop is closed."""
        try:
            self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            if not self.loop.is_closed():
                raise

    def close(self) -> None:
        """Cancels what still runs, stops the loop and joins the thread."""
        if self.loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(_cancel_all(), self.loop).result(CLOSE_DEADLINE_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(CLOSE_DEADLINE_S)
        self.loop.close()


async def _cancel_all() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
