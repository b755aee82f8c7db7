"""Several ingresses, one ledger: any of them answers about any request, and the end of one is told honestly."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from cluster.ingress.api.backend import Interrupted
from cluster.ingress.api.errors import UpstreamFailed
from cluster.ingress.backend import RelayBackend
from cluster.ledger import request_ledger
from kvstore.net.handshake import PeerInfo
from kvstore.net.host import boottime_ns, host_identity, new_incarnation
from tests.component.mini_cluster import SECRET, VOCAB, MiniCluster, collect, make_spec, until

MakeCluster = Callable[..., MiniCluster]


@pytest.fixture
async def pair_of_ingresses(
    make_cluster: MakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[MiniCluster, RelayBackend]]:
    """A cluster whose ingress has joined a ledger, and a second ingress that has no workers."""
    monkeypatch.setattr(request_ledger, "SILENCE_MS_MIN", 400)
    cluster = make_cluster(**{"ledger.url": f"sqlite:///{tmp_path / 'kopir.db'}"})
    await cluster.backend.join_ledger("127.0.0.1", share=lambda tenant: {"streams": cluster.backend.streams(tenant)})
    await cluster.start("prefill", "decode")
    other = make_sibling(cluster)
    await other.join_ledger("127.0.0.1")
    await other.start("127.0.0.1")
    yield cluster, other
    await other.close()


def make_sibling(cluster: MiniCluster) -> RelayBackend:
    me = PeerInfo(
        role="ingress",
        peer_id="ingress-1",
        incarnation=new_incarnation(),
        pid=os.getpid(),
        host_identity=host_identity(),
    )
    return RelayBackend(
        cluster.config,
        me=me,
        secret=SECRET,
        model_id="tiny",
        created=0,
        vocab_size=VOCAB,
        system_fingerprint="test",
        model_revision="tiny@1",
        registry=CollectorRegistry(),
        clock_ns=boottime_ns,
    )


async def record_of(backend: RelayBackend, request_id: str, *, tenant: str = "t") -> dict[str, Any]:
    """Returns the record as soon as the backend knows it."""
    async with asyncio.timeout(20):
        while (record := await backend.request_record(request_id, tenant=tenant)) is None:
            await asyncio.sleep(0.02)
    return record


async def test_any_ingress_tells_how_a_request_of_another_ended(
    pair_of_ingresses: tuple[MiniCluster, RelayBackend],
) -> None:
    """The whole journal, equal to what the owner says; another tenant learns nothing."""
    cluster, other = pair_of_ingresses
    await collect(await cluster.submit(make_spec()))
    await until(lambda: not cluster.backend.streams())
    mine = await record_of(cluster.backend, "req-1")
    assert await record_of(other, "req-1") == mine
    assert mine["phase"] == "finished"
    assert await other.request_record("req-1", tenant="x") is None


async def test_any_ingress_tells_the_present_state_and_cancels(
    pair_of_ingresses: tuple[MiniCluster, RelayBackend],
) -> None:
    """The owner is asked: the answer is as fresh as its own, and a cancel returns when the request is over."""
    cluster, other = pair_of_ingresses
    generation = await cluster.submit(make_spec(40, 400))
    first = await generation.next()
    generation.mark_first_delta()
    generation.delivered(len(first.token_ids))
    seen = await record_of(other, "req-1")
    assert seen["first_delta_sent"] is True and seen["delivered_output_tokens"] == len(first.token_ids)
    assert await other.cancel("req-1", tenant="x") is None, "another tenant cancels nothing"
    assert cluster.backend.streams()
    ended = await other.cancel("req-1", tenant="t")
    assert ended is not None and ended["phase"] == "cancelled"
    # Its client still reads: the books close when it has been told.
    assert isinstance(await generation.next(), Interrupted)
    assert not cluster.backend.streams()
    await cluster.at_rest()


async def test_an_ingress_tells_what_runs_at_the_others(pair_of_ingresses: tuple[MiniCluster, RelayBackend]) -> None:
    """Of one tenant or of all; of one that does not answer, its name alone."""
    cluster, other = pair_of_ingresses
    generation = await cluster.submit(make_spec(40, 400))
    for tenant in ("t", None):
        (share,) = await other.shares(tenant)
        assert [stream["request_id"] for stream in share["streams"]] == ["req-1"]
    assert await other.shares("x") == [{"streams": []}]
    siblings = cluster.backend._book._siblings
    assert siblings is not None
    await siblings.close()
    ingress_id = cluster.backend._me.peer_id
    assert await other.shares(None) == [{"ingress": [{"id": ingress_id, "pid": None, "streams": None}]}]
    await cluster.backend.cancel("req-1", tenant="t")
    with pytest.raises(UpstreamFailed):
        await collect(generation)


async def test_an_ingress_that_dies_leaves_an_honest_record(
    pair_of_ingresses: tuple[MiniCluster, RelayBackend],
) -> None:
    """gateway_lost with a stated lower bound; no other ingress makes up an ending before the silence is over."""
    cluster, other = pair_of_ingresses
    generation = await cluster.submit(make_spec(40, 400))
    first = await generation.next()
    generation.mark_first_delta()
    generation.delivered(len(first.token_ids))
    ledger = cluster.backend._book._ledger
    siblings = cluster.backend._book._siblings
    assert ledger is not None and siblings is not None
    other_ledger = other._book._ledger
    assert other_ledger is not None

    def is_written() -> bool:
        row = other_ledger.find("req-1", tenant="t")
        return row is not None and row.record["phase"] == "delivering"

    await until(is_written)
    # As a killed process: nothing more is written, nobody answers, nothing is taken back.
    await siblings.close()
    ledger._store.leave = lambda owner: None  # type: ignore[union-attr,method-assign]
    await asyncio.to_thread(ledger.close)

    before = await record_of(other, "req-1")
    assert before["phase"] == "delivering" and before["owner"] == "unreachable"
    after = await other.cancel("req-1", tenant="t")
    assert after is not None and after["phase"] == "interrupted"
    assert after["interruption"]["reason"] == "gateway_lost"
    assert after["interruption"]["delivered_output_tokens_is"] == "lower_bound"
    assert after["interruption"]["delivered_output_tokens"] == len(first.token_ids)
    assert after["first_delta_sent"] is True
