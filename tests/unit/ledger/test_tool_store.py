"""Rows of tool calls: the same claims on SQLite and on PostgreSQL."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cluster.core.tool_events import Asked, Call, CallState, ToolResult, call_id_of
from cluster.ledger.database import Database
from cluster.ledger.tool_store import Frozen, KeyReused, RunRow, ToolStore

FROZEN = Frozen(seed=(1 << 63) - 1, unix_s=1_700_000_000.25, prompt_digest="p" * 64, model="m@1")
ASKED = Asked("book", "a" * 64)


def make_run(request_id: str = "req-1", **changes: Any) -> RunRow:
    fields: dict[str, Any] = {"tenant": "t", "key": "k", "body_digest": "d", "frozen": FROZEN} | changes
    return RunRow(request_id=request_id, logical_id=fields.pop("logical_id", request_id), **fields)


def make_call(logical_id: str = "req-1", round_index: int = 0, call_index: int = 0, asked: Asked = ASKED) -> Call:
    return Call(
        call_id=call_id_of(logical_id, round_index, call_index),
        round_index=round_index,
        call_index=call_index,
        name=asked.name,
        arguments_digest=asked.arguments_digest,
    )


def test_a_call_goes_its_way(database: Database) -> None:
    """Intended, again with one more try, done once; the result is kept byte for byte, and not changed by anybody."""
    store = ToolStore(database)
    run, calls = store.open(make_run(), now_ms=1)
    assert (run, calls) == (make_run(), [])
    call, result = make_call(), ToolResult('{"ä": "Grüße 你好 😀"}', is_error=True)
    assert store.intend(run, call, now_ms=2) and store.intend(run, call, now_ms=3)
    assert store.settle(run, call, result, now_ms=4)
    assert not store.settle(run, call, ToolResult("other"), now_ms=5)
    assert not store.hand_over(run, call, "why", now_ms=5) and not store.intend(run, call, now_ms=5)
    taken, calls = store.open(make_run("req-2"), now_ms=6)
    assert [(found.call, found.state, found.result) for found in calls] == [(call, CallState.DONE, result)]
    assert (taken.logical_id, taken.epoch, taken.frozen) == ("req-1", 2, FROZEN)
    (told,) = store.calls_of_request("req-2", tenant="t")
    assert (told["tries"], told["state"], told["idempotency_key"]) == (2, "done", f"t:req-1:{call.call_id}")
    assert told == store.calls_of_request("req-1", tenant="t")[0], "asked by the request that made it"
    assert "Grüße" not in str(told)
    assert store.calls_of_request("req-2", tenant="other") == []


def test_an_intent_with_other_arguments_is_not_written_over(database: Database) -> None:
    """A place holds one call."""
    store = ToolStore(database)
    run, _ = store.open(make_run(), now_ms=1)
    assert store.intend(run, make_call(), now_ms=2)
    assert not store.intend(run, make_call(asked=Asked("book", "b" * 64)), now_ms=3)
    assert not store.intend(run, make_call(asked=Asked("pay", "a" * 64)), now_ms=3)


def test_the_life_before_writes_nothing_any_more(database: Database) -> None:
    """No intent, no result, no hand-over: what it was about to do is not done."""
    store = ToolStore(database)
    old, _ = store.open(make_run(), now_ms=1)
    assert store.intend(old, make_call(), now_ms=2)
    new, calls = store.open(make_run("req-2"), now_ms=3)
    assert [found.state for found in calls] == [CallState.INTENDED]
    assert not store.intend(old, make_call(call_index=1), now_ms=4)
    assert not store.settle(old, make_call(), ToolResult("late"), now_ms=4)
    assert not store.hand_over(old, make_call(), "late", now_ms=4)
    assert store.hand_over(new, make_call(), "x" * 1000, now_ms=5)
    assert store.open(make_run("req-3"), now_ms=6)[1][0].state is CallState.HANDED_OVER


def test_what_a_run_begins_with_is_frozen_by_its_first_call(database: Database) -> None:
    """Until then nothing was done, and the key may come with another body; afterwards another body is refused."""
    store = ToolStore(database)
    store.open(make_run(), now_ms=1)
    other = Frozen(seed=2, unix_s=2.0, prompt_digest="q" * 64, model="m@1")
    run, _ = store.open(make_run("req-2", body_digest="other", frozen=other), now_ms=2)
    assert (run.frozen, run.logical_id) == (other, "req-1")
    assert store.intend(run, make_call(), now_ms=3)
    again, _ = store.open(make_run("req-3", body_digest="other"), now_ms=4)
    assert again.frozen == other
    with pytest.raises(KeyReused, match="req-3"):
        store.open(make_run("req-4"), now_ms=5)
    assert store.intend(again, make_call(call_index=1), now_ms=6), "who was refused has taken nothing over"


def test_runs_are_apart(database: Database) -> None:
    """By key, by tenant, and each of those without a key."""
    store = ToolStore(database)
    rows = [
        make_run("req-1"),
        make_run("req-2", tenant="other"),
        make_run("req-3", key="other"),
        make_run("req-4", key=None),
        make_run("req-5", key=None),
    ]
    for row in rows:
        run, calls = store.open(row, now_ms=1)
        assert (run, calls) == (row, [])
        assert store.intend(run, make_call(row.logical_id), now_ms=1)


def test_one_of_many_lives_is_the_last(database: Database) -> None:
    """Sixteen at once take up one run: epochs are 1 to 16, one logical id, and only the highest may write."""
    store = ToolStore(database)
    with ThreadPoolExecutor(16) as pool:
        runs = list(pool.map(lambda n: store.open(make_run(f"req-{n}"), now_ms=1)[0], range(16)))
        assert sorted(run.epoch for run in runs) == list(range(1, 17))
        assert len({run.logical_id for run in runs}) == 1
        call = make_call(runs[0].logical_id)
        wrote = list(pool.map(lambda run: store.intend(run, call, now_ms=2), runs))
    assert [run.epoch for run, did in zip(runs, wrote, strict=True) if did] == [16]


def test_old_runs_go_with_their_calls(database: Database) -> None:
    """What was touched since stays."""
    store = ToolStore(database)
    old, _ = store.open(make_run("req-1", key="old"), now_ms=1)
    new, _ = store.open(make_run("req-2", key="new"), now_ms=1)
    for run in (old, new):
        assert store.intend(run, make_call(run.logical_id), now_ms=5)
    assert store.settle(new, make_call("req-2"), ToolResult("x"), now_ms=100)
    assert store.prune(50) == 1 and store.prune(50) == 0
    assert store.calls_of_request("req-1", tenant="t") == []
    assert len(store.calls_of_request("req-2", tenant="t")) == 1
    assert store.open(make_run("req-9", key="old", body_digest="other"), now_ms=101)[0].logical_id == "req-9"
