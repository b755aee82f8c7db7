"""Connections between simulated processes: ordered while nothing is wrong, and everything that can be wrong.

Owns the open links, the cuts and the chaos in force. A link is a connection of one dialler life and one listener life;
it carries messages both ways in order. A cut stops one direction: what is sent waits in the sender's buffers and
arrives after the heal, unless the connection breaks, which loses it. Chaos loses, doubles and delays single messages,
which a real connection would not do: the cores must stay safe even then.
"""

from __future__ import annotations

from typing import Any, Protocol

from cluster.sim.dice import Dice
from cluster.sim.kernel import Kernel, Life
from cluster.sim.scenario import Chaos
from kvstore.core.messages import BlocksPosted, Credit, Frame, Resend

REDIAL_NS = 30_000_000
BREAK_NS_MAX = 200_000_000
"""A connection that breaks during a cut breaks within this."""
NEVER_LOST_ALONE = (Credit, BlocksPosted, Resend)
"""Nothing makes up for the loss of these alone; a real connection loses them only by breaking."""


class Endpoint(Protocol):
    """A process that has links."""

    life: Life

    def on_link_up(self, link: Link) -> None: ...

    def on_link_down(self, link: Link) -> None: ...

    def on_message(self, link: Link, message: Any) -> None: ...


class Link:
    """One connection. Side 0 dialled, side 1 listened."""

    __slots__ = ("ends", "held", "is_open", "last_ns", "network")

    def __init__(self, network: Network, dialler: Endpoint, listener: Endpoint) -> None:
        self.network = network
        self.ends = (dialler, listener)
        self.is_open = True
        self.last_ns = [0, 0]
        self.held: tuple[list[Any], list[Any]] = ([], [])

    def send(self, sender: Endpoint, message: Any) -> bool:
        """Sends towards the other side. Returns False when the connection is known to be down."""
        if not self.is_open:
            return False
        self.network.carry(self, 0 if sender is self.ends[0] else 1, message)
        return True

    def peer_of(self, end: Endpoint) -> Endpoint:
        """Returns the other side."""
        return self.ends[1] if end is self.ends[0] else self.ends[0]


