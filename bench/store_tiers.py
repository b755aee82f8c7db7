"""``kopir bench tiers``: what the pools, the host slab and the disk below it are worth, and what they cost.

Three parts of one run: a long prompt cold, from the host tier and, after a restart of everything, from the disk (past
the page cache), with pools that keep nothing, and in a third life from pools that do, the device tier; the index of a
full 4 GiB disk tier recovered from its headers; and the disk itself, block by block, through the page cache and past
it, which is why the product reads and writes the way it does. ``bench.load_choice`` adds what deadlines on loads are
worth.
"""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from bench.clusters import kopir_cluster
from bench.load_choice import load_choice
from bench.report import Report, finish, make_target, quantile
from kvstore.core.disk_slots import DiskBlock, DiskIndex
from kvstore.core.eviction import LruPolicy
from kvstore.core.ids import BlockDigest, BlockHash, TenantId
from kvstore.core.quota import TenantBook
from kvstore.store.disk.file import FILE_NAME, open_disk
from kvstore.store.disk.file_io import FileIo, page_buffer
from kvstore.store.disk.layout import (
    header_offset,
    num_slots_in,
    pack_header,
    read_superblock,
    slots_start,
    stride_bytes,
)

MIB = 1 << 20
GIB = 1 << 30
PROMPT_TOKENS = 2048
BLOCK_BYTES = 368_640
BLOCK_TOKENS = 16
SPANS = ("lookup", "compute", "hand_off")
WARM_TIERS = ("device", "host", "disk")
HOST_RATIO = 15.0
"""The device tier must do what the host tier below it must."""
DISK_RATIO = 8.0
RECOVERY_BYTES = 4 * GIB
RECOVERY_LIMIT_S = 2.0
SETTLE_S = 60.0
REQUEST_DEADLINE_S = 120.0
WARM_UP_TOKENS = (PROMPT_TOKENS, 256)
QUICK_WARM_UP_TOKENS = (512,)
"""On a busy machine a cold long prompt takes tens of seconds."""
POOL_BLOCKS = 160
"""Little more than one prompt."""


def run_tiers(*, quick: bool, json_path: Path | None, check: bool, seed: int, folder: Path | None) -> int:
    """Runs the bench; returns the exit status. ``folder``: where the disk tier lies; default: temporary files."""
    report = Report.start("tiers", seed=seed)
    with tempfile.TemporaryDirectory(prefix="kopir-bench-", dir=folder) as name:
        place = Path(name)
        report.rows += _disk_rows(place, num_blocks=64 if quick else 256)
        report.rows += _recovery_rows(place, repetitions=3 if quick else 5)
        report.rows += _ttft_rows(place, seed=seed, num_prompts=2 if quick else 5, quick=quick)
    rows, targets = load_choice(seed)
    report.rows += rows
    report.targets += targets
    medians = {row["tier"]: row["ttft_ms_p50"] for row in report.rows if row["what"] == "ttft"}
    for tier, at_least in (("device", HOST_RATIO), ("host", HOST_RATIO), ("disk", DISK_RATIO)):
        report.targets.append(
            make_target(
                f"ttft_2048_{tier}_vs_cold", ours=medians[tier], reference=medians["cold"], unit="ms",
                at_least=at_least, smaller_is_better=True,
            )
        )  # fmt: skip
    tokens = {row["tier"]: row["tokens_of_tier_min"] for row in report.rows if row["what"] == "ttft"}
    for tier in WARM_TIERS:
        # A prompt that was computed again in part is no hit, however fast; a miss altogether counts as one token.
        report.targets.append(
            make_target(
                f"tokens_2048_from_{tier}", ours=max(1, tokens[tier]), reference=PROMPT_TOKENS - BLOCK_TOKENS,
                unit="tokens", at_least=1.0,
            )
        )  # fmt: skip
    recovery_s = next(row["recovery_s_p50"] for row in report.rows if row["what"] == "recovery")
    report.targets.append(
        make_target(
            "disk_4GiB_recovered_s", ours=recovery_s, reference=RECOVERY_LIMIT_S, unit="s", at_least=1.0,
            smaller_is_better=True,
        )
    )  # fmt: skip
    ttft = [row for row in report.rows if row["what"] == "ttft"]
    columns = ["tier", "prompt_tokens", "tokens_of_tier_min", "ttft_ms_p50", "ttft_ms_max"]
    report.show("Time to first token", [*columns, *(f"{name}_ms_p50" for name in SPANS)], ttft)
    report.show("Load or recompute, by arithmetic", ["kind", "way", "prompts", "total_s", "vs_none"], rows)
    disk = [row for row in report.rows if row["what"] == "disk"]
    report.show("Disk, one block at a time", ["op", "path", "threads", "gb_per_s"], disk)
    recovery = [row for row in report.rows if row["what"] == "recovery"]
    report.show("Recovery of the index", ["bytes", "blocks", "recovery_s_p50", "recovery_s_max"], recovery)
    return finish(report, json_path=json_path, check=check)


