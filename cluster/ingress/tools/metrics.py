"""What server-side tools count, for ``/metrics``."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

CALL_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
STOP_CODES = ("tool_divergence", "tool_outcome_unknown", "deadline_exceeded", "taken_over")


class ToolMetrics:
    """Counters of one ingress. Names of tools come from the configuration, so there are few."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.calls = Counter(
            "kopir_tool_calls",
            "Calls of server-side tools by how they ended: done, error (refused, unreachable, too large), unknown.",
            ("tool", "outcome"),
            registry=registry,
        )
        self.replayed = Counter(
            "kopir_tool_calls_replayed",
            "Calls whose recorded outcome was taken up by a later life of their request.",
            registry=registry,
        )
        self.seconds = Histogram(
            "kopir_tool_call_seconds",
            "Time of one try of a tool call.",
            ("tool",),
            buckets=CALL_BUCKETS_S,
            registry=registry,
        )
        self.stops = Counter(
            "kopir_tool_stops",
            "Answers that ended because their tool calls could not go on.",
            ("code",),
            registry=registry,
        )
        for code in STOP_CODES:
            self.stops.labels(code)
