"""Processes that die or stop while they work: what clients see, and that everything comes back."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import httpx
import openai
import pytest

from ..asking import ask, events, raw_body
from ..cluster import MODEL, Cluster, poll_until
from ..golden import Golden, make_prompt
from ..leaving import send, stream_in

ERROR_WITHIN_S = 2.0
LEASE_S = 2.0
LONG = 1000
"""Prompt tokens: long enough to be killed in the middle of prefill."""


def workers_of(cluster: Cluster, request_id: str) -> dict[str, dict[str, Any]]:
    """Returns the prefill and decode worker of a request's last attempt."""
    attempt = cluster.record(request_id)["attempts"][-1]
    return {role: attempt[role] for role in ("prefill", "decode")}


def wait_replaced(cluster: Cluster, dead: dict[str, Any]) -> None:
    """Waits until the slot of a dead worker has a new life that is ready."""

    def replaced() -> bool:
        worker = cluster.workers()[dead["worker_id"]]
        return bool(worker["state"] == "ready" and worker["incarnation"] != dead["incarnation"])

    poll_until(replaced, deadline_s=60, what=f"{dead['worker_id']} is replaced")
    assert cluster.workers()[dead["worker_id"]]["pid"] != dead["pid"]


def publishing_spans(record: dict[str, Any]) -> list[tuple[int, int]]:
    """Returns (started, surely stopped) of each attempt in nanoseconds of the ingress's clock, from the journal."""
    fenced = {entry["epoch"]: entry["at_ns"] for entry in record["events"] if entry["event"] == "fenced"}
    return [(attempt["started_ns"], fenced[attempt["epoch"]]) for attempt in record["attempts"]]


def post_beside(cluster: Cluster, answers: list[httpx.Response], **body: Any) -> threading.Thread:
    """Sends a completion from a thread; its answer is put into ``answers``."""

    def post() -> None:
        with httpx.Client(base_url=cluster.url, timeout=30) as http:
            answers.append(http.post("/v1/completions", content=raw_body(**body)))

    thread = threading.Thread(target=post)
    thread.start()
    return thread


@pytest.mark.parametrize("stream", [False, True])
def test_prefill_dies_before_the_first_delta(whole: Cluster, golden_bf16: Golden, stream: bool) -> None:
    """H1, F22: one complete answer by one more attempt on the other worker, the tokens of a quiet run, a new life."""
    prompt = make_prompt(100 + stream, LONG)
    answers: list[httpx.Response] = []
    thread = post_beside(whole, answers, prompt=prompt, max_tokens=8, stream=stream)
    request_id = stream_in(whole, "prefilling")
    dead = workers_of(whole, request_id)["prefill"]
    os.kill(dead["pid"], signal.SIGKILL)
    thread.join(30)
    (answer,) = answers
    assert answer.status_code == 200, answer.text
    if stream:
        *chunks, done = events(answer.content)
        assert done == "[DONE]"
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
    else:
        choices = answer.json()["choices"]
    right = golden_bf16.run(prompt, 8)
    assert "".join(choice["text"] for choice in choices) == right.text
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == [right.finish_reason]
    wait_replaced(whole, dead)
    whole.wait_idle()
    record = whole.record(request_id)
    assert record["phase"] == "finished"
    first, second = record["attempts"]
    assert first["end_reason"] == "worker_exited"
    assert second["prefill"]["worker_id"] != dead["worker_id"] and (first["epoch"], second["epoch"]) == (1, 2)
    (_, stopped_ns), (started_ns, _) = publishing_spans(record)
    assert stopped_ns <= started_ns, "two attempts could publish at the same time"


def test_decode_dies_before_anything_was_sent(whole: Cluster) -> None:
    """H2, F22: nobody else can decode, so the answer is an ordinary error at once; no fragment, a new life."""
    answers: list[httpx.Response] = []
    # Not streamed: the boundary is the first byte of the body, so tokens are computed and none is with the client.
    thread = post_beside(whole, answers, prompt=make_prompt(111, 30), max_tokens=400, ignore_eos=True)
    request_id = stream_in(whole, "decoding")
    dead = workers_of(whole, request_id)["decode"]
    killed_s = time.monotonic()
    os.kill(dead["pid"], signal.SIGKILL)
    thread.join(30)
    assert time.monotonic() - killed_s < ERROR_WITHIN_S
    (answer,) = answers
    assert answer.status_code == 503, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == "no_capacity"
    assert 0 < int(answer.headers["retry-after"]) < 120
    assert answer.headers["x-request-id"] == request_id
    wait_replaced(whole, dead)
    whole.wait_idle()
    record = whole.record(request_id)
    assert record["phase"] == "failed" and not record["first_delta_sent"]
    assert record["attempts"][0]["end_reason"] == "worker_exited"


