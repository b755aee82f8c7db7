"""What prefill and decode workers of a simulation have in common: links to ingresses, leases, the beat.

Follows ``workers.worker`` and ``workers.ingress_link``: one lease holder per ingress life, an ask every third of a
lease, expired attempts stopped. The beat runs only while something is held, so that a world at rest has no events.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cluster.core.attempt_events import WorkerRef
from cluster.sim.memory import SlotMemory
from cluster.sim.network import Link
from cluster.sim.scenario import MS
from cluster.sim.witness import Key
from kvstore.core.lease import LeaseHolder
from kvstore.core.messages import LeaseGrant

if TYPE_CHECKING:
    from cluster.sim.kernel import Life
    from cluster.sim.world import World

BLOCK_TOKENS = 4
SEEN_MAX = 4096


class SimWorker:
    """One life of a worker."""

    role = ""

    def __init__(self, world: World, life: Life) -> None:
        self.world = world
        self.kernel = world.kernel
        self.life = life
        shape = world.scenario.shape
        self.timing = shape.timing
        self.ref = WorkerRef(worker_id=life.name, incarnation=life.incarnation, pid=1, node="node")
        self.pool = world.parts.pool(shape.pool_blocks)
        self.memory = SlotMemory.of(life, shape.pool_blocks)
        self.slow_factor = 1
        self.seen: dict[Key, None] = {}
        self._links: dict[str, Link] = {}
        self._holders: dict[str, LeaseHolder] = {}
        self._beating = False

    # --- leases -----------------------------------------------------------------------------------------------

    @property
    def now_ns(self) -> int:
        """What this worker's clock shows."""
        return self.kernel.clock_ns(self.life)

    def hold(self, key: Key, ingress: str) -> None:
        """Takes an attempt on; the first ask leaves at once."""
        holder = self._holders.get(ingress)
        if holder is None:
            holder = self._holders[ingress] = self.world.parts.holder(self.timing.lease_ms)
        holder.begin(*key, now_ns=self.now_ns)
        self._ask(ingress, holder)
        self.beat()

    def let_go(self, key: Key, ingress: str) -> None:
        """Stops asking for an attempt."""
        holder = self._holders.get(ingress)
        if holder is not None:
            holder.end(*key)

    def holder(self, ingress: str) -> LeaseHolder:
        """Returns the lease holder towards one ingress."""
        return self._holders[ingress]

    def _ask(self, ingress: str, holder: LeaseHolder) -> None:
        link = self._links.get(ingress)
        if len(holder):
            ask = holder.ask(self.now_ns)
            if link is not None:
                link.send(self, ask)

    def beat(self) -> None:
        """Starts the beat unless it runs."""
        if not self._beating:
            self._beating = True
            self.kernel.at(self.timing.lease_ms * MS // 3, self.life, self._on_beat)

    def _on_beat(self) -> None:
        self._beating = False
        for ingress, holder in self._holders.items():
            self._ask(ingress, holder)
            expired = holder.expired(self.now_ns)
            if expired:
                self.on_lease_expired(expired)
            holder.check_invariants()
        self.on_beat()
        self.pool.check_invariants()
        if self.is_busy or any(len(holder) for holder in self._holders.values()):
            self.beat()

    @property
    def num_leases(self) -> int:
        """How many attempts are held for any ingress."""
        return sum(len(holder) for holder in self._holders.values())

    # --- links ------------------------------------------------------------------------------------------------

    def send(self, ingress: str, message: Any) -> bool:
        """Sends to an ingress now or not at all."""
        link = self._links.get(ingress)
        return link is not None and link.send(self, message)

    def on_link_up(self, link: Link) -> None:
        """An ingress is connected."""
        ingress = link.peer_of(self).life.incarnation
        self._links[ingress] = link
        holder = self._holders.get(ingress)
        if holder is not None:
            self._ask(ingress, holder)

    def on_link_down(self, link: Link) -> None:
        """A connection ended; that is not a death."""
        ingress = link.peer_of(self).life.incarnation
        if self._links.get(ingress) is link:
            del self._links[ingress]

    def on_message(self, link: Link, message: Any) -> None:
        """Takes one message."""
        ingress = link.peer_of(self).life.incarnation
        if isinstance(message, LeaseGrant):
            holder = self._holders.get(ingress)
            if holder is not None and holder.on_grant(message):
                self.on_granted(ingress)
        else:
            self.on_ingress_message(ingress, message)

    def on_gone(self, incarnation: str) -> None:
        """Another process is proved dead."""
        self._links.pop(incarnation, None)
        if incarnation in self._holders:
            self.on_ingress_gone(incarnation)
        self.on_peer_gone(incarnation)

    def has_seen(self, key: Key) -> bool:
        """Returns True for a key that was here before; remembers it."""
        if key in self.seen:
            return True
        self.seen[key] = None
        if len(self.seen) > SEEN_MAX:
            del self.seen[next(iter(self.seen))]
        return False

    # --- what a role adds -------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """True while the beat has something to watch besides leases."""
        return False

    def on_beat(self) -> None:
        """Looks at deadlines."""

    def on_granted(self, ingress: str) -> None:
        """A grant was taken."""

    def on_lease_expired(self, keys: list[Key]) -> None:
        """These attempts must stop."""

    def on_ingress_message(self, ingress: str, message: Any) -> None:
        """Takes a message of an ingress."""

    def on_ingress_gone(self, incarnation: str) -> None:
        """An ingress is proved dead."""

    def on_peer_gone(self, incarnation: str) -> None:
        """A worker is proved dead."""
