"""Bounds of numbers that the grammar library does not keep, so that a schema with one is refused and not half obeyed.

llguidance 1.9 lets the bound itself through where an exclusive bound is a whole number and the other bound lies within
one of it, away from zero: 2 under ``exclusiveMinimum`` 2 and ``maximum`` 2.25. Integers are not concerned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

_DATA: Final = frozenset({"const", "enum", "default", "examples"})
"""Keywords that hold values and not schemas."""
_JOINING: Final = frozenset({"anyOf", "oneOf", "$ref"})
"""Keywords whose schemas hold together with what stands beside them; ``allOf`` joins its own."""
_BOUNDS: Final = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})


def unkept_bound(schema: Any) -> str | None:
    """Returns the keyword of a bound that answers would not keep, or None.

    Bounds that stand apart are taken together wherever the schema joins some, which refuses a little too much.
    """
    parts = [part for part in _schemas(schema) if part.get("type") != "integer"]
    groups: list[Sequence[dict[str, Any]]] = [[part] for part in parts]
    if any("allOf" in part or (_JOINING & part.keys() and _BOUNDS & part.keys()) for part in parts):
        groups.append(parts)
    for group in groups:
        found = _slipping(group)
        if found is not None:
            return found
    return None


def _slipping(group: Sequence[dict[str, Any]]) -> str | None:
    upper = [*_values(group, "maximum"), *_values(group, "exclusiveMaximum")]
    lower = [*_values(group, "minimum"), *_values(group, "exclusiveMinimum")]
    for bound in _values(group, "exclusiveMinimum"):
        if _is_whole(bound) and bound >= 0 and any(bound < other < bound + 1 for other in upper):
            return "exclusiveMinimum"
    for bound in _values(group, "exclusiveMaximum"):
        if _is_whole(bound) and bound <= 0 and any(bound - 1 < other < bound for other in lower):
            return "exclusiveMaximum"
    return None


def _values(group: Sequence[dict[str, Any]], keyword: str) -> Iterator[int | float]:
    for part in group:
        value = part.get(keyword)
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield value


def _is_whole(value: int | float) -> bool:
    return isinstance(value, int) or value.is_integer()


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yields every object that may be a schema; a loop, because a body may be nested deeply."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield part
            waiting += [value for name, value in part.items() if name not in _DATA]
        elif isinstance(part, list):
            waiting += part
