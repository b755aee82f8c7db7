"""Malformed requests in 24 families, made from the OpenAPI document: what it allows is what the cases break.

``make_cases(document, model)`` gives every case; each is a small request of which at most one thing is wrong. A few
are harmless after all (a null where null is allowed): then the answer is 200, and that is right too.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Body = dict[str, Any]
LARGE = 400_000
"""Bytes of a body or text that is too large for the tests' limits."""


@dataclass(frozen=True)
class Case:
    """One request."""

    family: str
    name: str
    path: str
    content: bytes = b""
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)


def make_cases(document: dict[str, Any], model: str) -> list[Case]:
    """Returns the cases of all families."""
    return [case for family in FAMILIES.values() for case in family(document, model)]


def endpoints(document: dict[str, Any], model: str) -> Iterator[tuple[str, dict[str, Any], Body]]:
    """Yields (path, schema, a body that is fine) of every path that takes a body."""
    for path, operations in document["paths"].items():
        body = operations.get("post", {}).get("requestBody")
        if body is not None:
            schema = resolve(document, body["content"]["application/json"]["schema"])
            fine: Body = {"model": model, "max_tokens": 1}
            needed = set(schema["required"]) - set(fine)
            samples = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}
            yield path, schema, fine | {name: samples[name] for name in needed}


