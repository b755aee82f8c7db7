"""Traces of real requests, at a small collector that speaks OTLP over HTTP: what spans say, what they never cost."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from mini_cluster import MiniCluster

from cluster.config import TracingConfig
from cluster.ingress import tracing as tracing_module
from cluster.ingress.api.app import create_app
from cluster.ingress.api.tokenizer import TokenizerBundle
from cluster.ingress.tools.caller import ToolCaller
from cluster.ingress.tracing import CLOSE_DEADLINE_S, TracedRequests, Tracing, check_installed, current_trace
from cluster.tools_source import ServerTool
from kvstore.errors import EnvironmentProblem
from tests.collector import Collector, attributes

CALLER_TRACE, CALLER_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY = {"model": "tiny", "prompt": list(range(20, 60)), "max_tokens": 6, "temperature": 0}

TOOL = ServerTool(
    name="look",
    description="",
    parameters=None,
    url="http://tool/look",
    timeout_s=5.0,
    has_side_effects=False,
    on_unknown="repeat_with_key",
    max_tries=1,
)

MakeCluster = Callable[..., MiniCluster]


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@asynccontextmanager
async def endpoint(cluster: MiniCluster, tracing: Tracing, model: Path) -> AsyncIterator[httpx.AsyncClient]:
    """The HTTP application over the cluster, with traces."""
    tokenizer = TokenizerBundle.from_folder(model)
    app = create_app(cluster.backend, tokenizer, tracing=partial(TracedRequests, tracing=tracing))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://kopir", timeout=30) as http:
        yield http


async def test_a_request_is_one_trace_below_its_caller(
    make_cluster: MakeCluster, tiny_model: Path, collector: Collector
) -> None:
    """Ingress, queue, attempt, prefill, hand-off and decode, in order, with the ids of the journal."""
    cluster = make_cluster()
    await cluster.start("prefill", "decode")
    tracing = Tracing(TracingConfig(otlp_endpoint=collector.url, service_name="test"), instance="i-1")
    caller = {"traceparent": f"00-{CALLER_TRACE}-{CALLER_SPAN}-01"}
    async with endpoint(cluster, tracing, tiny_model) as http:
        answer = await http.post("/v1/completions", json=BODY, headers=caller)
        assert answer.status_code == 200, answer.text
        refused = await http.post("/v1/completions", json=BODY | {"temperature": 9}, headers=caller)
        assert refused.status_code == 400
        assert (await http.get("/v1/models")).headers.get("traceresponse") is None
        await cluster.at_rest()
        record = (await http.get(f"/v1/requests/{answer.headers['x-request-id']}")).json()
    await tracing.close()
    assert record["trace_id"] == CALLER_TRACE
    assert {span.trace_id.hex() for span in collector.spans} == {CALLER_TRACE}
    assert collector.resources[0] == {"service.name": "test", "service.instance.id": "i-1"}
    outer = [span for span in collector.spans if span.name == "POST /v1/completions"]
    (good,) = [span for span in outer if attributes(span)["http.response.status_code"] == 200]
    (bad,) = [span for span in outer if attributes(span)["http.response.status_code"] == 400]
    assert {span.parent_span_id.hex() for span in outer} == {CALLER_SPAN}
    assert answer.headers["traceresponse"] == f"00-{CALLER_TRACE}-{good.span_id.hex()}-01"
    assert not [span for span in collector.spans if span.parent_span_id == bad.span_id]
    names = {span.name: span for span in collector.spans if span is not bad}
    assert set(names) == {"POST /v1/completions", "generation", "queue", "attempt", "prefill", "hand_off", "decode"}
    parents = {"generation": good, "queue": names["generation"], "attempt": names["generation"]}
    parents |= dict.fromkeys(("prefill", "hand_off", "decode"), names["attempt"])
    assert {name: names[name].parent_span_id for name in parents} == {name: s.span_id for name, s in parents.items()}
    (attempt,) = record["attempts"]
    for name in ("attempt", "prefill", "hand_off", "decode"):
        found = attributes(names[name])
        assert (found["kopir.attempt_id"], found["kopir.epoch"]) == (attempt["attempt_id"], attempt["epoch"])
    assert attributes(names["prefill"])["kopir.worker"] == "prefill-0"
    assert attributes(names["decode"])["kopir.worker"] == "decode-0"
    assert attributes(names["generation"])["kopir.request_id"] == answer.headers["x-request-id"]
    one_after_another = [names[name] for name in ("queue", "prefill", "hand_off", "decode")]
    for before, after in pairwise(one_after_another):
        assert before.start_time_unix_nano <= before.end_time_unix_nano <= after.start_time_unix_nano
    for span in names.values():
        assert span.status.code == 0, span


async def test_who_is_not_sampled_sends_nothing(
    make_cluster: MakeCluster, tiny_model: Path, collector: Collector
) -> None:
    """By the caller's flag, or by our own share; a nonsense header begins a trace of our own."""
    cluster = make_cluster()
    await cluster.start("combined")
    none = Tracing(TracingConfig(otlp_endpoint=collector.url, sample_ratio=0.0), instance="i")
    every = Tracing(TracingConfig(otlp_endpoint=collector.url), instance="i")
    async with endpoint(cluster, none, tiny_model) as http:
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200
    async with endpoint(cluster, every, tiny_model) as http:
        headers = {"traceparent": f"00-{CALLER_TRACE}-{CALLER_SPAN}-00"}
        assert (await http.post("/v1/completions", json=BODY, headers=headers)).status_code == 200
    await cluster.at_rest()
    await none.close()
    assert collector.spans == []
    async with endpoint(cluster, every, tiny_model) as http:
        assert (await http.post("/v1/completions", json=BODY, headers={"traceparent": "x"})).status_code == 200
    await cluster.at_rest()
    await every.close()
    assert CALLER_TRACE not in {span.trace_id.hex() for span in collector.spans} != set()