# --- time to first token ----------------------------------------------------------------------------------------------


def _ttft_rows(place: Path, *, seed: int, num_prompts: int, quick: bool) -> list[dict[str, Any]]:
    """Times prompts cold and from the host tier, restarts everything, and times them from the disk, then from pools."""
    numbers = random.Random(seed)
    prompts = [[numbers.randrange(100, 48_000) for _ in range(PROMPT_TOKENS)] for _ in range(num_prompts)]
    blocks = num_prompts * (PROMPT_TOKENS // BLOCK_TOKENS)
    warm_up = QUICK_WARM_UP_TOKENS if quick else WARM_UP_TOKENS
    warm_up_blocks = sum(warm_up) // BLOCK_TOKENS
    size = (blocks + 2 * warm_up_blocks + 64) * (BLOCK_BYTES + 8192)
    settings = [
        f"kv.disk_path={place / 'tier'}",
        f"kv.disk_bytes={size}",
        f"kv.host_bytes={size}",
        f"workers.prefill.pool_blocks={POOL_BLOCKS}",
        f"ledger.url=sqlite:///{place / 'kopir.db'}",
    ]
    samples: dict[str, list[dict[str, Any]]] = {"cold": [], "device": [], "host": [], "disk": []}
    with _client([*settings, "kv.device_cache=false"]) as client:
        _warm_up(client, numbers, warm_up)
        samples["cold"] = [_request(client, prompt) for prompt in prompts]
        _wait_on_disk(client, blocks + warm_up_blocks)
        samples["host"] = [_request(client, prompt) for prompt in prompts]
    with _client([*settings, "kv.device_cache=false"]) as client:
        _warm_up(client, numbers, warm_up)
        samples["disk"] = [_request(client, prompt) for prompt in prompts]
    with _client([*settings, "kv.device_cache=true"]) as client:
        _warm_up(client, numbers, warm_up)
        for prompt in prompts:
            # From wherever it is found; then it is in the pools.
            _request(client, prompt)
            _wait_idle(client)
            samples["device"].append(_request(client, prompt))
    for tier in WARM_TIERS:
        for cold, warm in zip(samples["cold"], samples[tier], strict=True):
            assert warm["text"] == cold["text"], f"another answer from the {tier} tier"
    return [_ttft_row(tier, found) for tier, found in samples.items()]


def _ttft_row(tier: str, samples: list[dict[str, Any]]) -> dict[str, Any]:
    times = [sample["ttft_ms"] for sample in samples]
    return {
        "what": "ttft",
        "tier": tier,
        "prompt_tokens": PROMPT_TOKENS,
        "requests": len(samples),
        "cached_tokens_min": min(sum(sample["by_tier"].values()) for sample in samples),
        "tokens_of_tier_min": min(sample["by_tier"].get(tier, 0) for sample in samples),
        "ttft_ms_p50": quantile(times, 0.5),
        "ttft_ms_max": max(times),
        **{f"{name}_ms_p50": quantile([sample[f"{name}_ms"] for sample in samples], 0.5) for name in SPANS},
    }


@contextlib.contextmanager
def _client(settings: list[str]) -> Iterator[httpx.Client]:
    with (
        kopir_cluster(settings) as cluster,
        httpx.Client(base_url=cluster.url, timeout=REQUEST_DEADLINE_S, trust_env=False) as client,
    ):
        yield client


def _warm_up(client: httpx.Client, numbers: random.Random, sizes: Sequence[int]) -> None:
    """Prompts of another kind: pages, links and caches of the processes, and what a prefill takes."""
    for num_tokens in sizes:
        _request(client, [numbers.randrange(100, 48_000) for _ in range(num_tokens)])


def _request(client: httpx.Client, prompt: list[int]) -> dict[str, Any]:
    body = {"model": _model(client), "prompt": prompt, "max_tokens": 8, "temperature": 0, "stream": True}
    started = time.perf_counter()
    first_s, data = None, b""
    with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        for piece in response.iter_bytes():
            first_s = first_s or time.perf_counter() - started
            data += piece
    assert first_s is not None and b"[DONE]" in data, data[-500:]
    record = client.get(f"/v1/requests/{response.headers['x-request-id']}").json()
    events = {event["event"]: event for event in record["events"]}
    return {
        "ttft_ms": first_s * 1e3,
        "text": _text(data),
        "by_tier": events["prefill_began"]["cached_by_tier"],
        **{f"{name}_ms": events["prefill_ended"]["spans_ns"][name] / 1e6 for name in SPANS},
    }


def _text(data: bytes) -> str:
    import json

    events = [part[6:] for part in data.decode().split("\n\n") if part.startswith("data: {")]
    choices = [choice for event in events for choice in json.loads(event).get("choices", ())]
    return "".join(choice["text"] for choice in choices)


def _model(client: httpx.Client) -> str:
    return str(client.get("/v1/models").json()["data"][0]["id"])


def _wait_idle(client: httpx.Client) -> None:
    """Waits until no worker holds a block: what is measured next must not share the machine with copies."""
    end_s = time.monotonic() + SETTLE_S
    while time.monotonic() < end_s:
        workers = client.get("/internal/status").json()["workers"]
        if not any(worker["used_blocks"] or worker["running"] for worker in workers):
            return
        time.sleep(0.05)
    raise AssertionError(f"not idle within {SETTLE_S} s: {workers}")


def _wait_on_disk(client: httpx.Client, blocks: int) -> None:
    """Waits until so many blocks are written down: what is measured next must not share the disk with writes."""
    end_s = time.monotonic() + SETTLE_S
    while time.monotonic() < end_s:
        tiers = client.get("/internal/status").json()["store"][0]["tiers"]
        if next(tier["used_blocks"] for tier in tiers if tier["name"] == "disk") >= blocks:
            return
        time.sleep(0.1)
    raise AssertionError(f"not {blocks} blocks on the disk within {SETTLE_S} s: {tiers}")


# --- recovery ---------------------------------------------------------------------------------------------------------


def _recovery_rows(place: Path, *, repetitions: int) -> list[dict[str, Any]]:
    """Fills the headers of a 4 GiB tier, then opens it and builds its index, several times."""
    folder = place / "recovery"
    num_slots = num_slots_in(RECOVERY_BYTES, BLOCK_BYTES)
    open_disk(folder, block_bytes=BLOCK_BYTES, num_slots=num_slots).close()
    path = folder / FILE_NAME
    with path.open("r+b") as file:
        superblock = read_superblock(file.read(4096))
        numbers = random.Random(0)
        headers = b"".join(
            pack_header(
                DiskBlock(
                    slot, slot + 1, BlockHash(numbers.randbytes(32)), BlockDigest(numbers.randbytes(16)), TenantId("")
                ),
                store_id=superblock.store_id,
                block_bytes=BLOCK_BYTES,
            )
            for slot in range(num_slots)
        )
        file.seek(header_offset(0))
        file.write(headers)
    times = [_recover(folder, num_slots) for _ in range(repetitions)]
    path.unlink()
    return [
        {
            "what": "recovery",
            "bytes": RECOVERY_BYTES,
            "blocks": num_slots,
            "recovery_s_p50": quantile(times, 0.5),
            "recovery_s_max": max(times),
        }
    ]


def _recover(folder: Path, num_slots: int) -> float:
    started = time.perf_counter()
    disk = open_disk(folder, block_bytes=BLOCK_BYTES, num_slots=num_slots)
    index = DiskIndex(
        num_slots, policy=LruPolicy(num_slots), book=TenantBook(), block_bytes=BLOCK_BYTES, recovered=disk.recovered
    )
    seconds = time.perf_counter() - started
    assert index.counts().used == num_slots
    disk.close()
    return seconds


# --- the disk ---------------------------------------------------------------------------------------------------------


def _disk_rows(place: Path, *, num_blocks: int) -> list[dict[str, Any]]:
    """Times whole blocks through the page cache (cold) and past it."""
    folder = place / "disk"
    open_disk(folder, block_bytes=BLOCK_BYTES, num_slots=num_blocks).close()
    path = folder / FILE_NAME
    rows = []
    try:
        io = FileIo(path)
        stride, start = stride_bytes(BLOCK_BYTES), slots_start(num_blocks)
        payload = page_buffer(stride)
        payload[:] = os.urandom(stride)
        for is_direct in (False, True):
            if is_direct and not io.is_direct:
                continue
            kind = "direct" if is_direct else "page cache"

            def write(bulk: bool = is_direct) -> None:
                for slot in range(num_blocks):
                    io.write(payload, start + slot * stride, bulk=bulk)
                io.sync()

            rows.append(_disk_row("write and sync", kind, 1, num_blocks, _timed(write)))
            for threads in (1, 4):
                _forget_pages(path)
                seconds = _timed(partial(_read_all, io, num_blocks, start, stride, is_direct, threads))
                rows.append(_disk_row("read", kind, threads, num_blocks, seconds))
        io.close()
    finally:
        path.unlink()
    return rows


def _read_all(io: FileIo, num_blocks: int, start: int, stride: int, bulk: bool, threads: int) -> None:
    buffers = [page_buffer(stride) for _ in range(threads)]

    def read(thread: int) -> None:
        for slot in range(thread, num_blocks, threads):
            io.read_into(buffers[thread], start + slot * stride, bulk=bulk)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(threads)))


def _forget_pages(path: Path) -> None:
    """Drops the file from the page cache."""
    with path.open("rb") as file:
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _timed(action: Callable[[], Any]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _disk_row(op: str, path: str, threads: int, num_blocks: int, seconds: float) -> dict[str, Any]:
    return {
        "what": "disk",
        "op": op,
        "path": path,
        "threads": threads,
        "block_bytes": BLOCK_BYTES,
        "blocks": num_blocks,
        "gb_per_s": num_blocks * BLOCK_BYTES / seconds / 1e9,
    }
