"""Planted bugs of the request driver, for level 2: each overrides a method of ``SimBackend`` and leaves a rule out."""

from __future__ import annotations

from cluster.core import attempt_events as ev
from cluster.ingress.generation import RunningRequest
from cluster.sim.driver import SimBackend


class NeverAsksForFramesAgain(SimBackend):
    """A link that is back goes on where it was, whatever died with the old one."""

    def ask_resend(self, generation: RunningRequest, order: ev.AskResend) -> None:
        return


class KeepsLeases(SimBackend):
    """Closes the books of a request and leaves its leases to be renewed."""

    def closed(self, generation: RunningRequest, order: ev.Close) -> None:
        kept = {life: dict(granter.core._attempts) for life, granter in self._relay._granters.items()}
        super().closed(generation, order)
        for life, attempts in kept.items():
            if life in self._relay._granters:
                self._relay._granters[life].core._attempts.update(attempts)
