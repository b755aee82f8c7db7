"""Who waits for blocks at a worker: a bounded first-come line that never starves its head.

A pure structure. An entry leaves when it is admitted, cancelled or its deadline has passed. The head is not
overtaken: a request that needs many blocks would otherwise wait for ever behind small ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Entry = TypeVar("Entry")
Key = tuple[str, int]


@dataclass(slots=True)
class WaitingLine(Generic[Entry]):
    """At most ``limit`` entries, by (attempt_id, epoch)."""

    limit: int
    _entries: OrderedDict[Key, tuple[Entry, int]] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def join(self, key: Key, entry: Entry, *, deadline_ns: int) -> bool:
        """Adds an entry at the end. Returns False when the line is full."""
        assert key not in self._entries, f"{key} waits already"
        if len(self._entries) >= self.limit:
            return False
        self._entries[key] = (entry, deadline_ns)
        return True

    def leave(self, key: Key) -> Entry | None:
        """Takes an entry out wherever it stands; the exact key only. Returns it, or None."""
        found = self._entries.pop(key, None)
        return found[0] if found is not None else None

    def admit(self, try_admit: Callable[[Entry], bool]) -> int:
        """Offers the head, then the next, until one does not fit. Returns how many were admitted."""
        num_admitted = 0
        while self._entries:
            # Out of the line before it is offered: an admission may end at once and come back here for the next.
            key, (entry, deadline_ns) = self._entries.popitem(last=False)
            if not try_admit(entry):
                self._entries[key] = (entry, deadline_ns)
                self._entries.move_to_end(key, last=False)
                break
            num_admitted += 1
        return num_admitted

    def expire(self, now_ns: int) -> list[Entry]:
        """Takes out and returns every entry whose deadline has passed."""
        late = [key for key, (_, deadline_ns) in self._entries.items() if deadline_ns <= now_ns]
        return [self._entries.pop(key)[0] for key in late]
