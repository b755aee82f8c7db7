"""Two linked sides over one backend, and the means to stop, kill and replace the far one."""

from __future__ import annotations

import signal
import time
from abc import ABC, abstractmethod
from functools import partial
from itertools import count
from typing import Any

import psutil
from sides import PumpedSide, RemoteSide, Side

from kvstore.transport.inproc import InprocHub, InprocTransport
from kvstore.transport.ucx import UcxTransport

_incarnations = count(1)


class Pair(ABC):
    """``near`` lives in the test's process; each side knows the other by its incarnation."""

    backend: str
    same_host = True
    far_address: bytes
    near: Any
    far: Any

    def __init__(self) -> None:
        self.near_name = f"near-{next(_incarnations)}"
        self.far_name = f"far-{next(_incarnations)}"

    @abstractmethod
    def link(self, deadline_s: float = 10.0) -> tuple[str, str]:
        """Connects both sides at about the same time; returns what each got: "ok" or an error's name."""

    @abstractmethod
    def stop_far(self) -> None:
        """SIGSTOP."""

    @abstractmethod
    def resume_far(self) -> None:
        """SIGCONT."""

    @abstractmethod
    def kill_far(self) -> None:
        """SIGKILL; returns when the far side is gone."""

    @abstractmethod
    def replace_far(self) -> None:
        """Starts a far side with a new incarnation; the old one must be gone. Not linked yet."""

    @abstractmethod
    def end(self) -> None:
        """Frees everything."""


class InprocPair(Pair):
    """Both sides on one hub; time passes when a wait would otherwise not end."""

    backend = "inproc"

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._hub = InprocHub(lambda: self._now)
        self.near = self._make_side()
        self.far = self._make_side()

    def link(self, deadline_s: float = 10.0) -> tuple[str, str]:
        return (
            self.near.connect(self.far_name, self.far.address(), True, deadline_s),
            self.far.connect(self.near_name, self.near.address(), True, deadline_s),
        )

    def stop_far(self) -> None:
        self._hub.stop(self.far.address())

    def resume_far(self) -> None:
        self._hub.resume(self.far.address())

    def kill_far(self) -> None:
        self._hub.kill(self.far.address())

    def replace_far(self) -> None:
        self.far = self._make_side()
        self.far_name = f"far-{next(_incarnations)}"

    def end(self) -> None:
        self.near.close()
        self.far.close()

    def _make_side(self) -> PumpedSide:
        return PumpedSide(lambda: InprocTransport(self._hub), pump=self._pump)

    def _pump(self, seconds: float) -> None:
        """Lets ``seconds`` pass, and everything that can move, move, before and after."""
        self._hub.run()
        self._now += seconds
        self._hub.run()


class UcxPair(Pair):
    """The far side is a process of its own. ``backend``: ucx-local, ucx-copied (no direct reads) or ucx-network."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.backend = backend
        self.same_host = backend != "ucx-network"
        self._open = partial(UcxTransport, has_direct_reads=backend != "ucx-copied")
        self.near = self.make_near()
        self.far = self.make_far()
        self.far_address = self.far.address_for(self.near_name)

    def make_near(self) -> Side | RemoteSide:
        return Side(self._open)

    def make_far(self) -> RemoteSide:
        return RemoteSide(self._open)

    def link(self, deadline_s: float = 10.0) -> tuple[str, str]:
        near_address = self.near.address_for(self.far_name)
        answer = self.far.start("connect", self.near_name, near_address, self.same_host, deadline_s)
        ours = self.near.connect(self.far_name, self.far_address, self.same_host, deadline_s)
        return ours, answer()

    def stop_far(self) -> None:
        self.far.signal(signal.SIGSTOP)
        process = psutil.Process(self.far.process.pid)
        # The signal takes a moment to reach a thread that runs on another core.
        while process.status() != psutil.STATUS_STOPPED:
            time.sleep(0.0005)

    def resume_far(self) -> None:
        self.far.signal(signal.SIGCONT)

    def kill_far(self) -> None:
        self.far.kill()

    def replace_far(self) -> None:
        self.far.end()
        self.far = self.make_far()
        self.far_name = f"far-{next(_incarnations)}"
        self.far_address = self.far.address_for(self.near_name)

    def end(self) -> None:
        self.near.close()
        self.far.end()
