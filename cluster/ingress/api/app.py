"""The HTTP application: which path does what, and the shape of every error.

Owns routes and error handlers. Holds no state of requests: that is the backend's.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cluster.ingress.api.answer import Answer, Receive, Send, request_id_of_choice
from cluster.ingress.api.backend import Backend
from cluster.ingress.api.errors import (
    ApiError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    NotReady,
    as_api_error,
    echo,
)
from cluster.ingress.api.header_limits import HeaderLimits
from cluster.ingress.api.idempotency import HEADER as IDEMPOTENCY_HEADER
from cluster.ingress.api.idempotency import KeyHold, check_key, digest_of_body
from cluster.ingress.api.identity import RequestIdentity, request_id_of
from cluster.ingress.api.openapi import openapi_document
from cluster.ingress.api.parse import ClientGone, parse, read_body
from cluster.ingress.api.plan import AnswerPlan
from cluster.ingress.api.schema import MAX_CHOICES, ChatRequest, CompletionRequest
from cluster.ingress.api.seats import CLASS_HEADER
from cluster.ingress.api.services import ApiLimits, Services
from cluster.ingress.api.status_page import status_page_routes
from cluster.ingress.api.stream import StreamedAnswer
from cluster.ingress.api.tenants import KeyCheck, tenant_of_scope
from cluster.ingress.api.tokenizer import TokenizerBundle
from cluster.ingress.api.tool_answer import MAX_ROUNDS, StreamedToolAnswer, WholeToolAnswer, request_id_of_round
from cluster.ingress.api.whole import WholeAnswer
from cluster.ingress.api.window import EDGE_HEADER, WriteWindow
from cluster.ingress.api.wire import Model, ModelList, encode_json
from cluster.ingress.tools.service import Opening, ToolSession
from cluster.ledger.key_store import KeyRow
from kvstore.errors import KopirError

logger = logging.getLogger(__name__)

MAX_LABEL_CHARS = 128
CLIENT_RETRIES_MAX = 16
UNSUPPORTED_PATHS = ("/v1/responses", "/v1/embeddings")
_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")

Scope = Any


def create_app(
    backend: Backend, tokenizer: TokenizerBundle, limits: ApiLimits | None = None, **collaborators: Any
) -> FastAPI:
    """Returns the application in front of ``backend``.

    ``collaborators``: ``metrics``, clocks and randomness of ``Services``; left out, the real ones.
    """
    services = Services(backend=backend, tokenizer=tokenizer, limits=limits or ApiLimits(), **collaborators)
    info = InfoEndpoints(services)
    app = FastAPI(
        title="Kopir",
        openapi_url=None,
        routes=[
            Route("/v1/chat/completions", GenerationEndpoint(services, ChatRequest), methods=["POST"]),
            Route("/v1/completions", GenerationEndpoint(services, CompletionRequest), methods=["POST"]),
            Route("/v1/models", info.models, methods=["GET"]),
            Route("/v1/models/{model_id:path}", info.model, methods=["GET"]),
            Route("/v1/requests/{request_id}", info.request_record, methods=["GET"]),
            Route("/v1/requests/{request_id}/cancel", info.cancel, methods=["POST"]),
            Route("/healthz", info.healthz, methods=["GET"]),
            Route("/readyz", info.readyz, methods=["GET"]),
            Route("/metrics", info.metrics, methods=["GET"]),
            Route("/openapi.json", info.openapi, methods=["GET"]),
            *status_page_routes(),
            *(Route(path, _unsupported, methods=["GET", "POST"]) for path in UNSUPPORTED_PATHS),
        ],
        exception_handlers=_error_handlers(services),
    )
    app.add_middleware(KeyCheck, tenants=services.tenants, count=partial(_count_error, services))
    app.add_middleware(HeaderLimits, count=partial(_count_error, services))
    if services.tracing is not None:
        app.add_middleware(services.tracing)
    app.add_middleware(RequestIdentity, make_request_id=services.make_request_id)
    return app


class GenerationEndpoint:
    """``POST /v1/chat/completions`` or ``/v1/completions``, as a bare ASGI application: it needs ``receive``."""

    def __init__(self, services: Services, kind: type[ChatRequest] | type[CompletionRequest]) -> None:
        self._services = services
        self._kind = kind
        self._planner = services.planner()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services = self._services
        arrived_s = services.monotonic_s()
        headers = Request(scope).headers
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise InvalidRequest("content-encoding: compressed bodies are not supported.", param="content-encoding")
        length = headers.get("content-length", "")
        try:
            body = await read_body(
                receive,
                content_length=int(length) if length.isascii() and length.isdecimal() else None,
                limit_bytes=services.limits.max_body_bytes,
            )
        except ClientGone:
            return
        key, session = headers.get(IDEMPOTENCY_HEADER), None
        if self._kind is ChatRequest:
            request = parse(body, ChatRequest)
            session = None if request.server_tools is None else self._session(scope, request, key)
            plan = await (self._planner.chat(request) if session is None else session.first_plan())
        else:
            plan = await self._planner.completion(parse(body, CompletionRequest))
        hold: KeyHold | None = None
        if key is not None:
            claimed = await self._claim(scope, key, body)
            if isinstance(claimed, KeyRow):
                await _replay(claimed, send)
                return
            hold = claimed
        try:
            if session is not None:
                plan = await session.open(self._opening(scope, key, body), plan)
            await self._answer(scope, receive, send, plan, hold, arrived_s, session)
        except BaseException as error:
            if hold is not None:
                await asyncio.shield(hold.release())
            if session is not None and session.has_intent and isinstance(error, KopirError):
                # A tool may have done its work: whether to ask again is for the client to decide, not its library.
                error = as_api_error(error)
                error.should_retry = False
                raise error from None
            raise

    def _session(self, scope: Scope, request: ChatRequest, key: str | None) -> ToolSession:
        services = self._services
        if services.tools is None:
            raise InvalidRequest(
                "server_tools: this server has no tools.", param="server_tools", code="unsupported_parameter"
            )
        return services.tools.session(
            request,
            tenant=tenant_of_scope(scope).name,
            has_key=key is not None,
            planner=self._planner,
            model=services.backend.system_fingerprint or services.backend.model_id,
        )

    def _opening(self, scope: Scope, key: str | None, body: bytes) -> Opening:
        return Opening(
            tenant=tenant_of_scope(scope).name,
            key=key,
            body_digest=digest_of_body(scope["path"], body),
            request_id=request_id_of(scope),
        )

    async def _claim(self, scope: Scope, key: str, body: bytes) -> KeyHold | KeyRow:
        check_key(key)
        if self._services.idempotency is None:
            raise NotReady("Requests with an idempotency key need a ledger.", code="no_ledger")
        return await self._services.idempotency.claim(
            key, tenant=tenant_of_scope(scope).name, request_id=request_id_of(scope), path=scope["path"], body=body
        )

    async def _answer(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        plan: AnswerPlan,
        hold: KeyHold | None,
        arrived_s: float,
        session: ToolSession | None,
    ) -> None:
        services, headers = self._services, Request(scope).headers
        tenant, request_id = tenant_of_scope(scope), request_id_of(scope)
        kind: Callable[..., Answer] = StreamedAnswer if plan.stream else WholeAnswer
        if session is not None:
            kind = partial(StreamedToolAnswer if plan.stream else WholeToolAnswer, session=session)
        answer = kind(
            services,
            plan,
            request_id=request_id,
            # Behind the proxy the client's own id arrives under another name, see ``proxy_edge``.
            label=_label(headers.get("x-kopir-label", headers.get("x-request-id"))),
            tenant=tenant.name,
            salt=tenant.salt,
            client_retries=_client_retries(headers.get("x-stainless-retry-count")),
            arrived_s=arrived_s,
            hold=hold,
            request_class=headers.get(CLASS_HEADER),
            window=WriteWindow() if EDGE_HEADER in headers else None,
        )
        most = plan.num_prompt_tokens + plan.num_choices * plan.spec.max_tokens
        with services.tenants.place(tenant, request_id, num_tokens=most, num_choices=plan.num_choices) as usage:
            try:
                await answer.run(receive, send)
            finally:
                usage.tokens = answer.used_tokens


class InfoEndpoints:
    """Everything that does not generate."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._openapi = openapi_document()

    async def openapi(self, request: Request) -> Response:
        return _json(self._openapi)

    async def models(self, request: Request) -> Response:
        return _json(ModelList(data=[self._model()]))

    async def model(self, request: Request) -> Response:
        asked = request.path_params["model_id"]
        if asked != self._services.backend.model_id:
            raise NotFound(f"The model {echo(asked)} does not exist.", param="model", code="model_not_found")
        return _json(self._model())

    async def request_record(self, request: Request) -> Response:
        return await self._record(request, self._services.backend.request_record)

    async def cancel(self, request: Request) -> Response:
        return await self._record(request, self._services.backend.cancel)

    async def healthz(self, request: Request) -> Response:
        return _json({"status": "ok"})

    async def readyz(self, request: Request) -> Response:
        seats = self._services.seats
        if seats is not None and seats.is_draining:
            return _not_ready({"status": "draining", "message": "the server is stopping"}, seats.stops_in_s())
        state = self._services.backend.ready()
        body = {"status": "ready" if state.ready else "not_ready", "message": state.message, "detail": state.detail}
        if state.ready:
            return _json(body)
        return _not_ready(body | {"message": state.message or "not ready"}, 1)

    async def metrics(self, request: Request) -> Response:
        metrics = self._services.metrics
        if self._services.refresh_metrics is not None:
            await self._services.refresh_metrics()
        return Response(metrics.render(), headers={"content-type": metrics.content_type})

    def _model(self) -> Model:
        backend = self._services.backend
        return Model(id=backend.model_id, created=backend.created, max_model_len=backend.max_model_len)

    async def _record(self, request: Request, ask: Callable[..., Awaitable[dict[str, Any] | None]]) -> Response:
        request_id = request.path_params["request_id"]
        tenant = tenant_of_scope(request.scope).name
        # What cannot be an id of ours is asked of nobody.
        record = await ask(request_id, tenant=tenant) if _REQUEST_ID.fullmatch(request_id) else None
        if record is None:
            raise NotFound(f"No request {echo(request_id)} is known.", param="request_id", code="request_not_found")
        found = {
            "choices": await _others(ask, partial(request_id_of_choice, request_id), MAX_CHOICES, tenant),
            "rounds": await _others(ask, partial(request_id_of_round, request_id), MAX_ROUNDS, tenant),
        }
        if self._services.tools is not None:
            found["tool_calls"] = await self._services.tools.calls_of_request(request_id, tenant=tenant)
        return _json(record | {name: parts for name, parts in found.items() if parts})


