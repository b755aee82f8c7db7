"""One application behind uvicorn on loopback, in the event loop of the test."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import uvicorn

from cluster.ingress.api.app import create_app
from cluster.ingress.api.backend import Ended
from cluster.ingress.api.idempotency import IdempotencyKeys
from cluster.ingress.api.seats import Seats
from cluster.ingress.api.services import ApiLimits
from cluster.ingress.api.tenants import Tenants
from cluster.ingress.api.tokenizer import TokenizerBundle
from cluster.ingress.metrics import IngressMetrics
from cluster.ingress.tools.service import ToolService

from .fakes import MODEL_ID, FakeBackend, Step, batches, make_bundle, make_tokenizer

MAX_BODY_BYTES = 256 * 1024


@dataclass(kw_only=True)
class World:
    """A running endpoint and everything behind it."""

    url: str
    http: httpx.AsyncClient
    backend: FakeBackend
    bundle: TokenizerBundle
    metrics: IngressMetrics
    encode: Any

    def play(self, text: str, *, finish: str = "length", size: int = 1, logprobs: bool = False) -> list[int]:
        """Scripts an answer; returns its token ids."""
        token_ids = self.encode(text)
        self.backend.script = [*batches(token_ids, size=size, logprobs=logprobs), Ended(finish)]
        return token_ids

    def play_steps(self, steps: Sequence[Step]) -> None:
        self.backend.script = list(steps)

    async def chat(self, **body: Any) -> httpx.Response:
        request = {"model": MODEL_ID, "messages": [{"role": "user", "content": "hi"}]} | body
        return await self.http.post("/v1/chat/completions", json=request)

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": MODEL_ID, "prompt": "hi"} | body)


@asynccontextmanager
async def serve_app(app: Any) -> AsyncIterator[str]:
    """Serves an ASGI application on a free port of loopback for a with block; yields its URL."""
    # The protocol is named because asyncio sets TCP_NODELAY only then; 40 ms per answer otherwise.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    config = uvicorn.Config(app, log_level="error", ws="none", lifespan="off")
    config.load()
    server = uvicorn.Server(config)
    # Started and stopped by hand: serve() and shutdown() sleep, and take over signals.
    server.lifespan = config.lifespan_class(config)
    await server.startup(sockets=[listener])
    try:
        yield url
    finally:
        for connection in list(server.server_state.connections):
            connection.shutdown()
        for running in server.servers:
            running.close()
            await running.wait_closed()


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="session")
def bundle(tokenizer: Any) -> TokenizerBundle:
    return make_bundle(tokenizer)


@pytest.fixture
def tenants() -> Tenants:
    """No keys: everybody is let in. A module that wants keys has a fixture of this name."""
    return Tenants()


@pytest.fixture
def idempotency() -> IdempotencyKeys | None:
    """No ledger. A module that wants one has a fixture of this name."""
    return None


@pytest.fixture
def seats() -> Seats | None:
    """Everybody starts at once. A module that wants a queue has a fixture of this name."""
    return None


@pytest.fixture
def tools() -> Callable[[IngressMetrics], ToolService] | None:
    """No server-side tools. A module that wants some has a fixture of this name."""
    return None


@pytest.fixture
def limits() -> ApiLimits:
    """What one client may send. A module that wants other limits has a fixture of this name."""
    return ApiLimits(max_body_bytes=MAX_BODY_BYTES)


@pytest_asyncio.fixture
async def world(
    tokenizer: Any,
    bundle: TokenizerBundle,
    tenants: Tenants,
    idempotency: IdempotencyKeys | None,
    seats: Seats | None,
    tools: Callable[[IngressMetrics], ToolService] | None,
    limits: ApiLimits,
) -> AsyncIterator[World]:
    metrics = IngressMetrics()
    backend = FakeBackend(vocab_size=tokenizer.get_vocab_size())
    app = create_app(
        backend,
        bundle,
        limits,
        metrics=metrics,
        refresh_metrics=backend.refresh_metrics,
        tenants=tenants,
        seats=seats,
        idempotency=idempotency,
        tools=None if tools is None else tools(metrics),
    )
    async with serve_app(app) as url, httpx.AsyncClient(base_url=url, timeout=20) as http:
        yield World(
            url=url,
            http=http,
            backend=backend,
            bundle=bundle,
            metrics=metrics,
            encode=lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        )


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The packaged model in the cache."""
    found = sorted(Path.home().glob(".cache/kopir/**/tokenizer.json"))
    if not found:
        pytest.skip("the packaged model is not in the cache")
    return found[0].parent
