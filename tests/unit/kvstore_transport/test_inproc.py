"""The in-process backend as a simulator uses it: halves of copies, stops, deaths, any order of events."""

from __future__ import annotations

import random

import pytest

from kvstore.digest import block_digest
from kvstore.transport.base import BlockReceive, BlockSend, TransferResult
from kvstore.transport.inproc import InprocHub, InprocTransport


class World:
    """Two linked transports on a hub whose clock the test turns."""

    def __init__(self, choose=lambda num_copies: 0) -> None:  # type: ignore[no-untyped-def]
        self.now = 0.0
        self.hub = InprocHub(lambda: self.now, choose=choose)
        self.a, self.b = InprocTransport(self.hub), InprocTransport(self.hub)
        self.a.connect("b", self.b.address(), same_host=True, deadline_s=1)
        self.b.connect("a", self.a.address(), same_host=True, deadline_s=1)

    def check(self) -> None:
        self.a.check_invariants()
        self.b.check_invariants()


def test_other_things_happen_between_the_halves_of_a_copy() -> None:
    """After one step half of the block is there and nobody has been told."""
    world = World()
    target = bytearray(8)
    pushed = world.a.push("b", [BlockSend(1, memoryview(b"abcdefgh"))], deadline_s=9)
    received = world.b.receive("a", [BlockReceive(1, memoryview(target), None)], deadline_s=9)
    world.hub.step()
    assert bytes(target) == b"abcd\0\0\0\0" and not received.done() and not pushed.done()
    world.hub.run()
    assert bytes(target) == b"abcdefgh" and received.result() == pushed.result() == [TransferResult.OK]
    world.check()


def test_a_source_that_changes_between_the_halves_is_corrupt() -> None:
    """The digest was made before; the torn copy does not have it."""
    world = World()
    source = bytearray(b"abcdefgh")
    digest = block_digest(source)
    world.a.push("b", [BlockSend(1, memoryview(source))], deadline_s=9)
    received = world.b.receive("a", [BlockReceive(1, memoryview(bytearray(8)), digest)], deadline_s=9)
    world.hub.step()
    source[:] = b"zzzzzzzz"
    world.hub.run()
    assert received.result() == [TransferResult.CORRUPT]


def test_a_receiver_stopped_between_the_halves_goes_on_where_it_was() -> None:
    world = World()
    target = bytearray(8)
    world.a.push("b", [BlockSend(1, memoryview(b"abcdefgh"))], deadline_s=9)
    received = world.b.receive("a", [BlockReceive(1, memoryview(target), None)], deadline_s=2)
    world.hub.step()
    world.hub.stop(world.b.address())
    world.now = 5.0
    world.hub.run()
    assert not received.done()
    world.hub.resume(world.b.address())
    world.hub.run()
    assert received.done() and world.b.outstanding("a") == frozenset()
    world.check()


@pytest.mark.parametrize("seed", range(50))
def test_any_order_of_events_keeps_the_books_right(seed: int) -> None:
    """Random pushes, receives, steps, time, losses: every future ends, OK means the right bytes, nothing leaks."""
    rng = random.Random(seed)
    world = World(choose=rng.randrange)
    targets: dict[int, bytearray] = {}
    sources: dict[int, bytes] = {}
    futures = []
    landed: list[tuple[int, TransferResult]] = []
    for tag in range(1, 40):
        action = rng.random()
        if action < 0.45:
            sources[tag] = rng.randbytes(rng.choice((1, 7, 64)))
            futures.append(world.a.push("b", [BlockSend(tag, memoryview(sources[tag]))], deadline_s=3))
        if 0.2 < action < 0.75:
            content = sources.get(tag, b"never")
            targets[tag] = bytearray(len(content))
            receive = BlockReceive(tag, memoryview(targets[tag]), block_digest(content))
            future = world.b.receive("a", [receive], deadline_s=3)
            future.add_done_callback(lambda done, tag=tag: landed.append((tag, done.result()[0])))
            futures.append(future)
        if action > 0.9:
            world.now += 1.0
        for _ in range(rng.randrange(3)):
            world.hub.step()
            world.check()
    world.now += 10.0
    world.hub.run()
    world.check()
    assert all(future.done() for future in futures)
    for tag, result in landed:
        if result is TransferResult.OK:
            assert bytes(targets[tag]) == sources[tag]
    world.hub.kill(world.a.address())
    world.b.peer_lost("a", proved_dead=True)
    assert world.b.outstanding("a") == frozenset()
    world.check()
