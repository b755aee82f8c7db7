"""From the workers that run to those that are wanted: no more coming and going than needed, names given once."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from cluster.core.rollout import Rollout, Running, plan_rollout

SMALL, LARGE = "small", "large"


def decodes(*kinds: str, leaving: tuple[int, ...] = ()) -> dict[str, Running]:
    return {f"decode-{n}": Running("decode", kind, n in leaving) for n, kind in enumerate(kinds)}


def test_a_change_of_number_touches_nobody_else() -> None:
    """Up: one comes under the next name. Down: the highest number goes."""
    two = [("decode", SMALL)] * 2
    assert plan_rollout(decodes(SMALL), two) == Rollout(("decode-0",), (), (("decode-1", 1),), ())
    assert plan_rollout(decodes(SMALL, SMALL), two[:1]) == Rollout(("decode-0",), (), (), ("decode-1",))
    assert plan_rollout(decodes(SMALL, SMALL), two) == Rollout(("decode-0", "decode-1"), (), (), ())


def test_ten_come_after_nine() -> None:
    """Names are ordered by number, not by letter."""
    running = decodes(*[SMALL] * 11)
    assert plan_rollout(running, [("decode", SMALL)] * 10).leave == ("decode-10",)


def test_one_that_is_leaving_is_taken_back_before_another_starts() -> None:
    """But not for another kind, and its name stays its own meanwhile."""
    running = decodes(SMALL, SMALL, leaving=(1,))
    assert plan_rollout(running, [("decode", SMALL)] * 2) == Rollout(("decode-0",), ("decode-1",), (), ())
    assert plan_rollout(running, [("decode", LARGE)]) == Rollout((), (), (("decode-2", 0),), ("decode-0",))


def test_another_kind_comes_beside_the_old_one() -> None:
    """Both are there until the new one is ready."""
    rollout = plan_rollout(decodes(SMALL), [("decode", LARGE)])
    assert rollout == Rollout((), (), (("decode-1", 0),), ("decode-0",))


_ROLE = st.sampled_from(("prefill", "decode", "combined"))
_KIND = st.sampled_from((SMALL, LARGE))


@given(
    st.dictionaries(st.builds("{}-{}".format, _ROLE, st.integers(0, 12)), st.tuples(_KIND, st.booleans()), max_size=12),
    st.lists(st.tuples(_ROLE, _KIND), max_size=12),
)
def test_the_end_is_what_was_wanted_and_nothing_moves_without_need(
    there: dict[str, tuple[str, bool]], wanted: list[tuple[str, str]]
) -> None:
    """Counted by role and kind, whatever was there."""
    running = {name: Running(name.split("-")[0], kind, leaving) for name, (kind, leaving) in there.items()}
    rollout = plan_rollout(running, wanted)
    stay = [*rollout.keep, *rollout.take_back]
    end = [(running[name].role, running[name].kind) for name in stay] + [wanted[index] for _, index in rollout.start]
    assert Counter(end) == Counter(wanted)
    new = [name for name, _ in rollout.start]
    assert len({*running, *new}) == len(running) + len(new), "a name was given twice"
    assert set(rollout.leave) == {name for name in running if name not in stay and not running[name].is_leaving}
    assert all(name.startswith(f"{wanted[index][0]}-") for name, index in rollout.start)
    started = Counter(wanted[index] for _, index in rollout.start)
    for name in rollout.leave:
        assert not started[(running[name].role, running[name].kind)], "one goes and another of its kind comes"
