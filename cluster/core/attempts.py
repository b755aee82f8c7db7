"""The attempt ledger: one state machine per request, which decides what may run, be delivered and be repeated.

Pure: events in, instructions out. It holds the journal of its request (see ``cluster.core.journal``).

The rules it keeps:

* The boundary is delivery. ``FirstDelta`` comes before the first write; after it nothing is ever run again.
* A side of an attempt is *fenced* when its process is proved dead, it acknowledged a cancel, it reported its own
  fault or its last token, or its lease was revoked and has surely run out. A sent cancel fences nothing.
* Another attempt starts only when both sides of the old one are fenced, with a new epoch.
* Tokens of any attempt but the current one are dropped and counted. A gap is a fault of the worker, never patched.
* Each request ends exactly once: finished, failed, interrupted or cancelled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from cluster.core import attempt_events as ev
from cluster.core.attempt_events import ROLES, Instruction, Role, WorkerRef
from cluster.core.journal import Facts, FencedBy, Journal, Verdict, may_run_again


class Phase(Enum):
    """States of contract section 6."""

    ADMITTED = "admitted"
    ROUTED = "routed"
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    HANDING_OFF = "handing_off"
    DECODING = "decoding"
    DELIVERING = "delivering"
    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    CANCELLED = "cancelled"


ENDS = frozenset({Phase.FINISHED, Phase.FAILED, Phase.INTERRUPTED, Phase.CANCELLED})

_INTERRUPT_REASONS: dict[str, ev.InterruptReason] = {
    "worker_exited": "worker_exited",
    "network_cut": "network_cut",
    "lease_expired": "lease_expired",
    "deadline": "deadline",
    "shutdown": "shutdown",
}
"""Every other fault is told to the client as ``engine_fault``."""

_SILENCE = frozenset({"network_cut", "lease_expired"})


class Budget(Protocol):
    """Who may say no to another attempt although the request itself would allow it."""

    def take(self, now_ns: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class RetryTerms:
    """What another attempt of a request may cost."""

    num_prompt_tokens: int = 0
    max_reprefill_tokens: int | None = None
    """Prompt tokens that it may compute; None for no limit."""
    deadline_ns: int | None = None
    budget: Budget | None = None
    """Shared by all requests; None for no bound."""


@dataclass(slots=True)
class Attempt:
    """One run on one pair of workers."""

    attempt_id: str
    epoch: int
    workers: dict[Role, WorkerRef]
    started_ns: int
    dispatched: set[Role] = field(default_factory=set)
    """Sides that were sent work; the others hold nothing and need no fence."""
    fenced: set[Role] = field(default_factory=set)
    cancelled: set[Role] = field(default_factory=set)
    lost_link: set[Role] = field(default_factory=set)
    blamed: set[Role] = field(default_factory=set)
    """Sides that failed, or may have: the next attempt goes elsewhere if it can."""
    silent: set[Role] = field(default_factory=set)
    """Sides that did not hear the ingress, or were not heard, within a lease."""
    num_cached: int = 0
    """Prompt tokens that prefill found in the store."""
    first_token_ns: int | None = None
    num_received: int = 0
    """Tokens [0, num_received) were accepted."""
    num_generated: int = 0
    """Tokens that decode is known to have made."""
    handed_off: bool = False
    ended_ns: int | None = None
    end_reason: str | None = None

    @property
    def is_fenced(self) -> bool:
        """True when nothing of this attempt can be published any more."""
        return self.dispatched <= self.fenced


@dataclass(slots=True)
class RequestMachine:
    """One logical request from admission to the close of its books."""

    request_id: str
    stream: bool
    max_attempts: int
    admitted_ns: int
    lease_ms: int | None = field(default=None, kw_only=True)
    model: str | None = field(default=None, kw_only=True)
    """Revision with digest, for the journal."""
    told_by_event: bool = field(default=False, kw_only=True)
    """True: books stay open until ``Completed`` or ``AnswerEnded``, so that a write under way is still counted."""
    terms: RetryTerms = field(default_factory=RetryTerms, kw_only=True)
    journal: Journal = field(init=False)
    phase: Phase = Phase.ADMITTED
    attempts: list[Attempt] = field(default_factory=list)
    first_delta_sent: bool = False
    num_delivered: int = 0
    upstream_done: bool = False
    """The last token arrived, or a stop string matched: only the end of the answer is still to be written."""
    closed: bool = False
    _told: bool = False
    _pending_retry: bool = False
    _failure: tuple[str, str] = ("engine_fault", "")
    _discard_reason: str = "none"

    def __post_init__(self) -> None:
        self.journal = Journal(self.request_id, self.admitted_ns)

    # --- the one entry ------------------------------------------------------------------------------------

    def step(self, event: ev.AnyEvent) -> list[Instruction]:
        """Takes one event; returns what the driver must do, in order. Modifies: the machine and its journal."""
        before = self.phase
        out: list[Instruction] = getattr(self, _HANDLERS[type(event)])(event)
        if self.phase is not before:
            self.journal.phase(event.now_ns, self.phase.value)
        out += self._settle(event.now_ns)
        return out

    @property
    def current(self) -> Attempt | None:
        """The attempt whose tokens are accepted; None before the first."""
        return self.attempts[-1] if self.attempts else None

    @property
    def is_ended(self) -> bool:
        return self.phase in ENDS

    @property
    def is_fenced(self) -> bool:
        """True when nothing of any attempt can be published any more."""
        return all(attempt.is_fenced for attempt in self.attempts)

    def may_run_again(self) -> Verdict:
        """Answers the one question of an outage: may this input go to another replica now, and if not, why."""
        return may_run_again(
            Facts(
                end=self.phase.value if self.is_ended else None,
                first_delta_sent=self.first_delta_sent,
                is_complete=self.upstream_done,
                is_fenced=self.current is None or self.current.is_fenced,
                num_attempts=len(self.attempts),
                max_attempts=self.max_attempts,
            )
        )

    def check_invariants(self) -> None:
        """Asserts what must hold after every step."""
        epochs = [attempt.epoch for attempt in self.attempts]
        assert epochs == list(range(1, len(epochs) + 1)), epochs
        assert len(epochs) <= self.max_attempts, (epochs, self.max_attempts)
        for attempt in self.attempts[:-1]:
            assert attempt.is_fenced, f"epoch {attempt.epoch} could publish beside a later one"
        received = self.current.num_received if self.current else 0
        assert self.num_delivered <= received, (self.num_delivered, received)
        assert self.num_delivered == 0 or self.first_delta_sent, "delivered before the boundary was recorded"
        assert not self.closed or self.is_ended, self.phase

    # --- start of an attempt --------------------------------------------------------------------------------

    def _routed(self, event: ev.Routed) -> list[Instruction]:
        if self.is_ended:
            return []
        verdict = self.may_run_again()
        assert verdict.allowed, f"routed although {verdict.why}"
        attempt = Attempt(
            event.attempt_id,
            len(self.attempts) + 1,
            {"prefill": event.prefill, "decode": event.decode},
            event.now_ns,
        )
        self.attempts.append(attempt)
        self._pending_retry = False
        self.phase = Phase.RESERVING
        self.journal.attempt_started(
            event.now_ns,
            attempt.attempt_id,
            attempt.epoch,
            event.prefill,
            event.decode,
            remaining_attempts=self.max_attempts - attempt.epoch,
            lease_ms=self.lease_ms,
            model=self.model,
        )
        self._dispatch(attempt, "decode", event.now_ns)
        return [ev.SendReserve(attempt.attempt_id, attempt.epoch)]

    def _no_route(self, event: ev.NoRoute) -> list[Instruction]:
        if self.is_ended:
            return []
        return self._fail(event.now_ns, 503, "no_capacity", event.message, retryable=True)

    def _reserved(self, event: ev.BlocksReserved) -> list[Instruction]:
        attempt = self._current_live(event.attempt_id, event.epoch)
        if attempt is None or self.phase is not Phase.RESERVING:
            return []
        if "prefill" in attempt.fenced:
            worker = attempt.workers["prefill"].worker_id
            return self._lose(attempt, event.now_ns, "worker_exited", f"{worker} exited before it was asked")
        self._dispatch(attempt, "prefill", event.now_ns)
        self.phase = Phase.PREFILLING
        return [ev.SendPrefill(attempt.attempt_id, attempt.epoch)]

    def _refused(self, event: ev.WorkerRefused) -> list[Instruction]:
        attempt = self._find(event.attempt_id, event.epoch)
        if attempt is None or event.code == "duplicate":
            # A worker that has seen the attempt before may still run it: this says nothing about the first copy.
            return []
        self._set_fenced(attempt, event.role, event.now_ns, "refused")
        reason = f"{event.role} refused: {event.code}: {event.message}"
        return self._lose_side(attempt, event.role, event.now_ns, event.code, reason)

    def _prefill_began(self, event: ev.PrefillBegan) -> list[Instruction]:
        attempt = self._current_live(event.attempt_id, event.epoch)
        if attempt is not None:
            attempt.num_cached = event.cached_tokens
            self.journal.cached(event.now_ns, event.epoch, event.cached_tokens, event.cached_by_tier)
        return []

    def _prefill_ended(self, event: ev.PrefillEnded) -> list[Instruction]:
        attempt = self._find(event.attempt_id, event.epoch)
        if attempt is None:
            return []
        # Prefill is done with this attempt: there is nothing of it left to fence.
        self._set_fenced(attempt, "prefill", event.now_ns, "finished")
        attempt.handed_off = True
        self.journal.spans(event.now_ns, event.epoch, event.spans_ns)
        if self.phase is Phase.PREFILLING:
            self.phase = Phase.HANDING_OFF
        return []

    # --- tokens and delivery --------------------------------------------------------------------------------

    def _tokens(self, event: ev.TokensArrived) -> list[Instruction]:
        attempt = self._find(event.attempt_id, event.epoch)
        stop_index = event.first_index + event.num_tokens
        if attempt is not None:
            attempt.num_generated = max(attempt.num_generated, stop_index)
        if attempt is not None and attempt is self.current and (self.is_ended or self.upstream_done):
            return [ev.DropTokens(event.num_tokens, "not_wanted")]
        if attempt is None or attempt is not self.current or "decode" in (attempt.cancelled | attempt.fenced):
            return [ev.DropTokens(event.num_tokens, "stale_attempt")]
        if event.first_index > attempt.num_received:
            why = f"index {event.first_index} after {attempt.num_received} tokens"
            drop = ev.DropTokens(event.num_tokens, "gap")
            return [drop, *self._lose(attempt, event.now_ns, "engine_fault", why)]
        skip = min(attempt.num_received - event.first_index, event.num_tokens)
        fresh = event.num_tokens - skip
        out: list[Instruction] = [ev.DropTokens(skip, "duplicate")] if skip else []
        if attempt.num_received == 0:
            attempt.first_token_ns = event.now_ns
            self.journal.first_token(event.now_ns, attempt.epoch)
            self.phase = Phase.DELIVERING if self.first_delta_sent else Phase.DECODING
        attempt.num_received += fresh
        attempt.handed_off = True
        if event.end is not None:
            self.upstream_done = True
            self._end_attempt(attempt, event.now_ns, event.end)
            self._set_fenced(attempt, "decode", event.now_ns, "finished")
        if fresh or event.end is not None:
            out.append(ev.Deliver(skip, fresh, event.end))
        return out

    def _first_delta(self, event: ev.FirstDelta) -> list[Instruction]:
        assert self.current is not None and not self.is_ended, self.phase
        assert self.current.num_received > 0, f"epoch {self.current.epoch} has no token to send"
        self.first_delta_sent = True
        self.journal.first_delta(event.now_ns, self.current.epoch)
        self.phase = Phase.DELIVERING
        if not self._pending_retry:
            return []
        # The attempt was lost while its last tokens waited here; now that one goes out, it is too late to repeat.
        self._pending_retry = False
        reason, message = self._failure
        told = _INTERRUPT_REASONS.get(reason, "engine_fault")
        return [self._interrupted(event.now_ns, told, message)]

    def _interrupted(self, now_ns: int, reason: ev.InterruptReason, message: str) -> ev.Interrupt:
        assert self.current is not None
        self.phase = Phase.INTERRUPTED
        self._discard_reason = "interrupted"
        self.journal.ended(now_ns, "interrupted", reason=reason, delivered=self.num_delivered)
        return ev.Interrupt(reason, self.current.attempt_id, message)

    def _delivered(self, event: ev.Delivered) -> list[Instruction]:
        self.num_delivered = max(self.num_delivered, event.num_tokens)
        return []

    def _stop_matched(self, event: ev.StopMatched) -> list[Instruction]:
        if self.is_ended or self.upstream_done or self.current is None:
            return []
        self.upstream_done = True
        self._discard_reason = "stop_string"
        self._end_attempt(self.current, event.now_ns, "stop_string")
        return self._fence(self.current, "stop_string")

    def _completed(self, event: ev.Completed) -> list[Instruction]:
        if not self.is_ended:
            assert self.upstream_done, "completed without an end"
            assert self.current is not None, "completed without an attempt"
            self.phase = Phase.FINISHED
            self._told = True
            self._discard_reason = event.rest or self._discard_reason
            reason = self.current.end_reason or ""
            self.journal.ended(event.now_ns, "finished", reason=reason, delivered=self.num_delivered)
        return []

    def _answer_ended(self, event: ev.AnswerEnded) -> list[Instruction]:
        assert self.is_ended, f"the answer ended while the request is {self.phase.value}"
        if not self._told:
            self._told = True
            self.journal.told(event.now_ns, delivered=self.num_delivered)
        return []

    # --- losses ---------------------------------------------------------------------------------------------

    def _worker_gone(self, event: ev.WorkerGone) -> list[Instruction]:
        out: list[Instruction] = []
        for attempt in self.attempts:
            for role in ROLES:
                if attempt.workers[role].incarnation == event.incarnation:
                    self._set_fenced(attempt, role, event.now_ns, "worker_exited")
                    worker = attempt.workers[role].worker_id
                    out += self._lose_side(attempt, role, event.now_ns, "worker_exited", f"{worker} exited")
        return out

    def _link_lost(self, event: ev.LinkLost) -> list[Instruction]:
        attempt = self.current
        if attempt is None or self.is_ended or self.upstream_done:
            return []
        out: list[Instruction] = []
        for role in ROLES:
            if attempt.workers[role].incarnation == event.incarnation and self._needs(attempt, role):
                attempt.lost_link.add(role)
                self.journal.note(event.now_ns, "link_lost", attempt.epoch, role=role)
                out.append(ev.WaitForFence(attempt.attempt_id, attempt.epoch, role))
        return out

    def _link_back(self, event: ev.LinkBack) -> list[Instruction]:
        out: list[Instruction] = []
        for attempt in self.attempts:
            for role in ROLES:
                if attempt.workers[role].incarnation != event.incarnation:
                    continue
                attempt.lost_link.discard(role)
                is_combined = attempt.workers["prefill"] == attempt.workers["decode"]
                if role == "prefill" and is_combined and self._needs(attempt, role) and role not in attempt.cancelled:
                    # The order may have died with the link, and the lease that its decode side renews would hide that.
                    # A worker that has heard it refuses the second one as a duplicate.
                    out.append(ev.SendPrefill(attempt.attempt_id, attempt.epoch))
                if role == "decode" and self._needs(attempt, role) and role not in attempt.cancelled:
                    out.append(ev.AskResend(attempt.attempt_id, attempt.epoch, attempt.num_received))
                # A cancel that was sent into a dead connection is not a cancel that was heard.
                if role in attempt.cancelled and role not in attempt.fenced:
                    out.append(ev.SendCancel(attempt.attempt_id, attempt.epoch, role, "repeated"))
        return out

    def _faulted(self, event: ev.AttemptFaulted) -> list[Instruction]:
        attempt = self._find(event.attempt_id, event.epoch)
        if attempt is None:
            return []
        self._set_fenced(attempt, event.role, event.now_ns, "fault")
        return self._lose_side(attempt, event.role, event.now_ns, event.reason, f"{event.role}: {event.message}")

    def _cancel_acked(self, event: ev.CancelAcked) -> list[Instruction]:
        attempt = self._find(event.attempt_id, event.epoch)
        if attempt is None:
            return []
        attempt.num_generated = max(attempt.num_generated, event.num_generated)
        self._set_fenced(attempt, event.role, event.now_ns, "cancel_acked")
        return []

    def _timer(self, event: ev.TimerFired) -> list[Instruction]:
        attempt = self._find(event.attempt_id, event.epoch)
        if attempt is None or event.role in attempt.fenced:
            return []
        if event.role in attempt.cancelled:
            self._set_fenced(attempt, event.role, event.now_ns, "lease_ran_out")
            return []
        if event.role not in attempt.lost_link:
            return []
        return self._lapse(attempt, event.role, event.now_ns, "network_cut")

    def _lease_lapsed(self, event: ev.LeaseLapsed) -> list[Instruction]:
        attempt = self._find(event.attempt_id, event.epoch)
        if attempt is None or event.role in attempt.fenced or event.role not in attempt.dispatched:
            return []
        reason = "network_cut" if event.role in attempt.lost_link else "lease_expired"
        return self._lapse(attempt, event.role, event.now_ns, reason)

    def _lapse(self, attempt: Attempt, role: Role, now_ns: int, reason: str) -> list[Instruction]:
        """The lease of a side has run out unrenewed. It is revoked first, so that no late ask renews it."""
        out: list[Instruction] = []
        if role not in attempt.cancelled:
            attempt.cancelled.add(role)
            out.append(ev.SendCancel(attempt.attempt_id, attempt.epoch, role, reason))
        self._set_fenced(attempt, role, now_ns, "lease_ran_out")
        message = f"no sign of life of {attempt.workers[role].worker_id} within its lease"
        return [*out, *self._lose_side(attempt, role, now_ns, reason, message)]

    def _lose_side(self, attempt: Attempt, role: Role, now_ns: int, reason: str, message: str) -> list[Instruction]:
        """A side is over. That ends the attempt unless the side had nothing left to do for it."""
        # A transfer has two ends, and the one that tells of its failure need not be the one that failed.
        attempt.blamed.update(ROLES if reason == "transfer_failed" else (role,))
        if reason in _SILENCE:
            attempt.silent.add(role)
        return self._lose(attempt, now_ns, reason, message) if self._needs(attempt, role) else []

    def _lose(self, attempt: Attempt, now_ns: int, reason: str, message: str) -> list[Instruction]:
        """The attempt will not complete. Stops what is left of it; ends or repeats the request when it may."""
        if attempt.end_reason is not None or attempt is not self.current or self.is_ended or self.upstream_done:
            return []
        self._end_attempt(attempt, now_ns, reason, message=message)
        out = self._fence(attempt, reason)
        if self.first_delta_sent:
            told = _INTERRUPT_REASONS.get(reason, "engine_fault")
            return [*out, self._interrupted(now_ns, told, message)]
        self._pending_retry = True
        self._failure = (reason, message)
        return out

    # --- ends -----------------------------------------------------------------------------------------------

    def _client_gone(self, event: ev.ClientGone) -> list[Instruction]:
        if self.is_ended:
            return []
        self.phase = Phase.CANCELLED
        self._pending_retry = False
        self._discard_reason = event.reason
        out = self._stop(event.now_ns, event.reason)
        self.journal.ended(event.now_ns, "cancelled", reason=event.reason, delivered=self.num_delivered)
        return out

    def _deadline(self, event: ev.DeadlineReached) -> list[Instruction]:
        return self._cut(event.now_ns, "deadline", 504, "deadline_exceeded", "the request's deadline has passed")

    def _drained(self, event: ev.DrainEnded) -> list[Instruction]:
        return self._cut(event.now_ns, "shutdown", 503, "not_ready", "the server is stopping")

    def _cut(self, now_ns: int, reason: ev.InterruptReason, status: int, code: str, message: str) -> list[Instruction]:
        if self.is_ended or self.upstream_done:
            return []
        out = self._stop(now_ns, reason)
        if not self.first_delta_sent:
            return [*out, *self._fail(now_ns, status, code, message, retryable=False)]
        return [*out, self._interrupted(now_ns, reason, message)]

    def _fail(self, now_ns: int, status: int, code: str, message: str, *, retryable: bool) -> list[Instruction]:
        self.phase = Phase.FAILED
        self._discard_reason = "failed"
        self._pending_retry = False
        self.journal.ended(now_ns, "failed", reason=code, delivered=0)
        return [ev.Fail(status, code, message, retryable)]

    def _settle(self, now_ns: int) -> list[Instruction]:
        """Does what had to wait for a fence: repeat or fail the request, close the books."""
        out: list[Instruction] = []
        if self._pending_retry and self.current is not None and self.current.is_fenced and not self.is_ended:
            verdict = self._ask_to_repeat(self.current, now_ns)
            self.journal.decided(now_ns, self.current.epoch, verdict)
            self._pending_retry = False
            if verdict.allowed:
                self.phase = Phase.ROUTED
                self.journal.phase(now_ns, self.phase.value)
                failed_on = {a.workers[role].incarnation for a in self.attempts for role in a.blamed}
                silent = {a.workers[role].node for a in self.attempts for role in a.silent}
                out.append(ev.RouteAgain(tuple(sorted(failed_on)), tuple(sorted(silent))))
            else:
                status, code, retryable = _http_failure(self._failure[0])
                out += self._fail(now_ns, status, code, self._failure[1], retryable=retryable)
                self.journal.phase(now_ns, self.phase.value)
        told = self._told or not self.told_by_event
        if self.is_ended and told and not self.closed and self.is_fenced:
            self.closed = True
            generated = sum(attempt.num_generated for attempt in self.attempts)
            out.append(ev.Close(generated, self.num_delivered, self._discard_reason))
        return out

    def _ask_to_repeat(self, lost: Attempt, now_ns: int) -> Verdict:
        """Decides on another attempt; what lies outside of this request is asked last and written down first."""
        verdict = self.may_run_again()
        if not verdict.allowed:
            return verdict
        # What a prefill has handed over is in the store, whatever became of its decode.
        reprefill_tokens = 0 if lost.handed_off else max(0, self.terms.num_prompt_tokens - lost.num_cached)
        refused = self._refusal(lost, reprefill_tokens, now_ns)
        self.journal.asked(now_ns, lost.epoch, refused=refused, reprefill_tokens=reprefill_tokens)
        if refused is None:
            return verdict
        self._failure = (self._failure[0], f"{self._failure[1]}; not repeated: {refused}")
        return Verdict(False, refused)

    def _refusal(self, lost: Attempt, reprefill_tokens: int, now_ns: int) -> str | None:
        terms = self.terms
        if terms.max_reprefill_tokens is not None and reprefill_tokens > terms.max_reprefill_tokens:
            return f"it would compute {reprefill_tokens} prompt tokens, the limit is {terms.max_reprefill_tokens}"
        if terms.deadline_ns is not None:
            # As far as is known: the time that the lost attempt took to its first token.
            needed_ns = lost.first_token_ns - lost.started_ns if lost.first_token_ns is not None else 0
            if now_ns + needed_ns >= terms.deadline_ns:
                self._failure = ("deadline", self._failure[1])
                return "the request's deadline is too near"
        if terms.budget is not None and not terms.budget.take(now_ns):
            return "the retry budget of all requests is spent"
        return None

    # --- helpers --------------------------------------------------------------------------------------------

    def _find(self, attempt_id: str, epoch: int) -> Attempt | None:
        for attempt in self.attempts:
            if (attempt.attempt_id, attempt.epoch) == (attempt_id, epoch):
                return attempt
        return None

    def _current_live(self, attempt_id: str, epoch: int) -> Attempt | None:
        attempt = self._find(attempt_id, epoch)
        return attempt if attempt is self.current and not self.is_ended else None

    def _needs(self, attempt: Attempt, role: Role) -> bool:
        """True while the loss of this side would lose the attempt."""
        if self.is_ended or self.upstream_done or role not in attempt.dispatched or attempt is not self.current:
            return False
        return role == "decode" or not attempt.handed_off

    def _stop(self, now_ns: int, reason: str) -> list[Instruction]:
        """The request ends before its attempt does."""
        if self.current is None:
            return []
        self._end_attempt(self.current, now_ns, reason)
        return self._fence(self.current, reason)

    def _end_attempt(self, attempt: Attempt, now_ns: int, reason: str, *, message: str = "") -> None:
        if attempt.end_reason is None:
            attempt.ended_ns, attempt.end_reason = now_ns, reason
            self.journal.attempt_ended(now_ns, attempt.epoch, reason, is_complete=self.upstream_done, message=message)

    def _dispatch(self, attempt: Attempt, role: Role, now_ns: int) -> None:
        attempt.dispatched.add(role)
        self.journal.dispatched(now_ns, attempt.epoch, role)

    def _set_fenced(self, attempt: Attempt, role: Role, now_ns: int, by: FencedBy) -> None:
        """Nothing of this side can be published any more. Modifies: the attempt and the journal."""
        if role not in attempt.fenced:
            attempt.fenced.add(role)
            if role in attempt.dispatched:
                self.journal.fenced(now_ns, attempt.epoch, role, by)

    def _fence(self, attempt: Attempt, reason: str) -> list[Instruction]:
        """Cancels every side that may still run; each counts as alive until it is fenced."""
        out: list[Instruction] = []
        for role in ROLES:
            if role in attempt.dispatched and role not in attempt.fenced and role not in attempt.cancelled:
                attempt.cancelled.add(role)
                out.append(ev.SendCancel(attempt.attempt_id, attempt.epoch, role, reason))
                out.append(ev.WaitForFence(attempt.attempt_id, attempt.epoch, role))
        return out


def _http_failure(reason: str) -> tuple[int, str, bool]:
    """Returns (status, code, may the client try again by itself) of a request that failed before its first delta."""
    match reason:
        case "never_fits":
            return 400, "context_length_exceeded", False
        case "no_capacity" | "draining":
            return 503, "no_capacity", True
        case "deadline":
            return 504, "deadline_exceeded", False
        case _:
            return 502, "upstream_failed", False


_HANDLERS: dict[type[ev.Event], str] = {
    ev.Routed: "_routed",
    ev.NoRoute: "_no_route",
    ev.BlocksReserved: "_reserved",
    ev.WorkerRefused: "_refused",
    ev.PrefillBegan: "_prefill_began",
    ev.PrefillEnded: "_prefill_ended",
    ev.TokensArrived: "_tokens",
    ev.FirstDelta: "_first_delta",
    ev.Delivered: "_delivered",
    ev.StopMatched: "_stop_matched",
    ev.Completed: "_completed",
    ev.AnswerEnded: "_answer_ended",
    ev.WorkerGone: "_worker_gone",
    ev.LinkLost: "_link_lost",
    ev.LinkBack: "_link_back",
    ev.AttemptFaulted: "_faulted",
    ev.CancelAcked: "_cancel_acked",
    ev.TimerFired: "_timer",
    ev.LeaseLapsed: "_lease_lapsed",
    ev.ClientGone: "_client_gone",
    ev.DeadlineReached: "_deadline",
    ev.DrainEnded: "_drained",
}
"""By name, so that a subclass replaces a handler by overriding it."""
