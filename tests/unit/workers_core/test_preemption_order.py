"""Who yields, who waits, who comes back: exact answers, and nobody stands still for ever."""

from __future__ import annotations

import random

import pytest

from workers.core.preemption import Holding, Key, PreemptionOrder


def key(name: str) -> Key:
    return name, 1


def make_order(*names: str) -> PreemptionOrder:
    """All of them run, oldest first."""
    order = PreemptionOrder()
    for name in names:
        order.join(key(name))
        order.move(key(name), Holding.RUNNING)
    return order


def nobody(_: Key) -> bool:
    return False


def test_the_youngest_yields_to_the_older() -> None:
    """Never the other way round; the youngest of all waits."""
    order = make_order("a", "b", "c")
    assert order.victim(key("a"), nobody) == key("c")
    assert order.victim(key("b"), nobody) == key("c")
    assert order.victim(key("c"), nobody) is None


def test_who_cannot_decode_anyway_yields_first() -> None:
    """A slow reader's stream loses nothing, however old it is."""
    order = make_order("a", "b", "c", "d")
    assert order.victim(key("d"), lambda k: k == key("a")) == key("a")
    assert order.victim(key("b"), lambda k: k in (key("a"), key("c"))) == key("c")
    assert order.victim(key("a"), lambda k: k == key("a")) == key("d"), "not itself"


def test_one_leaves_at_a_time() -> None:
    """While somebody is leaving his blocks are on their way: nobody else is asked."""
    order = make_order("a", "b", "c")
    order.move(key("c"), Holding.LEAVING)
    assert order.victim(key("a"), nobody) is None
    order.move(key("c"), Holding.AWAY)
    assert order.victim(key("a"), nobody) == key("b")


def test_only_running_streams_are_asked() -> None:
    """Blocks that a peer still writes cannot be given away."""
    order = make_order("a", "b")
    order.join(key("c"))
    assert order.victim(key("a"), nobody) == key("b")
    order.leave(key("b"))
    assert order.victim(key("a"), nobody) is None


def test_the_oldest_that_is_away_returns_first_unless_it_is_idle() -> None:
    """In order of arrival; one whose reader is slow waits for his reader."""
    order = make_order("a", "b", "c")
    for name in ("c", "b"):
        order.move(key(name), Holding.LEAVING)
        order.move(key(name), Holding.AWAY)
    assert order.next_return(nobody) == key("b")
    assert order.next_return(lambda k: k == key("b")) == key("c")
    assert order.margin_blocks() == 1
    order.move(key("b"), Holding.RETURNING)
    assert order.next_return(nobody) == key("c")
    assert order.margin_blocks() == 2
    order.leave(key("c"))
    order.leave(key("nobody"))
    assert order.next_return(nobody) is None


def test_states_follow_their_order() -> None:
    """A step that is not in the life of a holder is a bug."""
    order = make_order("a")
    with pytest.raises(AssertionError, match="running -> away"):
        order.move(key("a"), Holding.AWAY)
    with pytest.raises(AssertionError, match="here already"):
        order.join(key("a"))


@pytest.mark.parametrize("seed", range(40))
def test_every_stream_ends_in_a_pool_that_is_too_small(seed: int) -> None:
    """Streams that grow by one block at a time, at random speeds: each ends, the books balance, work is bounded."""
    chooser = random.Random(seed)
    total = chooser.randint(6, 20)
    needs = [chooser.randint(1, total) for _ in range(12)]
    order = PreemptionOrder()
    held: dict[Key, int] = {}
    reached: dict[Key, int] = {}
    waiting = [key(f"s{number}") for number in range(len(needs))]
    need = {key(f"s{number}"): count for number, count in enumerate(needs)}
    num_preemptions = 0

    def free() -> int:
        return total - sum(held.values())

    for _ in range(20_000):
        if not need:
            break
        returning = order.next_return(nobody)
        if returning is not None and free() >= reached[returning] + order.margin_blocks():
            order.move(returning, Holding.RETURNING)
            order.move(returning, Holding.RUNNING)
            held[returning] = reached[returning]
        elif returning is None and waiting and free() >= 1 + order.margin_blocks():
            newest = waiting.pop(0)
            order.join(newest)
            order.move(newest, Holding.RUNNING)
            held[newest] = reached[newest] = 1
        running = [k for k in held if order.state(k) is Holding.RUNNING]
        one = chooser.choice(running)
        if reached[one] == need[one]:
            order.leave(one)
            del held[one], need[one]
        elif free():
            held[one] += 1
            reached[one] += 1
        elif (victim := order.victim(one, nobody)) is not None:
            num_preemptions += 1
            order.move(victim, Holding.LEAVING)
            order.move(victim, Holding.AWAY)
            del held[victim]
        assert free() >= 0
    assert not need, f"still unfinished: {need}"
    assert num_preemptions <= 40 * len(needs)
