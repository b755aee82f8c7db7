"""Errors that leave as an HTTP answer, always in OpenAI's shape.

    ApiError (KopirError)          status, type, code, param, retry advice
    ├── InvalidRequest      400    the body cannot be used; names the field
    ├── Unauthorized        401    no key, or one that is not known
    ├── Forbidden           403    a known key that may not be used
    ├── NotFound            404    model, request or path
    ├── Conflict            409    an idempotency key that is in use, was used, or broke
    ├── BodyTooLarge        413
    ├── Overloaded          429    quota or queue is full; retry-after
    ├── UpstreamFailed      502    a worker failed before the first delta; 504 with ``deadline_exceeded``
    └── NotReady            503    no pair of workers can serve now; retry-after

Owns the mapping from other errors of Kopir to these. Never shows a traceback or a value that may be secret.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvstore.errors import BadInput, DeadlineExceeded, KopirError, NoCapacity, PeerLost

MAX_RETRY_AFTER_S = 119
"""Client libraries obey ``retry-after`` only up to two minutes."""

MAX_ECHO_CHARS = 120
"""Most of a client's value that a message repeats."""


class ApiError(KopirError):
    """An answer with an error status. ``should_retry`` None leaves the decision to the client library."""

    status = 500
    type = "server_error"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
        should_retry: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.should_retry = should_retry

    def body(self) -> bytes:
        """Returns the JSON of the answer."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error | self.fields()})

    def fields(self) -> dict[str, Any]:
        """Returns what this kind of error says besides."""
        return {}

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Returns the retry advice as raw header pairs."""
        pairs = []
        if self.retry_after_s is not None:
            pairs.append((b"retry-after", str(max(1, min(self.retry_after_s, MAX_RETRY_AFTER_S))).encode()))
        if self.should_retry is not None:
            pairs.append((b"x-should-retry", b"true" if self.should_retry else b"false"))
        return pairs

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, dict(self.__dict__))


def _rebuild(cls: type[ApiError], message: str, state: dict[str, object]) -> ApiError:
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error


class InvalidRequest(ApiError):
    """400: the request cannot be used as it is."""

    status = 400
    type = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message, param=param, code=code)


class Unauthorized(ApiError):
    """401: no key, or an unknown one."""

    status = 401
    type = "authentication_error"

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [*super().headers(), (b"www-authenticate", b"Bearer")]


class Forbidden(ApiError):
    """403: the key is known and may not be used."""

    status = 403
    type = "permission_error"


class NotFound(ApiError):
    """404: no such model, request or path."""

    status = 404
    type = "invalid_request_error"


class MethodNotAllowed(ApiError):
    """405: the path exists, the method does not."""

    status = 405
    type = "invalid_request_error"


class Conflict(ApiError):
    """409: an idempotency key whose answer cannot be given again. Client libraries are told not to repeat it."""

    status = 409
    type = "invalid_request_error"

    def __init__(self, message: str, *, code: str, request_id: str, interruption: dict[str, Any] | None = None) -> None:
        super().__init__(message, code=code, param="Idempotency-Key", should_retry=False)
        self.request_id = request_id
        self.interruption = interruption

    def fields(self) -> dict[str, Any]:
        found = {"request_id": self.request_id}
        return found if self.interruption is None else found | {"interruption": self.interruption}


class BodyTooLarge(ApiError):
    """413: the body exceeds the configured limit."""

    status = 413
    type = "invalid_request_error"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"The request body is larger than {limit_bytes} bytes.", code="body_too_large")


class Overloaded(ApiError):
    """429: a quota or the queue is full."""

    status = 429
    type = "rate_limit_error"

    def __init__(self, message: str, *, retry_after_s: int, code: str = "queue_full") -> None:
        super().__init__(message, code=code, retry_after_s=retry_after_s)


class UpstreamFailed(ApiError):
    """502, or 504 for a deadline: the workers failed before the first delta.

    ``should_retry=False`` says that the gateway has spent the retry budget, so that client libraries do not add theirs.
    """

    status = 502
    type = "upstream_error"

    def __init__(
        self, message: str, *, code: str = "upstream_failed", status: int = 502, should_retry: bool | None = False
    ) -> None:
        super().__init__(message, code=code, should_retry=should_retry)
        self.status = status


class NotReady(ApiError):
    """503: nothing can serve now."""

    status = 503
    type = "server_error"

    def __init__(self, message: str, *, code: str = "not_ready", retry_after_s: int = 1) -> None:
        super().__init__(message, code=code, retry_after_s=retry_after_s)


def as_api_error(error: BaseException) -> ApiError:
    """Returns the answer for any error; what is not known becomes a 500 that tells nothing of the inside."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, BadInput):
        return InvalidRequest(str(error), param=error.field)
    if isinstance(error, NoCapacity):
        return NotReady(str(error) or "No worker has room now.", code="no_capacity")
    if isinstance(error, DeadlineExceeded):
        return UpstreamFailed(str(error) or "The deadline ran out.", code="deadline_exceeded", status=504)
    if isinstance(error, PeerLost):
        return UpstreamFailed(str(error) or "A worker was lost.")
    return ApiError("The server had an internal error.", code="internal_error")


def echo(value: object) -> str:
    """Returns a value of the client's, cut so that an error never grows with the request."""
    text = repr(value)
    return text if len(text) <= MAX_ECHO_CHARS else text[: MAX_ECHO_CHARS - 3] + "..."
