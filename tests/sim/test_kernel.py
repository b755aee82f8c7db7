"""Virtual time, links and copies: the ground that every simulated run stands on."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.sim.dice import Dice
from cluster.sim.kernel import EVENTS_MAX, Kernel, Life
from cluster.sim.memory import Copies, SlotMemory
from cluster.sim.network import Link, Network


def make_life(name: str) -> Life:
    return Life(name, f"{name}#1")


class Recorder:
    """An endpoint that writes down what reaches it."""

    def __init__(self, kernel: Kernel, name: str) -> None:
        self.kernel = kernel
        self.life = make_life(name)
        self.heard: list[Any] = []
        self.link: Link | None = None

    def on_link_up(self, link: Link) -> None:
        self.link = link
        self.heard.append("up")

    def on_link_down(self, link: Link) -> None:
        self.heard.append("down")

    def on_message(self, link: Link, message: Any) -> None:
        self.heard.append(message)


def make_pair() -> tuple[Kernel, Network, Recorder, Recorder]:
    kernel = Kernel()
    network = Network(kernel, Dice(1, 1), delay_ns_max=1_000_000)
    one, other = Recorder(kernel, "a"), Recorder(kernel, "b")
    network.dial(one, other)
    kernel.run(until_ns=10_000_000)
    return kernel, network, one, other


def send(sender: Recorder, *messages: Any) -> list[bool]:
    assert sender.link is not None
    return [sender.link.send(sender, message) for message in messages]


def test_events_run_in_order_of_time_then_of_making() -> None:
    """Ties are broken by age, never by chance."""
    kernel = Kernel()
    ran: list[str] = []
    for delay_ns, name in ((5, "c"), (1, "a"), (5, "d"), (1, "b")):
        kernel.at(delay_ns, None, ran.append, name)
    assert kernel.run(until_ns=10)
    assert ran == ["a", "b", "c", "d"]


def test_a_paused_life_runs_its_events_later_in_order_a_dead_one_never() -> None:
    """SIGSTOP and SIGKILL."""
    kernel = Kernel()
    paused, dead = make_life("p"), make_life("d")
    ran: list[str] = []
    for name in ("x", "y"):
        kernel.at(1, paused, ran.append, name)
    kernel.at(1, dead, ran.append, "never")
    kernel.pause(paused)
    dead.dead = True
    assert kernel.run(until_ns=5)
    assert ran == []
    kernel.resume(paused)
    kernel.run(until_ns=6)
    assert ran == ["x", "y"]


def test_a_world_that_spins_is_stopped() -> None:
    """Bounded in events, not only in time."""
    kernel = Kernel()

    def spin() -> None:
        kernel.at(0, None, spin)

    spin()
    assert not kernel.run(until_ns=1)
    assert kernel.num_events == EVENTS_MAX


def test_clocks_of_lives_differ_in_start_and_speed() -> None:
    """No two processes agree on the time."""
    kernel = Kernel()
    life = Life("a", "a#1", offset_ns=100, drift_ppm=400)
    kernel.at(1_000_000, None, lambda: None)
    kernel.run(until_ns=1_000_000)
    assert kernel.clock_ns(life) == 100 + 1_000_000 + 400


def test_messages_keep_their_order() -> None:
    """As on one connection, both ways."""
    kernel, _, one, other = make_pair()
    send(one, *range(50))
    send(other, *range(50))
    kernel.run(until_ns=kernel.now_ns + 10**9)
    assert one.heard == other.heard == ["up", *range(50)]


def test_a_cut_holds_messages_one_way_and_delivers_them_when_mended() -> None:
    """Like a connection that lives through the cut: nothing is lost, it is late."""
    kernel, network, one, other = make_pair()
    network.cut("a", "b", resets=False)
    send(one, 1, 2)
    send(other, 3)
    kernel.run(until_ns=kernel.now_ns + 10**9)
    assert (one.heard, other.heard) == (["up", 3], ["up"])
    network.mend("a", "b")
    kernel.run(until_ns=kernel.now_ns + 10**9)
    assert other.heard == ["up", 1, 2]


def test_a_reset_loses_what_is_under_way_and_the_dialler_comes_back() -> None:
    """Both sides notice; a send on the dead link says so."""
    kernel, network, one, other = make_pair()
    old = one.link
    send(one, "lost")
    network.reset("b", "a")
    assert send(one, "not sent") == [False]
    kernel.run(until_ns=kernel.now_ns + 10**9)
    assert one.heard == other.heard == ["up", "down", "up"]
    assert one.link is not old


@pytest.mark.parametrize("receiver_copies", [False, True])
def test_a_copy_that_was_given_up_still_lands_when_its_mover_wakes(receiver_copies: bool) -> None:
    """Put: the stopped sender writes late. Get: the stopped receiver reads late, whatever stands there by then."""
    kernel = Kernel()
    network = Network(kernel, Dice(1, 1), delay_ns_max=1_000_000)
    copies = Copies(kernel, network, Dice(2, 1), receiver_copies, 1_000_000)
    source, target = SlotMemory.of(make_life("p"), 1), SlotMemory.of(make_life("d"), 1)
    source.slots[0] = b"first"
    done: list[tuple[int, str]] = []
    copies.post_send(source, "d#1", 7, 0, lambda *facts: done.append(facts))
    copies.post_receive(target, "p#1", 7, 0, lambda *facts: done.append(facts))
    mover = target.life if receiver_copies else source.life
    kernel.pause(mover)
    kernel.run(until_ns=10**9)
    assert (target.slots, done) == ([b"\x00" * 16], [])
    copies.cancel_unmatched("p#1", "d#1")
    source.slots[0], target.slots[0] = b"source reused", b"target reused"
    kernel.resume(mover)
    kernel.run(until_ns=2 * 10**9)
    assert target.slots == [b"source reused"]
    assert done == [(7, "OK"), (7, "OK")]


def test_closing_cancels_what_never_met_its_other_half() -> None:
    """A send that nobody received, and the copies of a dead process."""
    kernel = Kernel()
    network = Network(kernel, Dice(1, 1), delay_ns_max=1_000_000)
    copies = Copies(kernel, network, Dice(2, 1), False, 1_000_000)
    source, target = SlotMemory.of(make_life("p"), 2), SlotMemory.of(make_life("d"), 2)
    done: list[tuple[int, str]] = []
    copies.post_send(source, "d#1", 1, 0, lambda *facts: done.append(facts))
    copies.cancel_unmatched("p#1", "d#1")
    copies.post_send(source, "d#1", 2, 1, lambda *facts: done.append(facts))
    copies.post_receive(target, "p#1", 2, 1, lambda *facts: done.append(facts))
    copies.drop_life("p#1")
    kernel.run(until_ns=10**9)
    assert done == [(1, "CANCELLED")]
    assert copies.num_open == 0
