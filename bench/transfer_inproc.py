"""Throughput of the in-process transport: what bookkeeping, copy and digest cost without any other process."""

from __future__ import annotations

import time
from statistics import median

from bench.report import Row
from bench.transfer_peer import DEADLINE_S, Pool
from kvstore.digest import block_digest
from kvstore.transport.base import BlockReceive, BlockSend, TransferResult
from kvstore.transport.inproc import InprocHub, InprocTransport

POOL_BYTES = 256 << 20


def measure_inproc(sizes: tuple[int, ...], *, batch_bytes: int, repeats: int) -> list[Row]:
    """Returns one row per block size, verified and not; batches of ``batch_bytes``, walking through 256 MiB."""
    hub = InprocHub(time.monotonic)
    near, far = InprocTransport(hub), InprocTransport(hub)
    near.connect("far", far.address(), same_host=True, deadline_s=DEADLINE_S)
    far.connect("near", near.address(), same_host=True, deadline_s=DEADLINE_S)
    source, target = Pool(POOL_BYTES), Pool(POOL_BYTES)
    source.fill(1)
    rows: list[Row] = []
    next_tag = 0
    for block_bytes in sizes:
        num_blocks = max(1, batch_bytes // block_bytes)
        for is_verified in (False, True):
            samples = []
            for _ in range(repeats):
                blocks, places = source.take(num_blocks, block_bytes), target.take(num_blocks, block_bytes)
                digests = [block_digest(block) if is_verified else None for block in blocks]
                tags = range(next_tag, next_tag + num_blocks)
                next_tag += num_blocks
                before = time.perf_counter()
                sends = [BlockSend(tag, memoryview(block)) for tag, block in zip(tags, blocks, strict=True)]
                near.push("far", sends, deadline_s=DEADLINE_S)
                receives = [
                    BlockReceive(tag, memoryview(place), digest)
                    for tag, place, digest in zip(tags, places, digests, strict=True)
                ]
                landed = far.receive("near", receives, deadline_s=DEADLINE_S)
                hub.run()
                samples.append(time.perf_counter() - before)
                assert set(landed.result()) == {TransferResult.OK}
            seconds, size = median(samples), num_blocks * block_bytes
            rows.append(
                {
                    "kind": "inproc",
                    "backend": "inproc",
                    "block_bytes": block_bytes,
                    "num_blocks": num_blocks,
                    "verified": is_verified,
                    "ms": round(seconds * 1e3, 4),
                    "gb_per_s": round(size / seconds / 1e9, 3),
                }
            )
    near.close()
    far.close()
    return rows
