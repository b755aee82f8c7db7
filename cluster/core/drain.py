"""When nothing runs any more on what is to go: one worker, or the whole gateway.

A pure state machine of the controller over what ingresses tell. An ingress tells the version of the membership that it
goes by and what it still has: until it has told of a version, it may still send work by an older one. So a drain needs
no word of the worker, whose queue may hold what nobody has read yet.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Told:
    """What one ingress has told last. ``busy``: lives of workers that attempts of it may still run on."""

    version: int = -1
    num_open: int = 0
    busy: frozenset[str] = frozenset()


@dataclass(slots=True)
class DrainWatch:
    """The last word of each ingress that lives."""

    _told: dict[str, Told] = field(default_factory=dict)

    def joined(self, ingress: str) -> None:
        """An ingress begins; it has told nothing yet."""
        self._told.setdefault(ingress, Told())

    def left(self, ingress: str) -> None:
        """An ingress is proved dead: nothing of it runs behind a lease."""
        self._told.pop(ingress, None)

    def told(self, ingress: str, *, version: int, num_open: int, busy: Collection[str]) -> None:
        """Takes the word of an ingress. One that has left, and an older word than the last, are ignored."""
        last = self._told.get(ingress)
        if last is not None and version >= last.version:
            self._told[ingress] = Told(version, num_open, frozenset(busy))

    def is_quiet(self, version: int) -> bool:
        """True when every ingress goes by ``version`` and has no request."""
        return all(told.version >= version and not told.num_open for told in self._told.values())

    def is_released(self, life: str, version: int) -> bool:
        """True when every ingress goes by ``version`` and has nothing on this worker life."""
        return all(told.version >= version and life not in told.busy for told in self._told.values())
