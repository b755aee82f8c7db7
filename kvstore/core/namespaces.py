"""Which computation each namespace of a store belongs to. A pure core.

A namespace is a name for one compatibility group: everybody who attaches to it has the same fingerprint, field by
field. Whoever attaches first says which. Two groups that run side by side (a rolling upgrade) use two names in one
store; their blocks could never be mixed up anyway, because the fingerprint is part of every block hash.

Weights that are changed in place raise ``weights_epoch``, a field of the fingerprint: from then on the namespace has
the new fingerprint, and whoever still has the old one is refused with the fields that differ. Old blocks have other
hashes; nobody asks for them any more and they leave by eviction.
"""

from __future__ import annotations

from collections.abc import Mapping

MAX_NAMESPACES = 64
EPOCH_FIELD = "weights_epoch"


class Namespaces:
    """Name -> fingerprint, as text by field. Belongs to one thread."""

    def __init__(self) -> None:
        self._fingerprints: dict[str, dict[str, str]] = {}

    def attach(self, name: str, fingerprint: Mapping[str, str]) -> tuple[str, ...]:
        """Returns the names of the fields that differ, sorted; empty: may use this namespace.

        The first to attach defines the namespace. ``("namespaces",)`` when there are too many already.
        """
        mine = self._fingerprints.get(name)
        if mine is None:
            if len(self._fingerprints) >= MAX_NAMESPACES:
                return ("namespaces",)
            self._fingerprints[name] = dict(fingerprint)
            return ()
        return differing_texts(mine, fingerprint)

    def update(self, name: str, fingerprint: Mapping[str, str]) -> bool:
        """Gives a namespace the fingerprint of changed weights, or finds that it has it already.

        False: there is no such namespace, or its epoch is not lower.
        """
        mine = self._fingerprints.get(name)
        if mine == fingerprint:
            return True
        if mine is None or _epoch(fingerprint) <= _epoch(mine):
            return False
        self._fingerprints[name] = dict(fingerprint)
        return True

    def fingerprint(self, name: str) -> dict[str, str]:
        """Returns the fingerprint of a namespace, by field; empty when nobody attached to it."""
        return dict(self._fingerprints.get(name, {}))


def differing_texts(mine: Mapping[str, str], theirs: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the names of the fields in which two fingerprints differ, sorted. A field of one side only differs."""
    return tuple(sorted(name for name in {*mine, *theirs} if mine.get(name) != theirs.get(name)))


def _epoch(fingerprint: Mapping[str, str]) -> int:
    text = fingerprint.get(EPOCH_FIELD, "0")
    return int(text) if text.isdecimal() else -1
