"""What an ingress counts, for ``/metrics``.

Owns one registry per ingress process, so that several applications in one process (tests) stay apart. Counts what
clients experienced: a stream that broke counts as interrupted, whatever its status line said.
"""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from cluster.ingress.tools.metrics import ToolMetrics

TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
GAP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)

OUTCOMES = ("finished", "interrupted", "client_gone", "failed", "rejected")

CAPACITY_CODES = ("no_capacity", "not_ready", "overloaded", "queue_full")
"""Error codes that say: the cluster has no room, now or at all."""


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
        self.admission_waiting = Gauge(
            "kopir_admission_waiting", "Requests that wait for a seat, by class.", ("class",), registry=self.registry
        )
        self.admission_seats = Gauge(
            "kopir_admission_seats", "Seats that are taken, by class.", ("class",), registry=self.registry
        )
        self.admission_refused = Counter(
            "kopir_admission_refused",
            "Requests that were not let in, by class.",
            ("class", "code"),
            registry=self.registry,
        )
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

        self.missed_deadlines = Counter(
            "kopir_missed_deadlines",
            "Requests that ended because their deadline had passed, before or after the first delta.",
            registry=self.registry,
        )
        self.capacity_refusals = Counter(
            "kopir_capacity_refusals",
            "Requests that were turned away because nothing had room for them. A tenant's own limits do not count.",
            ("code",),
            registry=self.registry,
        )
        for code in CAPACITY_CODES:
            self.capacity_refusals.labels(code)
        self.tools = ToolMetrics(self.registry)

    def count_error(self, status: int, code: str | None) -> None:
        """Counts an answer with an error status, or one that failed with it after its headers."""
        self.errors.labels(str(status), code or "").inc()
        if code in CAPACITY_CODES:
            self.capacity_refusals.labels(code).inc()
        elif code == "deadline_exceeded":
            self.missed_deadlines.inc()

    def count_interruption(self, reason: str) -> None:
        """Counts an answer that broke after its first delta."""
        self.interruptions.labels(reason).inc()
        if reason == "deadline":
            self.missed_deadlines.inc()

    def promises(self) -> dict[str, int]:
        """Returns the failures that are promised about apart from each other (row I5), each since the start."""
        return {
            "transport_failures": self._total("kopir_transport_failures_total"),
            "missed_deadlines": self._total("kopir_missed_deadlines_total"),
            "invariant_breaches": self._total("kopir_invariant_breaches_total"),
            "capacity_refusals": self._total("kopir_capacity_refusals_total"),
        }

    def tokens(self) -> dict[str, int]:
        """Returns what became of the tokens of closed requests: generated = delivered + discarded."""
        return {
            "generated_tokens": self._total("kopir_accounted_generated_tokens_total"),
            "delivered_tokens": self._total("kopir_accounted_delivered_tokens_total"),
            "discarded_tokens": self._total("kopir_discarded_tokens_total"),
        }

    def _total(self, name: str) -> int:
        """Returns the sum of a counter over its labels, whoever registered it."""
        samples = (sample for family in self.registry.collect() for sample in family.samples)
        return int(sum(sample.value for sample in samples if sample.name == name))

    def render(self) -> bytes:
        """Returns the text of ``/metrics``."""
        return generate_latest(self.registry)
