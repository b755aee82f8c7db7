"""The layout checker in the product: on joins, on landing in debug mode, and in the ingress's metrics."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from mini_cluster import SECRET, MiniCluster, collect, decode_address, make_spec, until

from cluster.ingress.api.errors import ApiError
from kernels.pattern import block_keys, expected_bits
from kvstore.errors import LayoutRefused
from kvstore.store.looker import look_at
from workers.kv_pool import KvPool
from workers.layout_proof import LayoutProof
from workers.prefill import PrefillSide

MakeCluster = Callable[..., MiniCluster]


class ForeignOrder(LayoutProof):
    """A worker whose engine keeps all heads of a token together and whose fingerprint does not say so."""

    def probe_block(self, challenge: bytes, *, writer: str, reader: str) -> KvPool:
        pool = KvPool(self.layout, 1)
        theirs = replace(self.layout, token_order="NHD")
        key = block_keys(theirs, self._seed(challenge, writer, reader), [0])[0]
        theirs.logical_view(pool.bytes_view[0])[...] = expected_bits(theirs, key)
        return pool


class SilentBits(LayoutProof):
    """A worker on whose path a single bit is lost."""

    def probe_block(self, challenge: bytes, *, writer: str, reader: str) -> KvPool:
        pool = super().probe_block(challenge, writer=writer, reader=reader)
        pool.bytes_view[0, 1234] ^= np.uint8(4)
        return pool


def metric(cluster: MiniCluster, name: str, **labels: str) -> float:
    return cluster.registry.get_sample_value(name, labels) or 0.0


@pytest.mark.parametrize(("liar", "kind"), [(ForeignOrder, "axis_order"), (SilentBits, "damaged")])
async def test_a_worker_that_writes_other_blocks_is_refused(
    make_cluster: MakeCluster, liar: type[LayoutProof], kind: str
) -> None:
    """Equal fingerprints are not believed: the probe block that came through the transport is read and refused."""
    cluster = make_cluster()
    await cluster.start("prefill", "decode")
    await until(lambda: metric(cluster, "kopir_layout_checks_total") >= 1)
    prefill = cluster.worker("prefill-0")
    decode = cluster.workers["decode-0"][1]
    honest = prefill._proof
    identity = replace(prefill._dialer._identity, proof=liar(honest.layout, honest._secret))
    prefill._dialer._identity = identity
    prefill._links.run(_forget(prefill, decode.incarnation), deadline_s=5.0)
    with pytest.raises(LayoutRefused, match=kind) as caught:
        prefill.warm_decode_peer(decode_address(decode))
    assert pickle.loads(pickle.dumps(caught.value)).violations == caught.value.violations
    await until(lambda: metric(cluster, "kopir_layout_violations_total", kind=kind) >= 1)
    prefill._dialer._identity = replace(identity, proof=honest)
    prefill.warm_decode_peer(decode_address(decode))


async def _forget(prefill: Any, incarnation: str) -> None:
    prefill._dialer.forget(incarnation)


def test_an_answer_to_another_challenge_is_no_answer(make_cluster: MakeCluster) -> None:
    """Another challenge, reader, writer or secret gives another pattern."""
    layout = make_cluster().layout
    mine, other = LayoutProof(layout, b"one"), LayoutProof(layout, b"two")
    challenge = mine.challenge()
    block = mine.probe_block(challenge, writer="a", reader="b").bytes_view[0]
    assert mine.check_probe(block, challenge, writer="a", reader="b").is_clean
    for proof, asked, writer, reader in (
        (mine, mine.challenge(), "a", "b"),
        (mine, challenge, "b", "a"),
        (mine, challenge, "a", "c"),
        (other, challenge, "a", "b"),
    ):
        assert not proof.check_probe(block, asked, writer=writer, reader=reader).is_clean
    assert mine.counters["layout_checks"] == 4 and other.counters["layout_violations.damaged"] == 1


async def test_full_verification_accepts_what_the_engine_writes(make_cluster: MakeCluster) -> None:
    """Honest blocks, a partly filled last one among them, are checked and pass."""
    cluster = make_cluster()
    await cluster.start("prefill", "decode", verify="full")
    spec = make_spec(num_prompt=41)
    tokens, end = await collect(await cluster.submit(spec))
    assert (tokens, end) == (cluster.golden(spec), "length")
    await until(lambda: metric(cluster, "kopir_layout_checks_total") >= 4)
    counters = (await cluster.statuses())["decode-0"].counters
    assert counters["layout_checks"] == 4 and not any(name.startswith("layout_violations") for name in counters)


@pytest.mark.parametrize("kind", ["not_finite", "tail_touched"])
async def test_full_verification_stops_blocks_whose_digest_is_right(
    make_cluster: MakeCluster, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A NaN or a touched tail that was there before the digest was taken ends the attempt; no token comes of it."""
    push = PrefillSide._push

    def push_damaged(self: PrefillSide, job: Any, stop: int) -> None:
        # The last block holds one token of the prompt: the rest of it is tail.
        token, value = (0, float("nan")) if kind == "not_finite" else (5, 1.0)
        self._memory.tensor[job.block_table[2], 1, 0, 1, token, 3] = torch.tensor(value)
        push(self, job, stop)

    monkeypatch.setattr(PrefillSide, "_push", push_damaged)
    # Every attempt would be damaged alike: one is enough, and its figures are exact.
    cluster = make_cluster(**{"attempts.max_attempts": 1})
    await cluster.start("prefill", "decode", verify="full")
    with pytest.raises(ApiError):
        await collect(await cluster.submit(make_spec(num_prompt=33)))
    await until(lambda: metric(cluster, "kopir_layout_violations_total", kind=kind) >= 1)
    assert (await cluster.statuses())["decode-0"].counters["blocks_corrupt"] == 1
    await cluster.at_rest()


