"""Server-side tools through the endpoint, with a real ledger and a real tool over HTTP. Rows F2 to F4."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from cluster.config_schema import ToolsConfig
from cluster.ingress.api.backend import Ended, Interrupted, Restarted
from cluster.ingress.api.errors import UpstreamFailed
from cluster.ingress.api.idempotency import IdempotencyKeys
from cluster.ingress.api.tool_format import TAGGED
from cluster.ingress.metrics import IngressMetrics
from cluster.ingress.tools.service import ToolService
from cluster.ledger.database import LedgerUnavailable, open_database
from cluster.ledger.key_store import KeyStore
from cluster.ledger.tool_store import ToolStore
from cluster.tools_source import load_tools
from tests.tool_server import CUT, LOST, Plan, ToolServer

from .conftest import World
from .fakes import MODEL_ID, Gate, Step, batches
from .test_stream import events

SECRET = "Bearer s3cr3t-of-the-tool"
CALL = TAGGED.call("book", {"room": "A7"})
PAY = TAGGED.call("pay", {"room": "A7"})
WIRE = TAGGED.call("wire", {"room": "B2"})
READ = TAGGED.call("read", {"room": "B2"})
NAMES = ["book", "pay", "wire", "read"]


@pytest.fixture(autouse=True)
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts with tools are longer than the 256 tokens of the other tests."""
    from . import fakes

    make = fakes.FakeBackend.__init__

    def make_roomy(self: Any, *, vocab_size: int) -> None:
        make(self, vocab_size=vocab_size, max_model_len=8192)

    monkeypatch.setattr(fakes.FakeBackend, "__init__", make_roomy)


class Ledger:
    """A ledger on disk whose part for tools can be away."""

    def __init__(self, path: Path) -> None:
        self.database = open_database(f"sqlite:///{path}")
        self.keys = KeyStore(self.database)
        self.tools = ToolStore(self.database)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(tmp_path / "kopir.db")
    yield ledger
    ledger.database.close()


@pytest.fixture
def server() -> Iterator[ToolServer]:
    with ToolServer() as server:
        yield server


@pytest.fixture
def settings() -> ToolsConfig:
    """A test that wants other bounds parametrizes this."""
    return ToolsConfig(max_rounds=4, max_calls=6, deadline_ms=20_000, max_result_bytes=4096)


@pytest.fixture
def idempotency(ledger: Ledger) -> IdempotencyKeys:
    return IdempotencyKeys(lambda: ledger.keys, owner="me", lease_s=0.05)


@pytest.fixture
def tools(
    ledger: Ledger, server: ToolServer, settings: ToolsConfig, tmp_path: Path
) -> Callable[[IngressMetrics], ToolService]:
    path = tmp_path / "tools.yaml"
    entries = [server.entry(name, headers={"authorization": SECRET}, timeout_ms=400) for name in NAMES]
    path.write_text(yaml.safe_dump({"tools": entries}))

    def make(metrics: IngressMetrics) -> ToolService:
        return ToolService(
            load_tools(path),
            store=lambda: ledger.tools,
            settings=settings,
            metrics=metrics.tools,
            clock_ns=time.monotonic_ns,
            unix_s=time.time,
        )

    return make


def script(world: World, *rounds: str | list[Step], finish: str = "stop") -> None:
    """One text, or steps, for each round to come."""
    world.backend.scripts = [
        [*batches(world.encode(text)), Ended(finish)] if isinstance(text, str) else text  # type: ignore[list-item]
        for text in rounds
    ]


async def ask(world: World, *, key: str | None = "k", **body: Any) -> httpx.Response:
    request = {
        "model": MODEL_ID,
        "messages": [{"role": "user", "content": "book A7"}],
        "server_tools": NAMES,
        "seed": 5,
    } | body
    headers = {} if key is None else {"idempotency-key": key}
    return await world.http.post("/v1/chat/completions", json=request, headers=headers)


def text_of(response: httpx.Response) -> str:
    if response.headers["content-type"].startswith("text/event-stream"):
        found = [event for event in events(response.content) if isinstance(event, dict)]
        return "".join(c["delta"].get("content") or "" for event in found for c in event.get("choices", ()))
    content: str = response.json()["choices"][0]["message"]["content"]
    return content