def test_decode_that_is_stopped_for_ever_is_waited_out(whole: Cluster) -> None:
    """B4, F44: its connections stay open; the stream ends within the lease all the same, and by the error event."""
    body = raw_body(prompt=make_prompt(112, 30), max_tokens=500, ignore_eos=True, stream=True)
    received, pid, stopped_s = b"", 0, 0.0
    with (
        httpx.Client(base_url=whole.url, timeout=30) as http,
        http.stream("POST", "/v1/completions", content=body) as answer,
    ):
        dead = workers_of(whole, answer.headers["x-request-id"])["decode"]
        for data in answer.iter_raw():
            received += data
            if not pid and received.count(b'"text":') > 3:
                pid = dead["pid"]
                os.kill(pid, signal.SIGSTOP)
                stopped_s = time.monotonic()
    waited_s = time.monotonic() - stopped_s
    try:
        last = events(received)[-1]
        assert last["error"]["code"] == "upstream_decode_interrupted"
        assert last["error"]["reason"] == "lease_expired"
        assert LEASE_S / 2 < waited_s < LEASE_S + 1.5
    finally:
        os.kill(pid, signal.SIGCONT)
    whole.wait_idle()


def test_decode_dies_after_the_fifth_delta(whole: Cluster, client: openai.OpenAI, golden_bf16: Golden) -> None:
    """What was delivered is a right beginning; then one error event, no [DONE], no finish; the client raises."""
    prompt = make_prompt(103, 64)
    pieces: list[str] = []
    raw = client.completions.with_raw_response.create(
        model=MODEL, prompt=prompt, max_tokens=500, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    request_id = raw.headers["x-request-id"]
    dead = workers_of(whole, request_id)["decode"]
    with pytest.raises(openai.APIError) as broken, raw.parse() as chunks:
        for chunk in chunks:
            assert chunk.choices[0].finish_reason is None
            pieces.append(chunk.choices[0].text)
            if len(pieces) == 5:
                os.kill(dead["pid"], signal.SIGKILL)
    error = broken.value.body
    assert isinstance(error, dict)
    assert error["type"] == "upstream_error" and error["code"] == "upstream_decode_interrupted"
    assert error["reason"] == "worker_exited" and error["param"] is None
    assert error["partial_output"] is True and error["retryable"] is False
    assert error["request_id"] == request_id
    delivered = error["delivered_output_tokens"]
    right = golden_bf16.run(prompt, delivered, ignore_eos=True)
    assert "".join(pieces).startswith(right.text) and delivered >= 5
    longer = golden_bf16.run(prompt, delivered + 1, ignore_eos=True)
    assert longer.text.startswith("".join(pieces)) or longer.text == "".join(pieces)
    record = whole.record(request_id)
    assert record["phase"] == "interrupted"
    assert record["interruption"]["delivered_output_tokens"] == delivered
    assert record["interruption"]["attempt_id"] == error["attempt_id"] == record["attempts"][0]["attempt_id"]
    wait_replaced(whole, dead)
    again = make_prompt(104, 30)
    assert ask(client, prompt=again, max_tokens=8).text == golden_bf16.run(again, 8).text


def test_decode_dies_and_the_raw_stream_ends_once(whole: Cluster) -> None:
    """The bytes: whole events only, the usage asked for, one error event as the very last, a clean end."""
    body = raw_body(
        messages=[{"role": "user", "content": "Tell me a long story."}],
        max_tokens=500,
        ignore_eos=True,
        stream=True,
        stream_options={"include_usage": True},
    )
    received = b""
    with (
        httpx.Client(base_url=whole.url, timeout=30) as http,
        http.stream("POST", "/v1/chat/completions", content=body) as answer,
    ):
        dead = workers_of(whole, answer.headers["x-request-id"])["decode"]
        killed = False
        for data in answer.iter_raw():
            received += data
            if not killed and received.count(b'"content":') > 5:
                os.kill(dead["pid"], signal.SIGKILL)
                killed = True
    assert killed
    *chunks, last = events(received)
    assert set(last) == {"error"} and last["error"]["code"] == "upstream_decode_interrupted"
    assert "[DONE]" not in chunks and not any("error" in chunk for chunk in chunks)
    usage = chunks.pop()
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] >= last["error"]["delivered_output_tokens"]
    assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])
    wait_replaced(whole, dead)


