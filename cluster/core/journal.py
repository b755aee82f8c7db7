"""The journal of one request: what happened, and why it was or was not run again.

A bounded list of entries, each a plain mapping that encodes as JSON. Entries that a retry decision rests on are always
kept (their number follows from the number of attempts); the others give way when the list is full. ``replay``
derives from the entries alone every answer to "may this input go to another replica now", so that a journal can be
checked long after its request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec import Struct

from cluster.core.attempt_events import Role, WorkerRef

NOTES_MAX = 192
"""Entries that no decision rests on."""

FencedBy = Literal["finished", "refused", "fault", "cancel_acked", "lease_ran_out", "worker_exited"]


class Verdict(Struct, frozen=True):
    """May the input run again now; ``why`` is for people either way."""

    allowed: bool
    why: str


class Facts(Struct, frozen=True, kw_only=True):
    """All that the question "may this input run again now" depends on."""

    end: str | None
    """How the request ended; None while it runs."""
    first_delta_sent: bool
    is_complete: bool
    """The answer is complete: only writing is left."""
    is_fenced: bool
    """Nothing of the current attempt can be published any more."""
    num_attempts: int
    max_attempts: int
    refused: str | None = None
    """What price, deadline or the shared budget said against another attempt, when they were asked."""


def may_run_again(facts: Facts) -> Verdict:
    """Decides from the facts. The one place where this rule stands; machine and replay both call it."""
    if facts.end is not None:
        return Verdict(False, f"the request is {facts.end}")
    if facts.first_delta_sent:
        return Verdict(False, "a delta was sent to the client")
    if facts.is_complete:
        return Verdict(False, "the answer is complete")
    if not facts.is_fenced:
        return Verdict(False, "the current attempt can still publish")
    if facts.num_attempts >= facts.max_attempts:
        return Verdict(False, f"{facts.num_attempts} of {facts.max_attempts} attempts are used")
    if facts.refused is not None:
        return Verdict(False, facts.refused)
    return Verdict(True, "nothing was sent and the old attempt is fenced")


@dataclass(slots=True)
class Journal:
    """Entries in the order of events; times are nanoseconds since admission."""

    request_id: str
    admitted_ns: int
    entries: list[dict[str, Any]] = field(default_factory=list)
    num_dropped: int = 0
    _num_notes: int = 0

    # --- what decisions rest on -----------------------------------------------------------------------------

    def attempt_started(
        self,
        now_ns: int,
        attempt_id: str,
        epoch: int,
        prefill: WorkerRef,
        decode: WorkerRef,
        *,
        remaining_attempts: int,
        lease_ms: int | None,
        model: str | None,
    ) -> None:
        self._keep(
            now_ns,
            "attempt_started",
            attempt_id=attempt_id,
            epoch=epoch,
            prefill=_worker(prefill),
            decode=_worker(decode),
            remaining_attempts=remaining_attempts,
            lease_ms=lease_ms,
            model=model,
        )

    def dispatched(self, now_ns: int, epoch: int, role: Role) -> None:
        self._keep(now_ns, "dispatched", epoch=epoch, role=role)

    def fenced(self, now_ns: int, epoch: int, role: Role, by: FencedBy) -> None:
        self._keep(now_ns, "fenced", epoch=epoch, role=role, by=by)

    def first_delta(self, now_ns: int, epoch: int) -> None:
        self._keep(now_ns, "first_delta_sent", epoch=epoch)

    def attempt_ended(self, now_ns: int, epoch: int, reason: str, *, is_complete: bool, message: str = "") -> None:
        self._keep(now_ns, "attempt_ended", epoch=epoch, reason=reason, is_complete=is_complete, message=message)

    def asked(self, now_ns: int, epoch: int, *, refused: str | None, reprefill_tokens: int) -> None:
        self._keep(now_ns, "retry_asked", epoch=epoch, refused=refused, reprefill_tokens=reprefill_tokens)

    def decided(self, now_ns: int, epoch: int, verdict: Verdict) -> None:
        self._keep(now_ns, "retry_decision", epoch=epoch, allowed=verdict.allowed, why=verdict.why)

    def ended(self, now_ns: int, end: str, *, reason: str, delivered: int) -> None:
        self._keep(now_ns, "ended", end=end, reason=reason, delivered_output_tokens=delivered)

    def told(self, now_ns: int, *, delivered: int) -> None:
        self._keep(now_ns, "told", delivered_output_tokens=delivered)

    # --- what is told besides ---------------------------------------------------------------------------------

    def phase(self, now_ns: int, phase: str) -> None:
        self._note(now_ns, "phase", phase=phase)

    def cached(self, now_ns: int, epoch: int, cached_tokens: int, by_tier: Mapping[str, int]) -> None:
        self._note(now_ns, "prefill_began", epoch=epoch, cached_tokens=cached_tokens, cached_by_tier=dict(by_tier))

    def spans(self, now_ns: int, epoch: int, spans_ns: Mapping[str, int]) -> None:
        self._note(now_ns, "prefill_ended", epoch=epoch, spans_ns=dict(spans_ns))

    def first_token(self, now_ns: int, epoch: int) -> None:
        self._note(now_ns, "first_token", epoch=epoch)

    def note(self, now_ns: int, what: str, epoch: int, **fields: Any) -> None:
        self._note(now_ns, what, epoch=epoch, **fields)

    def _note(self, now_ns: int, event: str, **fields: Any) -> None:
        if self._num_notes >= NOTES_MAX:
            self.num_dropped += 1
            return
        self._num_notes += 1
        self._keep(now_ns, event, **fields)

    def _keep(self, now_ns: int, event: str, **fields: Any) -> None:
        self.entries.append({"at_ns": now_ns - self.admitted_ns, "event": event, **fields})


@dataclass(frozen=True, slots=True)
class Replayed:
    """What the entries alone say."""

    facts: Facts
    """As they stand after the last entry."""
    decisions: tuple[Verdict, ...]
    """Every retry decision, in order, as it follows from the entries before it."""
    recorded: tuple[Verdict, ...]
    """The same decisions as the ledger took them."""

    @property
    def verdict(self) -> Verdict:
        """May the input run again after the last entry."""
        return may_run_again(self.facts)

    @property
    def is_sufficient(self) -> bool:
        """True when the journal explains every decision that was taken."""
        return self.decisions == self.recorded


def replay(entries: Iterable[Mapping[str, Any]]) -> Replayed:
    """Derives every retry decision from a journal, with no other source."""
    state = _Replay()
    derived: list[Verdict] = []
    recorded: list[Verdict] = []
    for entry in entries:
        if entry["event"] == "retry_decision":
            derived.append(may_run_again(state.facts()))
            recorded.append(Verdict(entry["allowed"], entry["why"]))
        else:
            state.take(entry)
    return Replayed(state.facts(), tuple(derived), tuple(recorded))


@dataclass(slots=True)
class _Replay:
    end: str | None = None
    sent: bool = False
    complete: bool = False
    epoch: int = 0
    max_attempts: int = 1
    dispatched: set[str] = field(default_factory=set)
    fenced: set[str] = field(default_factory=set)
    refused: str | None = None

    def take(self, entry: Mapping[str, Any]) -> None:
        match entry["event"]:
            case "attempt_started":
                self.epoch = entry["epoch"]
                self.max_attempts = self.epoch + entry["remaining_attempts"]
                self.dispatched, self.fenced = set(), set()
                self.refused = None
            case "dispatched" if entry["epoch"] == self.epoch:
                self.dispatched.add(entry["role"])
            case "fenced" if entry["epoch"] == self.epoch:
                self.fenced.add(entry["role"])
            case "retry_asked" if entry["epoch"] == self.epoch:
                self.refused = entry["refused"]
            case "first_delta_sent":
                self.sent = True
            case "attempt_ended" if entry["epoch"] == self.epoch:
                self.complete = self.complete or entry["is_complete"]
            case "ended":
                self.end = entry["end"]

    def facts(self) -> Facts:
        return Facts(
            end=self.end,
            first_delta_sent=self.sent,
            is_complete=self.complete,
            is_fenced=self.dispatched <= self.fenced,
            num_attempts=self.epoch,
            max_attempts=self.max_attempts,
            refused=self.refused,
        )


def _worker(ref: WorkerRef) -> dict[str, Any]:
    return {"worker_id": ref.worker_id, "incarnation": ref.incarnation, "pid": ref.pid, "node": ref.node}
