"""One application behind uvicorn on loopback, in the event loop of the test."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import uvicorn

from cluster.ingress.api.app import create_app
from cluster.ingress.api.backend import Ended
from cluster.ingress.api.services import ApiLimits
from cluster.ingress.api.tokenizer import TokenizerBundle
from cluster.ingress.metrics import IngressMetrics

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


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="session")
def bundle(tokenizer: Any) -> TokenizerBundle:
    return make_bundle(tokenizer)


@pytest_asyncio.fixture
async def world(tokenizer: Any, bundle: TokenizerBundle) -> AsyncIterator[World]:
    metrics = IngressMetrics()
    backend = FakeBackend(vocab_size=tokenizer.get_vocab_size())
    app = create_app(backend, bundle, ApiLimits(max_body_bytes=MAX_BODY_BYTES), metrics=metrics)
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none", lifespan="off"))
    server.capture_signals = _no_signals  # type: ignore[method-assign]
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    async with httpx.AsyncClient(base_url=url, timeout=20) as http:
        yield World(
            url=url,
            http=http,
            backend=backend,
            bundle=bundle,
            metrics=metrics,
            encode=lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        )
    server.should_exit = True
    await serving
    listener.close()


class _no_signals:
    def __enter__(self) -> None: ...

    def __exit__(self, *reason: object) -> None: ...


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The packaged model in the cache."""
    found = sorted(Path.home().glob(".cache/kopir/**/tokenizer.json"))
    if not found:
        pytest.skip("the packaged model is not in the cache")
    return found[0].parent
