"""Whose request it is: the key that came with it, and the place that its tenant has for it.

``KeyCheck`` stands around the whole application: whatever is not named in ``OPEN_PATHS`` needs a key where keys are
configured, so that a path that is added later is closed by default. What was found stands in the scope. A key never
gets into a log, a journal or an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from cluster.core.admission import Refused
from cluster.core.tenants import EVERYBODY, KeyRing, Tenant, TenantMeter
from cluster.ingress.api.errors import ApiError, Forbidden, Overloaded, Unauthorized

OPEN_PATHS = frozenset({"/", "/status.js", "/healthz", "/readyz", "/metrics", "/openapi.json"})
"""Paths that tell nothing of any tenant."""
MAX_KEY_CHARS = 512
_SCOPE_KEY = "kopir.tenant"


@dataclass(slots=True)
class Usage:
    """What a request has really used, filled in while it runs."""

    tokens: int = 0


@dataclass(slots=True, kw_only=True)
class Tenants:
    """Keys in force and what their tenants use. ``ring`` returns None where no keys are configured."""

    ring: Callable[[], KeyRing | None] = lambda: None
    meter: TenantMeter = field(default_factory=TenantMeter)
    clock_ns: Callable[[], int] = time.monotonic_ns

    def identify(self, authorization: str | None) -> Tenant:
        """Returns the tenant of an ``Authorization`` header. Raises: Unauthorized, Forbidden."""
        ring = self.ring()
        if ring is None:
            return EVERYBODY
        scheme, _, text = (authorization or "").strip().partition(" ")
        text = text.strip()
        if scheme.lower() != "bearer" or not text:
            raise Unauthorized("An API key is needed: send it as 'Authorization: Bearer KEY'.", code="missing_api_key")
        key = ring.find(text) if len(text) <= MAX_KEY_CHARS else None
        if key is None:
            raise Unauthorized("This API key is not known here.", code="invalid_api_key")
        if key.is_revoked:
            raise Forbidden(f"The key {key.key_id} was revoked.", code="key_revoked")
        return key.tenant

    @contextmanager
    def place(self, tenant: Tenant, request_id: str, *, num_tokens: int, num_choices: int) -> Iterator[Usage]:
        """Holds a place of the tenant while the block runs. Raises: Overloaded when a limit is reached."""
        refused = self.meter.admit(
            tenant, request_id, num_tokens=num_tokens, num_choices=num_choices, now_ns=self.clock_ns()
        )
        if refused is not None:
            raise overloaded(refused)
        usage = Usage()
        try:
            yield usage
        finally:
            self.meter.leave(request_id, used_tokens=usage.tokens, now_ns=self.clock_ns())


def overloaded(refused: Refused) -> ApiError:
    """Returns the answer for a refusal with 429."""
    return Overloaded(f"{refused.why}.", code=refused.code, retry_after_s=refused.retry_after_s or 1)


class KeyCheck:
    """ASGI middleware; see the module. ``count`` is told of each refusal."""

    def __init__(self, app: Any, *, tenants: Tenants, count: Callable[[ApiError], None]) -> None:
        self._app = app
        self._tenants = tenants
        self._count = count

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            try:
                scope[_SCOPE_KEY] = self._tenants.identify(_authorization(scope))
            except ApiError as error:
                if scope["path"] not in OPEN_PATHS:
                    self._count(error)
                    await answer_error(error, send)
                    return
        await self._app(scope, receive, send)


def tenant_of_scope(scope: MutableMapping[str, Any]) -> Tenant:
    """Returns whose request this is; on open paths, and outside of ``KeyCheck``, everybody's."""
    tenant = scope.get(_SCOPE_KEY, EVERYBODY)
    assert isinstance(tenant, Tenant), type(tenant)
    return tenant


def _authorization(scope: MutableMapping[str, Any]) -> str | None:
    for name, value in scope["headers"]:
        if name.lower() == b"authorization":
            text: str = value.decode("utf-8", "surrogateescape")
            return text
    return None


async def answer_error(error: ApiError, send: Any) -> None:
    """Answers outside of the application's own handlers of errors."""
    body = error.body()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *error.headers(),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
