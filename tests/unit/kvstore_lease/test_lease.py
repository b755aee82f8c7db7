"""Leases: the holder always stops before the granter believes that it has."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.lease import DRIFT_PPM, NS_PER_MS, OPEN_ASKS_MAX, LeaseGranter, LeaseHolder
from kvstore.core.messages import LeaseGrant

A = ("att-1", 1)
DURATION_MS = 100
DURATION_NS = DURATION_MS * NS_PER_MS


def make_holder() -> LeaseHolder:
    holder = LeaseHolder(DURATION_MS)
    holder.begin(*A, now_ns=0)
    return holder


def make_granter() -> LeaseGranter:
    granter = LeaseGranter(DURATION_MS)
    granter.dispatch(*A, now_ns=0)
    return granter


def test_nothing_is_published_before_the_first_grant() -> None:
    """A dispatch carries no lease."""
    holder = make_holder()
    holder.ask(5)
    assert not holder.may_publish(*A, now_ns=6)


def test_a_lease_runs_from_the_ask_not_from_the_grant() -> None:
    """A grant that arrives late is worth less, down to nothing."""
    holder, granter = make_holder(), make_granter()
    grant = granter.on_ask(holder.ask(10), 20)
    assert holder.on_grant(grant)
    assert holder.may_publish(*A, now_ns=10 + DURATION_NS - 1)
    assert not holder.may_publish(*A, now_ns=10 + DURATION_NS)


def test_grants_with_unknown_or_used_nonces_change_nothing() -> None:
    """A replayed or invented grant never extends a lease."""
    holder, granter = make_holder(), make_granter()
    grant = granter.on_ask(holder.ask(0), 0)
    assert holder.on_grant(grant)
    later = holder.ask(50)
    assert not holder.on_grant(grant)
    assert not holder.on_grant(LeaseGrant(nonce=99, duration_ms=DURATION_MS, granted=(A,)))
    assert not holder.may_publish(*A, now_ns=DURATION_NS)
    assert holder.on_grant(granter.on_ask(later, 60))
    assert holder.may_publish(*A, now_ns=DURATION_NS)


def test_a_grant_cannot_be_longer_than_the_holder_allows() -> None:
    """A granter with another setting cannot make the holder outlive its own duration."""
    holder = make_holder()
    ask = holder.ask(0)
    holder.on_grant(LeaseGrant(nonce=ask.nonce, duration_ms=DURATION_MS * 50, granted=(A,)))
    assert not holder.may_publish(*A, now_ns=DURATION_NS)


def test_reordered_grants_never_shorten_a_lease() -> None:
    """The answer to an older ask that arrives second leaves the newer deadline alone."""
    holder, granter = make_holder(), make_granter()
    first, second = holder.ask(0), holder.ask(40)
    holder.on_grant(granter.on_ask(second, 45))
    holder.on_grant(granter.on_ask(first, 46))
    assert holder.may_publish(*A, now_ns=40 + DURATION_NS - 1)


def test_revoked_attempt_stops_with_the_next_answer_and_for_good() -> None:
    """Left out of a grant once, an attempt is not asked for again."""
    holder, granter = make_holder(), make_granter()
    holder.on_grant(granter.on_ask(holder.ask(0), 0))
    granter.revoke(*A)
    holder.on_grant(granter.on_ask(holder.ask(10), 11))
    assert not holder.may_publish(*A, now_ns=12)
    assert holder.expired(12) == [A]
    assert holder.ask(13).attempts == ()


def test_an_attempt_that_is_never_granted_expires_after_one_duration() -> None:
    """B8: a worker whose ingress died right after the dispatch lets the attempt go."""
    holder = make_holder()
    holder.ask(0)
    assert holder.expired(DURATION_NS - 1) == []
    assert holder.expired(DURATION_NS) == [A]


def test_unknown_attempts_are_not_granted() -> None:
    """An ask of another epoch, or of an attempt that ended, gets nothing."""
    holder = LeaseHolder(DURATION_MS)
    holder.begin("att-1", 2, now_ns=0)
    granter = make_granter()
    assert granter.on_ask(holder.ask(0), 0).granted == ()
    granter.end(*A)
    assert granter.safe_after_ns(*A) is None
    assert make_holder().ask(0).attempts == (A,)
    assert granter.on_ask(make_holder().ask(0), 0).granted == ()


def test_never_granted_is_safe_at_once_granted_only_after_the_hold() -> None:
    """The granter's wait for a fence follows from what it granted."""
    holder, granter = make_holder(), make_granter()
    assert granter.safe_after_ns(*A) == 0
    granter.on_ask(holder.ask(0), 7)
    assert granter.safe_after_ns(*A) == 7 + granter.hold_ns
    assert granter.hold_ns > DURATION_NS


