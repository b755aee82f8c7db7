"""Idempotency-Key: one answer for one key. Contract section 5; case F44's ending is what a broken one keeps."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from cluster.ingress.api.backend import Ended, Interrupted
from cluster.ingress.api.errors import NotReady, UpstreamFailed
from cluster.ingress.api.idempotency import IdempotencyKeys, KeyHold
from cluster.ledger.database import Database, LedgerUnavailable, open_database
from cluster.ledger.key_store import KeyRow, KeyStore
from cluster.ledger.request_store import OwnerRow, RequestStore

from .conftest import World
from .fakes import Gate, batches


class Ledger:
    """A ledger on disk, which can be away, and which writes down when a key was marked as sent."""

    def __init__(self, path: Path) -> None:
        self.database: Database = open_database(f"sqlite:///{path}")
        self.lives = RequestStore(self.database)
        self.lives.register(OwnerRow("me", "ingress-me", "127.0.0.1", 1, 0), now_ms=0)
        self.store = KeyStore(self.database)
        self.is_away = False

    def keys(self, owner: str = "me") -> IdempotencyKeys:
        return IdempotencyKeys(self._reach, owner=owner, lease_s=0.05, unix_s=lambda: 1.0)

    def _reach(self) -> KeyStore:
        if self.is_away:
            raise LedgerUnavailable("away")
        return self.store

    def state(self, key: str) -> str | None:
        row = self.store.find("default", key)
        return None if row is None else row.state


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(tmp_path / "kopir.db")
    yield ledger
    ledger.database.close()


@pytest.fixture
def idempotency(ledger: Ledger) -> IdempotencyKeys:
    return ledger.keys()


async def ask(world: World, key: str = "k1", **body: Any) -> httpx.Response:
    request = {"model": "tiny-test-model", "prompt": "hi", "max_tokens": 9} | body
    return await world.http.post("/v1/completions", json=request, headers={"idempotency-key": key})


def conflict(answer: httpx.Response) -> dict[str, Any]:
    """Every 409 tells client libraries not to repeat it."""
    assert answer.status_code == 409, answer.text
    assert answer.headers["x-should-retry"] == "false"
    return dict(answer.json()["error"])


async def test_a_whole_answer_is_replayed(world: World) -> None:
    """The same bytes, named as a replay, without a second generation; spaces and order of keys do not matter."""
    world.play("hello")
    first = await ask(world)
    content = b'{"max_tokens": 9,  "prompt": "hi", "model": "tiny-test-model"}'
    again = await world.http.post("/v1/completions", content=content, headers={"idempotency-key": "k1"})
    assert (again.status_code, again.content) == (200, first.content)
    assert again.headers["x-idempotent-replay"] == "true" and "x-idempotent-replay" not in first.headers
    assert again.headers["x-kopir-original-request-id"] == first.headers["x-request-id"]
    assert len(world.backend.specs) == 1
    assert (await ask(world, "k2")).status_code == 200 and len(world.backend.specs) == 2


@pytest.mark.parametrize("change", [{"prompt": "ho"}, {"stream": True}, {"seed": 1}])
async def test_another_body_is_refused(world: World, change: dict[str, Any]) -> None:
    """A key stands for one request."""
    world.play("hello")
    await ask(world)
    assert conflict(await ask(world, **change))["code"] == "idempotency_key_reused"


async def test_another_endpoint_is_another_body(world: World) -> None:
    """The digest covers the path."""
    world.play("hello")
    await ask(world)
    body = {"model": "tiny-test-model", "messages": [{"role": "user", "content": "hi"}]}
    answer = await world.http.post("/v1/chat/completions", json=body, headers={"idempotency-key": "k1"})
    assert conflict(answer)["code"] == "idempotency_key_reused"


async def test_while_it_runs_the_second_is_told_who_runs(world: World) -> None:
    """With the id of the request, under which its journal stands."""
    gate = Gate()
    world.play("hello")
    world.backend.scripts = [[gate, *world.backend.script]]
    first = asyncio.create_task(ask(world))
    await gate.reached.wait()
    told = conflict(await ask(world))
    gate.open.set()
    answer = await first
    assert (told["code"], told["request_id"]) == ("request_in_progress", answer.headers["x-request-id"])


async def test_the_sent_mark_is_committed_before_the_first_byte(world: World, ledger: Ledger) -> None:
    """When a reader holds the first byte, every other process can already see that it went out."""
    gate = Gate()
    token_ids = world.encode("hello world")
    first, *rest = batches(token_ids)
    world.play_steps([first, gate, *rest, Ended("stop")])
    headers = {"idempotency-key": "k1"}
    body = {"model": "tiny-test-model", "prompt": "hi", "max_tokens": 9, "stream": True}
    async with world.http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        lines = answer.aiter_lines()
        assert (await anext(lines)).startswith("data:")
        assert ledger.state("k1") == "sent"
        gate.open.set()
        assert "data: [DONE]" in [line async for line in lines]
    while ledger.state("k1") == "sent":
        await asyncio.sleep(0.005)
    told = conflict(await ask(world, stream=True))
    assert (told["code"], len(world.backend.specs)) == ("request_finished", 1)


async def test_f44_an_interrupted_stream_stays_interrupted(world: World) -> None:
    """The second one gets the record of the interruption, not a second answer; the official client raises."""
    world.play_steps([*batches(world.encode("hello")), Interrupted("worker_exited", "att-1")])
    first = await ask(world, stream=True)
    event = first.text.split("data: ")[-1]
    assert "worker_exited" in event and "[DONE]" not in first.text
    while (told := conflict(await ask(world, stream=True)))["code"] == "request_in_progress":
        await asyncio.sleep(0.005)
    assert told["code"] == "request_interrupted"
    assert told["interruption"]["reason"] == "worker_exited"
    assert told["interruption"]["delivered_output_tokens"] > 0
    async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key="x", max_retries=5) as client:
        with pytest.raises(openai.ConflictError):
            await client.completions.create(
                model="tiny-test-model",
                prompt="hi",
                max_tokens=9,
                stream=True,
                extra_headers={"idempotency-key": "k1"},
            )
    assert len(world.backend.specs) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_byte_frees_the_key(world: World, ledger: Ledger, stream: bool) -> None:
    """Nothing went out, so the same key may try again, and gets its answer."""
    world.backend.submit_errors = [UpstreamFailed("a worker was lost")]
    world.play("hello")
    assert (await ask(world, stream=stream)).status_code == 502
    assert ledger.state("k1") is None
    assert (await ask(world, stream=stream)).status_code == 200


async def test_a_client_that_leaves_frees_the_key_or_has_broken_it(world: World, ledger: Ledger) -> None:
    """Before the first byte: free. After it: interrupted, reason client_gone."""
    gate = Gate()
    world.backend.scripts = [[gate], [*batches(world.encode("hello")), gate]]
    asking = asyncio.create_task(ask(world))
    await gate.reached.wait()
    asking.cancel()
    while ledger.state("k1") is not None:
        await asyncio.sleep(0.005)
    body = {"model": "tiny-test-model", "prompt": "hi", "max_tokens": 9, "stream": True}
    async with world.http.stream("POST", "/v1/completions", json=body, headers={"idempotency-key": "k1"}) as answer:
        await anext(answer.aiter_lines())
    while ledger.state("k1") == "sent":
        await asyncio.sleep(0.005)
    told = conflict(await world.http.post("/v1/completions", json=body, headers={"idempotency-key": "k1"}))
    assert told["interruption"]["reason"] == "client_gone"


async def claim(keys: IdempotencyKeys) -> KeyHold:
    held = await keys.claim("k1", tenant="default", request_id="req-1", path="/v1/completions", body=BODY)
    assert isinstance(held, KeyHold)
    return held


async def test_a_client_that_leaves_while_its_key_is_claimed_frees_it(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row is written by a thread that no cancel reaches; it must not stand for a request that never runs."""
    written, go_on = threading.Event(), threading.Event()
    right = ledger.store.claim

    def slow(*arguments: Any, **named: Any) -> KeyRow | None:
        found = right(*arguments, **named)
        written.set()
        go_on.wait(5.0)
        return found

    monkeypatch.setattr(ledger.store, "claim", slow)
    claiming = asyncio.create_task(claim(ledger.keys()))
    assert await asyncio.to_thread(written.wait, 5.0)
    claiming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await claiming
    go_on.set()
    async with asyncio.timeout(5.0):
        while ledger.state("k1") is not None:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("end", ["finished", "interrupted"])
