"""``kopir bench store``: put, get and exists of KV blocks, beside Mooncake Store on this host; memory of the indexes.

A put ends when the blocks can be seen by everybody; a get gives verified, leased views of the blocks (``get``) or a
verified copy (``get_copy``). Client and node are two processes, as a worker and its node are. Mooncake runs twice: over
TCP loopback from another process's segment, and in its best setting for one host: its own segment, copied by memcpy
(``MC_STORE_MEMCPY=1``); always with its batched calls. Neither verifies. All take turns, and who does not measure is
stopped. Memory is walked through over a working set that no cache holds.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.peers.drive import PeerProgram, mooncake_store
from bench.report import Report, Row, Target, finish, make_target, make_unmeasured
from bench.store_node import measure_directory, measure_index, store_node
from cluster.cli.common import write
from kvstore.core.ids import BlockHash
from kvstore.digest import block_digest
from kvstore.errors import EnvironmentProblem
from kvstore.net.handshake import PeerInfo
from kvstore.net.host import host_identity, new_incarnation
from kvstore.store.client import PutBlock, StoreClient

KIB, MIB = 1 << 10, 1 << 20
KV_BLOCK_BYTES = 368_640
NUM_BLOCKS = 32
SHAPES = ((256 * KIB, NUM_BLOCKS), (KV_BLOCK_BYTES, NUM_BLOCKS))
POOL_BYTES = 256 * MIB
SLAB_BYTES = 512 * MIB
CALL_DEADLINE_S = 10.0
SINGLE_EXISTS, SINGLE_HITS = 200, 300
INDEXED_BLOCKS, QUICK_INDEXED_BLOCKS = 1_000_000, 100_000
MATCHED_HASHES = 1_000
PEERS = ("tcp", "best")
VERSUS = {"tcp": 3.0, "best": 1.3}
HIT_US, BYTES_PER_BLOCK, MATCH_MS = 100.0, 300.0, 2.0

Sample = dict[str, float]


def run_store(*, quick: bool, json_path: Path | None, check: bool, seed: int, has_peers: bool) -> int:
    """Measures, prints tables, writes JSON. Returns the exit status."""
    report = Report.start("store", seed=seed)
    repeats = 7 if quick else 25
    for block_bytes, num_blocks in SHAPES:
        write(f"{num_blocks} blocks of {block_bytes} bytes ...")
        rows, targets = asyncio.run(
            _measure_blocks(block_bytes, num_blocks, repeats=repeats, seed=seed, has_peers=has_peers)
        )
        report.rows += rows
        report.targets += targets
    write("indexes ...")
    rows, targets = _measure_indexes(QUICK_INDEXED_BLOCKS if quick else INDEXED_BLOCKS)
    report.rows += rows
    report.targets += targets
    columns = [
        "backend",
        "block_bytes",
        "num_blocks",
        "put_ms",
        "get_ms",
        "get_copy_ms",
        "exists_us",
        "exists_batch_us",
    ]
    report.show("Blocks", columns, [row for row in report.rows if row["kind"] == "blocks"])
    report.show("One block, verified", ["block_bytes", "hit_us", "hit_us_p99", "view_us"], _of(report.rows, "hit"))
    columns = ["index", "blocks", "bytes_per_block", "match_1000_ms", "fill_s"]
    report.show("Indexes", columns, _of(report.rows, "index"))
    return finish(report, json_path=json_path, check=check)


def _of(rows: list[Row], kind: str) -> list[Row]:
    return [row for row in rows if row["kind"] == kind]


# --- blocks -------------------------------------------------------------------------------------------------


class OurStore:
    """Our client beside its node; each step works on blocks that were never used before."""

    def __init__(self, client: StoreClient, block_bytes: int, seed: int) -> None:
        self._client = client
        self._block_bytes = block_bytes
        stride = -(-block_bytes // 4096) * 4096
        self._per_pool = POOL_BYTES // stride
        source = np.frombuffer(np.random.default_rng(seed).bytes(POOL_BYTES), np.uint8).copy()
        target = np.ones(POOL_BYTES, np.uint8)
        starts = range(0, self._per_pool * stride, stride)
        self._source = [source.data[start : start + block_bytes] for start in starts]
        self._target = [target.data[start : start + block_bytes] for start in starts]
        self._next = 0

    def _take(self, num_blocks: int) -> list[int]:
        numbers = [(self._next + n) % self._per_pool for n in range(num_blocks)]
        self._next += num_blocks
        return numbers

    async def blocks(self, num_blocks: int) -> Sample:
        """Puts new blocks, gets them as verified views and as verified copies, asks for them. Returns seconds."""
        numbers = self._take(num_blocks)
        hashes = [BlockHash(secrets.token_bytes(32)) for _ in numbers]
        puts = [PutBlock(block_hash, self._source[n]) for block_hash, n in zip(hashes, numbers, strict=True)]
        times = [time.perf_counter()]
        stored = await self._client.put_blocks(puts)
        times.append(time.perf_counter())
        await self._get_views(hashes)
        times.append(time.perf_counter())
        loaded = await self._client.load_blocks(hashes, lambda n: self._target[numbers[n]])
        times.append(time.perf_counter())
        found = self._client.exist(hashes)
        times.append(time.perf_counter())
        if stored.stored != num_blocks or loaded.num_loaded != num_blocks or not all(found):
            raise EnvironmentProblem(f"stored {stored}, loaded {loaded}")
        if any(self._source[n] != self._target[n] for n in (numbers[0], numbers[-1])):
            raise EnvironmentProblem("the store returned other bytes")
        names = ("put_s", "get_s", "get_copy_s", "exists_batch_s")
        sample = {name: times[n + 1] - times[n] for n, name in enumerate(names)}
        singles = []
        for n in range(SINGLE_EXISTS):
            started_s = time.perf_counter()
            self._client.exist(hashes[n % num_blocks : n % num_blocks + 1])
            singles.append(time.perf_counter() - started_s)
        return sample | {"exists_s": median(singles)}

    async def _get_views(self, hashes: list[BlockHash]) -> None:
        prefix = await self._client.match(hashes)
        if prefix is None:
            raise EnvironmentProblem("a block that was put does not match")
        with prefix:
            right = [prefix.verify(n, prefix.view(n)) for n in range(len(prefix))]
            if len(right) != len(hashes) or not all(right) or not prefix.stands():
                raise EnvironmentProblem("a block that was put has other bytes")

    async def hits(self, count: int) -> Row:
        """Gets one block after the other, each verified: as a copy, and as a leased view. Returns a row."""
        numbers = self._take(NUM_BLOCKS)
        hashes = [BlockHash(secrets.token_bytes(32)) for _ in numbers]
        puts = [PutBlock(block_hash, self._source[n]) for block_hash, n in zip(hashes, numbers, strict=True)]
        await self._client.put_blocks(puts)
        copies, views = [], []
        for n in range(count):
            one = [hashes[n % NUM_BLOCKS]]
            target = self._target[(self._next + n) % self._per_pool]
            started_s = time.perf_counter()
            loaded = await self._client.load_blocks(one, lambda _, target=target: target)  # type: ignore[misc]
            copies.append(time.perf_counter() - started_s)
            if loaded.num_loaded != 1:
                raise EnvironmentProblem(f"a block that was put is not loaded: {loaded}")
        for n in range(count):
            started_s = time.perf_counter()
            await self._get_views([hashes[n % NUM_BLOCKS]])
            views.append(time.perf_counter() - started_s)
        copies.sort()
        return {
            "kind": "hit",
            "block_bytes": self._block_bytes,
            "hit_us": round(median(copies) * 1e6, 2),
            "hit_us_p99": round(copies[len(copies) * 99 // 100] * 1e6, 2),
            "view_us": round(median(views) * 1e6, 2),
            "copy_and_digest_us": round(self._bare_us(count), 2),
        }

    def _bare_us(self, count: int) -> float:
        """Returns what copying and digesting one block takes without any store."""
        samples = []
        for n in range(count):
            source, target = self._source[n % self._per_pool], self._target[n % self._per_pool]
            started_s = time.perf_counter()
            target[:] = source
            block_digest(target)
            samples.append(time.perf_counter() - started_s)
        return median(samples) * 1e6


async def _measure_blocks(
    block_bytes: int, num_blocks: int, *, repeats: int, seed: int, has_peers: bool
) -> tuple[list[Row], list[Target]]:
    secret = secrets.token_bytes(32)
    me = PeerInfo(
        role="bench", peer_id="bench", incarnation=new_incarnation(), pid=os.getpid(), host_identity=host_identity()
    )
    with ExitStack() as stack:
        address = stack.enter_context(
            store_node(secret, block_bytes=block_bytes, num_blocks=SLAB_BYTES // block_bytes)
        )  # fmt: skip
        client = StoreClient(me=me, secret=secret, block_bytes=block_bytes, call_deadline_s=CALL_DEADLINE_S)
        client.start(*address)
        try:
            if not await client.wait_connected(CALL_DEADLINE_S):
                raise EnvironmentProblem(f"the store node does not answer: {client.refusal}")
            ours = OurStore(client, block_bytes, seed)
            peers, reasons = _start_peers(stack) if has_peers else ({}, dict.fromkeys(PEERS, "needs --peers"))
            samples = await _take_turns(ours, peers, block_bytes, num_blocks, repeats)
            rows = [_row(name, block_bytes, num_blocks, taken) for name, taken in samples.items()]
            targets = _versus(block_bytes, num_blocks, samples, reasons)
            if block_bytes == KV_BLOCK_BYTES:
                with _all_stopped(peers):
                    rows.append(await ours.hits(SINGLE_HITS))
                hit_us = rows[-1]["hit_us"]
                targets.append(
                    make_target(
                        "host_hit_368640_verified", ours=hit_us, reference=HIT_US, unit="us", at_least=1.0,
                        smaller_is_better=True,
                    )
                )  # fmt: skip
        finally:
            await client.close()
    return rows, targets


def _start_peers(stack: ExitStack) -> tuple[dict[str, PeerProgram], dict[str, str]]:
    """Returns the peers that run, and why the others do not."""
    peers, reasons = {}, {}
    for name in PEERS:
        try:
            peers[name] = stack.enter_context(mooncake_store(name))
        except EnvironmentProblem as error:
            reasons[name] = str(error)
    return peers, reasons


async def _take_turns(
    ours: OurStore, peers: dict[str, PeerProgram], block_bytes: int, num_blocks: int, repeats: int
) -> dict[str, list[Sample]]:
    samples: dict[str, list[Sample]] = {"kopir": [], **{name: [] for name in peers}}
    # The first round of each is not counted: memory is touched for the first time.
    for turn in range(repeats + 1):
        with _all_stopped(peers):
            sample = await ours.blocks(num_blocks)
        if turn:
            samples["kopir"].append(sample)
        for name, peer in peers.items():
            with _all_stopped({other: program for other, program in peers.items() if other != name}):
                # Once unmeasured: the program has just been stopped, and should not pay for that.
                if turn:
                    peer.ask({"do": "exists", "num_keys": num_blocks})
                moved = peer.ask({"do": "blocks", "block_bytes": block_bytes, "num_blocks": num_blocks})
                asked = peer.ask({"do": "exists", "num_keys": num_blocks})
            if turn:
                samples[name].append(
                    {**moved, "exists_s": asked["single_s"], "exists_batch_s": asked["batch_s"]}
                )  # fmt: skip
    return samples


@contextmanager
def _all_stopped(peers: dict[str, PeerProgram]) -> Iterator[None]:
    with ExitStack() as stack:
        for peer in peers.values():
            stack.enter_context(peer.stopped())
        yield


def _medians(samples: list[Sample]) -> Sample:
    return {name: median(sample[name] for sample in samples) for name in samples[0]}


def _row(name: str, block_bytes: int, num_blocks: int, samples: list[Sample]) -> Row:
    seconds = _medians(samples)
    row: Row = {
        "kind": "blocks",
        "backend": "kopir" if name == "kopir" else f"mooncake-{name}",
        "block_bytes": block_bytes,
        "num_blocks": num_blocks,
        "verified": name == "kopir",
    }
    for key in ("put_s", "get_s", "get_copy_s"):
        if key in seconds:
            row[key.replace("_s", "_ms")] = round(seconds[key] * 1e3, 4)
    row["exists_us"] = round(seconds["exists_s"] * 1e6, 2)
    row["exists_batch_us"] = round(seconds["exists_batch_s"] * 1e6, 2)
    return row


def _versus(
    block_bytes: int, num_blocks: int, samples: dict[str, list[Sample]], reasons: dict[str, str]
) -> list[Target]:
    """Returns the targets of one shape against both settings of Mooncake."""
    ours = _medians(samples["kopir"])
    aims = [(f"{do}_{num_blocks}x{block_bytes}_vs_mooncake_{name}", f"{do}_s", name, VERSUS[name], "ms", 1e3)
            for do in ("put", "get") for name in PEERS]  # fmt: skip
    if block_bytes == KV_BLOCK_BYTES:
        aims.append(("exists_single_vs_mooncake", "exists_s", "best", 2.0, "us", 1e6))
        aims.append((f"exists_batch_{num_blocks}_vs_mooncake", "exists_batch_s", "best", 1.0, "us", 1e6))
    targets = []
    for target_id, key, name, at_least, unit, scale in aims:
        if name not in samples:
            reason = reasons.get(name, "not measured")
            targets.append(make_unmeasured(target_id, unit=unit, at_least=at_least, reason=reason))
            continue
        targets.append(
            make_target(
                target_id, ours=ours[key] * scale, reference=_medians(samples[name])[key] * scale, unit=unit,
                at_least=at_least, smaller_is_better=True,
            )
        )  # fmt: skip
    return targets


# --- indexes ------------------------------------------------------------------------------------------------


def _measure_indexes(num_blocks: int) -> tuple[list[Row], list[Target]]:
    rows: list[Row] = []
    targets: list[Target] = []
    for name, measure in (("directory", measure_directory), ("slab", measure_index)):
        figures = measure(num_blocks, MATCHED_HASHES)
        rows.append(
            {
                "kind": "index",
                "index": name,
                "blocks": num_blocks,
                "bytes_per_block": round(figures["bytes_per_block"], 1),
                "match_1000_ms": round(figures["match_s"] * 1e3, 4),
                "fill_s": round(figures["fill_s"], 2),
            }
        )
        aims: list[tuple[str, Any, float, str]] = [
            (f"{name}_bytes_per_block", figures["bytes_per_block"], BYTES_PER_BLOCK, "bytes")
        ]
        if name == "directory":
            aims.append(("directory_match_1000_hashes", figures["match_s"] * 1e3, MATCH_MS, "ms"))
        for target_id, ours, reference, unit in aims:
            if num_blocks != INDEXED_BLOCKS:
                reason = f"measured with {num_blocks} blocks only (--quick)"
                targets.append(make_unmeasured(target_id, unit=unit, at_least=1.0, reason=reason))
            else:
                targets.append(
                    make_target(
                        target_id, ours=ours, reference=reference, unit=unit, at_least=1.0, smaller_is_better=True
                    )
                )  # fmt: skip
    return rows, targets
