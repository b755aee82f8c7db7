"""Who may come in: a bound on the requests that one ingress holds, and the closed door of a drain.

A pure state machine. A request holds its place from admission until its books are closed, not until its client has
the answer: what still runs somewhere still counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

RETRY_AFTER_S = 1


@dataclass(frozen=True, slots=True)
class Refused:
    """Not now. ``status`` and ``code`` are those of contract section 4."""

    status: int
    code: str
    why: str
    retry_after_s: int | None = None


@dataclass(slots=True)
class Admission:
    """At most ``limit`` requests at a time, none while draining."""

    limit: int
    draining: bool = False
    num_refused: int = 0
    _inside: set[str] = field(default_factory=set)

    def admit(self, request_id: str) -> Refused | None:
        """Takes a request in (None), or says why not. Modifies: the places taken."""
        assert request_id not in self._inside, f"{request_id} is inside already"
        refused = self._refusal()
        if refused is not None:
            self.num_refused += 1
            return refused
        self._inside.add(request_id)
        return None

    def leave(self, request_id: str) -> None:
        """Gives the place back; unknown ones are ignored."""
        self._inside.discard(request_id)

    def drain(self) -> None:
        """Refuses everything from now on; what is inside finishes."""
        self.draining = True

    def __len__(self) -> int:
        return len(self._inside)

    def check_invariants(self) -> None:
        """Asserts what must hold after every step."""
        assert len(self._inside) <= self.limit, (len(self._inside), self.limit)

    def _refusal(self) -> Refused | None:
        if self.draining:
            return Refused(503, "not_ready", "the server is stopping", RETRY_AFTER_S)
        if len(self._inside) >= self.limit:
            why = f"{len(self._inside)} requests are waiting or running here already"
            return Refused(429, "overloaded", why, RETRY_AFTER_S)
        return None