async def of_ledger(world: World, response: httpx.Response) -> list[dict[str, Any]]:
    request_id = response.headers["x-request-id"]
    world.backend.records[request_id] = {"request_id": request_id}
    calls: list[dict[str, Any]] = (await world.http.get(f"/v1/requests/{request_id}")).json().get("tool_calls", [])
    return calls


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_between_two_rounds(world: World, server: ToolServer, stream: bool) -> None:
    """The tool acts once, with key and secret; the model sees its result; the client sees text alone and one ending."""
    script(world, "I look.\n" + CALL, "It is booked.")
    response = await ask(world, stream=stream)
    assert response.status_code == 200 and text_of(response) == "I look.\n\nIt is booked."
    (action,) = server.actions
    assert action.arguments == {"room": "A7"}
    first, second = world.backend.generations
    request_id = response.headers["x-request-id"]
    assert world.backend.request_ids == [request_id, f"{request_id}-r1"]
    (call,) = await of_ledger(world, response)
    assert (call["name"], call["state"], call["tries"], call["is_error"]) == ("book", "done", 1, False)
    assert action.key == call["idempotency_key"] == f"default:{request_id}:{call['tool_call_id']}"
    assert server.calls[0][1]["authorization"] == SECRET
    prompts = [world.bundle.table.decode(spec.prompt_token_ids) for spec in world.backend.specs]
    assert '{"done": "book", "number": 1}' in prompts[1] and CALL in prompts[1] and "<tool_call>" in prompts[0]
    assert [event for event, _ in first.notes] == ["tool_intent", "tool_result"]
    assert first.calls[-1] == ("completed", "tool_calls") and second.calls[-1] == "completed"
    assert "s3cr3t" not in response.text
    if stream:
        assert response.text.count("[DONE]") == 1 and "tool_calls" not in response.text
    else:
        choice = response.json()["choices"][0]
        assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]
        usage = response.json()["usage"]
        assert usage["prompt_tokens"] == sum(len(spec.prompt_token_ids) for spec in world.backend.specs)
        assert usage["completion_tokens"] == sum(len(world.encode(t)) for t in ("I look.\n" + CALL, "It is booked."))


async def test_the_official_client(world: World, server: ToolServer) -> None:
    """With `extra_body` and a header of its own it needs to know nothing more."""
    script(world, CALL, "Done.")
    async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(
            model=MODEL_ID,
            messages=[{"role": "user", "content": "book"}],
            extra_body={"server_tools": ["book"]},
            extra_headers={"Idempotency-Key": "official"},
        )
    assert answer.choices[0].message.content == "Done." and len(server.actions) == 1


REFUSED = [
    ({}, {"key": None}, "Idempotency-Key", "idempotency_key_required"),
    ({"server_tools": ["nothing"]}, {}, "server_tools", "unknown_tool"),
    ({"server_tools": ["book", "book"]}, {}, "server_tools", None),
    ({"server_tools": []}, {}, "server_tools", None),
    ({"n": 2}, {}, "n", None),
    ({"logprobs": True}, {}, "logprobs", None),
    ({"tools": [{"type": "function", "function": {"name": "x"}}]}, {}, "server_tools", None),
    ({"response_format": {"type": "json_object"}}, {}, "response_format", None),
    ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, {}, "tool_choice", None),
]


@pytest.mark.parametrize(("body", "how", "param", "code"), REFUSED)
async def test_what_is_refused(
    world: World, server: ToolServer, body: dict[str, Any], how: dict[str, Any], param: str, code: str | None
) -> None:
    """400 that names the field, before anything is claimed, generated or called."""
    response = await ask(world, **body, **how)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param, error
    assert code is None or error["code"] == code
    assert not world.backend.specs and not server.calls


async def test_tools_that_only_read_need_no_key(world: World, server: ToolServer) -> None:
    """Their calls are in the ledger all the same."""
    script(world, READ, "B2 is free.")
    response = await ask(world, key=None, server_tools=["read"])
    assert text_of(response) == "B2 is free." and len(server.done("read")) == 1
    assert [call["state"] for call in await of_ledger(world, response)] == ["done"]


async def test_the_choice_of_the_client_binds_the_first_round(world: World, server: ToolServer) -> None:
    """Required once is not required for ever; "none" calls nothing; in the last round nothing may be called."""
    script(world, CALL, "Done.")
    await ask(world, tool_choice="required")
    required, free = (spec.grammar for spec in world.backend.specs)
    assert required is not None and free is not None and required != free
    world.backend.specs.clear()
    script(world, "No.")
    assert text_of(await ask(world, key="k2", tool_choice="none")) == "No."
    assert world.backend.specs[0].grammar is None
    world.backend.specs.clear()
    script(world, CALL, CALL, CALL, CALL, "Enough.")
    assert text_of(await ask(world, key="k3")) == "Enough."
    assert [spec.grammar is None for spec in world.backend.specs] == [False] * 4 + [True]


