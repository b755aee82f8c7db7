"""Spans from a journal: what a lost attempt and a broken answer look like."""

from __future__ import annotations

from typing import Any

from cluster.core.trace_spans import SpanFacts, spans_of

MS = 1_000_000


def make_attempt(epoch: int, started_ms: int, ended_ms: int | None, reason: str | None) -> dict[str, Any]:
    return {
        "attempt_id": f"att-{epoch}",
        "epoch": epoch,
        "prefill": {"worker_id": "prefill-0"},
        "decode": {"worker_id": "decode-0"},
        "started_ns": started_ms * MS,
        "ended_ns": None if ended_ms is None else ended_ms * MS,
        "end_reason": reason,
        "received_tokens": 3,
    }


def make_record(**changes: Any) -> dict[str, Any]:
    record = {
        "request_id": "req-1",
        "phase": "finished",
        "prompt_tokens": 40,
        "cached_tokens": 0,
        "delivered_output_tokens": 3,
        "waited_ms": 0.0,
        "interruption": None,
        "attempts": [],
        "events": [],
    }
    return record | changes


def prefill_ended(epoch: int, at_ms: int, **spans_ms: int) -> dict[str, Any]:
    spans = {name: value * MS for name, value in spans_ms.items()}
    return {"event": "prefill_ended", "epoch": epoch, "at_ns": at_ms * MS, "spans_ns": spans}


def times(spans: list[SpanFacts]) -> list[tuple[str, float, float, str | None]]:
    return [(span.name, span.start_ns / MS, span.end_ns / MS, span.error) for span in spans]


def test_an_attempt_that_was_lost_in_its_prefill_is_an_error_beside_the_good_one() -> None:
    """The first has no hand-off and no decode; the wait for a seat is before admission."""
    record = make_record(
        waited_ms=30.0,
        attempts=[make_attempt(1, 1, 50, "worker_exited"), make_attempt(2, 60, 100, "stop")],
        events=[prefill_ended(2, 80, lookup=1, engine_queue=2, compute=10, hand_off=4)],
    )
    spans = spans_of(record, ended_ns=105 * MS)
    assert times(spans) == [
        ("generation", -30, 105, None),
        ("queue", -30, 1, None),
        ("attempt", 1, 50, "worker_exited"),
        ("prefill", 1, 50, "worker_exited"),
        ("attempt", 60, 100, None),
        ("prefill", 63, 76, None),
        ("hand_off", 76, 80, None),
        ("decode", 80, 100, None),
    ]
    assert [span.parent for span in spans] == [None, 0, 0, 2, 0, 4, 4, 4]
    assert [span.attributes.get("kopir.attempt_id") for span in spans[2:]] == ["att-1"] * 2 + ["att-2"] * 4


def test_a_broken_answer_says_its_reason() -> None:
    """In the generation, the attempt and the decode that broke."""
    record = make_record(
        phase="interrupted",
        interruption={"reason": "lease_expired"},
        attempts=[make_attempt(1, 0, 90, "lease_expired")],
        events=[prefill_ended(1, 10, compute=5, hand_off=1)],
    )
    found = {span.name: span.error for span in spans_of(record, ended_ns=95 * MS)}
    assert found == {
        "generation": "lease_expired",
        "queue": None,
        "attempt": "lease_expired",
        "prefill": None,
        "hand_off": None,
        "decode": "lease_expired",
    }


def test_what_never_started_has_a_queue_only() -> None:
    """And one whose attempt is open at its end ends with it."""
    assert times(spans_of(make_record(phase="failed"), ended_ns=7 * MS)) == [
        ("generation", 0, 7, "failed"),
        ("queue", 0, 7, None),
    ]
    open_attempt = make_record(phase="cancelled", attempts=[make_attempt(1, 2, None, None)])
    assert times(spans_of(open_attempt, ended_ns=9 * MS))[-1] == ("prefill", 2, 9, "cancelled")


def test_parts_that_do_not_fit_are_cut() -> None:
    """Clocks of two processes: no part begins before its attempt or ends after it."""
    record = make_record(
        attempts=[make_attempt(1, 50, 60, "length")], events=[prefill_ended(1, 70, compute=500, hand_off=1)]
    )
    for span in spans_of(record, ended_ns=80 * MS)[2:]:
        assert 50 * MS <= span.start_ns <= span.end_ns <= 60 * MS, span
