"""Who runs now and who waits: classes with quotas and priority in front of the seats of the decode workers.

A pure state machine over ``Admission`` (the bound on everything inside, and the closed door of a drain). A request
takes one seat for each answer that it asks for, from the moment it is started until it leaves; nobody is ever put off a
seat, so what runs keeps its pace whatever waits.

    enter ──seats free, nobody before it──> started
          ──would be served in time───────> waiting ──seats free──> started
          ──else──────────────────────────> Refused (429, with the time after which it would be served)
    waiting ──its time is over──> Refused

* Classes are served in their order; within a class, first come first served. A class never holds more than its quota.
* A reserve of the seats is withheld from all classes but the first, so that its next request need not wait.
* How long somebody would wait is the work before it over the seats at the mean duration of what ended lately; whoever
  would wait longer than it may is refused at once instead of at the end of its time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil

from cluster.core.admission import Admission, Refused

NS_PER_S = 1_000_000_000
RETRY_AFTER_S_MAX = 119
"""Client libraries obey ``retry-after`` only below two minutes."""
MEAN_WEIGHT = 0.125
"""The mean duration moves by an eighth of the difference with each request that ends."""


@dataclass(frozen=True, slots=True)
class Started:
    """The request may run now."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """The request waits until it is started or ``until_ns`` has come."""

    until_ns: int


@dataclass(frozen=True, slots=True)
class _Ticket:
    class_name: str
    num_seats: int
    until_ns: int


@dataclass(frozen=True, slots=True)
class _Seated:
    class_name: str
    num_seats: int
    since_ns: int


@dataclass(slots=True)
class AdmissionQueue:
    """Seats and waiting lines of one ingress. Belongs to one thread.

    ``quotas``: class -> largest share of the seats that it may hold, in order of priority, in (0, 1].
    """

    num_seats: int
    limit: int
    """Requests inside, waiting ones included."""
    quotas: Mapping[str, float]
    reserve_share: float = 0.0
    max_wait_ns: int = 10 * NS_PER_S
    door: Admission = field(init=False)
    mean_duration_ns: float | None = None
    """Of the requests that ended lately; None before the first."""
    _seated: dict[str, _Seated] = field(default_factory=dict)
    _lines: dict[str, OrderedDict[str, _Ticket]] = field(init=False)

    def __post_init__(self) -> None:
        assert self.num_seats >= 1, self.num_seats
        self.door = Admission(self.limit)
        self._lines = {name: OrderedDict() for name in self.quotas}

    # --- events ---------------------------------------------------------------------------------------------

    def enter(
        self, request_id: str, class_name: str, *, num_seats: int = 1, now_ns: int, deadline_ns: int | None = None
    ) -> Started | Waiting | Refused:
        """A request comes. One that asks for more seats than its class has is served when it has them all.

        ``deadline_ns``: when its time is over, waiting included; None for no end of its own.
        """
        refused = self.door.admit(request_id)
        if refused is not None:
            return self._honest(refused, class_name, num_seats, now_ns)
        ticket = _Ticket(class_name, min(num_seats, self._most_seats(class_name)), now_ns + self.max_wait_ns)
        if self._is_next(class_name) and self._fits(ticket):
            self._seat(request_id, ticket, now_ns)
            return Started()
        wait_ns = self.expected_wait_ns(class_name, num_seats, now_ns)
        until_ns = ticket.until_ns if deadline_ns is None else min(ticket.until_ns, deadline_ns)
        if now_ns + wait_ns > until_ns:
            self.door.leave(request_id)
            self.door.num_refused += 1
            why = f"the wait would be about {ceil(wait_ns / NS_PER_S)} s"
            return Refused(429, "queue_full", why, _whole_seconds(now_ns + wait_ns - until_ns))
        self._lines[class_name][request_id] = _Ticket(class_name, ticket.num_seats, until_ns)
        return Waiting(until_ns)

    def leave(self, request_id: str, *, now_ns: int) -> list[str]:
        """A request ends, or is given up while it waits. Returns who is started by that; unknown ones are ignored."""
        self.door.leave(request_id)
        for line in self._lines.values():
            line.pop(request_id, None)
        seated = self._seated.pop(request_id, None)
        if seated is not None:
            took_ns = max(0, now_ns - seated.since_ns)
            mean_ns = took_ns if self.mean_duration_ns is None else self.mean_duration_ns
            self.mean_duration_ns = mean_ns + MEAN_WEIGHT * (took_ns - mean_ns)
        return self._start_waiting(now_ns)

    def expire(self, request_id: str, *, now_ns: int) -> Refused | None:
        """The time of a waiting request may be over. Returns its refusal, or None when it does not wait any more."""
        for line in self._lines.values():
            ticket = line.get(request_id)
            if ticket is not None and ticket.until_ns <= now_ns:
                del line[request_id]
                self.door.leave(request_id)
                self.door.num_refused += 1
                wait_ns = self.expected_wait_ns(ticket.class_name, ticket.num_seats, now_ns)
                return Refused(429, "queue_full", "its time to wait is over", _whole_seconds(wait_ns))
        return None

    def drain(self) -> list[str]:
        """Refuses everything from now on. Returns who waited: they are told, what runs finishes."""
        self.door.drain()
        waiting = [request_id for line in self._lines.values() for request_id in line]
        for line in self._lines.values():
            line.clear()
        for request_id in waiting:
            self.door.leave(request_id)
        return waiting

    def resize(self, num_seats: int, *, now_ns: int) -> list[str]:
        """There are more or fewer seats from now on. Returns who is started; nobody is put off a seat."""
        assert num_seats >= 1, num_seats
        self.num_seats = num_seats
        for name, line in self._lines.items():
            for request_id, ticket in line.items():
                line[request_id] = replace(ticket, num_seats=min(ticket.num_seats, self._most_seats(name)))
        return self._start_waiting(now_ns)

    # --- questions ------------------------------------------------------------------------------------------

    def expected_wait_ns(self, class_name: str, num_seats: int, now_ns: int) -> int:
        """Returns how long a request that came now would wait for its seats."""
        mean_ns = self.mean_duration_ns
        if mean_ns is None:
            # Nothing has ended yet: what runs longest says how long it takes at least.
            mean_ns = max((now_ns - seated.since_ns for seated in self._seated.values()), default=0)
        before = num_seats
        for name, line in self._lines.items():
            before += sum(ticket.num_seats for ticket in line.values())
            if name == class_name:
                break
        return int(before * mean_ns / self._most_seats(class_name))

    def num_waiting(self, class_name: str) -> int:
        """Returns how many requests of a class wait."""
        return len(self._lines[class_name])

    def num_seated(self, class_name: str | None = None) -> int:
        """Returns how many seats are taken, by one class or by all."""
        return sum(seated.num_seats for seated in self._seated.values() if class_name in (None, seated.class_name))

    def check_invariants(self) -> None:
        """Asserts what must hold after every step."""
        self.door.check_invariants()
        waiting = [request_id for line in self._lines.values() for request_id in line]
        assert len(self.door) == len(self._seated) + len(waiting), "somebody is inside and nowhere"
        assert self.num_seated() <= self.num_seats, (self.num_seated(), self.num_seats)
        for name in self.quotas:
            assert self.num_seated(name) <= self._most_seats(name), name
        for name, line in self._lines.items():
            first = next(iter(line.values()), None)
            if first is not None and all(not self._lines[before] for before in self._before(name)):
                assert not self._fits(first), f"{name} waits beside free seats"

    # --- inside ---------------------------------------------------------------------------------------------

    def _most_seats(self, class_name: str) -> int:
        """Seats that a class may ever hold: its quota, and never the reserve unless it is the first."""
        most = max(1, int(self.num_seats * self.quotas[class_name]))
        if class_name == next(iter(self.quotas)):
            return most
        return max(1, min(most, self.num_seats - self._num_reserved()))

    def _num_reserved(self) -> int:
        return int(self.num_seats * self.reserve_share)

    def _before(self, class_name: str) -> list[str]:
        names = list(self.quotas)
        return names[: names.index(class_name)]

    def _is_next(self, class_name: str) -> bool:
        """True when nobody of its class or of those before it could take the seats that it would get."""
        if self._lines[class_name]:
            return False
        # A class at its quota does not hold up the ones behind it.
        return not any(
            line and self.num_seated(name) < self._most_seats(name)
            for name in self._before(class_name)
            if (line := self._lines[name])
        )

    def _fits(self, ticket: _Ticket) -> bool:
        name = ticket.class_name
        if self.num_seated(name) + ticket.num_seats > self._most_seats(name):
            return False
        free = self.num_seats - self.num_seated()
        if name != next(iter(self.quotas)):
            # At least one seat is for everybody, or a small server would serve one class only.
            free -= min(self._num_reserved(), self.num_seats - 1)
        return ticket.num_seats <= free

    def _seat(self, request_id: str, ticket: _Ticket, now_ns: int) -> None:
        self._seated[request_id] = _Seated(ticket.class_name, ticket.num_seats, now_ns)

    def _start_waiting(self, now_ns: int) -> list[str]:
        started: list[str] = []
        for name, line in self._lines.items():
            while line:
                request_id, ticket = next(iter(line.items()))
                if not self._fits(ticket):
                    break
                del line[request_id]
                self._seat(request_id, ticket, now_ns)
                started.append(request_id)
            if line and self.num_seated(name) < self._most_seats(name):
                break  # The seats that come free next are this class's.
        return started

    def _honest(self, refused: Refused, class_name: str, num_seats: int, now_ns: int) -> Refused:
        if refused.status != 429:
            return refused
        wait_ns = self.expected_wait_ns(class_name, num_seats, now_ns)
        return Refused(refused.status, refused.code, refused.why, _whole_seconds(wait_ns))


def _whole_seconds(wait_ns: float) -> int:
    return max(1, min(RETRY_AFTER_S_MAX, ceil(wait_ns / NS_PER_S)))
