"""One request of a simulated client at its ingress: its machine, the tokens on their way, what the client was given.

Follows ``cluster.ingress.generation`` and ``cluster.ingress.api.answer``: a queue of events between the machine and a
writer, the boundary recorded before the first write, text held back while a token has none of its own.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec import Struct

from cluster.core.attempts import RequestMachine
from cluster.sim.scenario import Ask
from kvstore.core.messages import GenerationSpec, Ticket


class Batch(Struct, frozen=True):
    """Accepted tokens of one frame."""

    first_index: int
    token_ids: tuple[int, ...]


class Ended(Struct, frozen=True):
    """The generation is complete."""


class Restarted(Struct, frozen=True):
    """Every token so far is void."""


class Broken(Struct, frozen=True):
    """The generation ended early: interrupted after the boundary, failed or cancelled."""

    ending: Literal["interrupted", "error", "cancelled"]
    detail: Any


@dataclass(slots=True)
class SimRequest:
    """A running request."""

    ask: Ask
    request_id: str
    spec: GenerationSpec
    machine: RequestMachine
    ingress: str
    """Incarnation of its ingress."""
    credit: int
    ticket: Ticket | None = None
    queue: deque[Batch | Ended | Restarted | Broken] = field(default_factory=deque)
    taken: list[int] = field(default_factory=list)
    """Tokens that the writer has; those past ``num_shown`` wait for their text."""
    num_shown: int = 0
    started: bool = False
    busy: bool = False
    """The writer is at work: a piece is being read or written."""
    told: bool = False
    """The client has its ending, or nobody is there to be told."""

    def num_visible(self) -> int:
        """Returns how many of the taken tokens have all of their text."""
        num = len(self.taken)
        every = self.ask.silent_every
        while every and num and num % every == 0:
            num -= 1
        return num

    def restart(self) -> None:
        """The tokens of the old attempt are void."""
        assert not self.started, f"{self.request_id} was repeated after its first write"
        self.taken.clear()
        self.num_shown = 0
