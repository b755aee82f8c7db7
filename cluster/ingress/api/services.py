"""What every request handler needs, gathered once per application."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from cluster.ingress.api.backend import Backend
from cluster.ingress.api.idempotency import IdempotencyKeys
from cluster.ingress.api.pace import WritePace
from cluster.ingress.api.plan import ModelFacts, Planner
from cluster.ingress.api.seats import Seats
from cluster.ingress.api.tenants import Tenants
from cluster.ingress.api.tokenizer import TokenizerBundle
from cluster.ingress.metrics import IngressMetrics
from cluster.ingress.tools.service import ToolService

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepAlive:
    """Comments in a stream that has nothing to say yet. ``ping_s`` 0: none, and no byte before the first delta."""

    ping_s: float = 0.0
    retry_after_first_byte: bool = False
    """False: the first byte is the boundary, after which nothing is repeated. True: the first delta is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiLimits:
    """Bounds on what a client can make the HTTP layer hold."""

    max_body_bytes: int = 4 * MIB
    keep_alive: KeepAlive = KeepAlive()
    client_stall_s: float = 60.0
    """A stream whose client takes nothing for so long is ended."""


def _random_seed() -> int:
    return secrets.randbits(63)


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Collaborators of the handlers; clocks and randomness come in here and nowhere else."""

    backend: Backend
    tokenizer: TokenizerBundle
    limits: ApiLimits = ApiLimits()
    metrics: IngressMetrics = field(default_factory=IngressMetrics)
    refresh_metrics: Callable[[], Awaitable[None]] | None = None
    """Brings what other processes count up to date before metrics are rendered."""
    pace: WritePace = field(default_factory=WritePace)
    tenants: Tenants = field(default_factory=Tenants)
    seats: Seats | None = None
    """None: everybody starts at once."""
    idempotency: IdempotencyKeys | None = None
    """None: requests with an idempotency key are refused."""
    tools: ToolService | None = None
    """None: requests with server-side tools are refused."""
    tracing: Callable[..., Any] | None = None
    """ASGI middleware around every request; None: no traces."""
    monotonic_s: Callable[[], float] = time.monotonic
    unix_s: Callable[[], float] = time.time
    random_seed: Callable[[], int] = _random_seed
    make_request_id: Callable[[], str] = lambda: f"req-{secrets.token_hex(16)}"

    def planner(self) -> Planner:
        """Returns the planner of the served model."""
        facts = ModelFacts(
            model_id=self.backend.model_id,
            max_model_len=self.backend.max_model_len,
            vocab_size=self.backend.vocab_size,
        )
        return Planner(facts, self.tokenizer, random_seed=self.random_seed)
