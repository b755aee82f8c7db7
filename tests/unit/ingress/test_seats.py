"""The queue in front of generations, over HTTP: who waits, who is told to come back, and what is given back."""

from __future__ import annotations

import asyncio
import time

import pytest

from cluster.core.admission_queue import AdmissionQueue
from cluster.ingress.api.backend import Ended
from cluster.ingress.api.seats import CLASS_HEADER, Seats

from .conftest import World
from .fakes import MODEL_ID, Gate, batches

DEADLINE_S = 10


@pytest.fixture
def seats() -> Seats:
    """One seat, and a short wait."""
    quotas = {"interactive": 1.0, "background": 1.0}
    queue = AdmissionQueue(1, 3, quotas, max_wait_ns=60_000_000_000)
    return Seats(queue, deadline_ms=None, clock_ns=time.monotonic_ns)


async def run_behind(world: World, seats: Seats) -> tuple[Gate, asyncio.Task]:  # type: ignore[type-arg]
    """Starts a request that holds the seat until its gate opens."""
    gate = Gate()
    world.play_steps([gate, *batches(world.encode("done"), size=1), Ended("length")])
    running = asyncio.create_task(world.complete(max_tokens=8))
    await asyncio.wait_for(gate.reached.wait(), DEADLINE_S)
    assert seats.queue.num_seated() == 1
    return gate, running


async def wait_for_line(seats: Seats, class_name: str, number: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while seats.queue.num_waiting(class_name) != number:
            await asyncio.sleep(0.001)


async def test_the_next_one_waits_and_is_served(world: World, seats: Seats) -> None:
    """It does not reach the backend before its turn."""
    gate, running = await run_behind(world, seats)
    waiting = asyncio.create_task(world.complete(max_tokens=8))
    await wait_for_line(seats, "interactive", 1)
    assert len(world.backend.specs) == 1
    gate.open.set()
    assert [(await task).status_code for task in (running, waiting)] == [200, 200]
    assert (seats.queue.num_seated(), len(seats.queue.door)) == (0, 0)


async def test_a_class_is_named_by_header_and_the_first_goes_first(world: World, seats: Seats) -> None:
    """An unknown one is 400 and names those that are known."""
    gate, running = await run_behind(world, seats)
    body = {"model": MODEL_ID, "prompt": "hi", "max_tokens": 8}
    order: list[str] = []

    async def ask(name: str) -> None:
        answer = await world.http.post("/v1/completions", json=body, headers={CLASS_HEADER: name})
        assert answer.status_code == 200
        order.append(name)

    low = asyncio.create_task(ask("background"))
    await wait_for_line(seats, "background", 1)
    high = asyncio.create_task(ask("interactive"))
    await wait_for_line(seats, "interactive", 1)
    unknown = await world.http.post("/v1/completions", json=body, headers={CLASS_HEADER: "vip"})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, CLASS_HEADER)
    assert "interactive, background" in unknown.json()["error"]["message"]
    gate.open.set()
    await asyncio.gather(running, low, high)
    assert order == ["interactive", "background"]


async def test_a_full_house_says_when_to_come_back(world: World, seats: Seats) -> None:
    """429 at once with the time that was measured."""
    seats.queue.mean_duration_ns = 7e9
    gate, running = await run_behind(world, seats)
    waiting = [asyncio.create_task(world.complete(max_tokens=8)) for _ in range(2)]
    await wait_for_line(seats, "interactive", 2)
    refused = await world.complete(max_tokens=8)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
    assert refused.headers["retry-after"] == "21"
    gate.open.set()
    await asyncio.gather(running, *waiting)


async def test_a_client_that_leaves_gives_its_place_in_the_line_back(world: World, seats: Seats) -> None:
    """Nothing of it reaches the backend."""
    gate, running = await run_behind(world, seats)
    waiting = asyncio.create_task(world.complete(max_tokens=8))
    await wait_for_line(seats, "interactive", 1)
    waiting.cancel()
    await wait_for_line(seats, "interactive", 0)
    gate.open.set()
    assert (await running).status_code == 200
    assert (len(world.backend.specs), len(seats.queue.door)) == (1, 0)


async def test_a_drain_tells_the_waiting(world: World, seats: Seats) -> None:
    """503; what runs finishes."""
    gate, running = await run_behind(world, seats)
    waiting = asyncio.create_task(world.complete(max_tokens=8))
    await wait_for_line(seats, "interactive", 1)
    assert (await world.http.get("/readyz")).status_code == 200
    seats.drain(until_ns=time.monotonic_ns() + 19_500_000_000)
    for refused in (await waiting, await world.complete(max_tokens=8), await world.http.get("/readyz")):
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
        assert refused.headers["retry-after"] == "20", "when the server has stopped at the latest"
    assert (await world.http.get("/readyz")).json()["status"] == "draining"
    assert (await world.http.get("/healthz")).status_code == 200
    gate.open.set()
    assert (await running).status_code == 200
