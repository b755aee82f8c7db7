"""A whole simulated cluster: processes and their lives, faults as they come due, heal, and rest.

Life cycle: ``World`` -> ``run`` (safety phase with faults; heal; liveness phase until nothing moves any more; probes
that must succeed; rest). Plays the part of controller and hosts: notices deaths, tells the others, starts replacements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cluster.core import attempt_events as ev
from cluster.core.attempts import RequestMachine
from cluster.sim.aims import Aims
from cluster.sim.client import SimRequest
from cluster.sim.coverage import cell_of, is_needed
from cluster.sim.decode import SimDecode
from cluster.sim.dice import Dice
from cluster.sim.ingress import IngressProcess, SimIngress
from cluster.sim.kernel import EVENTS_MAX, Kernel, Life
from cluster.sim.memory import Copies, block_content
from cluster.sim.network import Network
from cluster.sim.parts import Parts
from cluster.sim.prefill import SimPrefill
from cluster.sim.scenario import (
    MS,
    NETWORK,
    WORK,
    AnyFault,
    Ask,
    Chaos,
    Corrupt,
    Crash,
    Cut,
    Drain,
    EngineFault,
    Pause,
    Reset,
    Scenario,
    Slow,
)
from cluster.sim.witness import Witness, Witnesses

CLOCK_DRIFT_PPM_MAX = 450
"""Two clocks differ by less than the drift that leases allow for."""
CLOCK_OFFSET_NS_MAX = 10**15
REST_WAIT_NS = 60_000 * MS
"""Within this after the heal, everything must have come to rest."""
PROBE_WAIT_NS = 60_000 * MS
SETTLE_STEP_NS = 100 * MS
SETTLE_STEPS = 3
"""Nothing is held at so many looks in a row: links are back meanwhile, and what was under way has arrived."""
PROBE_NUMBER = 1000
PROBES_MAX = 40
EVENTS_MIN = 200
"""A seed whose requests were all refused is probed until it is a run of this size."""

Process = IngressProcess | SimPrefill | SimDecode


class World:
    """One scenario, running."""

    def __init__(self, scenario: Scenario, parts: Parts, witnesses: list[Witness], *, level: int = 1) -> None:
        self.scenario = scenario
        self.parts = parts
        self.kernel = Kernel()
        self.work = Dice(scenario.seed, WORK)
        timing = scenario.shape.timing
        net_dice = Dice(scenario.seed, NETWORK)
        self.network = Network(self.kernel, net_dice, delay_ns_max=timing.delay_ns_max)
        self.copies = Copies(self.kernel, self.network, net_dice, scenario.shape.receiver_copies, timing.copy_ns_max)
        self.asks: dict[str, Ask] = {}
        self.coverage: dict[str, int] = {}
        self.processes: dict[str, Process] = {}
        self.healed = False
        self.came_to_rest = False
        self._witnesses = Witnesses(witnesses)
        for witness in witnesses:
            witness.world = self
        self._num_lives: dict[str, int] = {}
        self._num_attempts = 0
        self._contents: dict[tuple[int, int], bytes] = {}
        self._aims = Aims(self, scenario.aims)
        self.num_probes = 0
        self._level = level
        self._ingress_lives: list[IngressProcess] = []
        """Every life: what a dead one had not finished must not unwind before the run is over."""
        self._is_over = False

    # --- the run --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Runs the scenario to its rest."""
        shape = self.scenario.shape
        for kind, num in (("i", shape.num_ingress), ("p", shape.num_prefill), ("d", shape.num_decode)):
            for number in range(num):
                self._start(f"{kind}{number}")
        for ask in self.scenario.asks:
            self.kernel.at(ask.at_ns, None, self._submit, ask)
        for fault in self.scenario.faults:
            self.kernel.at(fault.at_ns, None, self.strike, fault)
        self.kernel.run(until_ns=self.scenario.heal_at_ns)
        self._heal()
        self.came_to_rest = self._settle(REST_WAIT_NS)
        while not self.num_probes or (self.kernel.num_events < EVENTS_MIN and self.num_probes < PROBES_MAX):
            self._probe()
            self.came_to_rest &= self._settle(PROBE_WAIT_NS)
        for witness in self._witnesses.all:
            witness.now_ns = self.kernel.now_ns
            witness.at_rest(self)
        self.end()

    def end(self) -> None:
        """The run is over: what is left of it is thrown away and tells nobody anything."""
        self._is_over = True
        for process in self._ingress_lives:
            process.end()

    def _submit(self, ask: Ask) -> None:
        ingress = self.processes[f"i{ask.ingress}"]
        assert isinstance(ingress, IngressProcess), ingress
        if not ingress.life.dead:
            # The client's bytes reach the process when it runs again, if it is stopped.
            self.kernel.at(0, ingress.life, ingress.submit, ask)

    def _probe(self) -> None:
        """After the heal the cluster serves again: one request for each ingress."""
        shape = self.scenario.shape
        for number in range(shape.num_ingress):
            ask = Ask(
                number=PROBE_NUMBER + self.num_probes,
                at_ns=self.kernel.now_ns,
                ingress=number,
                stream=True,
                prompt_blocks=1,
                cached_blocks=0,
                max_tokens=3,
            )
            self.num_probes += 1
            self._submit(ask)

    def _settle(self, within_ns: int) -> bool:
        """Runs until nothing moves any more. Returns False when something still does after ``within_ns``."""
        if self._level == 1:
            return self.kernel.run(until_ns=self.kernel.now_ns + within_ns)
        # The duties of a real driver never end: here rest is when nothing is held and nobody waits.
        end_ns, num_quiet = self.kernel.now_ns + within_ns, 0
        while self.kernel.now_ns < end_ns and self.kernel.num_events < EVENTS_MAX:
            self.kernel.run(until_ns=self.kernel.now_ns + SETTLE_STEP_NS)
            num_quiet = num_quiet + 1 if self._is_at_rest() else 0
            if num_quiet == SETTLE_STEPS:
                return True
        return False

    def _is_at_rest(self) -> bool:
        for process in self.processes.values():
            if isinstance(process, IngressProcess):
                if process.life.dead or process.is_draining or process.running or process.num_leases:
                    return False
            else:
                counts = process.pool.counts()
                if process.life.dead or counts.free != counts.total or process.num_attempts or process.num_leases:
                    return False
        return True

    def _make_ingress(self, world: World, life: Life) -> IngressProcess:
        if self._level == 1:
            process: IngressProcess = SimIngress(world, life)
        else:
            from cluster.sim.driver import DriverIngress

            process = DriverIngress(world, life)
        self._ingress_lives.append(process)
        return process

    # --- lives ------------------------------------------------------------------------------------------------------

    def _start(self, name: str) -> None:
        """Begins a new life of a process."""
        number = self._num_lives[name] = self._num_lives.get(name, 0) + 1
        incarnation = f"{name}#{number if self.parts.fresh_incarnations else 1}"
        life = Life(
            name,
            incarnation,
            offset_ns=self.work.between(0, CLOCK_OFFSET_NS_MAX),
            drift_ppm=self.work.between(-CLOCK_DRIFT_PPM_MAX, CLOCK_DRIFT_PPM_MAX),
        )
        makers: dict[str, Callable[[World, Life], Process]] = {
            "i": self._make_ingress,
            "p": SimPrefill,
            "d": SimDecode,
        }
        process = makers[name[0]](self, life)
        self.processes[name] = process
        self.kernel.note("start", name, incarnation)
        if isinstance(process, IngressProcess):
            for other in self.processes.values():
                if not isinstance(other, IngressProcess) and not other.life.dead:
                    self.network.dial(other, process)
        else:
            for other in self.processes.values():
                if isinstance(other, IngressProcess) and not other.life.dead:
                    self.network.dial(process, other)

    def _kill(self, name: str, down_ns: int) -> None:
        process = self.processes[name]
        life = process.life
        if life.dead:
            return
        self.kernel.note("kill", name)
        life.dead = True
        life.backlog.clear()
        self.copies.drop_life(life.incarnation)
        self.network.drop_life(life)
        if isinstance(process, IngressProcess):
            self.tell("on_ingress_dead", life.incarnation)
            for request in process.untold.values():
                if not request.told:
                    request.told = True
                    self.tell("on_told", request, "cut", None)
        for other in self.processes.values():
            if other is not process and not other.life.dead:
                delay_ns = self.work.between(MS, self.scenario.shape.timing.detect_ns_max)
                self.kernel.at(delay_ns, other.life, other.on_gone, life.incarnation)
        self.kernel.at(down_ns, None, self._start, name)

    @property
    def num_attempts(self) -> int:
        """Attempts started so far."""
        return self._num_attempts

    def living(self, incarnation: str) -> SimDecode | None:
        """Returns the decode worker that lives this incarnation."""
        for process in self.processes.values():
            if isinstance(process, SimDecode) and process.life.incarnation == incarnation and not process.life.dead:
                return process
        return None

    # --- faults -----------------------------------------------------------------------------------------------------

    def strike(self, fault: AnyFault) -> None:
        """A fault happens now."""
        self.kernel.note("fault", type(fault).__name__)
        match fault:
            case Crash():
                self._kill(fault.target, fault.down_ns)
            case Pause():
                life = self.processes[fault.target].life
                if not life.dead and not life.paused:
                    if fault.for_ns < self.scenario.shape.timing.lease_ms * MS:
                        self._cover_slow(life)
                    self.kernel.pause(life)
                    self.kernel.at(fault.for_ns, None, self._resume, life)
            case Cut():
                self._cut(fault)
            case Reset():
                self.network.reset(fault.one, fault.other)
            case Chaos():
                self.network.chaos.append(fault)
                self.kernel.at(fault.for_ns, None, self._calm, fault)
            case Slow():
                worker = self.processes[fault.target]
                if not isinstance(worker, IngressProcess):
                    self._cover_slow(worker.life)
                    worker.slow_factor = fault.factor
                    self.kernel.at(fault.for_ns, None, self._speed_up, worker)
            case EngineFault():
                worker = self.processes[fault.target]
                if isinstance(worker, SimDecode) and not worker.life.dead:
                    self.kernel.at(0, worker.life, worker.on_engine_fault)
            case Corrupt():
                self.processes[fault.target].memory.num_damaged = fault.num_copies  # type: ignore[union-attr]
            case Drain():
                self._drain(fault)

    def _cut(self, fault: Cut) -> None:
        ways = [(fault.source, fault.destination)]
        if fault.both:
            ways.append((fault.destination, fault.source))
        for source, destination in ways:
            self.network.cut(source, destination, resets=fault.resets)
            self.kernel.at(fault.for_ns, None, self.network.mend, source, destination)

    def _drain(self, fault: Drain) -> None:
        ingress = self.processes[fault.target]
        assert isinstance(ingress, IngressProcess), fault
        if ingress.life.dead:
            return
        self.kernel.at(0, ingress.life, ingress.drain)
        self.kernel.at(fault.drain_ns, ingress.life, ingress.end_drain)
        # Clients are told and sides are fenced within a few leases; then the process exits.
        exit_ns = fault.drain_ns + 4 * self.scenario.shape.timing.lease_ms * MS
        self.kernel.at(exit_ns, None, self._exit, ingress.life)

    def _exit(self, life: Life) -> None:
        if not life.dead:
            self._kill(life.name, 50 * MS)

    def _resume(self, life: Life) -> None:
        if life.paused:
            self.kernel.resume(life)

    def _calm(self, fault: Chaos) -> None:
        if fault in self.network.chaos:
            self.network.chaos.remove(fault)

    def _speed_up(self, worker: Any) -> None:
        worker.slow_factor = 1

    def _heal(self) -> None:
        self.healed = True
        self.kernel.note("heal")
        self.network.mend_all()
        for process in self.processes.values():
            self._resume(process.life)
            if not isinstance(process, IngressProcess):
                process.slow_factor = 1
                process.memory.num_damaged = 0

    # --- what models ask for ------------------------------------------------------------------------------------------

    def tell(self, hook: str, *facts: Any) -> None:
        """Passes a fact on to whoever watches."""
        if not self._is_over:
            self._witnesses.tell(self.kernel.now_ns, hook, *facts)

    def on_state(self, request: SimRequest) -> None:
        """A request has entered a state."""
        self._aims.on_state(request)

    def client_leaves(self, request: SimRequest) -> None:
        """The client of a request goes away, now."""
        self._at_ingress(request, "client_leaves")

    def deadline_passes(self, request: SimRequest) -> None:
        """The deadline of a request is over, now."""
        self._at_ingress(request, "deadline_passes")

    def _at_ingress(self, request: SimRequest, what: str) -> None:
        ingress = self.processes[request.ingress.partition("#")[0]]
        if isinstance(ingress, IngressProcess) and ingress.life.incarnation == request.ingress:
            self.kernel.at(0, ingress.life, getattr(ingress, what), request)

    def new_attempt_id(self) -> str:
        """Returns an attempt id that was never used."""
        self._num_attempts += 1
        return f"att-{self._num_attempts}"

    def prompt_content(self, ask: Ask, index: int) -> bytes:
        """Returns what block ``index`` of a prompt holds."""
        key = (ask.number, index)
        content = self._contents.get(key)
        if content is None:
            content = self._contents[key] = block_content(ask.number, index)
        return content

    def cover(self, machine: RequestMachine, event: ev.AnyEvent) -> None:
        """Counts which cell of contract section 6 an event reaches."""
        cell = cell_of(machine, event)
        if cell is not None:
            self.coverage[cell] = self.coverage.get(cell, 0) + 1

    def _cover_slow(self, life: Life) -> None:
        """A worker is slow from now on, and alive: that reaches every request which needs it."""
        for process in self.processes.values():
            if isinstance(process, IngressProcess) and not process.life.dead:
                for request in process.running.values():
                    machine = request.machine
                    if not machine.is_ended and not machine.upstream_done and is_needed(machine, life.incarnation):
                        cell = f"{machine.phase.value}/slow"
                        self.coverage[cell] = self.coverage.get(cell, 0) + 1