def _error_handlers(services: Services) -> dict[Any, Callable[[Request, Any], Coroutine[Any, Any, Response]]]:
    def answer(request: Request, error: ApiError) -> Response:
        _count_error(services, error)
        response = Response(error.body(), status_code=error.status, media_type="application/json")
        response.raw_headers.extend(error.headers())
        return response

    async def expected(request: Request, error: Exception) -> Response:
        api_error = as_api_error(error)
        if api_error.status == 500:
            logger.error("request_failed request_id=%s", request_id_of(request.scope), exc_info=error)
        return answer(request, api_error)

    async def routing(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), error
        path = f"{request.method} {echo(request.url.path)}"
        if error.status_code == 405:
            response = answer(request, MethodNotAllowed(f"{path} is not possible.", code="method_not_allowed"))
            response.headers.update({k: v for k, v in (error.headers or {}).items() if k.lower() == "allow"})
            return response
        return answer(request, NotFound(f"{path} does not exist on this server.", code="unknown_path"))

    async def unexpected(request: Request, error: Exception) -> Response:
        response = answer(request, as_api_error(error))
        # This handler stands outside of every middleware, so it names the request itself.
        response.headers["x-request-id"] = request_id_of(request.scope)
        return response

    return {KopirError: expected, HTTPException: routing, Exception: unexpected}


