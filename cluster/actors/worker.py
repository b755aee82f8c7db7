"""The Ray actor around one life of a worker.

``max_restarts=0``: a replacement is a new actor with a new incarnation, made by the controller. Calls through Ray
are for joining, peers and status; requests, tokens and KV never travel here.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import ray

from workers.spec import DecodeAddress, IngressAddress, WorkerJoin, WorkerSpec

if TYPE_CHECKING:
    from kvstore.core.messages import Status
    from workers.worker import Worker

ACTOR_OPTIONS: dict[str, Any] = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": 16, "num_cpus": 0}


class WorkerProcess:
    """One worker process."""

    def __init__(self, spec: WorkerSpec, secret: bytes) -> None:
        self._spec = spec
        self._secret = secret
        self._worker: Worker | None = None

    def pid(self) -> int:
        """Returns the process id, as soon as the process is up."""
        return os.getpid()

    def start(self) -> WorkerJoin:
        """Loads the model, opens the links, returns what the controller needs to let this worker join."""
        # Imported here, so that the driver that defines the actor need not load torch.
        from workers.worker import Worker

        self._worker = Worker(self._spec, self._secret)
        return self._worker.start()

    def add_ingress(self, address: IngressAddress) -> None:
        self._running().add_ingress(address)

    def set_store(self, host: str, port: int) -> None:
        self._running().set_store(host, port)

    def remove_ingress(self, incarnation: str) -> None:
        self._running().remove_ingress(incarnation)

    def warm_decode_peer(self, address: DecodeAddress) -> None:
        """Opens and warms the KV link to a decode worker."""
        self._running().warm_decode_peer(address)

    def peer_gone(self, incarnation: str) -> None:
        """Tells that another process is proved dead, so that what it held can be freed."""
        self._running().peer_gone(incarnation)

    def status(self) -> Status:
        return self._running().status()

    def wait_until_stopped(self) -> str:
        """Blocks while the worker lives; ends with an ActorDiedError when the process dies."""
        return self._running().wait_until_stopped()

    def stop(self) -> None:
        """Stops the worker: streams in flight end with a fault, blocks are dropped, links closed."""
        if self._worker is not None:
            self._worker.close()

    def _running(self) -> Worker:
        if self._worker is None:
            raise RuntimeError(f"worker {self._spec.worker_id} has not started")
        return self._worker


# The library's decorator is untyped, so it is applied here and not above the class.
WorkerActor: Any = ray.remote(WorkerProcess)
