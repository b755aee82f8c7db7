"""The HTTP application over a ``MiniCluster``, behind uvicorn on loopback, and the official client in front of it."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import openai
import uvicorn
from mini_cluster import MiniCluster, tiny_tokenizer

from cluster.ingress.api.app import create_app
from cluster.ingress.api.chat_template import ChatTemplate
from cluster.ingress.api.services import ApiLimits
from cluster.ingress.api.tokenizer import TokenizerBundle

MODEL_ID = "tiny"


@asynccontextmanager
async def serve(
    cluster: MiniCluster, *, limits: ApiLimits | None = None, wrap: Callable[[Any], Any] = lambda app: app
) -> AsyncIterator[str]:
    """Serves the endpoint of ``cluster`` for a with block; yields its URL. ``wrap`` puts layers around the app."""
    bundle = TokenizerBundle(tiny_tokenizer(), eos_token_ids=(2,), template=ChatTemplate("", {}))
    app = wrap(create_app(cluster.backend, bundle, limits))
    # The protocol is named because asyncio sets TCP_NODELAY only then.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    config = uvicorn.Config(app, log_level="error", ws="none", lifespan="off")
    config.load()
    server = uvicorn.Server(config)
    # Started and stopped by hand: serve() and shutdown() sleep, and take over signals.
    server.lifespan = config.lifespan_class(config)
    await server.startup(sockets=[listener])
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        for connection in list(server.server_state.connections):
            connection.shutdown()
        for running in server.servers:
            running.close()
            await running.wait_closed()


def make_client(url: str, *, timeout_s: float = 60, max_retries: int = 0) -> openai.AsyncOpenAI:
    """Returns the official client."""
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=timeout_s, max_retries=max_retries)


def make_prompt(number: int, num_tokens: int) -> list[int]:
    """Returns a prompt of its own for each number."""
    return [(number * 7919 + index * 31) % 90 + 5 for index in range(num_tokens)]
