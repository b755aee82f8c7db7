"""Membership: one life per slot at a time, losses counted once, restarts bounded."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cluster.core.membership import RESTART_DELAY_NS_MIN, RESTART_WINDOW_NS, RESTARTS_MAX, Membership, SlotState


def make_ready(incarnation: str = "i1") -> Membership:
    membership = Membership()
    membership.starting("decode-0", "decode", incarnation)
    assert membership.joined("decode-0", incarnation, pid=7)
    assert membership.ready("decode-0", incarnation)
    return membership


def test_a_life_goes_from_starting_to_ready_and_watchers_see_each_step() -> None:
    """Every change gives a new version."""
    membership = make_ready()
    assert membership.version == 3
    assert [slot.worker_id for slot in membership.ready_slots("decode")] == ["decode-0"]
    assert membership.ready_slots("prefill") == []


def test_loss_is_counted_once_and_old_lives_change_nothing() -> None:
    """A second report of the same death, or any word of a dead life, is ignored."""
    membership = make_ready()
    lost = membership.lost("decode-0", "i1", now_ns=1000)
    assert lost is not None and lost.restart_at_ns == 1000 + RESTART_DELAY_NS_MIN
    assert membership.lost("decode-0", "i1", now_ns=1001) is None
    assert not membership.ready("decode-0", "i1")
    membership.starting("decode-0", "decode", "i2")
    assert membership.lost("decode-0", "i1", now_ns=1002) is None
    assert membership.slots["decode-0"].state is SlotState.STARTING
    assert membership.gone == ["i1"]


def test_restarts_back_off_and_end() -> None:
    """Each loss in the window waits longer; after the limit the slot stays lost; later it may start again."""
    membership = Membership()
    delays = []
    for life in range(RESTARTS_MAX + 1):
        membership.starting("w", "prefill", f"i{life}")
        slot = membership.lost("w", f"i{life}", now_ns=life)
        assert slot is not None
        delays.append(None if slot.restart_at_ns is None else slot.restart_at_ns - life)
    assert delays == [RESTART_DELAY_NS_MIN << n for n in range(RESTARTS_MAX)] + [None]
    membership.starting("w", "prefill", "later")
    slot = membership.lost("w", "later", now_ns=RESTART_WINDOW_NS + RESTARTS_MAX)
    assert slot is not None and slot.restart_at_ns is not None


def test_a_draining_life_is_taken_back_or_goes_with_its_slot() -> None:
    """It is not ready meanwhile; once removed no word of it counts, and it is gone exactly once."""
    membership = make_ready()
    assert membership.draining("decode-0", "i1")
    assert membership.ready_slots("decode") == [] and membership.slots["decode-0"].state is SlotState.DRAINING
    assert membership.ready("decode-0", "i1") and len(membership.ready_slots("decode")) == 1
    membership.draining("decode-0", "i1")
    before = membership.version
    assert not membership.removed("decode-0", "other") and membership.removed("decode-0", "i1")
    assert membership.version > before and not membership.removed("decode-0", "i1")
    assert (membership.slots, membership.gone) == ({}, ["i1"])
    assert not membership.ready("decode-0", "i1") and membership.lost("decode-0", "i1", now_ns=5) is None
    membership.check_invariants()


def test_refused_life_never_becomes_ready() -> None:
    """C2: a life whose fingerprint differs keeps its fields and never serves."""
    membership = Membership()
    membership.starting("w", "decode", "i1")
    membership.joined("w", "i1", pid=3)
    membership.refused("w", "i1", ("weights_digest",))
    assert not membership.ready("w", "i1")
    assert membership.slots["w"].refused_fields == ("weights_digest",)


class MembershipMachine(RuleBasedStateMachine):
    """Random events in random order never break the books."""

    def __init__(self) -> None:
        super().__init__()
        self.membership = Membership()
        self.lives = 0
        self.now_ns = 0

    names = st.sampled_from(["a", "b"])

    @rule(name=names)
    def start(self, name: str) -> None:
        slot = self.membership.slots.get(name)
        if slot is None or slot.state is SlotState.LOST:
            self.lives += 1
            self.membership.starting(name, "decode", f"i{self.lives}")

    @rule(name=names, event=st.sampled_from(["joined", "ready", "refused", "lost"]), back=st.integers(0, 2))
    def report(self, name: str, event: str, back: int) -> None:
        incarnation = f"i{self.lives - back}"
        self.now_ns += 10**9
        before = self.membership.version
        match event:
            case "joined":
                changed = self.membership.joined(name, incarnation, pid=1)
            case "ready":
                slot = self.membership.slots.get(name)
                if slot is None or slot.pid is None:
                    return
                changed = self.membership.ready(name, incarnation)
            case "refused":
                changed = self.membership.refused(name, incarnation, ("x",))
            case _:
                changed = self.membership.lost(name, incarnation, self.now_ns) is not None
        assert (self.membership.version > before) == changed

    @invariant()
    def sound(self) -> None:
        self.membership.check_invariants()


MembershipMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestMembershipMachine = MembershipMachine.TestCase
