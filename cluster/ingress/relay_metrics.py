"""What the request driver counts: tokens by their fate, messages that came too late, and what workers report."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from cluster.core.attempt_events import Close
from cluster.core.retry_budget import RetryBudget
from cluster.ingress.worker_metrics import WorkerMetrics

QUEUE_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TRANSPORT_REASONS = ("worker_exited", "network_cut", "lease_expired", "transfer_failed")
BREACHES = ("digest", "layout", "gap", "engine_fault")


class RelayMetrics:
    """Counters of one ingress. For every closed request: generated = delivered + discarded."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.accounted_generated = Counter(
            "kopir_accounted_generated_tokens", "Tokens that decode made for closed requests.", registry=registry
        )
        self.accounted_delivered = Counter(
            "kopir_accounted_delivered_tokens", "Of those, tokens that were fully written.", registry=registry
        )
        self.discarded = Counter(
            "kopir_discarded_tokens", "Of those, tokens that were not, by reason.", ("reason",), registry=registry
        )
        self.dropped_tokens = Counter(
            "kopir_dropped_frame_tokens", "Tokens of frames that were not handed on.", ("reason",), registry=registry
        )
        self.stale_messages = Counter(
            "kopir_stale_messages", "Messages about attempts that are over.", registry=registry
        )
        self._retries = Gauge(
            "kopir_retries",
            "Repeated attempts so far: taken from the budget, refused by it, and charged for clients' own.",
            ("outcome",),
            registry=registry,
        )
        self.rejected_connections = Gauge(
            "kopir_rejected_connections",
            "Connections to one of the ingress's own ports that failed the handshake.",
            ("port",),
            registry=registry,
        )
        self.transport_failures = Counter(
            "kopir_transport_failures",
            "Attempts that were lost because a worker, a link or a transfer was.",
            ("reason",),
            registry=registry,
        )
        self.invariant_breaches = Counter(
            "kopir_invariant_breaches",
            "What must never happen and was noticed: wrong bytes, wrong layout, gaps between tokens, engine faults.",
            ("kind",),
            registry=registry,
        )
        self.cached_by_tier = Counter(
            "kopir_cached_prompt_tokens_by_tier",
            "Prompt tokens that were not computed, by where their KV came from.",
            ("tier",),
            registry=registry,
        )
        self.prefill_queue = Histogram(
            "kopir_prefill_queue_seconds",
            "From a prompt's arrival at its prefill worker to its first step.",
            buckets=QUEUE_BUCKETS_S,
            registry=registry,
        )
        self.prefill_part = Histogram(
            "kopir_prefill_part_seconds",
            "Time of a prefill by part: lookup, engine_queue, compute, hand_off.",
            ("part",),
            buckets=QUEUE_BUCKETS_S,
            registry=registry,
        )
        self.workers = WorkerMetrics(registry, self.invariant_breaches)
        for reason in TRANSPORT_REASONS:
            self.transport_failures.labels(reason)
        for kind in BREACHES:
            self.invariant_breaches.labels(kind)

    def prefill_ended(self, spans_ns: Mapping[str, int]) -> None:
        """Books the parts of one prefill."""
        for part, duration_ns in spans_ns.items():
            self.prefill_part.labels(part).observe(duration_ns / 1e9)

    def dropped(self, reason: str, num_tokens: int) -> None:
        """Books tokens that were not handed on."""
        self.dropped_tokens.labels(reason).inc(num_tokens)
        if reason == "gap":
            self.invariant_breaches.labels("gap").inc()

    def attempt_lost(self, reason: str) -> None:
        """Books why an attempt ended, where that is a failure of ours."""
        if reason in TRANSPORT_REASONS:
            self.transport_failures.labels(reason).inc()
        elif reason == "engine_fault":
            self.invariant_breaches.labels("engine_fault").inc()

    def watch_budget(self, budget: RetryBudget) -> None:
        """Shows what a budget has counted."""
        self._retries.labels("taken").set_function(lambda: budget.num_taken)
        self._retries.labels("refused").set_function(lambda: budget.num_refused)
        self._retries.labels("charged").set_function(lambda: budget.num_charged)

    def account(self, close: Close) -> None:
        """Books one closed request."""
        discarded = close.num_generated - close.num_delivered
        assert discarded >= 0, close
        self.accounted_generated.inc(close.num_generated)
        self.accounted_delivered.inc(close.num_delivered)
        if discarded:
            self.discarded.labels(close.discard_reason).inc(discarded)