async def test_calls_over_the_limit_are_not_made(world: World, server: ToolServer) -> None:
    """Six are allowed: the seventh and eighth of one round are told to the model as not made."""
    script(world, "\n".join([READ] * 8), "Done.")
    assert text_of(await ask(world, server_tools=["read"])) == "Done."
    assert len(server.done("read")) == 6
    prompt = world.bundle.table.decode(world.backend.specs[1].prompt_token_ids)
    assert prompt.count("was not made") == 2 and world.backend.specs[1].grammar is None


async def test_tokens_of_all_rounds_count_for_the_limit(world: World, server: ToolServer) -> None:
    """The next round gets what is left; with nothing left the answer ends with `length` after its call."""
    num_call = len(world.encode(CALL))
    script(world, CALL, "Done.")
    await ask(world, max_tokens=num_call + 7)
    assert [spec.max_tokens for spec in world.backend.specs] == [num_call + 7, 7]
    script(world, CALL)
    response = await ask(world, key="k2", max_tokens=num_call)
    assert response.json()["choices"][0]["finish_reason"] == "length" and len(server.actions) == 2


async def test_a_call_that_was_cut_off_is_not_made(world: World, server: ToolServer) -> None:
    """Neither it nor the whole one before it: the round is not what the model meant."""
    script(world, CALL + "\n" + CALL[:-12], finish="length")
    response = await ask(world)
    assert response.json()["choices"][0]["finish_reason"] == "length" and not server.calls


OUTCOMES = [
    (CALL, Plan(acts=False, status=400, body=b"no such room"), "The tool refused (400): no such room"),
    (CALL, Plan(acts=False, status=409, body=b"taken"), "The tool refused (409): taken"),
    (CALL, Plan(acts=False, status=307, headers={"location": "http://127.0.0.1:1/"}), "The tool refused (307)"),
    (CALL, Plan(body=b"x" * 5000), "larger than 4096 bytes"),
    (CALL, Plan(body=b"a\x00b\xff"), "a\ufffdb\ufffd"),
    (CALL, Plan(body=b"\x1f\x8b", headers={"content-encoding": "gzip"}), "came compressed"),
]


@pytest.mark.parametrize(("call", "plan", "words"), OUTCOMES)
async def test_what_the_model_is_told(world: World, server: ToolServer, call: str, plan: Plan, words: str) -> None:
    """Refusals in their words, results that are too large or no text as such; one call, one answer."""
    server.plans["book"] = [plan]
    script(world, call, "Well.")
    assert text_of(await ask(world)) == "Well." and len(server.calls) == 1
    assert words in world.bundle.table.decode(world.backend.specs[1].prompt_token_ids)


@pytest.mark.parametrize("plan", [LOST, CUT, Plan(status=503), Plan(acts=False, status=503), Plan(status=429)])
async def test_a_tool_that_keeps_its_keys_is_asked_again(world: World, server: ToolServer, plan: Plan) -> None:
    """Whatever came of the first try: one action, the same key twice."""
    server.plans["book"] = [plan]
    script(world, CALL, "Done.")
    assert text_of(await ask(world)) == "Done."
    assert len(server.done("book")) == 1 and len(server.calls) == 2
    assert len({headers["idempotency-key"] for _, headers in server.calls}) == 1


@pytest.mark.parametrize(("plan", "num_calls"), [(LOST, 1), (CUT, 2)])
async def test_a_tool_that_can_be_asked_is_asked(world: World, server: ToolServer, plan: Plan, num_calls: int) -> None:
    """Done: its result is taken. Not done: it is made. Either way there is one action."""
    server.plans["pay"] = [plan]
    server.lookup_statuses = [202]
    script(world, PAY, "Paid.")
    assert text_of(await ask(world)) == "Paid."
    assert len(server.done("pay")) == 1 and len(server.calls) == num_calls and len(server.lookups) == 2


async def test_an_outcome_that_needs_a_person(world: World, server: ToolServer) -> None:
    """502 that names the call and its key, never repeated by libraries; asked again it is handed over again."""
    server.plans["wire"] = [LOST]
    for _ in range(2):
        script(world, WIRE)
        response = await ask(world)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (502, "tool_outcome_unknown")
        assert response.headers["x-should-retry"] == "false"
        (call,) = await of_ledger(world, response)
        assert call["state"] == "handed_over" and error["tool_call"]["idempotency_key"] == call["idempotency_key"]
        assert world.backend.last.calls[-1] == ("cancel", "gateway_fault")
    assert len(server.calls) == 1
    assert 'kopir_tool_stops_total{code="tool_outcome_unknown"} 2.0' in (await world.http.get("/metrics")).text


