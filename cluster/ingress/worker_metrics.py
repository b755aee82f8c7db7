"""What workers and store nodes report with their status, as metrics of the ingress that they report to.

Owns the last report of each life, because workers count from their start and metrics only ever grow. A report of a
life that was replaced meanwhile still counts; gauges are those of the last life of each worker id.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge

from kvstore.core.messages import Status

LIVES_MAX = 4096
"""Lives of workers and store nodes whose last report is remembered."""
LAYOUT_VIOLATIONS = "layout_violations."


class WorkerMetrics:
    """Counters and gauges of all workers. ``breaches`` (label ``kind``) counts what must never happen."""

    def __init__(self, registry: CollectorRegistry, breaches: Counter) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, labels, registry=registry)

        self._plain = {
            "layout_checks": counter(
                "kopir_layout_checks", "Blocks that workers and stores checked against their layout."
            ),
            "pushed_bytes": counter(
                "kopir_transferred_bytes", "KV bytes that prefill workers handed to decode workers."
            ),
            "pushed_blocks": counter(
                "kopir_transferred_blocks", "KV blocks that arrived there and matched their digest."
            ),
            "computed_tokens": counter("kopir_computed_prompt_tokens", "Prompt tokens that prefill workers computed."),
            "stored_blocks": counter("kopir_stored_blocks", "KV blocks that workers put into the store."),
            "preemptions": counter("kopir_preemptions", "Streams that gave their blocks up for others and came back."),
            "leases_expired": counter(
                "kopir_expired_leases", "Attempts that a worker ended because its lease ran out."
            ),
            "reservations_expired": counter("kopir_expired_reservations", "Reserved blocks whose prompt never came."),
        }
        self._layout_violations = counter("kopir_layout_violations", "What layout checks found, by kind.", "kind")
        self._received = counter("kopir_received_blocks", "Blocks that decode workers took in, by result.", "result")
        self._breaches = breaches
        self._blocks = gauge("kopir_pool_blocks", "Blocks of a worker's pool.", "worker", "state")
        self._requests = gauge("kopir_worker_requests", "Requests at a worker.", "worker", "state")
        self._leases = gauge("kopir_worker_leases", "Publishing leases that a worker holds.", "worker")
        self._reported: OrderedDict[str, Mapping[str, int]] = OrderedDict()

    def on_status(self, status: Status) -> None:
        """Takes the report of a worker."""
        self._add_since(status.incarnation, status.counters)
        worker = status.worker_id
        self._blocks.labels(worker, "all").set(status.pool_blocks)
        self._blocks.labels(worker, "used").set(status.used_blocks)
        self._blocks.labels(worker, "cached").set(status.cached_blocks)
        self._blocks.labels(worker, "quarantined").set(status.quarantined_blocks)
        self._requests.labels(worker, "running").set(status.running)
        self._requests.labels(worker, "waiting").set(status.waiting)
        self._leases.labels(worker).set(status.leases)

    def on_store(self, incarnation: str, counters: Mapping[str, int]) -> None:
        """Takes the report of a store node, whose other counters are its own."""
        self._add_since(incarnation, {name: value for name, value in counters.items() if name.startswith("layout_")})

    def _add_since(self, incarnation: str, counters: Mapping[str, int]) -> None:
        """Adds what a life has counted since its last report."""
        before = self._reported.get(incarnation, {})
        self._reported[incarnation] = counters
        self._reported.move_to_end(incarnation)
        if len(self._reported) > LIVES_MAX:
            self._reported.popitem(last=False)
        for name, value in counters.items():
            self._add(name, max(0, value - before.get(name, 0)))

    def _add(self, name: str, added: int) -> None:
        if name in self._plain:
            self._plain[name].inc(added)
        elif name.startswith(LAYOUT_VIOLATIONS):
            self._layout_violations.labels(name.removeprefix(LAYOUT_VIOLATIONS)).inc(added)
            self._breaches.labels("layout").inc(added)
        elif name.startswith("blocks_"):
            result = {"blocks_landed": "ok", "blocks_corrupt": "corrupt", "blocks_failed": "failed"}.get(name)
            if result is not None:
                self._received.labels(result).inc(added)
                if result == "corrupt":
                    self._breaches.labels("digest").inc(added)
