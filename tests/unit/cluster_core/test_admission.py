"""Admission: a place for each request until its books are closed."""

from __future__ import annotations

import pytest

from cluster.core.admission import Admission, Refused


def test_places_are_bounded_and_given_back() -> None:
    """The limit counts what is inside, not what came."""
    admission = Admission(2)
    assert admission.admit("a") is None
    assert admission.admit("b") is None
    refused = admission.admit("c")
    assert refused == Refused(429, "overloaded", "2 requests are waiting or running here already", 1)
    admission.leave("a")
    admission.leave("a")
    assert admission.admit("c") is None
    admission.check_invariants()
    assert (len(admission), admission.num_refused) == (2, 1)


def test_a_drain_refuses_all_and_lets_the_others_finish() -> None:
    """Contract section 6: finish what runs, refuse new."""
    admission = Admission(2)
    admission.admit("a")
    admission.drain()
    refused = admission.admit("b")
    assert isinstance(refused, Refused) and (refused.status, refused.code) == (503, "not_ready")
    assert len(admission) == 1


def test_the_same_request_cannot_come_in_twice() -> None:
    """That would let it give back somebody else's place."""
    admission = Admission(2)
    admission.admit("a")
    with pytest.raises(AssertionError, match="inside already"):
        admission.admit("a")