class Network:
    """All links of a world."""

    def __init__(self, kernel: Kernel, dice: Dice, *, delay_ns_max: int) -> None:
        self._kernel = kernel
        self._dice = dice
        self._delay_ns_max = delay_ns_max
        self._links: list[Link] = []
        self._cuts: dict[tuple[str, str], int] = {}
        self.chaos: list[Chaos] = []

    # --- links ------------------------------------------------------------------------------------------------

    def dial(self, dialler: Endpoint, listener: Endpoint) -> None:
        """Connects now, or tries again until it works or a side is dead."""
        if dialler.life.dead or listener.life.dead:
            return
        if self._is_cut(dialler.life.name, listener.life.name) or self._is_cut(listener.life.name, dialler.life.name):
            self._kernel.at(REDIAL_NS, dialler.life, self.dial, dialler, listener)
            return
        link = Link(self, dialler, listener)
        self._links.append(link)
        dialler.on_link_up(link)
        self._kernel.at(self._delay_ns(), listener.life, self._arrive, link)

    def _arrive(self, link: Link) -> None:
        if link.is_open:
            link.ends[1].on_link_up(link)

    def reset(self, one: str, other: str) -> None:
        """Breaks every link between two processes."""
        for link in [k for k in self._links if {end.life.name for end in k.ends} == {one, other}]:
            self._break(link)

    def drop_life(self, life: Life) -> None:
        """A process is dead: its connections break."""
        for link in [k for k in self._links if any(end.life is life for end in k.ends)]:
            self._break(link)

    def _break(self, link: Link) -> None:
        if not link.is_open:
            return
        link.is_open = False
        self._links.remove(link)
        dialler, listener = link.ends
        for end in link.ends:
            # Each side notices in its own time.
            self._kernel.at(self._dice.skewed(0, REDIAL_NS), end.life, end.on_link_down, link)
        self._kernel.at(REDIAL_NS + self._dice.between(0, REDIAL_NS), dialler.life, self._redial, dialler, listener)

    def _redial(self, dialler: Endpoint, listener: Endpoint) -> None:
        self.dial(dialler, listener)

    # --- messages -----------------------------------------------------------------------------------------------

    def carry(self, link: Link, side: int, message: Any) -> None:
        """Takes a message from side ``side`` of a link."""
        source, destination = link.ends[side].life.name, link.ends[1 - side].life.name
        if self._cuts and self._is_cut(source, destination):
            link.held[side].append(message)
            return
        kernel = self._kernel
        arrive_ns = max(kernel.now_ns + self._delay_ns(), link.last_ns[side])
        copies = 1
        if self.chaos:
            copies, extra_ns = self._fate(message)
            if copies == 0 and isinstance(message, Frame):
                # Tokens are lost only with their connection: a stream that waits for credit shows no gap later.
                kernel.at(self._dice.between(0, BREAK_NS_MAX), None, self._break, link)
            # A late message is overtaken by those sent after it.
            if extra_ns:
                kernel.at(
                    arrive_ns - kernel.now_ns + extra_ns, link.ends[1 - side].life, self._deliver, link, side, message
                )
                copies -= 1
        for _ in range(copies):
            kernel.at(arrive_ns - kernel.now_ns, link.ends[1 - side].life, self._deliver, link, side, message)
            link.last_ns[side] = arrive_ns

    def _deliver(self, link: Link, side: int, message: Any) -> None:
        if link.is_open:
            self._kernel.note("got", link.ends[side].life.name, type(message).__name__)
            link.ends[1 - side].on_message(link, message)

    def _fate(self, message: Any) -> tuple[int, int]:
        """Returns (copies, extra delay of one of them)."""
        dice = self._dice
        copies, extra_ns = 1, 0
        for chaos in self.chaos:
            if chaos.drop and dice.chance(chaos.drop / 100) and not isinstance(message, NEVER_LOST_ALONE):
                copies -= 1
            if chaos.double and dice.chance(chaos.double / 100):
                copies += 1
            if chaos.late and dice.chance(chaos.late / 100):
                extra_ns = dice.between(1, chaos.late_ns_max)
        return max(copies, 0), extra_ns if copies > 0 else 0

    def _delay_ns(self) -> int:
        return self._dice.skewed(50_000, self._delay_ns_max)

    # --- cuts ---------------------------------------------------------------------------------------------------

    def cut(self, source: str, destination: str, *, resets: bool) -> None:
        """Nothing passes this way until ``mend``."""
        self._cuts[source, destination] = self._cuts.get((source, destination), 0) + 1
        if resets:
            self._kernel.at(self._dice.between(0, BREAK_NS_MAX), None, self.reset, source, destination)

    def mend(self, source: str, destination: str) -> None:
        """Ends one cut of this way; what waited arrives."""
        left = self._cuts.get((source, destination), 0) - 1
        if left > 0:
            self._cuts[source, destination] = left
            return
        self._cuts.pop((source, destination), None)
        for link in self._links:
            for side in (0, 1):
                ends = link.ends
                if (ends[side].life.name, ends[1 - side].life.name) == (source, destination):
                    waiting = list(link.held[side])
                    link.held[side].clear()
                    for message in waiting:
                        self.carry(link, side, message)

    def mend_all(self) -> None:
        """Heals the network."""
        self.chaos.clear()
        for source, destination in list(self._cuts):
            self._cuts[source, destination] = 1
            self.mend(source, destination)

    def is_cut(self, one: str, other: str) -> bool:
        """True while something is cut between two processes, either way."""
        return bool(self._cuts) and (self._is_cut(one, other) or self._is_cut(other, one))

    def _is_cut(self, source: str, destination: str) -> bool:
        return (source, destination) in self._cuts
