"""The Ray Serve deployment around one ingress process.

Builds the HTTP application over the relay backend, keeps the membership current by a long poll at the controller,
and answers the internal status. Serve may route a request to another replica inside its accept handshake; a request
id is made inside the replica that runs the handler, so no id is ever seen twice.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import suppress
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError

from cluster.actors.controller import CONTROLLER_NAME, NAMESPACE, WATCH_DEADLINE_S
from cluster.config import Config
from cluster.ingress.app import IngressApp
from cluster.view import ClusterView
from kvstore.core.ids import Incarnation
from kvstore.net.host import new_incarnation
from workers.spec import IngressAddress

logger = logging.getLogger(__name__)

DEPLOYMENT_NAME = "kopir-ingress"
APPLICATION_NAME = "kopir"
CONTROLLER_RETRY_S = 0.5
WATCH_ANSWER_DEADLINE_S = WATCH_DEADLINE_S + 20.0
"""The controller answers within the first; beyond the second it is asked anew."""
DRAIN_LOOK_S = 0.05
"""How often an ingress looks at what it still has, while somebody waits for it."""


class IngressReplica:
    """One ingress replica."""

    def __init__(self, config: Config, model_path: str, secret: bytes) -> None:
        self._incarnation: Incarnation = new_incarnation()
        self._ingress = IngressApp(config, model_path, secret, self._incarnation)
        self._controller = ray.get_actor(CONTROLLER_NAME, namespace=NAMESPACE)
        self._watcher: asyncio.Task[None] | None = None
        self._teller: asyncio.Task[None] | None = None

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._ingress.build(on_start=self._start, on_stop=self._stop, cluster_status=self._cluster_status)

    async def _start(self) -> None:
        host, port = await self._ingress.start()
        address = IngressAddress(
            ingress_id=f"ingress-{self._incarnation[:8]}",
            incarnation=self._incarnation,
            host=host,
            port=port,
            pid=os.getpid(),
        )
        # The controller learns from the actor that this process is gone.
        actor = ray.get_runtime_context().current_actor
        self._take(await self._controller.register_ingress.remote(address, actor))
        self._watcher = asyncio.create_task(self._watch())

    async def _stop(self) -> None:
        for task in (self._watcher, self._teller):
            if task is not None:
                task.cancel()
        await self._ingress.close()

    async def _watch(self) -> None:
        """Keeps the membership current. A controller that is gone leaves the last view standing."""
        while True:
            try:
                async with asyncio.timeout(WATCH_ANSWER_DEADLINE_S):
                    view = await self._controller.watch.remote(self._ingress.view_version)
                self._take(view)
            except Exception as error:
                # Whatever it was, an ingress that no longer follows the membership would serve with dead workers.
                logger.warning("controller_lost error=%s", error or type(error).__name__, exc_info=error)
                await asyncio.sleep(CONTROLLER_RETRY_S)
                with suppress(ValueError, RayError):
                    self._controller = ray.get_actor(CONTROLLER_NAME, namespace=NAMESPACE)

    def _take(self, view: ClusterView) -> None:
        self._ingress.set_view(view)
        if view.is_draining and (self._teller is None or self._teller.done()):
            self._teller = asyncio.create_task(self._tell())

    async def _tell(self) -> None:
        """Tells the controller what this ingress still has, at each change, while something drains."""
        told = None
        while self._ingress.is_draining:
            report = self._ingress.drain_report()
            if report != told:
                try:
                    async with asyncio.timeout(WATCH_ANSWER_DEADLINE_S):
                        await self._controller.drain_report.remote(report)
                    told = report
                except (RayError, TimeoutError) as error:
                    logger.warning("drain_not_told error=%s", error or type(error).__name__)
            await asyncio.sleep(DRAIN_LOOK_S)

    async def _cluster_status(self) -> dict[str, Any]:
        try:
            return await asyncio.wait_for(self._controller.status.remote(), timeout=5)
        except (RayError, TimeoutError):
            return {"controller": {"pid": None}, "store": []}


# The library's decorators are untyped, so they are applied here and not above the class.
IngressDeployment: Any = serve.deployment(name=DEPLOYMENT_NAME, ray_actor_options={"num_cpus": 0})(
    serve.ingress()(IngressReplica)
)
