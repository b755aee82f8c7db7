"""The waiting line: bounded, first come first served within bounds, exact keys."""

from __future__ import annotations

from workers.core.waiting_line import WaitingLine


def make_line(*names: str, limit: int = 8) -> WaitingLine[str]:
    line: WaitingLine[str] = WaitingLine(limit)
    for number, name in enumerate(names):
        assert line.join((name, 1), name, deadline_ns=100 + number)
    return line


def test_one_that_does_not_fit_lets_others_pass() -> None:
    """F75: the head waits for room, those behind it that fit go on."""
    line = make_line("big", "small", "big too", "tiny")
    assert line.admit(lambda entry: not entry.startswith("big")) == 2
    assert line.expire(1000) == ["big", "big too"]


def test_it_is_overtaken_only_so_many_times() -> None:
    """No starvation: after the bound nobody behind it is offered, until it fits."""
    line = make_line("big", limit=100)
    line.overtakes_max = 3
    for number in range(5):
        assert line.join((f"small-{number}", 1), f"small-{number}", deadline_ns=1)
    offered: list[str] = []

    def only_small(entry: str) -> bool:
        offered.append(entry)
        return entry != "big"

    assert line.admit(only_small) == 3
    assert offered == ["big", "small-0", "small-1", "small-2"]
    offered.clear()
    assert line.admit(only_small) == 0
    assert offered == ["big"]
    assert line.admit(lambda _: True) == 3


def test_admit_goes_on_until_one_does_not_fit() -> None:
    """Everything that fits in order is admitted in order."""
    line = make_line("a", "b", "c")
    admitted: list[str] = []

    def admit(entry: str) -> bool:
        if entry == "c":
            return False
        admitted.append(entry)
        return True

    assert line.admit(admit) == 2
    assert admitted == ["a", "b"]
    assert ("c", 1) in line


def test_full_line_refuses() -> None:
    """The bound holds."""
    line = make_line("a", "b", limit=2)
    assert not line.join(("c", 1), "c", deadline_ns=1)
    assert len(line) == 2


def test_leave_takes_the_exact_key_only() -> None:
    """F39: leaving "job-1" never touches "job-10", nor another epoch of the same attempt."""
    line = make_line("job-1", "job-10")
    assert line.leave(("job-1", 2)) is None
    assert line.leave(("job-1", 1)) == "job-1"
    assert line.leave(("", 1)) is None
    assert ("job-10", 1) in line


def test_expire_takes_only_the_late() -> None:
    """An entry is late at its deadline, not before."""
    line = make_line("a", "b", "c")
    assert line.expire(99) == []
    assert line.expire(101) == ["a", "b"]
    assert len(line) == 1


def test_an_admission_that_admits_others_offers_each_entry_once() -> None:
    """A reservation whose answer cannot be sent frees its blocks, which offers them to the next in line at once."""
    line = make_line("a", "b", "c")
    offered: list[str] = []

    def admit(entry: str) -> bool:
        offered.append(entry)
        if entry == "a":
            line.admit(admit)
        return True

    assert line.admit(admit) == 1
    assert offered == ["a", "b", "c"]
    assert len(line) == 0


def test_a_refused_head_keeps_its_place_and_deadline() -> None:
    """Offered and refused, it is still first, and late when it was."""
    line = make_line("a", "b")
    line.admit(lambda entry: False)
    assert line.expire(100) == ["a"]
    assert ("b", 1) in line
