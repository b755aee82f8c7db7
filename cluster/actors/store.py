"""The Ray actor around one store node."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import ray

from cluster.view import StoreAddress, StoreSpec

if TYPE_CHECKING:
    from kvstore.store.host import StoreHost

ACTOR_OPTIONS: dict[str, Any] = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": 8, "num_cpus": 0}


class StoreProcess:
    """One store node process: host slab and its index."""

    def __init__(self, spec: StoreSpec, secret: bytes) -> None:
        self._spec = spec
        self._secret = secret
        self._host: StoreHost | None = None

    def start(self) -> StoreAddress:
        """Allocates the slab and listens. Raises: EnvironmentProblem when shared memory is too small."""
        from kvstore.store.host import StoreHost

        spec = self._spec
        self._host = StoreHost(
            node=spec.node,
            incarnation=spec.incarnation,
            secret=self._secret,
            block_bytes=spec.block_bytes,
            num_blocks=spec.num_blocks,
            host_identity=spec.host_identity,
        )
        host, port = self._host.start(spec.bind_host)
        return StoreAddress(incarnation=spec.incarnation, host=host, port=port, pid=os.getpid())

    def status(self) -> dict[str, Any]:
        """Returns this node's entry of ``kopir status --json``."""
        if self._host is None:
            return {}
        stat = self._host.status()
        blocks, used = stat["total"], stat["used"]
        tier = {"name": "host", "blocks": blocks, "used_blocks": used, "bytes": blocks * stat["block_bytes"]}
        return {"node": self._spec.node, "pid": os.getpid(), "tiers": [tier], **stat}

    def wait_until_stopped(self) -> str:
        """Blocks while the node lives; ends with an ActorDiedError when the process dies."""
        assert self._host is not None, "wait before start"
        return self._host.wait_until_stopped()

    def stop(self) -> None:
        """Unlinks the slab and closes every link."""
        if self._host is not None:
            self._host.close()


# The library's decorator is untyped, so it is applied here and not above the class.
StoreActor: Any = ray.remote(StoreProcess)