def resolve(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Returns what a reference stands for."""
    if "$ref" in schema:
        return dict(document["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
    return schema


def _raw(family: str, contents: dict[str, Callable[[bytes], bytes]]) -> Callable[..., Iterator[Case]]:
    """A family that spoils the bytes of a fine body."""

    def cases(document: dict[str, Any], model: str) -> Iterator[Case]:
        for path, _, fine in endpoints(document, model):
            for name, spoil in contents.items():
                yield Case(family, name, path, spoil(json.dumps(fine).encode()))

    return cases


def _fields(
    family: str, values: Callable[[str, dict[str, Any]], list[Any]], *, text: bool = False
) -> Callable[..., Iterator[Case]]:
    """A family that gives each field other values, made from its schema. ``text``: values are JSON already."""

    def cases(document: dict[str, Any], model: str) -> Iterator[Case]:
        for path, schema, fine in endpoints(document, model):
            for name, described in schema["properties"].items():
                for value in values(name, _merged(document, described)):
                    body = {key: item for key, item in fine.items() if key != name}
                    shown = value if text else json.dumps(value)
                    content = json.dumps(body)[:-1] + f', "{name}": {shown}}}'
                    yield Case(family, f"{name}={str(shown)[:40]}", path, content.encode("utf-8", "surrogatepass"))

    return cases


def _merged(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Returns every keyword of a schema and of its alternatives; ``types`` holds all types."""
    merged: dict[str, Any] = {"types": set()}
    for part in [schema, *schema.get("anyOf", ()), *schema.get("oneOf", ())]:
        part = resolve(document, part)
        merged |= {key: value for key, value in part.items() if key not in ("anyOf", "oneOf", "type")}
        if "type" in part:
            merged["types"].add(part["type"])
    return merged


def _deep(depth: int) -> bytes:
    return b'{"a":' * depth + b"1" + b"}" * depth


def _of_types(*types: str) -> Callable[[str, dict[str, Any]], bool]:
    return lambda name, schema: bool(schema["types"] & set(types))


def _wrong_type(name: str, schema: dict[str, Any]) -> list[Any]:
    samples = {"string": "x", "integer": 3, "number": 1.5, "boolean": True, "array": [], "object": {}}
    return [value for kind, value in samples.items() if kind not in schema["types"]]


def _below(name: str, schema: dict[str, Any]) -> list[Any]:
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    return [] if low is None else [low - 1, low - 10**6, -(10**18)]


def _above(name: str, schema: dict[str, Any]) -> list[Any]:
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    return [] if high is None else [high + 1, high + 10**6]


def _numbers(*texts: str) -> Callable[[str, dict[str, Any]], list[Any]]:
    return lambda name, schema: list(texts) if schema["types"] & {"integer", "number"} else []


def _too_long_text(name: str, schema: dict[str, Any]) -> list[Any]:
    return ["x" * (schema["maxLength"] + 1)] if "maxLength" in schema else []


def _too_long_array(name: str, schema: dict[str, Any]) -> list[Any]:
    if "array" not in schema["types"] or schema.get("maxItems", 1 << 20) > 2000:
        return []
    return [["x"] * (schema["maxItems"] + 1), [1] * (schema["maxItems"] + 1)]


def _empty(name: str, schema: dict[str, Any]) -> list[Any]:
    empties = {"array": [], "object": {}, "string": ""}
    return [value for kind, value in empties.items() if kind in schema["types"]]


def _bad_choice(name: str, schema: dict[str, Any]) -> list[Any]:
    return ["AUTO", "none ", "\u0000"] if "enum" in schema or "discriminator" in schema else []


def _bad_text(name: str, schema: dict[str, Any]) -> list[Any]:
    return ['"\\ud800"', '"a\\u0000b"', '"\\udc00\\ud800"'] if "string" in schema["types"] else []


def _bad_items(name: str, schema: dict[str, Any]) -> list[Any]:
    if "array" not in schema["types"]:
        return []
    return [[None], [[]], [{}], [True], [-1], [2**70], [{"role": "nobody"}], [{"role": "user"}], [[[[1]]]]]


def _bad_objects(name: str, schema: dict[str, Any]) -> list[Any]:
    if "object" not in schema["types"]:
        return []
    return [{"": 1}, {"type": None}, {"type": "text", "x": {}}, {"1": "a", "-1": 5, "999999999999": 1}]


def _missing(document: dict[str, Any], model: str) -> Iterator[Case]:
    for path, schema, fine in endpoints(document, model):
        for name in schema["required"]:
            body = copy.copy(fine)
            del body[name]
            yield Case("missing field", name, path, json.dumps(body).encode())


def _unknown(document: dict[str, Any], model: str) -> Iterator[Case]:
    for path, schema, fine in endpoints(document, model):
        for name in ("nonsense", "__class__", "", *(f"{known}s" for known in schema["properties"])):
            if name not in schema["properties"]:
                yield Case("unknown field", name, path, json.dumps(fine | {name: 1}).encode())


def _headers(document: dict[str, Any], model: str) -> Iterator[Case]:
    many = {f"x-h{number}": "v" for number in range(150)}
    for path, _, fine in endpoints(document, model):
        content = json.dumps(fine).encode()
        for name, headers in {
            "gzip": {"content-encoding": "gzip"},
            "br": {"content-encoding": "br, gzip"},
            "long": {"x-long": "v" * 40_000},
            "many": many,
            "key of nothing": {"idempotency-key": ""},
            "long key": {"idempotency-key": "k" * 300},
            "authorization": {"authorization": "Bearer " + "k" * 5000},
            "form": {"content-type": "multipart/form-data; boundary=x"},
        }.items():
            yield Case("headers", name, path, content, headers=headers)


def _methods(document: dict[str, Any], model: str) -> Iterator[Case]:
    for path, operations in document["paths"].items():
        plain = path.replace("{model_id}", model).replace("{request_id}", "req-1")
        for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            if method.lower() not in operations:
                yield Case("method", f"{method} {plain}", plain, method=method)


def _paths(document: dict[str, Any], model: str) -> Iterator[Case]:
    for path in (
        "/v1/responses",
        "/v1/embeddings",
        "/v1/audio/speech",
        "/v1/unknown",
        "//v1/models",
        "/v1/models/../x",
    ):
        yield Case("path", path, path, b"{}")
    yield Case("path", "long", "/v1/" + "x" * 6000, b"{}")


def _ids(document: dict[str, Any], model: str) -> Iterator[Case]:
    for bad in ("req-%00", "%ff%fe", "x" * 1000, "..%2f..%2fetc", "req-1'%20OR%201=1", "%F0%9F%98%80", "%0d%0aa:b"):
        yield Case("ids", bad[:40], f"/v1/requests/{bad}", method="GET")
        yield Case("ids", f"cancel {bad[:40]}", f"/v1/requests/{bad}/cancel")
        yield Case("ids", f"model {bad[:40]}", f"/v1/models/{bad}", method="GET")


FAMILIES: dict[str, Callable[[dict[str, Any], str], Iterator[Case]]] = {
    "not json": _raw("not json", {"words": lambda b: b"hello", "xml": lambda b: b"<a/>", "form": lambda b: b"a=1&b=2"}),
    "empty": _raw(
        "empty", {"nothing": lambda b: b"", "space": lambda b: b"  \n", "bom": lambda b: b"\xef\xbb\xbf" + b}
    ),
    "cut": _raw("cut", {str(n): (lambda b, n=n: b[: len(b) * n // 8]) for n in range(1, 8)}),
    "rest": _raw("rest", {"twice": lambda b: b + b, "comma": lambda b: b[:-1] + b",}", "nul": lambda b: b + b"\0"}),
    "top level": _raw(
        "top level",
        {"array": lambda b: b"[" + b + b"]", "null": lambda b: b"null", "text": lambda b: b'"x"', "1": lambda b: b"1"},
    ),
    "utf-8": _raw(
        "utf-8", {"ff": lambda b: b.replace(b"hi", b"\xff\xfe"), "half": lambda b: b.replace(b"hi", b"\xf0\x9f")}
    ),
    "utf-16": _raw(
        "utf-16", {"le": lambda b: b.decode().encode("utf-16"), "32": lambda b: b.decode().encode("utf-32")}
    ),
    "nesting": _raw(
        "nesting", {str(n): (lambda b, n=n: b[:-1] + b', "metadata": ' + _deep(n) + b"}") for n in (40, 20_000)}
    ),
    "large": _raw("large", {"spaces": lambda b: b + b" " * LARGE, "text": lambda b: b.replace(b"hi", b"x" * LARGE)}),
    "missing field": _missing,
    "unknown field": _unknown,
    "twice": _fields("twice", lambda name, schema: [f'1, "{name}": 2'], text=True),
    "null": _fields("null", lambda name, schema: [None]),
    "wrong type": _fields("wrong type", _wrong_type),
    "below": _fields("below", _below),
    "above": _fields("above", _above),
    "huge numbers": _fields("huge numbers", _numbers("1e400", "-1e400", "9" * 400, "1e-400", "-0"), text=True),
    "no numbers": _fields("no numbers", _numbers("NaN", "Infinity", "-Infinity", "0x10", "01", "+1"), text=True),
    "long text": _fields("long text", _too_long_text),
    "long array": _fields("long array", _too_long_array),
    "nothing inside": _fields("nothing inside", _empty),
    "choices": _fields("choices", _bad_choice),
    "text": _fields("text", _bad_text, text=True),
    "inside": _fields("inside", lambda name, schema: _bad_items(name, schema) + _bad_objects(name, schema)),
    "headers": _headers,
    "method": _methods,
    "path": _paths,
    "ids": _ids,
}
