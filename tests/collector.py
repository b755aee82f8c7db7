"""A small collector of OpenTelemetry traces: OTLP in protobuf over HTTP, on loopback, in threads of this process."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """Takes spans at ``url``; while ``answers`` is not set, it takes requests and says nothing."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        self.answers = threading.Event()
        self.answers.set()
        self.asked = threading.Event()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["content-length"]))
                collector.asked.set()
                if not collector.answers.wait(60):
                    return
                if self.headers.get("content-encoding") == "gzip":
                    data = gzip.decompress(data)
                collector.take(ExportTraceServiceRequest.FromString(data))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def take(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            self.resources.append({pair.key: pair.value.string_value for pair in resource.resource.attributes})
            for scope in resource.scope_spans:
                self.spans += scope.spans

    def close(self) -> None:
        self.answers.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def attributes(span: Any) -> dict[str, Any]:
    """Returns what a span says about itself."""
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes}