@pytest.mark.parametrize("device_cache", [True, False])
async def test_full_verification_looks_at_what_comes_from_a_cache(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, device_cache: bool
) -> None:
    """A cached block of right digest that cannot be KV is not used but computed anew; ``store verify`` names others."""
    push = PrefillSide._push

    def push_damaged(self: PrefillSide, job: Any, stop: int) -> None:
        for index in (0, 1):
            self._memory.tensor[job.block_table[index], 1, 0, 1, 5, 3] = torch.tensor(float("nan"))
        push(self, job, stop)

    cluster = make_cluster(**{"attempts.max_attempts": 1})
    await cluster.start("prefill", "decode", verify="full", device_cache=device_cache)
    spec = make_spec(num_prompt=41)
    with monkeypatch.context() as patched:
        patched.setattr(PrefillSide, "_push", push_damaged)
        with pytest.raises(ApiError):
            await collect(await cluster.submit(spec))
    await cluster.at_rest()
    generation = await cluster.submit(spec, "req-2")
    assert await collect(generation) == (cluster.golden(spec), "length")
    assert generation.cached_tokens == 0
    counters = (await cluster.statuses())["prefill-0"].counters
    # The first block is looked at in the pool, then in the store.
    num_looks = 1 + device_cache
    assert (counters["layout_checks"], counters["layout_violations.not_finite"]) == (num_looks, num_looks)
    assert counters["device_corrupt_blocks"] == device_cache
    await cluster.at_rest()

    assert cluster.store is not None
    async with look_at(*cluster._store_address, secret=SECRET) as looker:
        parts = [part async for part in looker.verify("host")]
    # Two of the prompt, one of the answer.
    assert [(part.num_checked, part.num_content) for part in parts if part.num_checked] == [(3, 3)]
    (found,) = [violation for part in parts for violation in part.violations]
    assert (found.kind, found.layer, found.kv, found.kv_head, found.token) == ("not_finite", 1, 0, 1, 5)
    before = metric(cluster, "kopir_layout_violations_total", kind="not_finite")
    stat = cluster.store.status()
    for _ in range(2):
        cluster.backend.on_store_status(stat["incarnation"], stat["counters"])
    assert metric(cluster, "kopir_layout_violations_total", kind="not_finite") == before + 1
