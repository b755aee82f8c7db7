"""What the request driver counts: tokens by their fate, messages that came too late, and what workers report."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge

from cluster.core.attempt_events import Close
from cluster.core.retry_budget import RetryBudget

WORKERS_MAX = 4096
"""Lives of workers and store nodes whose last report is remembered."""
VIOLATIONS = "layout_violations."


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
        self.layout_checks = Counter(
            "kopir_layout_checks",
            "Blocks that workers and stores checked against their layout.",
            registry=registry,
        )
        self.layout_violations = Counter(
            "kopir_layout_violations", "What those checks found, by kind.", ("kind",), registry=registry
        )
        self._reported: OrderedDict[str, dict[str, int]] = OrderedDict()

    def on_report(self, incarnation: str, counters: Mapping[str, int]) -> None:
        """Adds what a life of a worker or a store node has counted since its last report."""
        before = self._reported.get(incarnation, {})
        relevant = {name: value for name, value in counters.items() if name.startswith("layout_")}
        self._reported[incarnation] = relevant
        self._reported.move_to_end(incarnation)
        if len(self._reported) > WORKERS_MAX:
            self._reported.popitem(last=False)
        for name, value in relevant.items():
            added = max(0, value - before.get(name, 0))
            if name.startswith(VIOLATIONS):
                self.layout_violations.labels(name.removeprefix(VIOLATIONS)).inc(added)
            elif name == "layout_checks":
                self.layout_checks.inc(added)

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
