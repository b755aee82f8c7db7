"""Errors that nobody foresaw, inside a worker: each one is told, or ends the worker; none is waited out or leaks."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from mini_cluster import SETTLE_S, MiniCluster, collect, make_spec, until

from cluster.ingress.api.errors import UpstreamFailed
from workers.engine_loop import EngineLoop
from workers.fatal import EXIT_STATUS
from workers.prefill import PrefillSide

MakeCluster = Callable[..., MiniCluster]
LONG_LEASE = {"attempts.lease_ms": 60_000}
"""What is waited out by a lease would not end within these tests."""


def raises(error: Exception) -> Callable[..., None]:
    """Returns a method that raises."""

    def method(*_: Any, **__: Any) -> None:
        raise error

    return method


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("combined",)])
@pytest.mark.parametrize("step", ["_prepare", "_load_prefix", "_compute", "_hand_over", "_push"])
async def test_any_error_of_a_prefill_is_told(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, roles: tuple[str, ...], step: str
) -> None:
    """Not only those that the code expects: the client has its answer at once, and every block comes back."""
    cluster = make_cluster(**LONG_LEASE)
    await cluster.start(*roles, lease_ms=60_000)
    monkeypatch.setattr(PrefillSide, step, raises(ValueError("planted")))
    with pytest.raises(UpstreamFailed, match="ValueError: planted"):
        await asyncio.wait_for(collect(await cluster.submit(make_spec(100))), SETTLE_S)
    await cluster.at_rest()


@pytest.mark.parametrize("place", ["_run_step", "_finish_streams", "_commands"])
async def test_an_engine_thread_never_ends_silently(make_cluster: MakeCluster, place: str) -> None:
    """An error outside of the passes is the end of the worker, which says why; its process exits, in a cluster."""
    cluster = make_cluster()
    await cluster.start("prefill", "prefill", "decode")
    spec = make_spec(100)
    planted = RuntimeError("planted")
    worker, join = cluster.workers["prefill-0"]
    if place == "_commands":
        worker._engine._commands.put(raises(planted))
    else:
        setattr(worker._engine, place, raises(planted))
    generation = await cluster.submit(spec)
    await until(lambda: cluster.fatal)
    assert cluster.fatal == [planted]
    cluster.fatal.clear()
    # What the exit of the process tells:
    cluster.gone.append(join.incarnation)
    cluster.publish_view()
    assert await asyncio.wait_for(collect(generation), SETTLE_S) == (cluster.golden(spec), "length")
    # Here the process lives on, and a worker without its engine could not be closed.
    if place != "_commands":
        delattr(worker._engine, place)
    worker._engine._thread = threading.Thread(target=worker._engine._run)
    worker._engine.start()
    await cluster.at_rest()


def test_a_worker_that_cannot_go_on_ends_its_process_and_says_why() -> None:
    """From any thread, and whatever its other threads do."""
    program = (
        "import logging, threading; from workers.fatal import end_process; logging.basicConfig();"
        "thread = threading.Thread(target=end_process, args=(ValueError('planted'),)); thread.start();"
        "threading.Event().wait()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=SETTLE_S, check=False
    )
    assert done.returncode == EXIT_STATUS
    assert "worker_failed" in done.stderr and "ValueError: planted" in done.stderr


def test_an_end_that_was_asked_for_is_no_death() -> None:
    """The loop tells of an error, and only of an error."""
    told: list[Exception] = []

    class NoEngine:
        class limits:
            block_tokens = 16

    loop = EngineLoop(
        NoEngine(),  # type: ignore[arg-type]
        chunk_tokens=16,
        clock_ns=lambda: 0,
        on_tokens=lambda _: None,
        on_decode_fault=lambda *_: None,
        on_died=told.append,
    )
    loop.start()
    loop.close()
    assert told == []


async def test_a_push_that_never_ends_holds_up_nobody(make_cluster: MakeCluster) -> None:
    """A stop in the middle of a push: the link loop waits for no transfer, and what may be read stays fenced."""
    cluster = make_cluster()
    await cluster.start("prefill", "decode")
    worker = cluster.worker("prefill-0")
    assert worker._prefill is not None
    transport = worker._transport
    never: list[Any] = []

    def push(peer: str, sends: Any, *, deadline_s: float) -> Any:
        from concurrent.futures import Future

        never.append(Future())
        return never[-1]

    transport.push = push  # type: ignore[method-assign]
    generation = await cluster.submit(make_spec(100))
    await until(lambda: never)
    await generation.cancel("client_gone")
    await until(lambda: not worker._prefill._jobs and worker._prefill._storing)
    closed = threading.Event()

    async def close() -> None:
        await worker._prefill.close()
        closed.set()

    await asyncio.to_thread(worker._links.run, close(), deadline_s=SETTLE_S)
    assert closed.is_set() and not worker._prefill._storing
    assert worker._pool.counts().quarantined > 0, "a peer may still read these blocks"
    for future in never:
        future.cancel()


async def test_the_end_of_a_job_is_waited_for_when_the_worker_stops(make_cluster: MakeCluster) -> None:
    """Jobs that end by the stop begin to store what they have computed; that ends before the worker does."""
    cluster = make_cluster()
    await cluster.start("prefill", "decode")
    worker = cluster.worker("prefill-0")
    prefill = worker._prefill
    assert prefill is not None
    right, computing, go_on = worker._engine._engine.forward, threading.Event(), threading.Event()

    def slow(chunks: Any) -> Any:
        logits = right(chunks)
        computing.set()
        go_on.wait(SETTLE_S)
        return logits

    worker._engine._engine.forward = slow  # type: ignore[method-assign]
    await cluster.submit(make_spec(100))
    assert await asyncio.to_thread(computing.wait, SETTLE_S)
    closing = asyncio.ensure_future(asyncio.to_thread(worker._links.run, prefill.close(), deadline_s=SETTLE_S))
    await until(lambda: prefill._closing)
    go_on.set()
    await closing
    assert not prefill._storing and not prefill._jobs
    worker._pool.check_invariants()
    assert worker._pool.counts().owned == 0
