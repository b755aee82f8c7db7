"""What a slab index keeps per slot, besides the record in its table. Pure parts of ``SlabIndex`` alone."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.core.ids import TenantId
from kvstore.core.quota import MAX_TENANTS


class FreeSlots:
    """Slots to give out, oldest first. Slots never used yet are counted, not listed: an empty index is small."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._next_fresh = 0
        self._returned: deque[int] = deque()

    def __len__(self) -> int:
        return self._num_slots - self._next_fresh + len(self._returned)

    def __iter__(self) -> Iterator[int]:
        yield from range(self._next_fresh, self._num_slots)
        yield from self._returned

    def append(self, slot: int) -> None:
        self._returned.append(slot)

    def popleft(self) -> int:
        if self._next_fresh < self._num_slots:
            self._next_fresh += 1
            return self._next_fresh - 1
        return self._returned.popleft()


class TenantNumbers:
    """Small numbers for the tenants that have a slot now; a number is used again once its tenant has none."""

    def __init__(self) -> None:
        self._names: list[TenantId] = []
        self._num_slots: list[int] = []
        self._numbers: dict[TenantId, int] = {}
        self._unused: list[int] = []

    def find(self, tenant: TenantId) -> int:
        """Returns the tenant's number, or one that no slot has."""
        return self._numbers.get(tenant, MAX_TENANTS)

    def name(self, number: int) -> TenantId:
        return self._names[number]

    def take(self, tenant: TenantId) -> int:
        """Counts one slot more for a tenant; returns its number."""
        number = self._numbers.get(tenant)
        if number is None:
            number = self._unused.pop() if self._unused else len(self._names)
            if number == len(self._names):
                self._names.append(tenant)
                self._num_slots.append(0)
            self._names[number] = tenant
            self._numbers[tenant] = number
        self._num_slots[number] += 1
        return number

    def give_back(self, number: int) -> None:
        """Counts one slot less."""
        self._num_slots[number] -= 1
        if self._num_slots[number] == 0:
            del self._numbers[self._names[number]]
            self._unused.append(number)


@dataclass(slots=True)
class Slots:
    """What each slot has besides its record in the table, in parallel arrays."""

    generation: array[int]
    pins: array[int]
    tenant: array[int]
    """Number of the tenant that the slot is charged to; see ``TenantNumbers``."""
    free: FreeSlots


def make_slots(num_slots: int) -> Slots:
    """Returns the arrays of a slab whose slots are all free: 14 bytes per slot."""
    return Slots(
        generation=array("Q", bytes(8 * num_slots)),
        pins=array("I", bytes(4 * num_slots)),
        tenant=array("H", bytes(2 * num_slots)),
        free=FreeSlots(num_slots),
    )
