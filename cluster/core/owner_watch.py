"""Which ingresses are dead, seen from the counters that they leave in the ledger.

Pure. Every life of an ingress counts up a *beat*. A watcher compares beats only with what it has read itself and times
them by its own clock, so that no two machines' clocks are ever compared: a life whose beat has not changed for
``silence_ns`` is dead. The silence is chosen longer than the lease of an attempt, so that nothing of a dead owner can
still be published when it is declared so. A watcher that could not look for a while (its database was away, or it was
stopped itself) has seen nothing in that time, so it starts to wait anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

LOOKS_MIN = 3
"""A silence counts only if it was looked at so often while it lasted."""


@dataclass(frozen=True, slots=True)
class SilentOwner:
    """A life that has shown nothing since ``beat``."""

    owner: str
    beat: int


@dataclass(slots=True)
class OwnerWatch:
    """What one watcher has seen of the others."""

    me: str
    silence_ns: int
    _last_look_ns: int | None = None
    _seen: dict[str, tuple[int, int]] = field(default_factory=dict)
    """owner -> (beat, when it was first read)."""

    def observe(self, beats: Iterable[tuple[str, int]], *, now_ns: int) -> list[SilentOwner]:
        """Takes all (owner, beat) rows as read at ``now_ns``; returns those that have been silent too long.

        Modifies: what was seen. A watcher never declares itself.
        """
        rows = {owner: beat for owner, beat in beats if owner != self.me}
        was_blind = self._last_look_ns is None or now_ns - self._last_look_ns > self.silence_ns // LOOKS_MIN
        self._last_look_ns = now_ns
        self._seen = {} if was_blind else {owner: seen for owner, seen in self._seen.items() if owner in rows}
        silent: list[SilentOwner] = []
        for owner, beat in rows.items():
            last = self._seen.get(owner)
            if last is None or last[0] != beat:
                self._seen[owner] = (beat, now_ns)
            elif now_ns - last[1] >= self.silence_ns:
                silent.append(SilentOwner(owner, beat))
        return silent