async def test_an_outcome_that_needs_a_person_after_the_first_delta(world: World, server: ToolServer) -> None:
    """The stream breaks with one event that says so, and keeps its key."""
    server.plans["wire"] = [LOST]
    script(world, "I do it. " + WIRE)
    response = await ask(world, stream=True)
    *_, last = events(response.content)
    error = last["error"]
    assert text_of(response) == "I do it." and "[DONE]" not in response.text
    assert (error["code"], error["reason"]) == ("upstream_decode_interrupted", "tool_outcome_unknown")
    assert error["retryable"] is False and error["partial_output"] is True
    assert 0 < error["delivered_output_tokens"] <= len(world.encode("I do it. "))
    again = await ask(world, stream=True)
    assert again.status_code == 409 and again.json()["error"]["code"] == "request_interrupted"
    assert len(server.calls) == 1


LOSSES: list[list[Step]] = [
    [UpstreamFailed("the worker is gone")],
    [Interrupted("worker_exited", "att")],
]


@pytest.mark.parametrize("steps", LOSSES)
async def test_after_a_call_the_request_may_run_again_and_the_call_may_not(
    world: World, server: ToolServer, steps: list[Step]
) -> None:
    """The second round failed before the first delta: the error is not repeated by libraries, the key is free, and who
    asks again gets the recorded result: one action, the same ids, the same seed."""
    script(world, CALL, steps)
    broken = await ask(world, seed=None)
    assert broken.status_code == 502 and broken.headers["x-should-retry"] == "false"
    script(world, CALL, "Done.")
    response = await ask(world, seed=None)
    assert text_of(response) == "Done." and len(server.calls) == 1
    first, _, again, _ = world.backend.specs
    assert first == again, "seed and prompt are those of the first life"
    (call,) = await of_ledger(world, response)
    assert call["recorded_by"] == broken.headers["x-request-id"]
    assert "kopir_tool_calls_replayed_total 1.0" in (await world.http.get("/metrics")).text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_run_that_asks_for_something_else_is_stopped(world: World, server: ToolServer, stream: bool) -> None:
    """409 `tool_divergence`: nothing is made, nothing is replayed, and not a word of the other run is shown."""
    for number, other in enumerate((TAGGED.call("book", {"room": "B2"}), PAY, "No need.", "Hm. " + PAY)):
        key = f"k{number}"
        script(world, CALL, [UpstreamFailed("gone")])
        await ask(world, key=key, stream=stream)
        num_calls = len(server.calls)
        script(world, other)
        response = await ask(world, key=key, stream=stream)
        assert (response.status_code, response.json()["error"]["code"]) == (409, "tool_divergence"), response.text
        assert response.headers["x-should-retry"] == "false" and len(server.calls) == num_calls


async def test_text_before_a_recorded_call_is_shown_once_it_is_past(world: World, server: ToolServer) -> None:
    """A whole answer is not shown before its end, so its run may begin with text and be repeated: nothing is lost."""
    script(world, "I look. " + CALL, [UpstreamFailed("gone")])
    await ask(world)
    script(world, "I look. " + CALL, "Done.")
    assert text_of(await ask(world)) == "I look.\n\nDone." and len(server.calls) == 1


async def test_another_body_with_the_key_of_a_call(world: World, server: ToolServer) -> None:
    """409 `idempotency_key_reused`, although the key itself was freed."""
    script(world, CALL, [UpstreamFailed("gone")])
    await ask(world)
    response = await ask(world, messages=[{"role": "user", "content": "something else"}])
    assert (response.status_code, response.json()["error"]["code"]) == (409, "idempotency_key_reused")
    assert response.headers["x-should-retry"] == "false" and len(server.calls) == 1


async def test_a_prompt_that_cannot_be_made_again(world: World, ledger: Ledger) -> None:
    """Another model than the one that asked for the recorded call: handed over, not run."""
    script(world, CALL, [UpstreamFailed("gone")])
    await ask(world)
    world.backend.system_fingerprint = "fp-other"
    response = await ask(world)
    assert (response.status_code, response.json()["error"]["code"]) == (409, "tool_divergence")
    assert len(world.backend.specs) == 2


async def test_a_lost_attempt_of_a_round_is_void(world: World, server: ToolServer) -> None:
    """Calls of an attempt that was lost before its end are not made; those of the next one are, once."""
    steps: list[Step] = [*batches(world.encode("Hm. " + CALL)), Restarted("att-2")]
    script(world, [*steps, *batches(world.encode(CALL)), Ended("stop")], [*batches(world.encode("Do")), Restarted("x")])
    world.backend.scripts[1] += [*batches(world.encode("Done.")), Ended("stop")]
    assert text_of(await ask(world)) == "Done." and len(server.actions) == 1