def test_open_asks_are_bounded() -> None:
    """A granter that never answers cannot fill the holder's memory."""
    holder = make_holder()
    asks = [holder.ask(n) for n in range(OPEN_ASKS_MAX + 5)]
    holder.check_invariants()
    assert not holder.on_grant(LeaseGrant(nonce=asks[0].nonce, duration_ms=1, granted=(A,)))


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 80), st.integers(0, 150), st.integers(0, 150), st.booleans(), st.booleans()),
        min_size=1,
        max_size=30,
    ),
    revoke_at=st.integers(0, 29),
    drift_ppm=st.integers(-DRIFT_PPM + 1, DRIFT_PPM - 1),
    offset_ns=st.integers(-(10**12), 10**12),
)
@settings(max_examples=300, deadline=None)
def test_holder_has_stopped_when_the_granter_says_so(
    steps: list[tuple[int, int, int, bool, bool]], revoke_at: int, drift_ppm: int, offset_ns: int
) -> None:
    """With any delay, loss, clock offset and bounded drift, nothing is publishable at ``safe_after_ns``."""

    def holder_clock(now_ns: int) -> int:
        return offset_ns + now_ns + now_ns * drift_ppm // 1_000_000

    holder, granter = LeaseHolder(DURATION_MS), LeaseGranter(DURATION_MS)
    holder.begin(*A, now_ns=holder_clock(0))
    granter.dispatch(*A, now_ns=0)
    grants: list[tuple[int, LeaseGrant]] = []
    now_ms = 0
    for number, (gap_ms, there_ms, back_ms, lost_there, lost_back) in enumerate(steps):
        now_ms += gap_ms
        if number == revoke_at:
            granter.revoke(*A)
        ask = holder.ask(holder_clock(now_ms * NS_PER_MS))
        if lost_there:
            continue
        grant = granter.on_ask(ask, (now_ms + there_ms) * NS_PER_MS)
        if not lost_back:
            grants.append(((now_ms + there_ms + back_ms) * NS_PER_MS, grant))
    safe_ns = granter.safe_after_ns(*A)
    assert safe_ns is not None
    for arrival_ns, grant in sorted(grants, key=lambda item: item[0]):
        if arrival_ns <= safe_ns:
            holder.on_grant(grant)
    assert not holder.may_publish(*A, now_ns=holder_clock(safe_ns))


def test_an_attempt_that_nobody_asks_for_lapses_once() -> None:
    """A stopped or unreachable holder is found by its silence; a revoked attempt is granted nothing more."""
    holder, granter = make_holder(), make_granter()
    granter.on_ask(holder.ask(0), 7)
    assert granter.lapse(7 + granter.hold_ns - 1) == []
    assert granter.lapse(7 + granter.hold_ns) == [A]
    assert granter.lapse(7 + granter.hold_ns) == []
    assert granter.on_ask(holder.ask(1), 8 + granter.hold_ns).granted == ()
    granter.check_invariants()


def test_a_dispatch_that_never_arrived_lapses_after_one_hold() -> None:
    """The time a holder has for its first ask."""
    granter = make_granter()
    assert granter.lapse(granter.hold_ns - 1) == []
    assert granter.lapse(granter.hold_ns) == [A]


def test_a_revoked_attempt_does_not_lapse() -> None:
    """Whoever revoked it waits for its fence already."""
    granter = make_granter()
    granter.revoke(*A)
    assert granter.lapse(10 * granter.hold_ns) == []


def test_asks_are_due_every_third_of_a_duration() -> None:
    """Two may be lost before a lease runs out."""
    holder = make_holder()
    assert holder.next_ask_ns is None
    holder.ask(9)
    assert holder.next_ask_ns == 9 + DURATION_NS // 3