async def _others(
    ask: Callable[..., Awaitable[dict[str, Any] | None]], id_of: Callable[[int], str], most: int, tenant: str
) -> list[dict[str, Any]]:
    """Returns the records of what a request consists of besides its first part, up to the first that is not there."""
    found = []
    for index in range(1, most):
        if (record := await ask(id_of(index), tenant=tenant)) is None:
            break
        found.append(record)
    return found


def _count_error(services: Services, error: ApiError) -> None:
    services.metrics.count_error(error.status, error.code)


def _not_ready(body: dict[str, Any], retry_after_s: int) -> Response:
    error = {"message": body["message"], "type": "server_error", "param": None, "code": "not_ready"}
    return _json(body | {"error": error}, status=503, headers={"retry-after": str(retry_after_s)})


async def _unsupported(request: Request) -> Response:
    path = request.url.path
    message = f"{path} is not served here; this server has /v1/chat/completions and /v1/completions."
    raise NotFound(message, code="unsupported_endpoint")


async def _replay(row: KeyRow, send: Send) -> None:
    """Writes a whole answer once more, as it was."""
    assert row.response is not None, row.request_id
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(row.response)).encode()),
        (b"x-idempotent-replay", b"true"),
        (b"x-kopir-original-request-id", row.request_id.encode()),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": row.response, "more_body": False})


def _json(value: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode_json(value), status_code=status, headers=headers, media_type="application/json")


def _client_retries(value: str | None) -> int:
    """Returns how often the client's library has sent this request before, as it says; 0 where it says nothing."""
    return min(int(value), CLIENT_RETRIES_MAX) if value is not None and value.isascii() and value.isdigit() else 0


def _label(value: str | None) -> str | None:
    """Returns a client's own id, fit for a log line."""
    if not value:
        return None
    return "".join(char if char.isprintable() else "?" for char in value[:MAX_LABEL_CHARS])
