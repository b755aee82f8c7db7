"""Counts of what happened, each with a name. Owns nothing."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Counters:
    """Base of a dataclass whose fields are counts that only grow."""

    def to_dict(self) -> dict[str, int]:
        """Returns name -> count."""
        return {item.name: getattr(self, item.name) for item in fields(self)}
