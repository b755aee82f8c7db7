"""From the journal of an ended request to the spans of a trace: what took how long, in which attempt.

Pure. Times are nanoseconds since admission, as in the journal; a wait for a seat comes before it and is negative.

    generation
      queue          until the first attempt is started: the wait for a seat, and for a pair of workers
      attempt        one for each, with its id and epoch
        prefill      look-up, the worker's queue and computing
        hand_off     until decode holds every block
        decode       from then on
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

GOOD_ENDS = ("stop", "length", "stop_string", "finished")


class SpanFacts(Struct, frozen=True, kw_only=True):
    """One span; ``parent`` is an index into the list that it stands in, None for the outermost."""

    name: str
    start_ns: int
    end_ns: int
    parent: int | None
    attributes: dict[str, str | int | float | bool]
    error: str | None = None


def spans_of(record: Mapping[str, Any], *, ended_ns: int) -> list[SpanFacts]:
    """Returns the spans of a request's record (``RunningRequest.record``), parents before their children."""
    events: list[Mapping[str, Any]] = record["events"]
    attempts: list[Mapping[str, Any]] = record["attempts"]
    waited_ns = int(record["waited_ms"] * 1e6)
    interruption = record.get("interruption")
    is_good = record["phase"] == "finished"
    spans = [
        SpanFacts(
            name="generation",
            start_ns=-waited_ns,
            end_ns=ended_ns,
            parent=None,
            attributes={
                "kopir.request_id": record["request_id"],
                "kopir.phase": record["phase"],
                "kopir.prompt_tokens": record["prompt_tokens"],
                "kopir.cached_tokens": record["cached_tokens"],
                "kopir.delivered_output_tokens": record["delivered_output_tokens"],
            },
            error=None if is_good else str(interruption["reason"] if interruption else record["phase"]),
        )
    ]
    began_ns = attempts[0]["started_ns"] if attempts else ended_ns
    spans.append(SpanFacts(name="queue", start_ns=-waited_ns, end_ns=began_ns, parent=0, attributes={}))
    for attempt in attempts:
        own = [entry for entry in events if entry.get("epoch") == attempt["epoch"]]
        _add_attempt(spans, attempt, own, phase=record["phase"], closed_ns=ended_ns)
    return spans


def _add_attempt(
    spans: list[SpanFacts],
    attempt: Mapping[str, Any],
    events: Iterable[Mapping[str, Any]],
    *,
    phase: str,
    closed_ns: int,
) -> None:
    start_ns = attempt["started_ns"]
    end_ns = closed_ns if attempt["ended_ns"] is None else attempt["ended_ns"]
    reason = attempt["end_reason"] or phase
    error = None if reason in GOOD_ENDS else str(reason)
    about: dict[str, str | int | float | bool] = {
        "kopir.attempt_id": attempt["attempt_id"],
        "kopir.epoch": attempt["epoch"],
    }
    workers = {role: attempt[role]["worker_id"] for role in ("prefill", "decode")}
    parent = len(spans)
    spans.append(
        SpanFacts(
            name="attempt",
            start_ns=start_ns,
            end_ns=end_ns,
            parent=0,
            attributes=about
            | {f"kopir.{role}_worker": worker for role, worker in workers.items()}
            | {"kopir.received_tokens": attempt["received_tokens"]},
            error=error,
        )
    )
    done = next((entry for entry in events if entry["event"] == "prefill_ended"), None)
    if done is None:
        # It ended before decode had every block, or before prefill could say so.
        spans.append(
            SpanFacts(
                name="prefill",
                start_ns=start_ns,
                end_ns=end_ns,
                parent=parent,
                attributes=about | {"kopir.worker": workers["prefill"]},
                error=error,
            )
        )
        return
    # The worker's clock measured the parts, ours when it was told of the end: the parts are laid before it.
    handed_ns = min(done["at_ns"], end_ns)
    parts: Mapping[str, int] = done["spans_ns"]
    computed_ns = max(start_ns, handed_ns - parts.get("hand_off", 0))
    took_ns = sum(parts.get(name, 0) for name in ("lookup", "engine_queue", "compute"))
    spans += [
        SpanFacts(
            name="prefill",
            start_ns=max(start_ns, computed_ns - took_ns),
            end_ns=computed_ns,
            parent=parent,
            attributes=about
            | {"kopir.worker": workers["prefill"]}
            | {f"kopir.{name}_ms": parts.get(name, 0) / 1e6 for name in ("lookup", "engine_queue", "compute")},
        ),
        SpanFacts(name="hand_off", start_ns=computed_ns, end_ns=handed_ns, parent=parent, attributes=about),
        SpanFacts(
            name="decode",
            start_ns=handed_ns,
            end_ns=end_ns,
            parent=parent,
            attributes=about | {"kopir.worker": workers["decode"], "kopir.received_tokens": attempt["received_tokens"]},
            error=error,
        ),
    ]
