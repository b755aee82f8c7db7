"""Leases on the right to publish for an attempt, without comparing clocks of two processes.

Two pure state machines, one per side of a link. The holder (a worker) asks; the granter (an ingress) answers. A lease
exists only as the answer to an ask: it runs from the moment the holder *sent* the ask whose nonce the grant repeats.
The granter counts the same duration, stretched by drift and margin, from the moment it *sent* the grant. That moment
is later than the ask, so the holder always stops first, whatever the delays in between were.

A dispatch message never carries a lease, so an attempt that was dispatched and never granted may publish nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from kvstore.core.messages import LeaseAsk, LeaseGrant

Key = tuple[str, int]
"""(attempt_id, epoch)."""

DRIFT_PPM = 1000
"""How much slower than the granter's the holder's clock may run: 1,000 parts per million."""
MARGIN_NS = 20_000_000
"""Added by the granter for the coarseness of timers."""
OPEN_ASKS_MAX = 16
"""Asks that wait for their grant; the oldest is given up first, its grant would be worth the least."""
ASKS_PER_DURATION = 3
NS_PER_MS = 1_000_000


@dataclass(slots=True)
class _Held:
    """One attempt at its holder."""

    began_ns: int
    until_ns: int | None = None
    """Deadline of the lease; None until the first grant."""
    revoked: bool = False


@dataclass(slots=True)
class LeaseHolder:
    """The worker's side: asks, and knows until when each attempt may publish."""

    duration_ms: int
    _held: dict[Key, _Held] = field(default_factory=dict)
    _open_asks: OrderedDict[int, tuple[int, frozenset[Key]]] = field(default_factory=OrderedDict)
    _next_nonce: int = 1
    _asked_ns: int | None = None

    @property
    def next_ask_ns(self) -> int | None:
        """When to ask again: a third of the duration after the last ask; None before the first."""
        return None if self._asked_ns is None else self._asked_ns + self.duration_ms * NS_PER_MS // ASKS_PER_DURATION

    def begin(self, attempt_id: str, epoch: int, *, now_ns: int) -> None:
        """Takes an attempt on. It may not publish before its first grant. Modifies: the attempts held."""
        self._held.setdefault((attempt_id, epoch), _Held(began_ns=now_ns))

    def end(self, attempt_id: str, epoch: int) -> None:
        """Lets an attempt go; unknown ones are ignored."""
        self._held.pop((attempt_id, epoch), None)

    def ask(self, now_ns: int) -> LeaseAsk:
        """Returns the ask to send *now*, for every attempt that is not revoked. Each nonce is used once."""
        nonce = self._next_nonce
        self._next_nonce += 1
        self._asked_ns = now_ns
        keys = tuple(key for key, held in self._held.items() if not held.revoked)
        self._open_asks[nonce] = (now_ns, frozenset(keys))
        while len(self._open_asks) > OPEN_ASKS_MAX:
            self._open_asks.popitem(last=False)
        return LeaseAsk(nonce=nonce, attempts=keys)

    def on_grant(self, grant: LeaseGrant) -> bool:
        """Takes a grant. Returns False, changing nothing, when its nonce is unknown, given up or used already.

        An attempt that this ask named and the grant leaves out is revoked for good.
        """
        asked = self._open_asks.pop(grant.nonce, None)
        if asked is None:
            return False
        sent_ns, keys = asked
        # The holder never takes more than it is configured for, whatever the granter says.
        until_ns = sent_ns + min(grant.duration_ms, self.duration_ms) * NS_PER_MS
        granted = set(grant.granted)
        for key in keys:
            held = self._held.get(key)
            if held is None:
                continue
            if key in granted:
                held.until_ns = until_ns if held.until_ns is None else max(held.until_ns, until_ns)
            else:
                held.revoked = True
        return True

    def may_publish(self, attempt_id: str, epoch: int, *, now_ns: int) -> bool:
        """True while the attempt is held, granted, not revoked, and its lease has not run out."""
        held = self._held.get((attempt_id, epoch))
        return held is not None and not held.revoked and held.until_ns is not None and now_ns < held.until_ns

    def was_granted(self, attempt_id: str, epoch: int) -> bool:
        """True if the attempt is held and ever had a lease."""
        held = self._held.get((attempt_id, epoch))
        return held is not None and held.until_ns is not None

    def expired(self, now_ns: int) -> list[Key]:
        """Returns attempts that must stop: revoked, run out, or not granted within one duration of their begin."""
        return [key for key, held in self._held.items() if held.revoked or now_ns >= self._stop_ns(held)]

    def __len__(self) -> int:
        return len(self._held)

    def check_invariants(self) -> None:
        """Asserts what must hold after every step."""
        assert len(self._open_asks) <= OPEN_ASKS_MAX, len(self._open_asks)
        assert all(nonce < self._next_nonce for nonce in self._open_asks), self._next_nonce

    def _stop_ns(self, held: _Held) -> int:
        return held.began_ns + self.duration_ms * NS_PER_MS if held.until_ns is None else held.until_ns


