"""Fixtures of the transport tests: pairs of connected sides over each backend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
from sides import RemoteSide, Side

from kvstore.transport.ucx import UcxTransport

_incarnations = count(1)


@dataclass
class Pair:
    """``near`` lives in the test's process, ``far`` in its own; each knows the other by its incarnation."""

    near: Side
    far: Any
    near_name: str
    far_name: str
    same_host: bool

    def link(self, deadline_s: float = 10.0) -> tuple[str, str]:
        """Connects both sides at the same time; returns what each got."""
        answer = self.far.start("connect", self.near_name, self.near.address(), self.same_host, deadline_s)
        ours = self.near.connect(self.far_name, self._far_address, self.same_host, deadline_s)
        return ours, answer()

    def restart(self) -> None:
        """Replaces the far side by a new process with a new incarnation; the old one must be gone."""
        self.far.end()
        self.far = RemoteSide(UcxTransport)
        self.far_name = f"far-{next(_incarnations)}"
        self.prepare()

    def prepare(self) -> None:
        self._far_address = self.far.address()

    def end(self) -> None:
        self.near.close()
        self.far.end()


def make_ucx_pair(*, same_host: bool) -> Pair:
    number = next(_incarnations)
    pair = Pair(Side(UcxTransport), RemoteSide(UcxTransport), f"near-{number}", f"far-{number}", same_host)
    pair.prepare()
    return pair


@pytest.fixture(params=["same_host", "network"])
def ucx_pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Two linked processes: over shared memory, and over TCP as between hosts."""
    pair = make_ucx_pair(same_host=request.param == "same_host")
    try:
        assert pair.link() == ("ok", "ok")
        yield pair
    finally:
        pair.end()


@pytest.fixture
def same_host_pair() -> Iterator[Pair]:
    pair = make_ucx_pair(same_host=True)
    try:
        assert pair.link() == ("ok", "ok")
        yield pair
    finally:
        pair.end()