async def test_what_went_out_never_frees_its_key(ledger: Ledger, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """The ledger is away when a stream ends and back when its handler is cancelled: the key is not given out again."""
    held = await claim(ledger.keys())
    await held.sent()

    def away(*arguments: Any, **named: Any) -> bool:
        raise LedgerUnavailable("away")

    monkeypatch.setattr(ledger.store, "finish" if end == "finished" else "interrupt", away)
    with pytest.raises(NotReady):
        await (held.finished() if end == "finished" else held.interrupted({"reason": "worker_exited"}))
    await held.release()
    assert ledger.state("k1") == "sent"


def orphan(ledger: Ledger, body: bytes, *, sent: bool) -> None:
    """A row that an ingress left behind which is gone."""
    from cluster.ingress.api.idempotency import digest_of_body

    row = KeyRow(
        tenant="default",
        key="k1",
        body_digest=digest_of_body("/v1/completions", body),
        request_id="req-dead",
        owner="gone",
    )
    assert ledger.store.claim(row, now_ms=0) is None
    if sent:
        assert ledger.store.mark_sent(row, now_ms=0)


BODY = b'{"model":"tiny-test-model","prompt":"hi","max_tokens":9}'


async def test_the_key_of_a_dead_ingress_waits_out_the_lease(world: World, ledger: Ledger) -> None:
    """Then the request runs once, however many ask."""
    orphan(ledger, BODY, sent=False)
    world.play("hello")
    started = asyncio.get_running_loop().time()
    answers = await asyncio.gather(
        *(world.http.post("/v1/completions", content=BODY, headers={"idempotency-key": "k1"}) for _ in range(5))
    )
    assert asyncio.get_running_loop().time() - started >= 0.05
    assert sorted(answer.status_code for answer in answers) in ([200, 409, 409, 409, 409], [200] * 2 + [409] * 3)
    assert len(world.backend.specs) == 1


async def test_a_dead_ingress_that_sent_something_has_broken_the_key(world: World, ledger: Ledger) -> None:
    """Nothing runs again."""
    orphan(ledger, BODY, sent=True)
    told = conflict(await world.http.post("/v1/completions", content=BODY, headers={"idempotency-key": "k1"}))
    assert (told["code"], told["interruption"]["reason"]) == ("request_interrupted", "gateway_lost")
    assert world.backend.specs == []


@pytest.mark.parametrize("stream", [False, True])
async def test_one_that_was_taken_for_dead_sends_nothing(world: World, ledger: Ledger, stream: bool) -> None:
    """It lost its key while it computed: its client gets an error, not a second answer to the same key."""
    gate = Gate()
    world.play("hello")
    world.backend.scripts = [[gate, *world.backend.script]]
    first = asyncio.create_task(ask(world, stream=stream))
    await gate.reached.wait()
    row = ledger.store.find("default", "k1")
    assert row is not None
    taker = KeyRow(tenant="default", key="k1", body_digest=row.body_digest, request_id="req-other", owner="another")
    assert ledger.store.take_over(row, taker, now_ms=2)
    gate.open.set()
    assert conflict(await first)["code"] == "request_in_progress"
    assert ledger.store.find("default", "k1") == taker


async def test_without_the_ledger_a_keyed_request_is_refused_and_others_are_not(world: World, ledger: Ledger) -> None:
    """A promise that cannot be written down is not given."""
    world.play("hello")
    ledger.is_away = True
    refused = await ask(world)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_ledger")
    assert (await world.complete()).status_code == 200


@pytest.mark.parametrize("key", ["", "x" * 256, "tab\there"])
async def test_a_key_that_is_none_is_refused(world: World, key: str) -> None:
    """Named, like any field."""
    answer = await ask(world, key)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Idempotency-Key")
