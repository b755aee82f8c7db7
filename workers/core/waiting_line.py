"""Who waits for blocks at a worker: a bounded line, first come first served, that starves nobody.

A pure structure. An entry leaves when it is admitted, cancelled or its deadline has passed. One that does not fit lets
those behind it pass, because a request that fits should not stand idle behind one that does not; but only
``overtakes_max`` times: from then on nobody passes it, or one that needs many blocks would wait for ever.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

Entry = TypeVar("Entry")
Key = tuple[str, int]

OVERTAKES_MAX: Final = 8


@dataclass(slots=True)
class _Place(Generic[Entry]):
    entry: Entry
    deadline_ns: int
    num_overtaken: int = 0


@dataclass(slots=True)
class WaitingLine(Generic[Entry]):
    """At most ``limit`` entries, by (attempt_id, epoch)."""

    limit: int
    overtakes_max: int = OVERTAKES_MAX
    _places: OrderedDict[Key, _Place[Entry]] = field(default_factory=OrderedDict)
    _offered: set[Key] = field(default_factory=set)
    """Entries that are being offered at this moment."""

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: Key) -> bool:
        return key in self._places

    def join(self, key: Key, entry: Entry, *, deadline_ns: int) -> bool:
        """Adds an entry at the end. Returns False when the line is full."""
        assert key not in self._places, f"{key} waits already"
        if len(self._places) >= self.limit:
            return False
        self._places[key] = _Place(entry, deadline_ns)
        return True

    def leave(self, key: Key) -> Entry | None:
        """Takes an entry out wherever it stands; the exact key only. Returns it, or None."""
        found = self._places.pop(key, None)
        return found.entry if found is not None else None

    def admit(self, try_admit: Callable[[Entry], bool]) -> int:
        """Offers each entry in order, as far as those that do not fit may be overtaken. Returns how many fitted.

        ``try_admit`` may come back here: what is being offered is not offered again.
        """
        num_admitted = 0
        refused: list[_Place[Entry]] = []
        for key in list(self._places):
            place = self._places.get(key)
            if place is None or key in self._offered:
                continue
            self._offered.add(key)
            try:
                fits = try_admit(place.entry)
            finally:
                self._offered.discard(key)
            if fits:
                self._places.pop(key, None)
                num_admitted += 1
                for passed in refused:
                    passed.num_overtaken += 1
            else:
                refused.append(place)
            if any(place.num_overtaken >= self.overtakes_max for place in refused):
                break
        return num_admitted

    def expire(self, now_ns: int) -> list[Entry]:
        """Takes out and returns every entry whose deadline has passed."""
        late = [key for key, place in self._places.items() if place.deadline_ns <= now_ns]
        return [self._places.pop(key).entry for key in late]
