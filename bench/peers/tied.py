"""Programs that a bench starts and that must not outlive it, however it ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from types import FrameType

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
KILL_DEADLINE_S = 10.0


def tied(number: signal.Signals) -> Callable[[], None]:
    """Returns a ``preexec_fn`` after which the kernel sends ``number`` to the child when this process is gone.

    A child that was stopped meanwhile would not see that its input has ended. Call on a thread that lives as long as
    the process: the kernel takes the end of that thread for the end of the parent.
    """
    parent = os.getpid()

    def ask_kernel() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(number))
        if os.getppid() != parent:
            os._exit(1)

    return ask_kernel


def end_group(process: subprocess.Popen[str]) -> None:
    """Kills what is left of the process group that ``process`` leads, stopped or not, and reaps the leader."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(KILL_DEADLINE_S)


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Lets SIGTERM unwind like an exception, so that everything that was started is stopped."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