@dataclass(slots=True)
class _Granted:
    """One attempt at its granter."""

    heard_ns: int
    """When the holder last asked; before its first ask, when the attempt was dispatched."""
    safe_after_ns: int
    """The holder has stopped by then, if nothing more is granted."""
    revoked: bool = False


@dataclass(slots=True)
class LeaseGranter:
    """The ingress's side of one link: says which attempts may go on, and when a silent one has surely stopped."""

    duration_ms: int
    _attempts: dict[Key, _Granted] = field(default_factory=dict)

    def dispatch(self, attempt_id: str, epoch: int, *, now_ns: int) -> None:
        """Makes an attempt grantable. Without a grant its holder publishes nothing, so it is safe at once."""
        self._attempts.setdefault((attempt_id, epoch), _Granted(heard_ns=now_ns, safe_after_ns=now_ns))

    def on_ask(self, ask: LeaseAsk, now_ns: int) -> LeaseGrant:
        """Returns the grant to send *now*. Unknown, revoked and ended attempts are left out, which revokes them."""
        granted = []
        for key in ask.attempts:
            attempt = self._attempts.get(key)
            if attempt is None or attempt.revoked:
                continue
            attempt.heard_ns = now_ns
            attempt.safe_after_ns = max(attempt.safe_after_ns, now_ns + self.hold_ns)
            granted.append(key)
        return LeaseGrant(nonce=ask.nonce, duration_ms=self.duration_ms, granted=tuple(granted))

    @property
    def hold_ns(self) -> int:
        """How long after a grant its holder may still publish, in the granter's own time."""
        duration_ns = self.duration_ms * NS_PER_MS
        return duration_ns + duration_ns * DRIFT_PPM // 1_000_000 + MARGIN_NS

    def revoke(self, attempt_id: str, epoch: int) -> None:
        """Grants this attempt nothing more. It is fenced by an acknowledged cancel or at ``safe_after_ns``."""
        attempt = self._attempts.get((attempt_id, epoch))
        if attempt is not None:
            attempt.revoked = True

    def lapse(self, now_ns: int) -> list[Key]:
        """Revokes and returns attempts that nobody has asked for during a whole hold: each has surely stopped.

        This finds what no broken link tells of: a stopped process, a path that drops one way, a dispatch or a last
        message that was lost. Each attempt is returned once.
        """
        silent = [
            key
            for key, attempt in self._attempts.items()
            if not attempt.revoked and now_ns >= attempt.heard_ns + self.hold_ns
        ]
        for key in silent:
            self._attempts[key].revoked = True
        return silent

    def end(self, attempt_id: str, epoch: int) -> None:
        """Forgets an attempt that ended, was acknowledged, or whose holder is proved dead."""
        self._attempts.pop((attempt_id, epoch), None)

    def safe_after_ns(self, attempt_id: str, epoch: int) -> int | None:
        """Returns when the holder has provably stopped; None for an attempt that this granter does not know."""
        attempt = self._attempts.get((attempt_id, epoch))
        return attempt.safe_after_ns if attempt is not None else None

    def __len__(self) -> int:
        return len(self._attempts)

    def check_invariants(self) -> None:
        """Asserts what must hold after every step."""
        for key, attempt in self._attempts.items():
            assert attempt.heard_ns <= attempt.safe_after_ns, (key, attempt)
