"""Keys at the door, and what a tenant sees and may use. Case F58, the part of the HTTP layer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from cluster.core.tenants import Key, KeyRing, Tenant, TenantMeter, digest_of_key, salt_bytes
from cluster.ingress.api.tenants import Tenants

from .conftest import World
from .fakes import Gate

KEY_A, KEY_B, KEY_OLD = "kopir-secret-of-a", "kopir-secret-of-b", "kopir-secret-revoked"


@pytest.fixture
def tenants() -> Tenants:
    """Two tenants; a has one place, b has sixty tokens a minute."""
    a = Tenant(name="a", salt=salt_bytes("a", "salt of a"), max_concurrency=1)
    b = Tenant(name="b", salt=salt_bytes("b", "salt of b"), tokens_per_minute=60)
    ring = KeyRing(
        {
            digest_of_key(KEY_A): Key(key_id="key-a", tenant=a),
            digest_of_key(KEY_B): Key(key_id="key-b", tenant=b),
            digest_of_key(KEY_OLD): Key(key_id="key-old", tenant=b, is_revoked=True),
        }
    )
    return Tenants(ring=lambda: ring, meter=TenantMeter(), clock_ns=lambda: 0)


@pytest.fixture(autouse=True)
def no_secret_is_told(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing that is logged during any of these tests holds a key or a salt."""
    caplog.set_level(logging.DEBUG)
    yield
    for secret in (KEY_A, KEY_B, KEY_OLD, "salt of a", "salt of b"):
        assert secret not in caplog.text


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def chat(world: World, key: str, **body: Any) -> httpx.Response:
    request = {"model": "tiny-test-model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4} | body
    return await world.http.post("/v1/chat/completions", json=request, headers=bearer(key))


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({}, 401, "missing_api_key"),
        ({"authorization": "Basic abc"}, 401, "missing_api_key"),
        ({"authorization": "Bearer"}, 401, "missing_api_key"),
        ({"authorization": "Bearer kopir-unknown"}, 401, "invalid_api_key"),
        ({"authorization": "Bearer " + "x" * 5000}, 401, "invalid_api_key"),
        ({"authorization": f"Bearer {KEY_OLD}"}, 403, "key_revoked"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions", "/v1/requests/req-1", "/nowhere"])
async def test_nothing_is_answered_without_a_good_key(
    world: World, path: str, headers: dict[str, str], status: int, code: str
) -> None:
    """In the shape of every error, with an id, and without the key."""
    method = "POST" if path.endswith("completions") else "GET"
    answer = await world.http.request(method, path, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert answer.headers["x-request-id"].startswith("req-")
    assert ("www-authenticate" in answer.headers) == (status == 401)
    assert KEY_OLD not in answer.text and "unknown" not in answer.text
    assert world.backend.specs == []


@pytest.mark.parametrize("path", ["/", "/status.js", "/healthz", "/readyz", "/metrics"])
async def test_probes_need_no_key(world: World, path: str) -> None:
    """They tell nothing of any tenant."""
    assert (await world.http.get(path)).status_code == 200


async def test_f58_blocks_of_tenants_are_kept_apart(world: World) -> None:
    """The salt of the key's tenant goes with the request, whatever the body and the headers say."""
    world.play("hello")
    assert (await chat(world, KEY_A)).status_code == 200
    assert (await chat(world, KEY_B)).status_code == 200
    forged = {"x-tenant": "a", "x-kopir-tenant": "a", "x-kopir-salt": "salt of a"} | bearer(KEY_B)
    body = {"model": "tiny-test-model", "prompt": "hi", "max_tokens": 4, "prompt_cache_key": "a"}
    assert (await world.http.post("/v1/completions", json=body, headers=forged)).status_code == 200
    refused = await world.http.post("/v1/completions", json=body | {"tenant_salt": "salt of a"}, headers=forged)
    assert refused.json()["error"]["param"] == "tenant_salt"
    salt_a, salt_b = salt_bytes("a", "salt of a"), salt_bytes("b", "salt of b")
    assert [spec.tenant_salt for spec in world.backend.specs] == [salt_a, salt_b, salt_b]


async def test_requests_are_seen_by_their_own_tenant_only(world: World) -> None:
    """Another tenant hears the same 404 as for an id that never was."""
    world.backend.records["req-1"] = {"request_id": "req-1", "tenant": "a"}
    assert (await world.http.get("/v1/requests/req-1", headers=bearer(KEY_A))).status_code == 200
    other = await world.http.get("/v1/requests/req-1", headers=bearer(KEY_B))
    never = await world.http.get("/v1/requests/req-2", headers=bearer(KEY_B))
    assert (other.status_code, other.json()["error"]["code"]) == (404, never.json()["error"]["code"])
    assert (await world.http.post("/v1/requests/req-1/cancel", headers=bearer(KEY_B))).status_code == 404


async def test_a_place_is_held_while_an_answer_runs(world: World) -> None:
    """The second at once is refused with a time to come back; after the first has ended there is room."""
    gate = Gate()
    token_ids = world.play("hello")
    world.backend.scripts = [[gate, *world.backend.script]]
    first = asyncio.create_task(chat(world, KEY_A, stream=True))
    await gate.reached.wait()
    second = await chat(world, KEY_A)
    assert (second.status_code, second.json()["error"]["code"]) == (429, "concurrency_limit")
    assert 1 <= int(second.headers["retry-after"]) < 120
    assert (await chat(world, KEY_B)).status_code == 200
    gate.open.set()
    assert (await first).status_code == 200
    assert len(token_ids) and (await chat(world, KEY_A)).status_code == 200


async def test_tokens_of_a_minute_are_counted(world: World) -> None:
    """What a failed request held comes back whole; an answered one pays for prompt and answer."""
    world.play("hello")
    world.backend.submit_errors = [ConnectionError("no"), None]
    assert (await chat(world, KEY_B)).status_code == 500
    answer = await chat(world, KEY_B)
    used = answer.json()["usage"]["total_tokens"]
    assert answer.status_code == 200 and used < 60
    refused = await chat(world, KEY_B, max_tokens=61 - used)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(refused.headers["retry-after"]) < 120