async def test_a_client_that_leaves_while_its_tool_works(world: World, server: ToolServer, ledger: Ledger) -> None:
    """The call is finished and recorded, nothing else begins; who asks again gets its result."""
    gate = asyncio.Event()
    loop = asyncio.get_running_loop()
    left = asyncio.Event()

    def wait() -> None:
        loop.call_soon_threadsafe(gate.set)
        asyncio.run_coroutine_threadsafe(left.wait(), loop).result(10)

    server.plans["book"] = [Plan(after=wait)]
    script(world, CALL)
    asking = asyncio.create_task(ask(world))
    await asyncio.wait_for(gate.wait(), 10)
    asking.cancel()
    await asyncio.wait((asking,))
    left.set()
    await asyncio.wait_for(world.backend.last.over.wait(), 10)
    assert ("cancel", "client_gone") in world.backend.last.calls

    async def again() -> httpx.Response:
        while True:
            script(world, CALL, "Done.")
            response = await ask(world)
            if response.status_code != 409:
                return response
            await asyncio.sleep(0.01)

    response = await asyncio.wait_for(again(), 10)
    assert text_of(response) == "Done." and len(server.calls) == 1


@pytest.mark.parametrize("settings", [ToolsConfig(deadline_ms=300)])
@pytest.mark.parametrize("text", ["", "Wait. "])
async def test_the_deadline_of_all_rounds(world: World, server: ToolServer, text: str, settings: ToolsConfig) -> None:
    """Before the first delta 504, after it the one event with the reason `deadline`; what runs is cancelled."""
    script(world, [*batches(world.encode(text + "\n")), Gate()])
    response = await ask(world, stream=True)
    if text:
        assert events(response.content)[-1]["error"]["reason"] == "deadline"
    else:
        assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert ("cancel", "gateway_fault") in world.backend.last.calls and not server.calls


async def test_without_the_ledger_nothing_is_called(
    world: World, server: ToolServer, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No intent, no call: 503. A result that cannot be kept is not shown, and the next life asks the tool again."""

    def away(*args: Any, **named: Any) -> bool:
        raise LedgerUnavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(ledger.tools, "intend", away)
        script(world, CALL)
        response = await ask(world)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_ledger")
        assert response.headers["x-should-retry"] == "false" and not server.calls
    with monkeypatch.context() as patch:
        patch.setattr(ledger.tools, "settle", away)
        patch.setattr("cluster.ingress.tools.runner.STORE_RETRY_S", 0.01)
        script(world, CALL)
        response = await ask(world)
        assert response.status_code == 503 and response.headers["x-should-retry"] == "false"
        assert len(server.actions) == 1 and len(world.backend.specs) == 2
    script(world, CALL, "Done.")
    assert text_of(await ask(world)) == "Done." and len(server.actions) == 1


async def test_a_life_that_was_taken_over_does_nothing(world: World, server: ToolServer, ledger: Ledger) -> None:
    """While its model wrote, another ingress took the request up: its intent is refused, so nothing is called."""
    gate = Gate()
    script(world, [*batches(world.encode(CALL)), gate, Ended("stop")])
    asking = asyncio.create_task(ask(world))
    await asyncio.wait_for(gate.reached.wait(), 10)
    with ledger.database.transaction() as connection:
        connection.exec_driver_sql("UPDATE kopir_tool_runs SET epoch = epoch + 1")
    gate.open.set()
    response = await asking
    assert (response.status_code, response.json()["error"]["code"]) == (409, "request_in_progress")
    assert not server.calls


async def test_nothing_secret_is_written_down(
    world: World, server: ToolServer, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Neither headers nor arguments nor URLs: not in a log at any level, the journal, an error or the ledger."""
    caplog.set_level(logging.DEBUG)
    server.plans["book"] = [LOST, Plan(acts=False, status=500, body=b"secret-words")]
    server.plans["wire"] = [LOST]
    script(world, CALL, WIRE)
    response = await ask(world)
    assert response.status_code == 502
    told = [json.dumps(await of_ledger(world, response)), response.text, (await world.http.get("/metrics")).text]
    told += [repr(note) for generation in world.backend.generations for note in generation.notes]
    told += [record.getMessage() for record in caplog.records if "sqlalchemy" not in record.name]
    told += [file.read_bytes().decode("latin-1") for file in tmp_path.glob("kopir.db*")]
    for secret in ("s3cr3t", "secret-words", server.url):
        assert not any(secret in text for text in told), secret
    assert not any("A7" in text for text in told[3:-3]), "arguments are nobody's business"
