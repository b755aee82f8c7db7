"""Several hosts on one machine: network namespaces on a switch, and the ways in which a network fails.

Owns the switch (a bridge in this process's own namespace, which is a host as well) and the namespaces; takes them away
again. Needs root and ``ip``; where that is missing it says so. Frames are lost by the switch, silently, as on a real
network: neither end is told, and connections stay open until somebody runs out of patience.
"""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from bench.network import COMMAND_DEADLINE_S, Place, require_namespaces, run_ip, wait_until_up
from kvstore.errors import BadInput, EnvironmentProblem

MAX_HOSTS = 200


@dataclass(frozen=True, slots=True)
class Host:
    """A namespace with one device, plugged into ``port`` of the switch."""

    place: Place
    port: str


FAULTS: dict[str, tuple[str, ...]] = {
    "cut": ("learning", "off", "locked", "on", "flood", "off", "bcast_flood", "off", "mcast_flood", "off"),
    "mute": ("learning", "off", "locked", "on"),
    "deaf": ("learning", "off", "flood", "off", "bcast_flood", "off", "mcast_flood", "off"),
    "apart": ("isolated", "on"),
}
"""What is switched at the ports of the hosts concerned. ``mute``: nothing comes from them any more; ``deaf``: nothing
reaches them; ``cut``: both; ``apart``: they do not hear each other, but everybody else."""


class Hosts:
    """The switch and what is plugged into it. ``address`` is this process's own."""

    def __init__(self, network: str, bridge: str) -> None:
        self._network = network
        self._bridge = bridge
        self.address = f"{network}.1"
        self.hosts: list[Host] = []

    def add(self, mark: str) -> Host:
        """Makes another host. Raises: EnvironmentProblem."""
        number = len(self.hosts)
        if number >= MAX_HOSTS:
            raise BadInput("hosts", number + 1, f"at most {MAX_HOSTS}")
        place = Place(f"kopir-{mark}-{number}", "eth0", f"{self._network}.{number + 10}")
        host = Host(place, f"k{mark}{number}")
        run_ip("netns", "add", place.namespace)
        self.hosts.append(host)
        run_ip("link", "add", host.port, "type", "veth", "peer", "name", place.device, "netns", place.namespace)
        run_ip("link", "set", host.port, "master", self._bridge, "up")
        run_ip("-n", place.namespace, "addr", "add", f"{place.host}/24", "dev", place.device)
        run_ip("-n", place.namespace, "link", "set", place.device, "up")
        run_ip("-n", place.namespace, "link", "set", "lo", "up")
        wait_until_up(place)
        return host

    @contextmanager
    def broken(self, fault: str, *hosts: Host) -> Iterator[None]:
        """Breaks the network of some hosts meanwhile; see ``FAULTS``. Raises: BadInput for an unknown fault."""
        if fault not in FAULTS:
            raise BadInput("fault", fault, f"one of {sorted(FAULTS)}")
        switches = FAULTS[fault]
        try:
            for host in hosts:
                self._set(host, *switches, "fdb_flush")
            yield
        finally:
            for host in hosts:
                self._set(host, *_opposite(switches))

    @contextmanager
    def slow(self, host: Host, rate: str) -> Iterator[None]:
        """Limits what a host sends to ``rate`` (as ``tc`` writes it: ``20mbit``) meanwhile."""
        at = ("-n", host.place.namespace, "qdisc")
        _tc(*at, "add", "dev", host.place.device, "root", "tbf", "rate", rate, "burst", "64kbit", "latency", "400ms")
        try:
            yield
        finally:
            _tc(*at, "del", "dev", host.place.device, "root")

    def _set(self, host: Host, *switches: str) -> None:
        run_ip("link", "set", host.port, "type", "bridge_slave", *switches)


def _opposite(switches: tuple[str, ...]) -> tuple[str, ...]:
    return tuple({"on": "off", "off": "on"}.get(word, word) for word in switches)


@contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    """Makes ``count`` hosts beside this one and removes them at the end. Raises: EnvironmentProblem."""
    require_namespaces()
    mark = secrets.token_hex(3)
    bridge = f"kbr{mark}"
    made = Hosts(f"10.79.{secrets.randbelow(250) + 1}", bridge)
    try:
        run_ip("link", "add", bridge, "type", "bridge")
        run_ip("addr", "add", f"{made.address}/24", "dev", bridge)
        run_ip("link", "set", bridge, "up")
        for _ in range(count):
            made.add(mark)
        yield made
    finally:
        for host in made.hosts:
            _quietly("netns", "del", host.place.namespace)
            _quietly("link", "del", host.port)
        _quietly("link", "del", bridge)


def _quietly(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, timeout=COMMAND_DEADLINE_S)


def _tc(*arguments: str) -> None:
    done = subprocess.run(["tc", *arguments], capture_output=True, text=True, timeout=COMMAND_DEADLINE_S)
    if done.returncode != 0:
        raise EnvironmentProblem(f"tc {' '.join(arguments)}: {done.stderr.strip()}")