def test_blocks_outlive_the_worker_that_computed_them(
    whole: Cluster, client: openai.OpenAI, golden_bf16: Golden
) -> None:
    """The other prefill worker loads what the dead one had stored, and says the same."""
    prompt = make_prompt(105, 100)
    stored = whole.stored_blocks()
    first = ask(client, prompt=prompt, max_tokens=12)
    assert first.cached_tokens == 0
    whole.wait_stored(above=stored)
    dead = workers_of(whole, first.request_id)["prefill"]
    os.kill(dead["pid"], signal.SIGKILL)
    poll_until(
        lambda: (
            whole.workers()[dead["worker_id"]]["incarnation"] != dead["incarnation"]
            or whole.workers()[dead["worker_id"]]["state"] != "ready"
        ),
        deadline_s=10,
        what="the death is known",
    )
    second = ask(client, prompt=prompt, max_tokens=12)
    other = workers_of(whole, second.request_id)["prefill"]
    assert other["incarnation"] != dead["incarnation"]
    assert second.cached_tokens == 96
    assert second.content == first.content
    assert second.text == golden_bf16.run(prompt, 12).text
    wait_replaced(whole, dead)


def test_decode_that_pauses_within_its_lease_goes_on(
    whole: Cluster, client: openai.OpenAI, golden_bf16: Golden
) -> None:
    """Stopped for a third of the lease in mid-stream: nothing is lost, repeated or broken off."""
    prompt = make_prompt(106, 40)
    pieces: list[str] = []
    raw = client.completions.with_raw_response.create(
        model=MODEL, prompt=prompt, max_tokens=40, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    pid = workers_of(whole, raw.headers["x-request-id"])["decode"]["pid"]
    reason = None
    with raw.parse() as chunks:
        for chunk in chunks:
            reason = chunk.choices[0].finish_reason
            pieces.append(chunk.choices[0].text)
            if len(pieces) == 5:
                pause(pid, 0.7)
    assert reason == "length"
    assert "".join(pieces) == golden_bf16.run(prompt, 40, ignore_eos=True).text
    assert whole.pids()["decode-0"] == pid


def pause(pid: int, seconds: float) -> None:
    """Stops a process for a while: the fault itself, nothing waits for it."""
    os.kill(pid, signal.SIGSTOP)
    threading.Event().wait(seconds)
    os.kill(pid, signal.SIGCONT)


def test_store_dies_and_requests_go_on(whole: Cluster, client: openai.OpenAI, golden_bf16: Golden) -> None:
    """Without its store a prompt is computed; the new store fills again."""
    (node,) = whole.status()["store"]
    pid = node["pid"]
    os.kill(pid, signal.SIGKILL)
    prompt = make_prompt(107, 64)
    answer = ask(client, prompt=prompt, max_tokens=8)
    assert answer.text == golden_bf16.run(prompt, 8).text

    def back() -> bool:
        store = whole.status()["store"]
        return bool(store and store[0]["pid"] != pid and store[0].get("clients") == node["clients"])

    poll_until(back, deadline_s=30, what="a new store has its clients back")
    other = make_prompt(108, 64)
    stored = whole.stored_blocks()
    first = ask(client, prompt=other, max_tokens=8)
    whole.wait_stored(above=stored)
    second = ask(client, prompt=other, max_tokens=8)
    assert (first.cached_tokens, second.cached_tokens) == (0, 63)
    assert first.content == second.content


def test_client_leaves_while_decode_is_dead(whole: Cluster) -> None:
    """Two ends at once close the books once."""
    with send(whole, prompt=make_prompt(109, 30), max_tokens=500, ignore_eos=True):
        request_id = stream_in(whole, "delivering")
        dead = workers_of(whole, request_id)["decode"]
        os.kill(dead["pid"], signal.SIGKILL)
    wait_replaced(whole, dead)
    whole.wait_idle()
    assert whole.record(request_id)["phase"] in ("cancelled", "interrupted")


def test_a_directory_that_dies_is_replaced_and_told_everything(
    whole: Cluster, client: openai.OpenAI, golden_bf16: Golden
) -> None:
    """Requests go on without it; the new one has another pid and knows every block that the store holds."""
    dead = whole.status()["directory"]["pid"]
    os.kill(dead, signal.SIGKILL)
    prompt = make_prompt(107, 70)
    assert ask(client, prompt=prompt, max_tokens=8).text == golden_bf16.run(prompt, 8).text

    def knows_all() -> bool:
        status = whole.status()
        known = status["directory"].get("nodes", {})
        stored = {f"store-{node['node']}": {"host": node["used"]} for node in status["store"]}
        return bool(status["directory"]["pid"] != dead and known == stored)

    poll_until(knows_all, deadline_s=20, what="the directory is back")
    assert whole.status()["controller"]["pid"] not in (None, dead)
