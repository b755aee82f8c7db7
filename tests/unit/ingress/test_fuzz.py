"""Malformed input, made from the OpenAPI document: an error that names itself, never a 5xx, never a hang."""

from __future__ import annotations

import asyncio
from collections import Counter

import httpx
import msgspec
import pytest

from cluster.ingress.api.openapi import openapi_document
from cluster.ingress.api.schema import ChatRequest, CompletionRequest

from .conftest import World
from .fakes import MODEL_ID
from .families import FAMILIES, Case, make_cases

CASE_DEADLINE_S = 15.0
AT_ONCE = 16


async def answer_to(http: httpx.AsyncClient, case: Case) -> httpx.Response:
    headers = {"content-type": "application/json"} | case.headers
    async with asyncio.timeout(CASE_DEADLINE_S):
        return await http.request(case.method, case.path, content=case.content, headers=headers)


def check(case: Case, answer: httpx.Response) -> None:
    """Either it was fine after all, or the answer is an error in the shape of every error."""
    about = f"{case.family}/{case.name} {case.path}: {answer.status_code} {answer.text[:300]}"
    assert answer.status_code < 500, about
    assert "x-request-id" in answer.headers or answer.status_code == 400, about
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert set(error) >= {"message", "type", "param", "code"} and error["message"], about
        assert len(answer.content) < 4096, "an error does not grow with the request"
        assert answer.status_code != 422, about


async def test_no_malformed_request_is_a_fault_of_ours(world: World) -> None:
    """Every case of every family, sixteen at once; a good request is answered afterwards."""
    document = (await world.http.get("/openapi.json")).json()
    world.play("hello")
    counts: Counter[str] = Counter()
    statuses: Counter[int] = Counter()
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(case: Case) -> None:
        async with gate:
            answer = await answer_to(world.http, case)
        check(case, answer)
        counts[case.family] += 1
        statuses[answer.status_code] += 1

    await asyncio.gather(*(one(case) for case in make_cases(document, MODEL_ID)))
    assert set(counts) == set(FAMILIES) and len(FAMILIES) >= 24
    assert statuses[400] > 500, "the cases are meant to be refused"
    assert (await world.complete()).status_code == 200


def test_the_document_is_that_of_the_decoders() -> None:
    """A field that the decoder knows stands there with its bounds, and no other."""
    document = openapi_document()
    for kind in (ChatRequest, CompletionRequest):
        schema = document["components"]["schemas"][kind.__name__]
        assert set(schema["properties"]) == {field.encode_name for field in msgspec.structs.fields(kind)}
        assert schema["additionalProperties"] is False
    assert document["components"]["schemas"]["ChatRequest"]["properties"]["n"]["anyOf"][0]["maximum"] == 16


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/embeddings"])
async def test_what_is_not_served_says_what_is(world: World, path: str) -> None:
    """Another name than a wrong path, and the way to go."""
    answer = await world.http.post(path, json={"model": MODEL_ID, "input": "hi"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, "unsupported_endpoint")
    assert "/v1/chat/completions" in error["message"]
