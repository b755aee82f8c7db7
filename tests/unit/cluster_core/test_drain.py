"""When what is to go has nothing left: only by the word of every ingress that lives, and none older than the order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.core.drain import DrainWatch

INGRESSES = ("i0", "i1", "i2")
LIVES = ("w0", "w1")


def test_nobody_there_is_quiet() -> None:
    """Without an ingress there is no request."""
    drains = DrainWatch()
    assert drains.is_quiet(7) and drains.is_released("w0", 7)


def test_an_ingress_that_has_not_heard_may_still_send() -> None:
    """Its word by an older membership says nothing about what it sends until it has the new one."""
    drains = DrainWatch()
    drains.joined("i0")
    drains.told("i0", version=4, num_open=0, busy=())
    assert not drains.is_quiet(5) and not drains.is_released("w0", 5)
    drains.told("i0", version=5, num_open=1, busy=("w0",))
    assert not drains.is_quiet(5) and not drains.is_released("w0", 5) and drains.is_released("w1", 5)
    drains.told("i0", version=5, num_open=1, busy=())
    assert not drains.is_quiet(5) and drains.is_released("w0", 5)
    drains.told("i0", version=4, num_open=0, busy=())
    assert not drains.is_quiet(5), "an older word came late"
    drains.told("i0", version=6, num_open=0, busy=())
    assert drains.is_quiet(5)


def test_a_dead_ingress_holds_nobody_up_and_is_not_heard_any_more() -> None:
    """A new one counts from its start, before its first word."""
    drains = DrainWatch()
    drains.joined("i0")
    drains.left("i0")
    assert drains.is_quiet(1)
    drains.told("i0", version=1, num_open=3, busy=("w0",))
    assert drains.is_quiet(1)
    drains.joined("i1")
    assert not drains.is_quiet(1)


_STEP = st.one_of(
    st.tuples(st.just("joined"), st.sampled_from(INGRESSES)),
    st.tuples(st.just("left"), st.sampled_from(INGRESSES)),
    st.tuples(
        st.just("told"),
        st.sampled_from(INGRESSES),
        st.integers(0, 3),
        st.integers(0, 2),
        st.sets(st.sampled_from(LIVES)),
    ),
)


@given(st.lists(_STEP, max_size=30), st.integers(0, 3))
def test_released_means_that_each_living_ingress_said_so(steps: list[tuple], version: int) -> None:  # type: ignore[type-arg]
    """Against the whole history."""
    drains = DrainWatch()
    words: dict[str, tuple[int, int, set[str]]] = {}
    for step in steps:
        if step[0] == "joined":
            drains.joined(step[1])
            words.setdefault(step[1], (-1, 0, set()))
        elif step[0] == "left":
            drains.left(step[1])
            words.pop(step[1], None)
        else:
            _, ingress, told, num_open, busy = step
            drains.told(ingress, version=told, num_open=num_open, busy=busy)
            if ingress in words and told >= words[ingress][0]:
                words[ingress] = (told, num_open, busy)
    assert drains.is_quiet(version) == all(told >= version and num == 0 for told, num, _ in words.values())
    for life in LIVES:
        released = all(told >= version and life not in busy for told, _, busy in words.values())
        assert drains.is_released(life, version) == released