@pytest.mark.parametrize("is_silent", [True, False], ids=["silent", "down"])
async def test_a_collector_that_is_gone_delays_nobody(
    make_cluster: MakeCluster, tiny_model: Path, collector: Collector, is_silent: bool
) -> None:
    """Answers go out while it holds the line or refuses it, and the end of the process waits a moment only."""
    cluster = make_cluster()
    await cluster.start("combined")
    url = collector.url
    if is_silent:
        collector.answers.clear()
    else:
        collector.close()
    tracing = Tracing(TracingConfig(otlp_endpoint=url), instance="i")
    async with endpoint(cluster, tracing, tiny_model) as http:
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200
        if is_silent:
            assert await asyncio.to_thread(collector.asked.wait, 20)
        for _ in range(5):
            assert (await http.post("/v1/completions", json=BODY)).status_code == 200
    assert collector.spans == []
    started_s = time.monotonic()
    await tracing.close()
    # The collector still has not answered: this wait ended by itself.
    assert time.monotonic() - started_s < CLOSE_DEADLINE_S + 5
    assert collector.spans == []


async def test_calls_for_a_request_carry_its_trace(collector: Collector) -> None:
    """A tool that the ingress calls on behalf of a request gets ``traceparent`` and the caller's ``tracestate``."""
    tracing = Tracing(TracingConfig(otlp_endpoint=collector.url), instance="i")
    seen: dict[str, str] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async with ToolCaller(max_result_bytes=1000, transport=httpx.MockTransport(tool)) as caller:
            # In a task of its own, as the rounds of a request are.
            called = asyncio.create_task(caller.call(TOOL, b"{}", key="k", timeout_s=5))
            assert (await called).kind == "answered"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    def tool(request: httpx.Request) -> httpx.Response:
        seen.update({name: request.headers[name] for name in ("traceparent", "tracestate")})
        return httpx.Response(200, stream=httpx.ByteStream(b"{}"))

    transport = httpx.ASGITransport(app=TracedRequests(app, tracing=tracing))
    async with httpx.AsyncClient(transport=transport, base_url="http://kopir") as http:
        headers = {"traceparent": f"00-{CALLER_TRACE}-{CALLER_SPAN}-01", "tracestate": "a=b"}
        answer = await http.post("/v1/completions", headers=headers)
    assert seen == {"traceparent": answer.headers["traceresponse"], "tracestate": "a=b"}
    assert current_trace() is None
    await tracing.close()


def test_without_a_collector_nothing_is_imported() -> None:
    """The extra need not even be installed."""
    code = "import sys, cluster.ingress.app; print([n for n in sys.modules if n.startswith('opentelemetry.exporter')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything starts."""
    monkeypatch.setattr(tracing_module.importlib.util, "find_spec", lambda name: None)
    check_installed(TracingConfig())
    with pytest.raises(EnvironmentProblem, match=r"kopir\[tracing\]"):
        check_installed(TracingConfig(otlp_endpoint="http://127.0.0.1:4318/v1/traces"))
