"""Two tenants on one cluster: apart in the cache, in the journal, in the quota; and nothing secret is written down."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from cluster.keys_source import add_key, revoke_key

from ..asking import ask
from ..cluster import Cluster, poll_until
from ..combined.conftest import CONFIG
from ..conftest import RunCluster
from ..golden import make_prompt

RUNS = 10


class Site:
    """The cluster, its keys file, and a client for each tenant."""

    def __init__(self, cluster: Cluster, path: Path, keys: dict[str, str]) -> None:
        self.cluster = cluster
        self.path = path
        self.keys = keys

    def client(self, tenant: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.cluster.url}/v1", api_key=self.keys[tenant], max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def site(run_cluster: RunCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys = {tenant: add_key(path, tenant)[1] for tenant in ("a", "b")}
    with run_cluster({**CONFIG, "auth": {"keys_file": str(path), "reload_s": 0.1}}) as cluster:
        cluster.http.headers["authorization"] = f"Bearer {keys['a']}"
        yield Site(cluster, path, keys)
        cluster.wait_idle()
        written = b"".join(file.read_bytes() for file in cluster.place.folder.rglob("*") if file.is_file())
        salts = [line.split()[1] for line in path.read_text().splitlines() if "salt:" in line]
        assert len(salts) >= 2
        for secret in (*keys.values(), *salts):
            assert secret.encode() not in written, "a log, the ledger or another file holds a secret"


def test_f58_nobody_learns_from_the_cache_what_another_tenant_sent(site: Site) -> None:
    """B's time to an answer is that of a cold prompt after A has sent it, forged names or not; A itself hits."""
    prompt = make_prompt(26, 512)
    a, b = site.client("a"), site.client("b")
    before = site.cluster.stored_blocks()
    assert ask(a, prompt=prompt, max_tokens=1).cached_tokens == 0
    site.cluster.wait_stored(above=before)
    forged = {"x-kopir-tenant": "a", "x-tenant": "a", "x-namespace": "a"}
    assert ask(b.with_options(default_headers=forged), prompt=prompt, max_tokens=1).cached_tokens == 0
    with pytest.raises(openai.BadRequestError, match="tenant_salt"):
        b.completions.create(
            model="smollm2-135m-instruct", prompt=prompt, max_tokens=1, extra_body={"tenant_salt": "a"}
        )
    assert ask(a, prompt=prompt, max_tokens=1).cached_tokens >= 496
    # Ten prompts that A has sent and ten that nobody has: what B waits for them must not tell which.
    known = [make_prompt(2600 + number, 256) for number in range(RUNS)]
    cold = [make_prompt(2700 + number, 256) for number in range(RUNS)]
    for warmed in known:
        ask(a, prompt=warmed, max_tokens=1)
    site.cluster.wait_idle()
    seconds: dict[str, list[float]] = {"known": [], "cold": []}
    for pair in zip(known, cold, strict=True):
        for kind, asked in zip(seconds, pair, strict=True):
            answer = b.completions.with_raw_response.create(
                model="smollm2-135m-instruct", prompt=asked, max_tokens=1, temperature=0.0
            )
            assert answer.parse().usage.prompt_tokens_details.cached_tokens == 0
            seconds[kind].append(answer.elapsed.total_seconds())
    ratio = statistics.median(seconds["known"]) / statistics.median(seconds["cold"])
    assert ratio > 0.8, seconds


def test_a_request_is_seen_and_cancelled_by_its_tenant_only(site: Site) -> None:
    """Its journal is a 404 to the other, in any state; the status shows streams of the own tenant."""
    answer = ask(site.client("a"), prompt=make_prompt(27, 40), max_tokens=2)
    path = f"/v1/requests/{answer.request_id}"
    as_b = {"authorization": f"Bearer {site.keys['b']}"}
    assert site.cluster.http.get(path).status_code == 200
    assert site.cluster.http.get(path, headers=as_b).status_code == 404
    assert site.cluster.http.post(f"{path}/cancel", headers=as_b).status_code == 404
    with site.client("a").completions.create(
        model="smollm2-135m-instruct", prompt=make_prompt(28, 40), max_tokens=900, stream=True
    ) as stream:
        next(iter(stream))
        assert len(site.cluster.status()["streams"]) == 1
        seen = site.cluster.http.get("/internal/status", headers=as_b).json()
        assert seen["streams"] == [] and seen["ingress"][0]["streams"] == 1
    site.cluster.wait_idle()


def test_keys_come_and_go_while_it_serves(site: Site) -> None:
    """No key, 401; a new one works as soon as the file has it; a revoked one is told so, 403; limits follow too."""
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{site.cluster.url}/v1", api_key="kopir-none", max_retries=0).models.list()
    key_id, key = add_key(site.path, "c")
    client = openai.OpenAI(base_url=f"{site.cluster.url}/v1", api_key=key, max_retries=0)

    def status() -> int:
        return client.models.with_raw_response.list().http_response.status_code

    def code() -> int:
        try:
            return status()
        except openai.APIStatusError as error:
            return error.status_code

    poll_until(lambda: code() == 200, deadline_s=10, what="the new key is let in")
    limited = site.path.read_text().replace("name: c\n", "name: c\n  tokens_per_minute: 60\n")
    site.path.write_text(limited)

    def limit() -> openai.RateLimitError | None:
        try:
            ask(client, prompt=make_prompt(29, 40), max_tokens=20)
        except openai.RateLimitError as error:
            return error
        return None

    refused = poll_until(limit, deadline_s=20, what="the new limit is in force")
    assert refused.code == "rate_limit_exceeded" and 1 <= int(refused.response.headers["retry-after"]) < 120
    revoke_key(site.path, key_id)
    poll_until(lambda: code() == 403, deadline_s=10, what="the revoked key is refused")
