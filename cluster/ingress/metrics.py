"""What an ingress counts, for ``/metrics``.

Owns one registry per ingress process, so that several applications in one process (tests) stay apart. Counts what
clients experienced: a stream that broke counts as interrupted, whatever its status line said.
"""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
GAP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)

OUTCOMES = ("finished", "interrupted", "client_gone", "failed", "rejected")


class IngressMetrics:
    """Counters and histograms of the HTTP layer. Other parts of the ingress may add theirs to ``registry``."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "kopir_requests",
            "Generation requests by how they ended: finished, interrupted (after the first delta), client_gone, "
            "failed (5xx), rejected (4xx).",
            ("endpoint", "outcome"),
            registry=self.registry,
        )
        self.interruptions = Counter(
            "kopir_interruptions", "Answers that broke after the first delta.", ("reason",), registry=self.registry
        )
        self.errors = Counter(
            "kopir_http_errors", "Answers with an error status.", ("status", "code"), registry=self.registry
        )
        self.running = Gauge("kopir_running_requests", "Generation requests under way.", registry=self.registry)
        self.prompt_tokens = Counter("kopir_prompt_tokens", "Prompt tokens of started answers.", registry=self.registry)
        self.cached_tokens = Counter(
            "kopir_cached_prompt_tokens", "Prompt tokens that were not computed.", registry=self.registry
        )
        self.generated_tokens = Counter(
            "kopir_generated_tokens", "Tokens that reached the ingress.", registry=self.registry
        )
        self.delivered_tokens = Counter(
            "kopir_delivered_tokens", "Tokens whose text was fully written to a client.", registry=self.registry
        )
        self.ttft = Histogram(
            "kopir_time_to_first_delta_seconds",
            "From the request's arrival to the first write of content.",
            buckets=TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self.gap = Histogram(
            "kopir_inter_event_seconds",
            "Time between content events of a stream.",
            buckets=GAP_BUCKETS_S,
            registry=self.registry,
        )

    def render(self) -> bytes:
        """Returns the text of ``/metrics``."""
        return generate_latest(self.registry)
