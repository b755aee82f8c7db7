"""The Ray actor around one store node."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from cluster.view import StoreAddress, StoreSpec

if TYPE_CHECKING:
    from cluster.keys_source import KeysSource
    from kvstore.store.host import StoreHost

ACTOR_OPTIONS: dict[str, Any] = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": 8, "num_cpus": 0}


class StoreProcess:
    """One store node process: host slab and its index."""

    def __init__(self, spec: StoreSpec, secret: bytes) -> None:
        self._spec = spec
        self._secret = secret
        self._host: StoreHost | None = None
        self._stopped = threading.Event()

    def start(self) -> StoreAddress:
        """Allocates the slab, opens the disk and listens. Raises: EnvironmentProblem when one cannot be had."""
        from cluster.keys_source import KeysSource
        from kvstore.store.host import DiskPlan, StoreHost

        spec = self._spec
        keys = None if spec.keys_file is None else KeysSource(spec.keys_file, reload_s=spec.keys_reload_s)
        self._host = StoreHost(
            node=spec.node,
            incarnation=spec.incarnation,
            secret=self._secret,
            block_bytes=spec.block_bytes,
            num_blocks=spec.num_blocks,
            host_identity=spec.host_identity,
            quotas=None if keys is None else keys.current.quotas(),
            disk=None if spec.disk_path is None else DiskPlan(Path(spec.disk_path), spec.disk_bytes, spec.disk_sync),
            eviction=spec.eviction,
        )
        host, port = self._host.start(spec.bind_host)
        if keys is not None:
            threading.Thread(target=self._follow, args=(keys,), name="kopir-quotas", daemon=True).start()
        return StoreAddress(incarnation=spec.incarnation, host=host, port=port, pid=os.getpid())

    def _follow(self, keys: KeysSource) -> None:
        """Brings changed quotas into force, until the node stops."""
        assert self._host is not None
        while not self._stopped.wait(self._spec.keys_reload_s):
            if keys.look():
                self._host.set_quotas(keys.current.quotas())

    def set_directory(self, host: str, port: int) -> None:
        """Names the directory that lives now."""
        if self._host is not None:
            self._host.set_directory(host, port)

    def status(self) -> dict[str, Any]:
        """Returns this node's entry of ``kopir status --json``."""
        if self._host is None:
            return {}
        return {"node": self._spec.node, "pid": os.getpid(), **self._host.status()}

    def wait_until_stopped(self) -> str:
        """Blocks while the node lives; ends with an ActorDiedError when the process dies."""
        assert self._host is not None, "wait before start"
        return self._host.wait_until_stopped()

    def stop(self) -> None:
        """Unlinks the slab and closes every link."""
        self._stopped.set()
        if self._host is not None:
            self._host.close()


# The library's decorator is untyped, so it is applied here and not above the class.
StoreActor: Any = ray.remote(StoreProcess)
