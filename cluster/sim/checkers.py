"""What must hold in every run, one class for each claim. Each watches from outside and keeps its own books."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cluster.core.journal import replay
from cluster.sim.decode import TOKEN_EPOCH, SimDecode
from cluster.sim.ingress import IngressProcess
from cluster.sim.prefill import SimPrefill
from cluster.sim.scenario import MS
from cluster.sim.witness import Key, Witness
from kvstore.core.lease import DRIFT_PPM

if TYPE_CHECKING:
    from cluster.core.attempt_events import Close
    from cluster.sim.client import SimRequest
    from cluster.sim.world import World


class OneEnding(Witness):
    """Every request ends exactly once for its client, and its machine ends and closes its books."""

    def __init__(self) -> None:
        super().__init__()
        self._endings: dict[str, list[str]] = {}
        self._admitted: dict[str, SimRequest] = {}
        self._closed: dict[str, int] = {}
        self._dead: set[str] = set()

    def on_ingress_dead(self, incarnation: str) -> None:
        self._dead.add(incarnation)

    def on_admitted(self, request: SimRequest) -> None:
        self._admitted[request.request_id] = request

    def on_told(self, request: SimRequest, ending: str, detail: Any) -> None:
        endings = self._endings.setdefault(request.request_id, [])
        endings.append(ending)
        if len(endings) > 1:
            self.violate(f"{request.request_id} ended twice: {endings}")

    def on_closed(self, request: SimRequest, close: Close) -> None:
        self._closed[request.request_id] = self._closed.get(request.request_id, 0) + 1
        if self._closed[request.request_id] > 1:
            self.violate(f"{request.request_id} closed its books twice")

    def at_rest(self, world: World) -> None:
        for request_id, request in self._admitted.items():
            endings = self._endings.get(request_id, [])
            if not endings:
                self.violate(f"{request_id} never ended; its machine is {request.machine.phase.value}")
            elif request.ingress not in self._dead and request_id not in self._closed:
                phase = request.machine.phase.value
                self.violate(f"{request_id} ended as {endings[0]} and never closed its books ({phase})")


class HonestEnding(Witness):
    """What the client is told is what it was given: finished means complete, interrupted names the right count."""

    def on_told(self, request: SimRequest, ending: str, detail: Any) -> None:
        ask, machine = request.ask, request.machine
        if ending == "finished":
            expected = ask.max_tokens
            for limit in (ask.eos_at, ask.stop_string_at):
                if limit is not None:
                    expected = min(expected, limit + 1)
            if request.num_shown < expected:
                self.violate(f"{request.request_id} finished with {request.num_shown} of {expected} tokens")
        elif ending == "interrupted":
            if not machine.first_delta_sent or machine.num_delivered != request.num_shown:
                self.violate(
                    f"{request.request_id} interrupted: told {machine.num_delivered}, written {request.num_shown}"
                )
        elif ending == "error" and request.started:
            self.violate(f"{request.request_id} got an HTTP error after its first write")


class TokenOrder(Witness):
    """The client is given tokens 0, 1, 2 ... of one single attempt."""

    def __init__(self) -> None:
        super().__init__()
        self._written: dict[str, tuple[int, int]] = {}
        """Request -> (epoch, number of tokens written)."""

    def on_wrote(self, request: SimRequest, tokens: tuple[int, ...]) -> None:
        for token in tokens:
            epoch, index = divmod(token, TOKEN_EPOCH)
            known_epoch, num_written = self._written.get(request.request_id, (epoch, 0))
            if epoch != known_epoch:
                self.violate(f"{request.request_id}: text of epoch {epoch} glued to text of epoch {known_epoch}")
            elif index != num_written:
                self.violate(f"{request.request_id}: token {index} after {num_written} tokens")
            self._written[request.request_id] = (known_epoch, num_written + 1)


class OnePublisher(Witness):
    """No two attempts publish to one request: only tokens of the current one are accepted."""

    def __init__(self) -> None:
        super().__init__()
        self._latest: dict[str, int] = {}

    def on_accepted(self, request: SimRequest, key: Key, first_index: int, num_tokens: int) -> None:
        current = request.machine.current
        if current is None or (current.attempt_id, current.epoch) != key:
            self.violate(f"{request.request_id}: tokens of {key} accepted while another attempt is current")
        if key[1] < self._latest.get(request.request_id, 0):
            self.violate(f"{request.request_id}: tokens of epoch {key[1]} accepted after those of a later one")
        self._latest[request.request_id] = max(key[1], self._latest.get(request.request_id, 0))


class StoppedBeforeNext(Witness):
    """When the next attempt starts, or the books close, no holder of an older attempt passes a lease check any more."""

    def __init__(self) -> None:
        super().__init__()
        self._over: dict[Key, str] = {}

    def on_route_again(self, request: SimRequest) -> None:
        self._end(request, "the next attempt started")

    def on_closed(self, request: SimRequest, close: Close) -> None:
        self._end(request, "its books were closed")

    def _end(self, request: SimRequest, why: str) -> None:
        assert self.world is not None
        for attempt in request.machine.attempts:
            key = (attempt.attempt_id, attempt.epoch)
            self._over.setdefault(key, why)
            for process in self.world.processes.values():
                if isinstance(process, SimDecode) and not process.life.dead and process.could_publish(key):
                    self.violate(f"{process.life.incarnation} could still publish for {key} when {why}")

    def on_publish_checked(self, key: Key) -> None:
        if key in self._over:
            self.violate(f"the holder of {key} published after {self._over[key]}")


class RetryOnlyUnsent(Witness):
    """A request runs again only while nothing was written towards its client, and within its budget."""

    def __init__(self) -> None:
        super().__init__()
        self._written: set[str] = set()

    def on_wrote(self, request: SimRequest, tokens: tuple[int, ...]) -> None:
        self._written.add(request.request_id)
        if not request.machine.first_delta_sent and not request.machine.is_ended:
            self.violate(f"{request.request_id} was written to before the boundary was recorded")

    def on_route_again(self, request: SimRequest) -> None:
        if request.request_id in self._written:
            self.violate(f"{request.request_id} runs again after a write")
        if len(request.machine.attempts) >= request.machine.max_attempts:
            self.violate(f"{request.request_id} runs again beyond its budget")


class OneHolder(Witness):
    """Each attempt of each epoch is held by one life of one decode worker."""

    def __init__(self) -> None:
        super().__init__()
        self._holders: dict[Key, str] = {}

    def on_held(self, key: Key, incarnation: str, ingress: str) -> None:
        known = self._holders.setdefault(key, incarnation)
        if known != incarnation:
            self.violate(f"{key} is held by {known} and by {incarnation}")


class OrphansStop(Witness):
    """A decode whose ingress died publishes nothing more after one lease, in the holder's time."""

    def __init__(self) -> None:
        super().__init__()
        self._ingress: dict[Key, str] = {}
        self._dead_ns: dict[str, int] = {}
        self._lease_ns = 0

    def on_admitted(self, request: SimRequest) -> None:
        assert request.machine.lease_ms is not None
        self._lease_ns = request.machine.lease_ms * MS

    def on_held(self, key: Key, incarnation: str, ingress: str) -> None:
        self._ingress[key] = ingress

    def on_ingress_dead(self, incarnation: str) -> None:
        self._dead_ns[incarnation] = self.now_ns

    def on_publish_checked(self, key: Key) -> None:
        dead_ns = self._dead_ns.get(self._ingress.get(key, ""))
        if dead_ns is not None and self.now_ns > dead_ns + self._lease_ns + self._lease_ns * DRIFT_PPM // 1_000_000:
            self.violate(f"{key} publishes {(self.now_ns - dead_ns) // MS} ms after the death of its ingress")


