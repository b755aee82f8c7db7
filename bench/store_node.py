"""The processes that ``kopir bench store`` measures: a store node, and indexes filled with a million blocks."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import psutil

from kvstore.core.directory import Directory, TierChange
from kvstore.core.eviction import LruPolicy
from kvstore.core.ids import BlockDigest, BlockHash
from kvstore.core.slab_index import HolderId, SlabIndex
from kvstore.net.host import new_incarnation

START_S, STOP_S, FILL_S = 60.0, 10.0, 240.0
PART = 1 << 15
MATCHES = 200


@contextmanager
def store_node(secret: bytes, *, block_bytes: int, num_blocks: int) -> Iterator[tuple[str, int]]:
    """Runs a store node in a process of its own; gives its address."""
    with _process(_serve_node, secret, block_bytes, num_blocks) as pipe:
        if not pipe.poll(START_S):
            raise TimeoutError("the store node does not start")
        yield pipe.recv()


def _serve_node(pipe: Connection, secret: bytes, block_bytes: int, num_blocks: int) -> None:
    from kvstore.store.host import StoreHost

    host = StoreHost(
        node="bench", incarnation=new_incarnation(), secret=secret, block_bytes=block_bytes, num_blocks=num_blocks
    )
    pipe.send(host.start("127.0.0.1"))
    pipe.recv()
    host.close()


def measure_directory(num_blocks: int, num_hashes: int) -> dict[str, float]:
    """Fills a directory in a process of its own.

    Returns: ``bytes_per_block`` by resident memory, ``match_s`` for ``num_hashes`` present hashes (median), ``fill_s``.
    """
    return _measure(_fill_directory, num_blocks, num_hashes)


def measure_index(num_blocks: int, num_hashes: int) -> dict[str, float]:
    """The same for the index of a slab; its bytes per block include the table in shared memory."""
    return _measure(_fill_index, num_blocks, num_hashes)


def _measure(target: Any, num_blocks: int, num_hashes: int) -> dict[str, float]:
    with _process(target, num_blocks, num_hashes) as pipe:
        if not pipe.poll(FILL_S):
            raise TimeoutError("filling takes too long")
        figures: dict[str, float] = pipe.recv()
        return figures


def _fill_directory(pipe: Connection, num_blocks: int, num_hashes: int) -> None:
    directory = Directory(lease_ns=1_000_000_000)
    directory.join("node", "life", sequence=0, now_ns=0)
    asked: list[BlockHash] = []
    before_bytes, started_s = _resident_bytes(), time.perf_counter()
    for part, start in enumerate(range(0, num_blocks, PART)):
        hashes = _random_hashes(min(PART, num_blocks - start))
        # One hash of each part per round, so that a match walks through the whole memory of the directory.
        asked += [BlockHash(bytes(one)) for one in hashes[: num_hashes * PART // num_blocks + 1]]
        directory.snapshot(
            "node", "life", sequence=0, part=part, is_last=False, changes=(TierChange("host", hashes, ()),), now_ns=0
        )
    del hashes
    fill_s = time.perf_counter() - started_s
    asked = asked[:num_hashes]
    figures = _figures(before_bytes, num_blocks, fill_s)
    assert len(asked) == num_hashes and len(directory) == num_blocks, (len(asked), len(directory))
    pipe.send(figures | {"match_s": _median_s(lambda: len(directory.match(asked)), num_hashes)})
    pipe.recv()


def _fill_index(pipe: Connection, num_blocks: int, num_hashes: int) -> None:
    before_bytes, started_s = _resident_bytes(), time.perf_counter()
    index = SlabIndex(num_blocks, policy=LruPolicy(num_blocks))
    writer, digest = HolderId("bench"), BlockDigest(bytes(16))
    asked: list[BlockHash] = []
    for start in range(0, num_blocks, PART):
        hashes = _random_hashes(min(PART, num_blocks - start))
        asked += [BlockHash(bytes(one)) for one in hashes[: num_hashes * PART // num_blocks + 1]]
        outcomes = index.reserve(hashes, writer=writer, deadline_ns=1)
        for block_hash, outcome in zip(hashes, outcomes, strict=True):
            index.commit(
                block_hash, slot=outcome.slot, generation=outcome.generation, digest=digest, writer=writer
            )  # fmt: skip
        index.expire(2)
    del hashes, outcomes, block_hash, outcome
    fill_s = time.perf_counter() - started_s
    asked = asked[:num_hashes]
    reader = HolderId("reader")

    def match() -> int:
        found = index.match(asked, reader=reader, now_ns=3, deadline_ns=4)
        assert found.lease_id is not None
        index.release(found.lease_id, reader=reader)
        return len(found.blocks)

    figures = _figures(before_bytes, num_blocks, fill_s)
    pipe.send(figures | {"match_s": _median_s(match, num_hashes)})
    pipe.recv()


def _figures(before_bytes: int, num_blocks: int, fill_s: float) -> dict[str, float]:
    gc.collect()
    return {"bytes_per_block": (_resident_bytes() - before_bytes) / num_blocks, "fill_s": fill_s}


def _median_s(match: Any, expected: int) -> float:
    samples = []
    for _ in range(MATCHES):
        started_s = time.perf_counter()
        found = match()
        samples.append(time.perf_counter() - started_s)
        assert found == expected, (found, expected)
    return median(samples)


def _random_hashes(count: int) -> list[BlockHash]:
    raw = os.urandom(32 * count)
    return [BlockHash(raw[32 * n : 32 * n + 32]) for n in range(count)]


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


@contextmanager
def _process(target: Any, *arguments: Any) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        try:
            ours.send(None)
        except OSError:
            pass
        process.join(STOP_S)
        if process.is_alive():
            process.kill()
            process.join(STOP_S)
