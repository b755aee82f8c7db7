"""The workers as an ingress sees them, where no process is needed."""

from __future__ import annotations

from cluster.ingress.fleet import Fleet
from cluster.view import ClusterView, WorkerView
from kvstore.core.messages import Status


def view(version: int, *names: str) -> ClusterView:
    fields = {"role": "decode", "state": "ready", "pid": 1, "node": "n", "host_identity": "h", "pool_blocks": 8}
    workers = tuple(WorkerView(worker_id=name, incarnation=f"life-{name}", **fields) for name in names)  # type: ignore[arg-type]
    return ClusterView(version=version, workers=workers, gone=())


async def test_workers_that_come_and_go_while_they_are_asked_break_no_status() -> None:
    """F56: the answer is that of the membership at the time of the question."""

    class Changing(Fleet):
        async def _ask(self, incarnation: str) -> Status | None:
            self.set_view(view(self.view.version + 1, "decode-0"))
            return None

    fleet = Changing("h", on_gone=lambda _: None)
    fleet.set_view(view(1, "decode-0", "decode-1"))
    assert [entry["id"] for entry in await fleet.statuses()] == ["decode-0", "decode-1"]
    assert [entry["id"] for entry in await fleet.statuses()] == ["decode-0"]
