"""One ingress process: HTTP application, request driver and relay server, put together.

Owns them and their order. Knows nothing of Ray: the deployment gives it start, stop and the cluster's status as
calls, so that the same ingress runs in tests without a cluster.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cluster.config import Config, class_quotas, num_seats
from cluster.core.admission_queue import AdmissionQueue
from cluster.core.tenants import EVERYBODY, Tenant, TenantMeter
from cluster.ingress.api.app import create_app
from cluster.ingress.api.idempotency import IdempotencyKeys
from cluster.ingress.api.seats import Seats
from cluster.ingress.api.services import ApiLimits, KeepAlive
from cluster.ingress.api.tenants import Tenants, tenant_of_scope
from cluster.ingress.api.tokenizer import TokenizerBundle
from cluster.ingress.backend import RelayBackend
from cluster.ingress.metrics import IngressMetrics
from cluster.ingress.tools.service import ToolService
from cluster.ingress.tracing import TracedRequests, Tracing
from cluster.keys_source import keys_source
from cluster.tools_source import load_tools
from cluster.view import ClusterView, DrainReport
from kvstore.net.handshake import PeerInfo
from kvstore.net.host import boottime_ns, host_identity
from workers.model.config import read_config
from workers.model.digests import model_digests

logger = logging.getLogger(__name__)

RELAY_HOST = "127.0.0.1"
STORE_STATUS_DEADLINE_S = 1.0


class IngressApp:
    """Everything of one ingress replica but Ray Serve."""

    def __init__(self, config: Config, model_path: str, secret: bytes, incarnation: str) -> None:
        folder = Path(model_path)
        weights_digest = model_digests(folder)["weights"]
        self._config = config
        self._me = PeerInfo(
            role="ingress",
            peer_id=f"ingress-{incarnation[:8]}",
            incarnation=incarnation,
            pid=os.getpid(),
            host_identity=host_identity(config.kv.host_identity),
        )
        self._tokenizer = TokenizerBundle.from_folder(folder)
        self._metrics = IngressMetrics()
        self._keys = keys_source(config)
        self._watch_keys: asyncio.Task[None] | None = None
        self._tracing = None
        if config.tracing.otlp_endpoint is not None:
            self._tracing = Tracing(config.tracing, instance=self._me.peer_id)
        self._tenants = Tenants(
            ring=lambda: None if self._keys is None else self._keys.current,
            meter=TenantMeter(shares=config.ingress.replicas),
            clock_ns=boottime_ns,
        )
        self._seats = Seats(
            AdmissionQueue(
                num_seats(config),
                config.limits.max_queued_requests,
                class_quotas(config.admission.classes),
                reserve_share=config.admission.reserve_share,
                max_wait_ns=config.admission.max_wait_ms * 1_000_000,
            ),
            deadline_ms=config.attempts.deadline_ms,
            clock_ns=boottime_ns,
            metrics=self._metrics,
        )
        self._backend = RelayBackend(
            config,
            me=self._me,
            secret=secret,
            model_id=config.served_model_name or folder.name,
            created=int((folder / "config.json").stat().st_mtime),
            vocab_size=read_config(folder).vocab_size,
            system_fingerprint=f"kopir-{config.dtype}-{weights_digest[:12]}",
            model_revision=f"{config.model}@sha256:{weights_digest}",
            registry=self._metrics.registry,
            clock_ns=boottime_ns,
        )

        self._tools = self._tool_service(config)

    def _tool_service(self, config: Config) -> ToolService | None:
        if config.tools.file is None:
            return None
        return ToolService(
            load_tools(config.tools.file),
            store=lambda: self._backend.tools,
            settings=config.tools,
            metrics=self._metrics.tools,
            clock_ns=boottime_ns,
            unix_s=time.time,
        )

    def build(
        self,
        *,
        on_start: Callable[[], Awaitable[None]],
        on_stop: Callable[[], Awaitable[None]],
        cluster_status: Callable[[], Awaitable[dict[str, Any]]],
    ) -> FastAPI:
        """Returns the ASGI application; ``on_start`` and ``on_stop`` run with its lifespan."""

        async def refresh_metrics() -> None:
            """Takes what the store nodes have counted; without an answer in time the last figures stand."""
            with suppress(TimeoutError):
                facts = await asyncio.wait_for(cluster_status(), STORE_STATUS_DEADLINE_S)
                for store in facts.get("store", []):
                    self._backend.on_store_status(store["incarnation"], store["counters"])

        app = create_app(
            self._backend,
            self._tokenizer,
            self._limits(),
            metrics=self._metrics,
            refresh_metrics=refresh_metrics,
            tenants=self._tenants,
            seats=self._seats,
            tools=self._tools,
            tracing=None if self._tracing is None else partial(TracedRequests, tracing=self._tracing),
            idempotency=IdempotencyKeys(
                lambda: self._backend.keys,
                owner=self._me.incarnation,
                lease_s=self._config.attempts.lease_ms / 1000,
            ),
        )

        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            await on_start()
            try:
                yield
            finally:
                await on_stop()

        async def status(request: Request) -> Response:
            return JSONResponse(await self._status(await cluster_status(), tenant_of_scope(request.scope)))

        app.router.lifespan_context = lifespan
        app.router.routes.append(Route("/internal/status", status, methods=["GET"]))
        return app

    def _limits(self) -> ApiLimits:
        server = self._config.server
        keep_alive = KeepAlive(ping_s=server.keep_alive_ping_s, retry_after_first_byte=server.retry_after_first_byte)
        limits = self._config.limits
        return ApiLimits(
            max_body_bytes=limits.max_body_bytes,
            keep_alive=keep_alive,
            client_stall_s=limits.client_stall_ms / 1000,
        )

    async def start(self) -> tuple[str, int]:
        """Joins the ledger, then listens for workers; returns (host, port)."""
        if self._keys is not None:
            self._watch_keys = asyncio.create_task(self._keys.watch())
        await self._backend.join_ledger(RELAY_HOST, share=self._share)
        return await self._backend.start(RELAY_HOST)

    async def close(self) -> None:
        """Sends the waiting away, ends running requests honestly, then the links."""
        self._seats.drain()
        if self._watch_keys is not None:
            self._watch_keys.cancel()
        await self._backend.close()
        if self._tools is not None:
            await self._tools.close()
        if self._tracing is not None:
            await self._tracing.close()

    def set_view(self, view: ClusterView) -> None:
        """Takes a newer membership; one that says that the gateway stops closes the door."""
        self._backend.set_view(view)
        if view.num_seats is not None:
            self._seats.resize(view.num_seats)
        if view.stops_in_s is not None and not self._seats.is_draining:
            self._seats.drain(until_ns=boottime_ns() + int(view.stops_in_s * 1e9))

    @property
    def view_version(self) -> int:
        """Version of the membership in use."""
        return self._backend.view_version

    @property
    def is_draining(self) -> bool:
        """True while the controller wants to know what runs here."""
        return self._backend.view.is_draining

    def drain_report(self) -> DrainReport:
        """Returns what still runs here, by the membership in use."""
        view = self._backend.view
        leaving = {worker.incarnation for worker in view.workers if worker.state == "draining"}
        return DrainReport(
            ingress=self._me.incarnation,
            version=view.version,
            num_open=self._seats.num_open,
            busy=tuple(sorted(leaving & self._backend.busy_lives())),
        )

    async def _status(self, cluster: dict[str, Any], tenant: Tenant) -> dict[str, Any]:
        """Returns the facts; with keys configured, a tenant sees streams and interruptions of its own only."""
        whose = None if tenant == EVERYBODY else tenant.name
        workers, others = await asyncio.gather(self._backend.worker_statuses(), self._backend.shares(whose))
        stores = cluster.get("store", [])
        return {
            "workers": workers,
            "store": stores,
            "directory": cluster.get("directory", {"pid": None}),
            "controller": cluster.get("controller", {"pid": None}),
            "policy": self._backend.policy_status(),
            "leases": sum(part.get("leases", 0) for part in (*workers, *stores)),
            **joined([self._share(whose), *others]),
        }

    def _share(self, whose: str | None) -> dict[str, Any]:
        """Returns what this ingress alone knows; ``whose``: the tenant that may see it, None for everybody's."""
        num_streams = len(self._backend.streams())
        return {
            "ingress": [{"id": self._me.peer_id, "pid": self._me.pid, "streams": num_streams}],
            "streams": self._backend.streams(whose),
            "interruptions": self._backend.interruptions(whose),
            "promises": self._metrics.promises(),
            "tokens": self._metrics.tokens(),
        }


def joined(shares: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the shares of all ingresses as one: lists one after another, interruptions by age, counts added up."""
    whole: dict[str, Any] = {"ingress": [], "streams": [], "interruptions": [], "promises": {}, "tokens": {}}
    for share in shares:
        for name, mine in whole.items():
            theirs = share.get(name, type(mine)())
            if isinstance(mine, list):
                mine += theirs
            else:
                for key, count in theirs.items():
                    mine[key] = mine.get(key, 0) + count
    whole["interruptions"].sort(key=lambda told: told["age_s"])
    return whole
