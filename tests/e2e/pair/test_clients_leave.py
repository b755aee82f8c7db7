"""Clients that leave: whatever the moment, the work stops and every block comes back."""

from __future__ import annotations

import asyncio
import random

import httpx
import pytest

from ..asking import events, raw_body
from ..cluster import Cluster
from ..golden import Golden, make_prompt
from ..leaving import send, stream_in

NUM_REQUESTS = 100
NUM_CUT = 30
CUT_WITHIN_S = 6.0


@pytest.mark.parametrize("phase", ["reserving", "prefilling"])
def test_client_that_leaves_before_the_first_delta(pair: Cluster, phase: str) -> None:
    """The prefill stops, decode lets its reservation go, the journal says why."""
    pair.wait_idle()
    with send(pair, prompt=make_prompt(70 + len(phase), 1000), max_tokens=16):
        request_id = stream_in(pair, phase, "prefilling")
    pair.wait_idle(5.0)
    record = pair.record(request_id)
    assert record["phase"] == "cancelled" and not record["first_delta_sent"]
    assert record["delivered_output_tokens"] == 0
    assert record["attempts"][0]["fenced"]


def test_client_that_leaves_after_the_first_delta(pair: Cluster) -> None:
    """Decode stops long before the budget of tokens is used."""
    pair.wait_idle()
    with send(pair, prompt=make_prompt(71, 30), max_tokens=900, ignore_eos=True) as connection:
        received = b""
        while b'"text":' not in received:
            received += connection.recv(65536)
        request_id = stream_in(pair, "delivering")
    pair.wait_idle(5.0)
    record = pair.record(request_id)
    assert record["phase"] == "cancelled" and record["first_delta_sent"]
    assert 1 <= record["attempts"][0]["generated_tokens"] < 900


def test_cancel_endpoint_stops_a_running_request(pair: Cluster) -> None:
    """``POST /v1/requests/{id}/cancel`` answers when the worker has stopped."""
    pair.wait_idle()
    with send(pair, prompt=make_prompt(72, 30), max_tokens=900, ignore_eos=True):
        request_id = stream_in(pair, "delivering")
        answer = pair.http.post(f"/v1/requests/{request_id}/cancel")
        assert answer.status_code == 200 and answer.json()["phase"] == "cancelled"
        assert answer.json()["attempts"][0]["fenced"]
        pair.wait_idle(5.0)


async def test_hundred_requests_thirty_of_them_cut(pair: Cluster, golden: Golden) -> None:
    """Afterwards all pool blocks are free and nothing runs; who stayed got the right answer."""
    pair.wait_idle()
    pids = pair.pids()
    chance = random.Random(100)
    cut = set(chance.sample(range(NUM_REQUESTS), NUM_CUT))
    prompts = [make_prompt(80 + index, 24 + 8 * index) for index in range(4)]
    moments = {index: chance.uniform(0, CUT_WITHIN_S) for index in cut}

    async def one(client: httpx.AsyncClient, index: int) -> tuple[int, str] | None:
        body = raw_body(prompt=prompts[index % 4], max_tokens=12, stream=index % 2 == 0)
        try:
            # A client that leaves at a moment of its own: its time limit is the whole of its patience.
            async with asyncio.timeout(moments.get(index)):
                answer = await client.post("/v1/completions", content=body)
        except TimeoutError:
            return None
        assert answer.status_code == 200, answer.text
        if index % 2:
            return index, answer.json()["choices"][0]["text"]
        chunks = events(answer.content)
        assert chunks.pop() == "[DONE]"
        return index, "".join(chunk["choices"][0]["text"] for chunk in chunks)

    limits = httpx.Limits(max_connections=NUM_REQUESTS)
    async with httpx.AsyncClient(base_url=pair.url, timeout=100, limits=limits) as client:
        answers = await asyncio.gather(*(one(client, index) for index in range(NUM_REQUESTS)))
    stayed = [answer for answer in answers if answer is not None]
    assert len(stayed) >= NUM_REQUESTS - NUM_CUT
    assert len(stayed) < NUM_REQUESTS, "nobody was cut: the moments do not reach into the work"
    status = pair.wait_idle(15.0)
    assert status["streams"] == []
    assert pair.pids() == pids
    for index, text in stayed:
        assert text == golden.run(prompts[index % 4], 12).text, index