class RightBytes(Witness):
    """Whatever is computed over, or taken in from a copy, holds the bytes that were written for it."""

    def on_block_read(self, where: str, expected: bytes, actual: bytes) -> None:
        if expected != actual:
            self.violate(f"{where}: {actual!r} where {expected!r} was written")


class Conservation(Witness):
    """Every generated token is delivered or discarded: the books agree with what workers made and clients got."""

    def __init__(self) -> None:
        super().__init__()
        self._generated: dict[Key, int] = {}
        self._closed: list[tuple[SimRequest, Close]] = []

    def on_generated(self, key: Key) -> None:
        self._generated[key] = self._generated.get(key, 0) + 1

    def on_closed(self, request: SimRequest, close: Close) -> None:
        self._closed.append((request, close))
        made = sum(self._generated.get((a.attempt_id, a.epoch), 0) for a in request.machine.attempts)
        if not close.num_delivered <= close.num_generated <= made:
            self.violate(
                f"{request.request_id}: delivered {close.num_delivered}, booked {close.num_generated}, made {made}"
            )

    def at_rest(self, world: World) -> None:
        for request, close in self._closed:
            if close.num_delivered != request.num_shown:
                self.violate(
                    f"{request.request_id}: {close.num_delivered} booked as delivered, {request.num_shown} written"
                )


class SufficientJournal(Witness):
    """The journal alone explains every retry decision, and what it says of the boundary is true."""

    def on_closed(self, request: SimRequest, close: Close) -> None:
        replayed = replay(request.machine.journal.entries)
        if not replayed.is_sufficient:
            self.violate(f"{request.request_id}: {replayed.decisions} from a journal of {replayed.recorded}")
        if replayed.facts.first_delta_sent != request.started:
            self.violate(f"{request.request_id}: the journal is wrong about the first delta")


class NothingLeft(Witness):
    """At rest after the heal: no events, every block free, no lease, no request; and the cluster serves again."""

    def __init__(self) -> None:
        super().__init__()
        self._probes: dict[str, str] = {}

    def on_told(self, request: SimRequest, ending: str, detail: Any) -> None:
        self._probes[request.request_id] = ending

    def at_rest(self, world: World) -> None:
        if not world.came_to_rest:
            self.violate("the cluster did not come to rest")
        for name, process in world.processes.items():
            if isinstance(process, IngressProcess):
                if process.running:
                    self.violate(f"{name} still runs {sorted(process.running)}")
                if process.num_leases:
                    self.violate(f"{name} still grants {process.num_leases} leases")
            else:
                self._check_worker(name, process)
        for number in range(world.num_probes):
            ending = self._probes.get(f"req-{1000 + number}", "nothing")
            if ending != "finished":
                ingress = number % world.scenario.shape.num_ingress
                self.violate(f"after the heal, a request at i{ingress} got: {ending}")

    def _check_worker(self, name: str, worker: SimPrefill | SimDecode) -> None:
        worker.pool.check_invariants()
        counts = worker.pool.counts()
        if counts.free != counts.total:
            self.violate(f"{name}: blocks are not free at rest: {counts}")
        if worker.num_attempts or worker.num_leases:
            self.violate(f"{name} still holds {worker.num_attempts} attempts and {worker.num_leases} leases")


ALL: tuple[type[Witness], ...] = (
    OneEnding,
    HonestEnding,
    TokenOrder,
    OnePublisher,
    StoppedBeforeNext,
    RetryOnlyUnsent,
    OneHolder,
    OrphansStop,
    RightBytes,
    Conservation,
    SufficientJournal,
    NothingLeft,
)
"""Every claim that a run is held to."""
