"""Faults aimed at a state: when a request enters it, this happens to it. Chance alone seldom meets the short states.

``Aims`` belongs to a world and is told of every change of state. An aim acts once, a moment after its state was
entered, and only if the request is still in it. A held answer makes a short state last: while the way back from decode
is cut, neither the reservation nor the first token arrives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.core.attempts import Attempt
from cluster.sim.client import SimRequest
from cluster.sim.scenario import MS, Aim, Crash, Cut, Drain, Pause, Reset, Slow

if TYPE_CHECKING:
    from cluster.sim.world import World

HOLD_FROM = {"reserving": "reserving", "handing_off": "prefilling"}
"""The state on whose entry the way back from decode is cut, so that the aimed one lasts."""


class Aims:
    """The aims of a scenario, each until it has acted."""

    def __init__(self, world: World, aims: tuple[Aim, ...]) -> None:
        self._world = world
        self._waiting = {aim.number: aim for aim in aims}

    def on_state(self, request: SimRequest) -> None:
        """A request has entered a state."""
        aim = self._waiting.get(request.ask.number)
        attempt = request.machine.current
        if aim is None or attempt is None:
            return
        state = request.machine.phase.value
        if aim.hold_ns and HOLD_FROM.get(aim.state) == state:
            self._hold(aim, request, attempt)
        if aim.state == state:
            del self._waiting[aim.number]
            self._world.kernel.at(aim.after_ns, None, self._act, aim, request, attempt)

    def _hold(self, aim: Aim, request: SimRequest, attempt: Attempt) -> None:
        timing = self._world.scenario.shape.timing
        ingress = request.ingress.partition("#")[0]
        prefill_ns = request.ask.prompt_blocks * timing.chunk_ns if aim.state == "handing_off" else 0
        held_ns = prefill_ns + aim.hold_ns
        decode = attempt.workers["decode"].worker_id
        self._world.strike(Cut(at_ns=0, source=decode, destination=ingress, for_ns=held_ns, both=False, resets=False))

    def _act(self, aim: Aim, request: SimRequest, attempt: Attempt) -> None:
        machine, world = request.machine, self._world
        if machine.current is not attempt or machine.phase.value != aim.state or request.told:
            return
        worker = attempt.workers[aim.role].worker_id
        ingress = request.ingress.partition("#")[0]
        lease_ns = world.scenario.shape.timing.lease_ms * MS
        match aim.what:
            case "worker_gone":
                world.strike(Crash(at_ns=0, target=worker, down_ns=aim.for_ns))
            case "no_sign_of_life" if aim.for_ns > lease_ns:
                world.strike(Pause(at_ns=0, target=worker, for_ns=aim.for_ns))
            case "no_sign_of_life" if aim.state == "delivering":
                # What is sent during the cut dies with the connection.
                cut_ns = aim.for_ns // 2 + MS
                world.strike(Cut(at_ns=0, source=worker, destination=ingress, for_ns=cut_ns, both=False, resets=True))
            case "no_sign_of_life":
                world.strike(Reset(at_ns=0, one=worker, other=ingress))
            case "slow" if aim.for_ns < lease_ns // 2:
                world.strike(Pause(at_ns=0, target=worker, for_ns=aim.for_ns))
            case "slow":
                world.strike(Slow(at_ns=0, target=worker, for_ns=aim.for_ns, factor=4))
            case "client_gone":
                world.client_leaves(request)
            case "deadline":
                world.deadline_passes(request)
            case "draining":
                world.strike(Drain(at_ns=0, target=ingress, drain_ns=aim.for_ns % (5 * MS)))
