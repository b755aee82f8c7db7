"""Everything that does not generate: models, records, health, metrics, unknown paths, request ids."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.ingress.api.backend import Interrupted, ReadyState

from .conftest import World
from .fakes import MODEL_ID, batches


async def test_models(world: World) -> None:
    """One model, by list and by name; another name is a 404."""
    model = {
        "id": MODEL_ID,
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "kopir",
        "max_model_len": 256,
    }
    assert (await world.http.get("/v1/models")).json() == {"object": "list", "data": [model]}
    assert (await world.http.get(f"/v1/models/{MODEL_ID}")).json() == model
    response = await world.http.get("/v1/models/some/other")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


async def test_request_record_and_cancel(world: World) -> None:
    """The record is the backend's; an unknown id is a 404 on both."""
    world.backend.records["req-1"] = {"request_id": "req-1", "phase": "decoding"}
    assert (await world.http.get("/v1/requests/req-1")).json()["phase"] == "decoding"
    assert (await world.http.post("/v1/requests/req-1/cancel")).json()["phase"] == "cancelled"
    for response in (await world.http.get("/v1/requests/x"), await world.http.post("/v1/requests/x/cancel")):
        assert (response.status_code, response.json()["error"]["code"]) == (404, "request_not_found")


async def test_health_and_readiness(world: World) -> None:
    """Alive is not ready: readyz says why not, in OpenAI's error shape too."""
    assert (await world.http.get("/healthz")).status_code == 200
    assert (await world.http.get("/readyz")).json()["status"] == "ready"
    world.backend.state = ReadyState(False, "no decode worker", {"decode": 0})
    response = await world.http.get("/readyz")
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["code"] == "not_ready"
    assert response.json()["detail"] == {"decode": 0}
    assert (await world.http.get("/healthz")).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("POST", "/v1/embeddings", 404),
        ("POST", "/v1/responses", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
    ],
)
async def test_unknown_paths_and_methods_have_the_error_shape(
    world: World, method: str, path: str, status: int
) -> None:
    """Never ``{"detail": ...}``."""
    response = await world.http.request(method, path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"].startswith("req-")
    if status == 405:
        assert response.headers["allow"]


async def test_request_ids_are_the_servers(world: World) -> None:
    """A client's x-request-id is a label, cleaned for logs; the id is new each time and names the answer."""
    world.play("hello")
    ids = set()
    for _ in range(2):
        response = await world.http.post(
            "/v1/completions", json={"model": MODEL_ID, "prompt": "x"}, headers={"x-request-id": "job-1"}
        )
        ids.add(response.headers["x-request-id"])
        assert response.json()["id"] == "cmpl-" + response.headers["x-request-id"][4:]
        assert response.headers.get_list("x-request-id") == [response.headers["x-request-id"]]
    assert len(ids) == 2
    assert all(len(request_id) == 36 and request_id.startswith("req-") for request_id in ids)
    assert world.backend.labels == ["job-1", "job-1"]
    assert {generation.request_id for generation in world.backend.generations} == ids
    await world.http.post(
        "/v1/completions", json={"model": MODEL_ID, "prompt": "x"}, headers={"x-request-id": "a\tb" + "c" * 999}
    )
    label = world.backend.labels[-1]
    assert label is not None
    assert (label[:3], len(label)) == ("a?b", 128)


async def test_metrics_count_what_clients_experienced(world: World) -> None:
    """D5: a broken stream counts as interrupted; tokens, cached tokens and errors are counted."""
    world.backend.cached_tokens = 1
    token_ids = world.play("hello world")
    await world.complete(stream=True)
    word = world.encode("fox")
    world.play_steps([*batches(word), Interrupted("network_cut", "att-1")])
    await world.chat(stream=True)
    await world.chat(temperature=9)
    response = await world.http.get("/metrics")
    assert world.backend.num_refreshed == 1, "what other processes count was not asked for"
    assert response.headers["content-type"].startswith("text/plain")
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    assert all(name[0].startswith("kopir_") for name in samples)
    assert samples["kopir_requests_total", "completion", "finished"] == 1
    assert samples["kopir_requests_total", "chat", "interrupted"] == 1
    assert samples["kopir_interruptions_total", "network_cut"] == 1
    assert samples["kopir_http_errors_total", "400", "invalid_value"] == 1
    assert samples["kopir_generated_tokens_total",] == len(token_ids) + len(word)
    assert samples["kopir_delivered_tokens_total",] == len(token_ids) + len(word)
    assert samples["kopir_cached_prompt_tokens_total",] == 2
    assert samples["kopir_time_to_first_delta_seconds_count",] == 2
    assert samples["kopir_running_requests",] == 0
