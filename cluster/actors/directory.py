"""The Ray actor around the directory: which store node has which block."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import ray

from cluster.view import DirectoryAddress
from kvstore.core.ids import Incarnation

if TYPE_CHECKING:
    from kvstore.store.directory_server import DirectoryHost

ACTOR_OPTIONS: dict[str, Any] = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": 8, "num_cpus": 0}


class DirectoryProcess:
    """One directory process. Its state is soft: a replacement is told everything by the nodes."""

    def __init__(self, incarnation: Incarnation, secret: bytes) -> None:
        self._incarnation = incarnation
        self._secret = secret
        self._host: DirectoryHost | None = None

    def start(self, bind_host: str) -> DirectoryAddress:
        """Listens. Raises: OSError when the address cannot be had."""
        from kvstore.store.directory_server import DirectoryHost

        self._host = DirectoryHost(incarnation=self._incarnation, secret=self._secret)
        host, port = self._host.start(bind_host)
        return DirectoryAddress(incarnation=self._incarnation, host=host, port=port, pid=os.getpid())

    def status(self) -> dict[str, Any]:
        """Returns the directory's part of ``kopir status --json``."""
        return {} if self._host is None else {"pid": os.getpid(), **self._host.status()}

    def wait_until_stopped(self) -> str:
        """Blocks while the directory lives; ends with an ActorDiedError when the process dies."""
        assert self._host is not None, "wait before start"
        return self._host.wait_until_stopped()

    def stop(self) -> None:
        """Closes every connection."""
        if self._host is not None:
            self._host.close()


# The library's decorator is untyped, so it is applied here and not above the class.
DirectoryActor: Any = ray.remote(DirectoryProcess)
