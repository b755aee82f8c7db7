"""The OpenAPI document of the endpoint, made from the structs that decode the bodies: it cannot say anything else.

Pure. Served at ``/openapi.json``; the fuzzer of the tests takes its cases from it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from cluster.ingress.api.schema import ChatRequest, CompletionRequest

ERROR_STATUSES = {
    "400": "The request cannot be used; `param` names the field.",
    "401": "No API key, or an unknown one.",
    "403": "The API key was revoked.",
    "404": "No such model, request or path.",
    "409": "An idempotency key that is in use, was used with another body, or whose answer broke.",
    "413": "The body is too large.",
    "429": "A quota or the queue is full; `retry-after` says when to come back.",
    "502": "A worker failed before the first delta.",
    "503": "Nothing can serve now; `retry-after` says when to come back.",
    "504": "The deadline ran out before the first delta.",
}
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def openapi_document() -> dict[str, Any]:
    """Returns the document, OpenAPI 3.1."""
    kinds = [ChatRequest, CompletionRequest]
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    responses = {status: _error(text) for status, text in ERROR_STATUSES.items()}
    request_id = {"name": "request_id", "in": "path", "required": True, "schema": {"type": "string", "maxLength": 128}}
    model_id = {"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Kopir", "version": "1"},
        "paths": {
            "/v1/chat/completions": _generation("ChatRequest", "Answers a conversation.", responses),
            "/v1/completions": _generation("CompletionRequest", "Continues a text or a token array.", responses),
            "/v1/models": _get("The served model, in a list.", responses),
            "/v1/models/{model_id}": _get("The served model.", responses, model_id),
            "/v1/requests/{request_id}": _get("The journal of a request.", responses, request_id),
            "/v1/requests/{request_id}/cancel": {
                "parameters": [request_id],
                "post": {
                    "summary": "Cancels a request.",
                    "responses": {"200": {"description": "Its journal."}} | responses,
                },
            },
            "/healthz": _get("The process lives.", {}),
            "/readyz": _get("A request could be served now.", {"503": responses["503"]}),
            "/metrics": _get("Prometheus metrics.", {}),
        },
        "components": {
            "schemas": {**schemas, "Error": _ERROR_SCHEMA},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _generation(schema: str, summary: str, responses: dict[str, Any]) -> dict[str, Any]:
    key = {
        "name": "Idempotency-Key",
        "in": "header",
        "schema": {"type": "string", "minLength": 1, "maxLength": 255},
    }
    body = {"required": True, "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}}
    answer = {"description": "The answer: JSON, or server-sent events when `stream` is true."}
    return {
        "post": {
            "summary": summary,
            "parameters": [key],
            "requestBody": body,
            "responses": {"200": answer} | responses,
        }
    }


def _get(summary: str, responses: dict[str, Any], *parameters: dict[str, Any]) -> dict[str, Any]:
    operation = {"summary": summary, "responses": {"200": {"description": summary}} | responses}
    return ({"parameters": list(parameters)} if parameters else {}) | {"get": operation}


def _error(text: str) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Error"}
    return {"description": text, "content": {"application/json": {"schema": schema}}}
