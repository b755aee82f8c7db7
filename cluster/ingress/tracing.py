"""OpenTelemetry traces of requests: which parts took how long, in which attempt.

Owns the way to the collector. The span of the HTTP request is open while it is answered; what happened inside follows
from the journal when the books of a generation are closed, so that nothing is measured twice and nothing stands in the
way of a token. Spans are sent by a thread of their own out of a bounded queue: a collector that is slow or gone loses
spans and never delays a request. Without a collector nothing of OpenTelemetry is imported.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from cluster.config import TracingConfig
from cluster.core.trace_spans import spans_of
from cluster.ingress.api.identity import request_id_of
from kvstore.errors import EnvironmentProblem

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

logger = logging.getLogger(__name__)

GENERATION_PATHS = ("/v1/chat/completions", "/v1/completions")
PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
QUEUE_SPANS = 4096
BATCH_SPANS = 512
SEND_EVERY_MS = 1000
SEND_DEADLINE_S = 5.0
CLOSE_DEADLINE_S = 1.0
"""How long the spans that wait hold up the end of the process."""


def check_installed(config: TracingConfig) -> None:
    """Raises: EnvironmentProblem when traces are asked for and the extra is not installed."""
    if config.otlp_endpoint is None:
        return
    for name in PACKAGES:
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise EnvironmentProblem(f"tracing.otlp_endpoint needs {name}: pip install 'kopir[tracing]'")


class Tracing:
    """Makes spans and sends them; one per ingress process."""

    def __init__(self, config: TracingConfig, *, instance: str, unix_ns: Callable[[], int] = time.time_ns) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._unix_ns = unix_ns
        self._exporter = OTLPSpanExporter(endpoint=config.otlp_endpoint, timeout=SEND_DEADLINE_S)
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(config.sample_ratio)),
            resource=Resource({"service.name": config.service_name, "service.instance.id": instance}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter,
                max_queue_size=QUEUE_SPANS,
                max_export_batch_size=BATCH_SPANS,
                schedule_delay_millis=SEND_EVERY_MS,
                export_timeout_millis=SEND_DEADLINE_S * 1000,
            )
        )
        self._tracer = self._provider.get_tracer("kopir")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, method: str, path: str, headers: Mapping[str, str], request_id: str) -> RequestTrace:
        """Opens the span of an HTTP request, below the caller's span where it names one by W3C ``traceparent``."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        span = self._tracer.start_span(
            f"{method} {path}",
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            start_time=self._unix_ns(),
            attributes={"http.request.method": method, "url.path": path, "kopir.request_id": request_id},
        )
        return RequestTrace(self, span, set_span_in_context(span))

    def headers_of(self, context: Context) -> dict[str, str]:
        """Returns the headers by which a call made for this request is known to belong to it."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, context=context)
        return carrier

    def generation_ended(self, context: Context, record: Mapping[str, Any], ended_ns: int) -> None:
        """Makes the spans of a generation that ended now, ``ended_ns`` after its admission."""
        from opentelemetry.trace import StatusCode, set_span_in_context

        admitted_unix_ns = self._unix_ns() - ended_ns
        contexts: list[Context] = []
        for facts in spans_of(record, ended_ns=ended_ns):
            span = self._tracer.start_span(
                facts.name,
                context=context if facts.parent is None else contexts[facts.parent],
                start_time=admitted_unix_ns + facts.start_ns,
                attributes=facts.attributes,
            )
            contexts.append(set_span_in_context(span))
            if facts.error is not None:
                span.set_status(StatusCode.ERROR, facts.error)
            span.end(end_time=admitted_unix_ns + max(facts.start_ns, facts.end_ns))

    def end(self, span: Span, status: int | None, broke: str | None) -> None:
        """Closes the span of an HTTP request. ``status`` None: nothing was answered."""
        from opentelemetry.trace import StatusCode

        if status is not None:
            span.set_attribute("http.response.status_code", status)
        if broke is not None:
            # The status line said 200 long before: what the client got is what counts.
            span.set_status(StatusCode.ERROR, broke)
        elif status is None or status >= 500:
            span.set_status(StatusCode.ERROR, "no answer" if status is None else f"HTTP {status}")
        span.end(end_time=self._unix_ns())

    async def close(self) -> None:
        """Sends what waits, for a moment; a collector that does not answer loses it."""

        def send_rest() -> None:
            self._provider.force_flush(int(CLOSE_DEADLINE_S * 1000))
            self._provider.shutdown()

        # A daemon: it must not hold up the process when the collector takes the connection and says nothing.
        thread = threading.Thread(target=send_rest, name="kopir-traces-end", daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, CLOSE_DEADLINE_S)


class RequestTrace:
    """The trace that one HTTP request belongs to."""

    def __init__(self, tracing: Tracing, span: Span, context: Context) -> None:
        self._tracing = tracing
        self._span = span
        self._context = context
        self._broke: str | None = None

    @property
    def trace_id(self) -> str:
        return f"{self._span.get_span_context().trace_id:032x}"

    def headers(self) -> dict[str, str]:
        """Returns ``traceparent`` (and ``tracestate``) for calls that are made for this request."""
        return self._tracing.headers_of(self._context)

    def generation_ended(self, record: Mapping[str, Any], *, ended_ns: int) -> None:
        """Takes the final record of a generation of this request, ``ended_ns`` after its admission."""
        interruption = record.get("interruption")
        if interruption is not None:
            self._broke = str(interruption["reason"])
        self._tracing.generation_ended(self._context, record, ended_ns)

    def end(self, status: int | None) -> None:
        """The answer is over."""
        self._tracing.end(self._span, status, self._broke)


_current: ContextVar[RequestTrace | None] = ContextVar("kopir_request_trace", default=None)


def current_trace() -> RequestTrace | None:
    """Returns the trace of the HTTP request that this task works for; None when there is none."""
    return _current.get()


def trace_headers() -> dict[str, str]:
    """Returns the headers that a call on behalf of the present request carries; none where nothing is traced."""
    trace = _current.get()
    return {} if trace is None else trace.headers()


class TracedRequests:
    """ASGI middleware: the span of each generation request, and ``traceresponse`` on its answer."""

    def __init__(self, app: Any, *, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] not in GENERATION_PATHS:
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        trace = self._tracing.begin(scope["method"], scope["path"], headers, request_id_of(scope))
        answer = (b"traceresponse", trace.headers().get("traceparent", "").encode())
        status: int | None = None

        def send_traced(message: MutableMapping[str, Any]) -> Any:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), answer]}
            return send(message)

        token = _current.set(trace)
        try:
            await self._app(scope, receive, send_traced)
        finally:
            _current.reset(token)
            trace.end(status)
