"""From the workers that run to the workers that are wanted: which stay, which come, which go.

Pure and deterministic. Two workers are alike when their role and their *kind* are equal, whatever they are called; a
worker that is alike stays, so that a change of numbers touches nobody else. What is to go is named, not stopped: it
goes once what takes its place is ready, and once its requests are over.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Running:
    """One worker that is there. ``is_leaving``: it drains, and can be taken back."""

    role: str
    kind: Hashable
    is_leaving: bool = False


@dataclass(frozen=True, slots=True)
class Rollout:
    """Names of workers; ``start`` has the index of each one among the wanted."""

    keep: tuple[str, ...]
    take_back: tuple[str, ...]
    start: tuple[tuple[str, int], ...]
    leave: tuple[str, ...]


def plan_rollout(running: Mapping[str, Running], wanted: Sequence[tuple[str, Hashable]]) -> Rollout:
    """Returns how to come from ``running`` to ``wanted``, a list of (role, kind).

    Names are ``ROLE-NUMBER``; low numbers stay, and no name is given that anything in ``running`` still has.
    """
    names = sorted(running, key=_order)
    free = [*(n for n in names if not running[n].is_leaving), *(n for n in names if running[n].is_leaving)]
    in_use = set(names)
    keep: list[str] = []
    take_back: list[str] = []
    start: list[tuple[str, int]] = []
    for index, (role, kind) in enumerate(wanted):
        found = next((name for name in free if (running[name].role, running[name].kind) == (role, kind)), None)
        if found is not None:
            free.remove(found)
            (take_back if running[found].is_leaving else keep).append(found)
            continue
        number = 0
        while f"{role}-{number}" in in_use:
            number += 1
        in_use.add(f"{role}-{number}")
        start.append((f"{role}-{number}", index))
    leave = [name for name in free if not running[name].is_leaving]
    return Rollout(tuple(keep), tuple(take_back), tuple(start), tuple(leave))


def _order(name: str) -> tuple[str, int, str]:
    role, _, number = name.rpartition("-")
    return role, int(number) if number.isdecimal() else 0, name
