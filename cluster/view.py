"""What the controller tells an ingress about the cluster, and how a cluster is planned.

Owns nothing; plain data that crosses process borders.
"""

from __future__ import annotations

from msgspec import Struct

from workers.spec import WorkerSpec


class WorkerView(Struct, frozen=True, kw_only=True):
    """One worker slot as the ingress routes by it."""

    worker_id: str
    role: str
    state: str
    incarnation: str
    pid: int | None
    node: str
    host_identity: str
    pool_blocks: int
    refused_fields: tuple[str, ...] = ()


class DirectoryAddress(Struct, frozen=True, kw_only=True):
    """Where a directory that is up listens."""

    incarnation: str
    host: str
    port: int
    pid: int


class ClusterView(Struct, frozen=True, kw_only=True):
    """A snapshot of the membership. ``gone`` lists incarnations proved dead."""

    version: int
    workers: tuple[WorkerView, ...]
    gone: tuple[str, ...]
    directory: DirectoryAddress | None = None
    stops_in_s: float | None = None
    """The gateway stops: it takes nothing new, and what runs has so many seconds. None while it does not."""

    num_seats: int | None = None
    """Answers that may be under way at one ingress, once that has changed since its start."""

    @property
    def is_draining(self) -> bool:
        """True while ingresses tell what they still have: the gateway stops, or a worker is to go."""
        return self.stops_in_s is not None or any(worker.state == "draining" for worker in self.workers)


class DrainReport(Struct, frozen=True, kw_only=True):
    """What an ingress still has; see ``cluster.core.drain``."""

    ingress: str
    """Its incarnation."""
    version: int
    num_open: int
    busy: tuple[str, ...]


class StoreSpec(Struct, frozen=True, kw_only=True):
    """One store node: how many blocks of how many bytes its slab holds, and where it listens."""

    node: str
    incarnation: str
    block_bytes: int
    num_blocks: int
    bind_host: str
    host_identity: str
    keys_file: str | None = None
    """Where the tenants' quotas stand."""
    keys_reload_s: float = 1.0
    disk_path: str | None = None
    """Folder of the node's disk tier; each node has one of its own."""
    disk_bytes: int = 0
    disk_sync: bool = True
    eviction: str = "kopir"


class StoreAddress(Struct, frozen=True, kw_only=True):
    """Where a store node that is up listens."""

    incarnation: str
    host: str
    port: int
    pid: int


class ClusterPlan(Struct, frozen=True, kw_only=True):
    """What the controller starts. Worker specs are templates: each life gets a fresh incarnation."""

    workers: tuple[WorkerSpec, ...]
    store: StoreSpec | None
    thread_environment: dict[str, dict[str, str]]
    """Environment variables per role, set before torch is imported."""


class WorkersWanted(Struct, frozen=True, kw_only=True):
    """The workers that a running cluster is to have; names in the specs count for nothing."""

    workers: tuple[WorkerSpec, ...]
    thread_environment: dict[str, dict[str, str]]
    num_seats: int
    drain_s: float
    """How long the requests of a worker that goes may take to finish."""


class Applied(Struct, frozen=True, kw_only=True):
    """Which workers came, were taken back while they were leaving, and go."""

    started: tuple[str, ...]
    taken_back: tuple[str, ...]
    leaving: tuple[str, ...]
