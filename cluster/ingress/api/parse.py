"""From the bytes of a body to a typed request, or to one sentence that names the field.

Owns body size and the wording of complaints. Never looks at the model.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeVar

import msgspec

from cluster.ingress.api.errors import BodyTooLarge, InvalidRequest
from cluster.ingress.api.schema import UNSUPPORTED, ChatRequest, CompletionRequest

MAX_DISCARDED_BODY_BYTES = 64 << 20
"""A body over the limit is read and dropped up to this size, so that the client gets to read the answer."""

Request = TypeVar("Request", ChatRequest, CompletionRequest)

_DECODERS: dict[type, msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind) for kind in (ChatRequest, CompletionRequest)
}
_PATH = re.compile(r" - at `\$\.?(.*?)`\Z", re.DOTALL)
_FIELD = re.compile(r"Object (contains unknown|missing required) field `(.*?)`", re.DOTALL)
_LAST_NAME = re.compile(r"([A-Za-z_]\w*)(?:\[[^\]]*\])*\Z")


class ClientGone(Exception):
    """The client closed the connection while its body was read."""


async def read_body(
    receive: Callable[[], Awaitable[MutableMapping[str, Any]]], *, content_length: int | None, limit_bytes: int
) -> bytes:
    """Reads a whole request body.

    Raises: BodyTooLarge above ``limit_bytes``; ClientGone.
    """
    if content_length is not None and content_length > MAX_DISCARDED_BODY_BYTES:
        raise BodyTooLarge(limit_bytes)
    chunks: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        num_bytes += len(chunk)
        if num_bytes <= limit_bytes:
            chunks.append(chunk)
        else:
            chunks.clear()
        if num_bytes > MAX_DISCARDED_BODY_BYTES:
            raise BodyTooLarge(limit_bytes)
        if not message.get("more_body", False):
            break
    if num_bytes > limit_bytes:
        raise BodyTooLarge(limit_bytes)
    return b"".join(chunks)


def parse(body: bytes, kind: type[Request]) -> Request:
    """Decodes a body.

    Raises: InvalidRequest naming the field, for anything that the schema does not allow.
    """
    try:
        request: Request = _DECODERS[kind].decode(body)
        return request
    except msgspec.ValidationError as error:
        raise _complaint(str(error)) from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    except UnicodeDecodeError:
        raise InvalidRequest("The body is not valid UTF-8.", code="invalid_json") from None
    except RecursionError:  # only a field of free JSON can get here; typed fields are refused before
        raise InvalidRequest("The body is nested too deeply.", code="invalid_json") from None


def _complaint(message: str) -> InvalidRequest:
    """Turns msgspec's message into ours: the field first, then what is wrong with it."""
    path = ""
    if found := _PATH.search(message):
        path, message = found[1], message[: found.start()]
    code = "invalid_type" if message.startswith("Expected") and ", got" in message else "invalid_value"
    if found := _FIELD.match(message):
        path = f"{path}.{found[2]}" if path else found[2]
        missing = found[1].startswith("missing")
        code = "missing_required_parameter" if missing else "unknown_parameter"
        message = "this field is required" if missing else "unknown parameter"
    path = path[:256].removesuffix(".type")
    name = _LAST_NAME.search(path)
    # The struct that refuses a value may be nested below the parameter that is not served.
    root = re.split(r"[.\[]", path, maxsplit=1)[0]
    for candidate in (name[1] if name else "", root):
        if candidate in UNSUPPORTED and code != "missing_required_parameter":
            return InvalidRequest(f"{path}: {UNSUPPORTED[candidate]}.", param=path, code="unsupported_parameter")
    text = message[:1].lower() + message[1:] if message.startswith("Expected") else message
    return InvalidRequest(f"{path or 'body'}: {text}.", param=path or None, code=code)
