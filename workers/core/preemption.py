"""Who gives up his blocks when a stream needs one and the pool has none, and who comes back first.

Pure. Attempts hold blocks in order of arrival. A stream that needs a block takes it from a stream that cannot use its
own at the moment (its reader is slow), or else from the youngest that is younger than itself; the youngest of all
waits. So the oldest always gets on, and nobody is pushed back and forth. Who is away comes back in order of arrival,
and nobody new is admitted before.

Life of a holder: receiving -> running -> leaving -> away -> returning -> running ...; it can end in each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

Key = tuple[str, int]
"""(attempt_id, epoch)."""


class Holding(Enum):
    """What an attempt does with its blocks."""

    RECEIVING = "receiving"
    RUNNING = "running"
    LEAVING = "leaving"
    AWAY = "away"
    RETURNING = "returning"


_STEPS = {
    (Holding.RECEIVING, Holding.RUNNING),
    (Holding.RUNNING, Holding.LEAVING),
    (Holding.LEAVING, Holding.AWAY),
    (Holding.AWAY, Holding.RETURNING),
    (Holding.RETURNING, Holding.RUNNING),
}


@dataclass(slots=True)
class PreemptionOrder:
    """The attempts of one worker that hold blocks, or held some and will again, oldest first."""

    _holders: dict[Key, Holding] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._holders)

    def join(self, key: Key) -> None:
        """A new attempt got its first blocks."""
        assert key not in self._holders, f"{key} is here already"
        self._holders[key] = Holding.RECEIVING

    def leave(self, key: Key) -> None:
        """An attempt has ended; an unknown one is ignored."""
        self._holders.pop(key, None)

    def move(self, key: Key, to: Holding) -> None:
        """An attempt goes on to its next state."""
        at = self._holders[key]
        assert (at, to) in _STEPS, f"{key}: {at.value} -> {to.value}"
        self._holders[key] = to

    def state(self, key: Key) -> Holding | None:
        """Returns what an attempt does, None when it is not here."""
        return self._holders.get(key)

    def victim(self, needy: Key, is_idle: Callable[[Key], bool]) -> Key | None:
        """Returns who leaves for ``needy``; None to wait: somebody is leaving already, or nobody may be asked.

        ``is_idle`` says whether a stream could not decode now even with all blocks of the world.
        """
        order = list(self._holders)
        if any(holding is Holding.LEAVING for holding in self._holders.values()):
            return None
        running = [key for key in reversed(order) if self._holders[key] is Holding.RUNNING and key != needy]
        for key in running:
            if is_idle(key):
                return key
        place = order.index(needy)
        return running[0] if running and order.index(running[0]) > place else None

    def next_return(self, is_idle: Callable[[Key], bool]) -> Key | None:
        """Returns the oldest that is away and could decode, or None."""
        away = (key for key, holding in self._holders.items() if holding is Holding.AWAY)
        return next((key for key in away if not is_idle(key)), None)

    def margin_blocks(self) -> int:
        """Returns how many blocks must stay free when somebody is let in: one for each stream that will soon ask."""
        return sum(holding in (Holding.RUNNING, Holding.RETURNING) for holding in self._holders.values())
