"""Which cells of the contract's table of attempt states (section 6) a run has reached: state x what happened then.

A cell counts when its event reaches a request in that state and is about it: the death of a worker that has nothing
left to do for an attempt is no loss of that attempt, and what comes after the last token ends nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from cluster.core import attempt_events as ev
from cluster.core.attempts import RequestMachine

STATES = ("reserving", "prefilling", "handing_off", "decoding", "delivering")
"""The states that last. ``delivering`` is the column *after the first delta*, the others are the one before it."""
ROWS = ("worker_gone", "no_sign_of_life", "slow", "client_gone", "deadline", "draining")
"""The rows of section 6."""
MORE_ROWS = ("worker_fault", "worker_refused")
"""What a worker says by itself; section 6 has no row for it, so nothing is asked of their counts."""
CELLS = tuple(f"{state}/{row}" for state in STATES for row in ROWS)
AT_LEAST = 1000
"""So often the seeds of CI must reach each cell."""
IMPOSSIBLE = (
    (("admitted",), "a request is routed in the event that admits it"),
    (("routed",), "an attempt is dispatched in the event that chooses its pair"),
    (("finished", "failed", "interrupted", "cancelled"), "an ended request ignores what happens"),
)
"""States in which nothing can happen to a request, and why."""

_ROW_OF: dict[type, str] = {
    ev.WorkerGone: "worker_gone",
    ev.LinkLost: "no_sign_of_life",
    ev.LeaseLapsed: "no_sign_of_life",
    ev.AttemptFaulted: "worker_fault",
    ev.WorkerRefused: "worker_refused",
    ev.ClientGone: "client_gone",
    ev.DeadlineReached: "deadline",
    ev.DrainEnded: "draining",
}


def cell_of(machine: RequestMachine, event: ev.AnyEvent) -> str | None:
    """Returns the cell that an event reaches, given the machine as it is before the event; None for no cell."""
    row = _ROW_OF.get(type(event))
    if row is None or machine.is_ended:
        return None
    if machine.upstream_done and not isinstance(event, ev.ClientGone):
        return None
    match event:
        case ev.WorkerGone() | ev.LinkLost():
            if not is_needed(machine, event.incarnation):
                return None
        case ev.LeaseLapsed() | ev.AttemptFaulted() | ev.WorkerRefused():
            attempt = machine.current
            if attempt is None or (attempt.attempt_id, attempt.epoch) != (event.attempt_id, event.epoch):
                return None
    return f"{machine.phase.value}/{row}"


def is_needed(machine: RequestMachine, incarnation: str) -> bool:
    """Returns True while the current attempt has work left for this life of a worker."""
    attempt = machine.current
    if attempt is None or attempt.end_reason is not None:
        return False
    decodes = attempt.workers["decode"].incarnation == incarnation
    return decodes or (attempt.workers["prefill"].incarnation == incarnation and not attempt.handed_off)


def short_of(coverage: Mapping[str, int], at_least: int) -> dict[str, int]:
    """Returns the cells of section 6 that were reached less than ``at_least`` times, with their counts."""
    return {cell: coverage.get(cell, 0) for cell in CELLS if coverage.get(cell, 0) < at_least}


def table(coverage: Mapping[str, int]) -> tuple[list[str], list[list[object]]]:
    """Returns (columns, rows): one row for each state that lasts, then any other that something happened in."""
    columns = ["state", *ROWS, *MORE_ROWS]
    reached = {cell.partition("/")[0] for cell in coverage}
    states = [*STATES, *sorted(reached - set(STATES))]
    return columns, [[state, *(coverage.get(f"{state}/{row}", 0) for row in columns[1:])] for state in states]


def why_not() -> list[str]:
    """Returns one line for each reason why states have no row."""
    return [f"{', '.join(states)}: {reason}" for states, reason in IMPOSSIBLE]
