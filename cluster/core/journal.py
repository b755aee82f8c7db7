"""The journal of one request: what happened, and why it was or was not run again.

A bounded list of entries, each a plain mapping that encodes as JSON. ``replay`` derives from the entries alone every
answer to "may this input go to another replica now", so that a journal can be checked long after its request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.core.attempt_events import WorkerRef

ENTRIES_MAX = 256


@dataclass(frozen=True, slots=True)
class Verdict:
    """May the input run again now; ``why`` is for people either way."""

    allowed: bool
    why: str


@dataclass(slots=True)
class Journal:
    """Entries in the order of events; times are nanoseconds since admission."""

    request_id: str
    admitted_ns: int
    entries: list[dict[str, Any]] = field(default_factory=list)
    num_dropped: int = 0

    def phase(self, now_ns: int, phase: str) -> None:
        self._add(now_ns, "phase", phase=phase)

    def attempt_started(self, now_ns: int, attempt_id: str, epoch: int, prefill: WorkerRef, decode: WorkerRef) -> None:
        self._add(
            now_ns,
            "attempt_started",
            attempt_id=attempt_id,
            epoch=epoch,
            prefill=_worker(prefill),
            decode=_worker(decode),
        )

    def cached(self, now_ns: int, epoch: int, cached_tokens: int, by_tier: Mapping[str, int]) -> None:
        self._add(now_ns, "prefill_began", epoch=epoch, cached_tokens=cached_tokens, cached_by_tier=dict(by_tier))

    def spans(self, now_ns: int, epoch: int, spans_ns: Mapping[str, int]) -> None:
        self._add(now_ns, "prefill_ended", epoch=epoch, spans_ns=dict(spans_ns))

    def first_token(self, now_ns: int, epoch: int) -> None:
        self._add(now_ns, "first_token", epoch=epoch)

    def first_delta(self, now_ns: int, epoch: int) -> None:
        self._add(now_ns, "first_delta_sent", epoch=epoch)

    def attempt_ended(self, now_ns: int, epoch: int, reason: str, message: str = "") -> None:
        self._add(now_ns, "attempt_ended", epoch=epoch, reason=reason, message=message)

    def decided(self, now_ns: int, epoch: int, verdict: Verdict) -> None:
        self._add(now_ns, "retry_decision", epoch=epoch, allowed=verdict.allowed, why=verdict.why)

    def ended(self, now_ns: int, end: str, *, reason: str, delivered: int) -> None:
        self._add(now_ns, "ended", end=end, reason=reason, delivered_output_tokens=delivered)

    def note(self, now_ns: int, what: str, epoch: int, **fields: Any) -> None:
        self._add(now_ns, what, epoch=epoch, **fields)

    def _add(self, now_ns: int, event: str, **fields: Any) -> None:
        if len(self.entries) >= ENTRIES_MAX:
            self.num_dropped += 1
            return
        self.entries.append({"at_ns": now_ns - self.admitted_ns, "event": event, **fields})


@dataclass(frozen=True, slots=True)
class Replayed:
    """What the entries alone say."""

    first_delta_sent: bool
    num_attempts: int
    decisions: tuple[bool, ...]
    """Every retry decision, in order, as it follows from the entries before it."""


def replay(entries: Iterable[Mapping[str, Any]], *, max_attempts: int) -> Replayed:
    """Derives every retry decision from a journal. Equal to the recorded ones, or the journal is not sufficient."""
    sent = ended = False
    num_attempts = 0
    decisions: list[bool] = []
    for entry in entries:
        match entry["event"]:
            case "attempt_started":
                num_attempts += 1
            case "first_delta_sent":
                sent = True
            case "ended":
                ended = True
            case "retry_decision":
                # An entry is written only once the old attempt is fenced.
                decisions.append(not sent and not ended and num_attempts < max_attempts)
    return Replayed(sent, num_attempts, tuple(decisions))


def _worker(ref: WorkerRef) -> dict[str, Any]:
    return {"worker_id": ref.worker_id, "incarnation": ref.incarnation, "pid": ref.pid, "node": ref.node}
