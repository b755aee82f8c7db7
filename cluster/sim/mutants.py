"""Planted bugs: each replaces one core, or one habit of a driver, by a version with one rule taken out.

They prove that the checkers find something. Product code knows nothing of them: a mutant is a subclass or a changed
``Parts``, and the world is built from it. ``expected`` names checkers of which one must report it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cluster.core import attempt_events as ev
from cluster.core.attempt_events import ROLES, Instruction
from cluster.core.attempts import Attempt, RequestMachine
from cluster.core.journal import Verdict
from cluster.sim.driver_mutants import (
    KeepsLeases,
    NeverAsksForFramesAgain,
)
from cluster.sim.parts import Parts
from cluster.sim.run import Violation, run_scenario
from cluster.sim.scenario import make_scenario
from kvstore.core.block_pool import BlockPool
from kvstore.core.ids import AttemptId
from kvstore.core.lease import LeaseGranter, LeaseHolder
from kvstore.core.messages import LeaseAsk, LeaseGrant


class PublishesWithoutLease(LeaseHolder):
    """A holder that never looks at its deadline."""

    def may_publish(self, attempt_id: str, epoch: int, *, now_ns: int) -> bool:
        return (attempt_id, epoch) in self._held

    def expired(self, now_ns: int) -> list[tuple[str, int]]:
        return [key for key, held in self._held.items() if held.revoked and held.until_ns is None]


class TakesAnyGrant(LeaseHolder):
    """A holder that counts every grant from its latest ask, whichever ask it answers."""

    def on_grant(self, grant: LeaseGrant) -> bool:
        if not self._open_asks and self._next_nonce > 1:
            self._open_asks[self._next_nonce - 1] = (self._asked_ns or 0, frozenset(grant.granted))
        latest = max(self._open_asks, default=None)
        if latest is None:
            return False
        return super().on_grant(LeaseGrant(nonce=latest, duration_ms=grant.duration_ms, granted=grant.granted))


class CountsFromGrant(LeaseGranter):
    """A granter that takes the holder to have stopped as soon as it has revoked."""

    def safe_after_ns(self, attempt_id: str, epoch: int) -> int | None:
        attempt = self._attempts.get((attempt_id, epoch))
        return None if attempt is None or attempt.revoked else attempt.safe_after_ns


class GrantsRevoked(LeaseGranter):
    """A granter that goes on granting what it has revoked."""

    def on_ask(self, ask: LeaseAsk, now_ns: int) -> LeaseGrant:
        for key in ask.attempts:
            if key in self._attempts:
                self._attempts[key].revoked = False
        return super().on_ask(ask, now_ns)


class TakesAnyEpoch(RequestMachine):
    """A ledger that books tokens of any attempt to the current one."""

    def _tokens(self, event: ev.TokensArrived) -> list[Instruction]:
        current = self.current
        if current is not None and not self.is_ended and not self.upstream_done:
            fields = {name: getattr(event, name) for name in event.__struct_fields__}
            event = ev.TokensArrived(**{**fields, "attempt_id": current.attempt_id, "epoch": current.epoch})
        return super()._tokens(event)


class PatchesGaps(RequestMachine):
    """A ledger that takes tokens wherever they start."""

    def _tokens(self, event: ev.TokensArrived) -> list[Instruction]:
        attempt = self._find(event.attempt_id, event.epoch)
        if attempt is not None and event.first_index > attempt.num_received:
            attempt.num_received = event.first_index
        return super()._tokens(event)


class RepeatsDuplicates(RequestMachine):
    """A ledger that delivers tokens again which it has delivered already."""

    def _tokens(self, event: ev.TokensArrived) -> list[Instruction]:
        attempt = self._find(event.attempt_id, event.epoch)
        if attempt is not None and event.first_index < attempt.num_received:
            attempt.num_received = event.first_index
        return super()._tokens(event)


class CancelIsAck(RequestMachine):
    """A ledger that takes a cancel for acknowledged when it is sent."""

    def _fence(self, attempt: Attempt, reason: str) -> list[Instruction]:
        orders = super()._fence(attempt, reason)
        attempt.fenced |= set(ROLES)
        return orders


class RetriesUnfenced(RequestMachine):
    """A ledger that starts the next attempt at once, beside the old one."""

    def _settle(self, now_ns: int) -> list[Instruction]:
        if self._pending_retry and not self.is_ended and len(self.attempts) < self.max_attempts:
            self._pending_retry = False
            return [ev.RouteAgain(())]
        return super()._settle(now_ns)

    def may_run_again(self) -> Verdict:
        verdict = super().may_run_again()
        return Verdict(True, "why wait") if verdict.why == "the current attempt can still publish" else verdict

    def check_invariants(self) -> None:
        """The invariant would tell at once; the checkers must find it alone."""


class ForgetsBudget(RequestMachine):
    """A ledger that spends more attempts than it was given."""

    def may_run_again(self) -> Verdict:
        verdict = super().may_run_again()
        spent = len(self.attempts) >= self.max_attempts + 2
        return verdict if spent or not verdict.why.endswith("attempts are used") else Verdict(True, "once more")

    def check_invariants(self) -> None:
        """See ``RetriesUnfenced``."""


class RetriesDelivered(RequestMachine):
    """A ledger that forgets the boundary when an attempt is lost."""

    def _lose(self, attempt: Attempt, now_ns: int, reason: str, message: str) -> list[Instruction]:
        sent, self.first_delta_sent = self.first_delta_sent, False
        try:
            return super()._lose(attempt, now_ns, reason, message)
        finally:
            self.first_delta_sent = sent

    def _settle(self, now_ns: int) -> list[Instruction]:
        sent, self.first_delta_sent = self.first_delta_sent, False
        try:
            return super()._settle(now_ns)
        finally:
            self.first_delta_sent = sent


class TrustsOldLink(RequestMachine):
    """A ledger that goes on after a lost link as if no frame had died with it."""

    def _link_back(self, event: ev.LinkBack) -> list[Instruction]:
        return [order for order in super()._link_back(event) if not isinstance(order, ev.AskResend)]


class NeverLapses(LeaseGranter):
    """A granter that waits for ever for a holder that has gone silent."""

    def lapse(self, now_ns: int) -> list[tuple[str, int]]:
        return []


class SkipsQuarantine(BlockPool):
    """A pool that gives a slot out again while a transfer may still touch it."""

    def release(
        self,
        attempt_id: AttemptId,
        epoch: int,
        *,
        now_ns: int,
        writer_may_still_write: bool = False,
        reader_may_still_read: bool = False,
    ) -> bool:
        return super().release(attempt_id, epoch, now_ns=now_ns)


def _trusts_digest(_content: bytes, _digest: bytes) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Mutant:
    """One planted bug and the checkers that may report it."""

    parts: Parts
    expected: frozenset[str]
    level: int = 1


def _mutant(expected: str, **changes: Any) -> Mutant:
    return Mutant(replace(Parts(), **changes), frozenset(expected.split()), level=2 if "driver" in changes else 1)


MUTANTS: dict[str, Mutant] = {
    "no_lease_check": _mutant("StoppedBeforeNext OrphansStop", holder=PublishesWithoutLease),
    "grant_nonce_ignored": _mutant("StoppedBeforeNext OrphansStop", holder=TakesAnyGrant),
    "revoke_taken_for_stop": _mutant("StoppedBeforeNext", granter=CountsFromGrant),
    "revoked_granted_again": _mutant("StoppedBeforeNext NothingLeft", granter=GrantsRevoked),
    "no_epoch_check": _mutant("OnePublisher TokenOrder", machine=TakesAnyEpoch),
    "first_delta_after_write": _mutant("RetryOnlyUnsent", mark_before_write=False),
    "index_not_checked": _mutant("TokenOrder HonestEnding", machine=PatchesGaps),
    "duplicates_delivered": _mutant("TokenOrder", machine=RepeatsDuplicates),
    "cancel_taken_for_ack": _mutant("StoppedBeforeNext", machine=CancelIsAck),
    "retry_without_fence": _mutant("StoppedBeforeNext", machine=RetriesUnfenced),
    "retry_after_delivery": _mutant("RetryOnlyUnsent", machine=RetriesDelivered),
    "budget_not_charged": _mutant("RetryOnlyUnsent", machine=ForgetsBudget),
    "quarantine_skipped": _mutant("RightBytes", pool=SkipsQuarantine),
    "digest_skipped": _mutant("RightBytes", verify=_trusts_digest),
    "reservation_never_expires": _mutant("NothingLeft OneEnding", reservations_expire=False),
    "incarnation_reused": _mutant("NothingLeft OneHolder", fresh_incarnations=False),
    "lost_frames_not_asked_for": _mutant("NothingLeft OneEnding", machine=TrustsOldLink),
    "silence_ignored": _mutant("NothingLeft OneEnding", granter=NeverLapses),
    "driver_asks_for_no_frames": _mutant("NothingLeft OneEnding", driver=NeverAsksForFramesAgain),
    "driver_keeps_leases": _mutant("NothingLeft StoppedBeforeNext", driver=KeepsLeases),
}
"""By name; ``kopir sim mutants`` runs them all."""

SEEDS_MAX = 1000
"""Within so many seeds each of them must be caught."""


def hunt(name: str, *, seeds_max: int, first_seed: int = 0) -> Violation | None:
    """Runs seeds until an expected checker reports the planted bug; returns its report, or None."""
    mutant = MUTANTS[name]
    for seed in range(first_seed, first_seed + seeds_max):
        for violation in run_scenario(make_scenario(seed), mutant.parts, level=mutant.level)[0].violations:
            if violation.checker in mutant.expected:
                return violation
    return None
