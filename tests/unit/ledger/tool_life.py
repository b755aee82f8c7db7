"""One life of a gateway around one tool call, in a process of its own, which kills itself where it is told to.

Real ledger, real HTTP, the product's own driver; only the model is left out: it asks for one call.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

from cluster.core import tool_events as ev
from cluster.core.tool_events import Call, LoopTerms, ToolResult
from cluster.core.tool_ledger import ToolRun
from cluster.ingress.api.errors import ApiError
from cluster.ingress.metrics import IngressMetrics
from cluster.ingress.tools.caller import Outcome, ToolCaller
from cluster.ingress.tools.runner import ToolRunner, ToolWork, WantedCall
from cluster.ledger.database import open_database
from cluster.ledger.tool_store import Frozen, RunRow, ToolStore
from cluster.tools_source import load_tools

OWN_POINTS = ("before_intent", "after_intent", "after_call", "before_result", "after_result")
"""Where a life kills itself."""
TOOL_POINTS = ("tool_heard", "tool_acted")
"""Where the tool kills its caller: before it acts on a call that has arrived, and before it answers."""
FROZEN = Frozen(seed=1, unix_s=1.0, prompt_digest="p", model="m")


def _die(here: str, point: str) -> None:
    if here == point:
        os.kill(os.getpid(), signal.SIGKILL)


class _Store(ToolStore):
    point = ""

    def intend(self, run: RunRow, call: Call, *, now_ms: int) -> bool:
        _die("before_intent", self.point)
        is_ours = super().intend(run, call, now_ms=now_ms)
        _die("after_intent", self.point)
        return is_ours

    def settle(self, run: RunRow, call: Call, result: ToolResult, *, now_ms: int) -> bool:
        _die("before_result", self.point)
        is_kept = super().settle(run, call, result, now_ms=now_ms)
        _die("after_result", self.point)
        return is_kept


class _Caller(ToolCaller):
    point = ""

    async def call(self, *args: Any, **named: Any) -> Outcome:
        outcome = await super().call(*args, **named)
        _die("after_call", self.point)
        return outcome


def live(url: str, tools: str, name: str, request_id: str, point: str, told: Connection) -> None:
    """Runs to the end, or to ``point``; tells ("finished", what the model was told) or ("failed", error code)."""
    told.send(asyncio.run(_live(url, tools, name, request_id, point)))


async def _live(url: str, tools: str, name: str, request_id: str, point: str) -> tuple[str, Any]:
    database = open_database(url)
    store = _Store(database)
    store.point = point
    known = {tool.name: tool for tool in load_tools(tools)}
    row = RunRow(tenant="t", key="k", body_digest="d", request_id=request_id, logical_id=request_id, frozen=FROZEN)
    row, recorded = store.open(row, now_ms=1)
    deadline_ns = time.monotonic_ns() + 60 * 1_000_000_000
    terms = LoopTerms(max_rounds=4, max_calls=4, deadline_ns=deadline_ns)
    run = ToolRun(row.logical_id, terms, {tool.name: tool.terms() for tool in known.values()}, recorded)
    async with _Caller(max_result_bytes=4096) as caller:
        caller.point = point
        work = ToolWork(
            store=store,
            tools=known,
            caller=caller,
            metrics=IngressMetrics().tools,
            clock_ns=time.monotonic_ns,
            unix_s=time.time,
        )
        runner = ToolRunner(run, row, work)
        try:
            step = await runner.round([WantedCall(name, '{"room": "A7"}')])
            assert isinstance(step, ev.NextRound), step
            await runner.round(())
        except ApiError as error:
            return "failed", error.code
        finally:
            database.close()
    return "finished", step.results[0].content
