"""Randomness of a simulation: one seed, the same numbers under every Python version.

Only ``Random.random`` is used underneath: its sequence for an integer seed is the one thing that Python guarantees.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeVar

Item = TypeVar("Item")


class Dice:
    """Draws for one purpose. Two dice of one seed with different purposes are independent."""

    __slots__ = ("_draw",)

    def __init__(self, seed: int, purpose: int) -> None:
        self._draw = Random((seed << 8) | purpose).random

    def chance(self, probability: float) -> bool:
        """Returns True with this probability in [0, 1]."""
        return self._draw() < probability

    def below(self, shares: Sequence[float]) -> int:
        """Returns the index of one of ``shares``, each with its probability; their number for the rest."""
        share = self._draw()
        for index, size in enumerate(shares):
            if share < size:
                return index
            share -= size
        return len(shares)

    def between(self, low: int, high: int) -> int:
        """Returns a whole number in [low, high]."""
        return low + int(self._draw() * (high - low + 1))

    def skewed(self, low: int, high: int) -> int:
        """Returns a whole number in [low, high], small ones much more often."""
        share = self._draw()
        return low + int(share * share * share * (high - low + 1))

    def pick(self, items: Sequence[Item]) -> Item:
        """Returns one of ``items``."""
        return items[int(self._draw() * len(items))]
