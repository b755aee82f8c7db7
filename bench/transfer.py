"""``kopir bench transfer``: how fast blocks move between two processes of this machine, and what that costs.

Every throughput is end to end: from the sender's ``push`` until the receiver's result, the control message between
them included. memcpy and digest of the same bytes are measured by the receiving process, in turn with the transfers.
All memory is walked through over a working set that no cache holds.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from bench.network import Place
from bench.peers.drive import measure_peers
from bench.report import Report, Row, Target, finish, make_target, make_unmeasured
from bench.transfer_inproc import measure_inproc
from bench.transfer_network import measure_network
from bench.transfer_peer import (
    DEADLINE_S,
    RECEIVER,
    Echo,
    Land,
    Landed,
    Pool,
    Reference,
    Referenced,
    Relink,
    Setup,
    Watch,
    open_transport,
    percentiles_us,
    serve,
)
from cluster.cli.common import write
from kvstore.digest import block_digest
from kvstore.errors import EnvironmentProblem
from kvstore.transport.base import BlockReceive, BlockSend
from kvstore.transport.ucx import UcxTransport

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
POOL_BYTES = 256 * MIB
KV_BLOCK_BYTES = 368_640
"""16 tokens of the packaged model: 30 layers, K and V, 3 heads of 64, 2 bytes each."""
KV_BLOCK_TOKENS = 16
BATCH_BYTES = 96 * MIB
BATCH_BLOCKS_MAX = 256
ROUND_TRIP_BYTES = 64
IDLE_PAUSE_S = 0.003
JOIN_S = 10.0

SIZES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, KV_BLOCK_BYTES, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
NETWORK_SIZES = (KV_BLOCK_BYTES, 4 * MIB)
QUICK_SIZES = (4 * KIB, 64 * KIB, KV_BLOCK_BYTES, 4 * MIB)
KV_TOKENS = (16, 64, 256, 1024, 2048, 4096)


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    sizes: tuple[int, ...]
    repeats: int
    latency_repeats: int
    cold_repeats: int


FULL = Effort(SIZES, repeats=15, latency_repeats=1000, cold_repeats=5)
QUICK = Effort(QUICK_SIZES, repeats=7, latency_repeats=300, cold_repeats=2)


@dataclass(frozen=True, slots=True)
class Sample:
    """One batch: end-to-end and receiver's time, processor time of both processes."""

    total_s: float
    receive_s: float
    cpu_s: float


class Pair:
    """The sending side (this process) and its receiving process, linked by a transport and a pipe.

    Life cycle: made -> ``relink`` -> steps -> closed by ``pair``.
    """

    def __init__(self, connection: Connection, seed: int) -> None:
        self._connection = connection
        self._pool = Pool(POOL_BYTES)
        self._pool.fill(seed)
        self._transport: UcxTransport | None = None
        self._next_tag = 0
        self._ask(Setup(POOL_BYTES))

    def relink(self, ends: tuple[Place, Place] | None = None) -> float:
        """Opens fresh transports on both sides. Returns seconds from the first connect to a warm link.

        ``ends``: where the sender and the receiver live on a cable; without it both use this host's memory.
        """
        self.close_transport()
        ours, theirs = ends or (None, None)
        transport = self._transport = open_transport(ours)
        address = self._ask(Relink(transport.address_for(RECEIVER), theirs))
        before = time.perf_counter()
        transport.connect(RECEIVER, address, same_host=ends is None, deadline_s=DEADLINE_S)
        self._connection.recv()
        return time.perf_counter() - before

    def move(self, block_bytes: int, num_blocks: int, *, verify: bool) -> Sample:
        """Moves one batch. Raises: EnvironmentProblem when a block did not arrive whole."""
        transport = self._linked()
        blocks = self._pool.take(num_blocks, block_bytes)
        digests = [block_digest(block) for block in blocks] if verify else None
        first_tag = self._take_tags(num_blocks)
        cpu_before, before = time.process_time(), time.perf_counter()
        sends = [BlockSend(first_tag + index, memoryview(blocks[index])) for index in range(num_blocks)]
        pushed = transport.push(RECEIVER, sends, deadline_s=DEADLINE_S)
        landed: Landed = self._ask(Land(first_tag, num_blocks, block_bytes, digests))
        pushed.result()
        cpu_s = time.process_time() - cpu_before + landed.cpu_s
        if not landed.all_ok:
            raise EnvironmentProblem(f"{num_blocks} blocks of {block_bytes} bytes did not all arrive whole")
        return Sample(landed.landed_at - before, landed.receive_s, cpu_s)

    def reference(self, block_bytes: int, num_blocks: int) -> Referenced:
        """Measures memcpy and digest of as many bytes in the receiving process."""
        referenced: Referenced = self._ask(Reference(num_blocks, block_bytes))
        return referenced

    def latencies(self, block_bytes: int, num_repeats: int) -> list[float]:
        """Returns one-way seconds of single blocks whose receive was posted before."""
        transport = self._linked()
        first_tag = self._take_tags(num_repeats)
        self._connection.send(Watch(first_tag, num_repeats, block_bytes))
        pushed_at = []
        for index in range(num_repeats):
            block = memoryview(self._pool.take(1, block_bytes)[0])
            self._connection.recv()
            pushed_at.append(time.perf_counter())
            transport.push(RECEIVER, [BlockSend(first_tag + index, block)], deadline_s=DEADLINE_S).result()
        landed_at: list[float] = self._connection.recv()
        return [landed - pushed for pushed, landed in zip(pushed_at, landed_at, strict=True)]

    def round_trips(self, num_repeats: int) -> list[float]:
        """Returns seconds from a call of ``push`` with 64 bytes until the echo's result, as a caller sees them."""
        transport = self._linked()
        first_tag = self._take_tags(num_repeats)
        out, into = memoryview(bytes(ROUND_TRIP_BYTES)), memoryview(bytearray(ROUND_TRIP_BYTES))
        self._ask(Echo(first_tag, num_repeats, ROUND_TRIP_BYTES))
        samples = []
        for tag in range(first_tag, first_tag + num_repeats):
            back = transport.receive(RECEIVER, [BlockReceive(tag, into, None)], deadline_s=DEADLINE_S)
            before = time.perf_counter()
            transport.push(RECEIVER, [BlockSend(tag, out)], deadline_s=DEADLINE_S)
            back.result()
            samples.append(time.perf_counter() - before)
        self._connection.recv()
        return samples

    def probes(self, num_repeats: int) -> list[float]:
        """Returns seconds of probes back to back, each asked on the transport's thread when the one before is back."""
        transport = self._linked()
        samples: list[float] = []
        done: Future[None] = Future()

        def ask(before: Future[float] | None = None) -> None:
            if before is not None:
                if (error := before.exception()) is not None:
                    done.set_exception(error)
                    return
                samples.append(before.result())
            if len(samples) == num_repeats:
                done.set_result(None)
            else:
                transport.probe(RECEIVER, deadline_s=DEADLINE_S).add_done_callback(ask)

        ask()
        done.result()
        return samples

    def awaited_probes(self, num_repeats: int) -> list[float]:
        """As ``probes``, while this side awaits a block that comes after the last of them."""
        transport = self._linked()
        tag, block_bytes = self._take_tags(1), ROUND_TRIP_BYTES
        self._ask(Echo(tag, 1, block_bytes))
        into, out = memoryview(bytearray(block_bytes)), memoryview(bytes(block_bytes))
        awaited = transport.receive(RECEIVER, [BlockReceive(tag, into, None)], deadline_s=DEADLINE_S)
        samples = self.probes(num_repeats)
        transport.push(RECEIVER, [BlockSend(tag, out)], deadline_s=DEADLINE_S)
        awaited.result()
        self._connection.recv()
        return samples

    def asyncio_round_trips(self, num_repeats: int) -> list[float]:
        """As ``round_trips``, awaited on an event loop, as the links of a worker do."""
        transport = self._linked()
        first_tag = self._take_tags(num_repeats)
        out, into = memoryview(bytes(ROUND_TRIP_BYTES)), memoryview(bytearray(ROUND_TRIP_BYTES))
        self._ask(Echo(first_tag, num_repeats, ROUND_TRIP_BYTES))

        async def run() -> list[float]:
            samples = []
            for tag in range(first_tag, first_tag + num_repeats):
                back = transport.receive(RECEIVER, [BlockReceive(tag, into, None)], deadline_s=DEADLINE_S)
                before = time.perf_counter()
                transport.push(RECEIVER, [BlockSend(tag, out)], deadline_s=DEADLINE_S)
                await asyncio.wrap_future(back)
                samples.append(time.perf_counter() - before)
            return samples

        samples = asyncio.run(run())
        self._connection.recv()
        return samples

    def idle_probes(self, num_repeats: int) -> list[float]:
        """Returns seconds of probes of which each finds both sides asleep."""
        samples = []
        for _ in range(num_repeats):
            time.sleep(IDLE_PAUSE_S)
            samples.append(self._linked().probe(RECEIVER, deadline_s=DEADLINE_S).result())
        return samples

    def close_transport(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _linked(self) -> UcxTransport:
        assert self._transport is not None, "relink first"
        return self._transport

    def _take_tags(self, count: int) -> int:
        first = self._next_tag
        self._next_tag += count
        return first

    def _ask(self, step: Any) -> Any:
        self._connection.send(step)
        return self._connection.recv()


@contextmanager
def pair(seed: int) -> Iterator[Pair]:
    """Starts the receiving process; ends it, and whatever hangs, on the way out."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), name="kopir-bench-receiver", daemon=True)
    process.start()
    theirs.close()
    made: Pair | None = None
    try:
        made = Pair(ours, seed)
        yield made
        ours.send(None)
        process.join(JOIN_S)
    except EOFError as error:
        raise EnvironmentProblem("the receiving process of the bench ended early") from error
    finally:
        if made is not None:
            made.close_transport()
        if process.is_alive():
            process.kill()
            process.join(JOIN_S)
        ours.close()


def run_transfer(
    *, quick: bool, json_path: Path | None, plot_path: Path | None, check: bool, seed: int, has_peers: bool
) -> int:
    """Runs the bench, prints tables and writes what was asked for. Returns the exit status."""
    effort = QUICK if quick else FULL
    report = Report.start("transfer", seed=seed)
    with pair(seed) as linked:
        write("cold transfers ...")
        report.rows += _measure_cold(linked, effort)
        for block_bytes in effort.sizes:
            write(f"blocks of {block_bytes} bytes ...")
            report.rows += _measure_size(linked, block_bytes, _batch_blocks(block_bytes), effort)
        write("windows, prompts, round trips ...")
        for num_blocks in (1, 4, 16):
            report.rows += _measure_size(linked, KV_BLOCK_BYTES, num_blocks, effort, kind="window")
        report.rows += [_measure_prompt(linked, tokens, effort) for tokens in KV_TOKENS]
        report.rows += _measure_probes(linked, effort)
        report.rows += _measure_round_trips(linked, effort)
        for block_bytes in effort.sizes:
            report.rows.append(_measure_latency(linked, block_bytes, effort))
        peer_targets: list[Target] = []
        if has_peers:
            write("peers ...")
            peer_rows, peer_targets = measure_peers(linked, repeats=effort.repeats)
            report.rows += peer_rows
        write("between network namespaces ...")
        network_rows, network_targets = measure_network(
            linked, tuple((size, _batch_blocks(size)) for size in NETWORK_SIZES), repeats=max(3, effort.repeats // 2)
        )
        report.rows += network_rows
    report.rows += measure_inproc((KV_BLOCK_BYTES, 4 * MIB), batch_bytes=BATCH_BYTES, repeats=effort.repeats)
    report.targets += _targets(report.rows) + network_targets + peer_targets
    report.notes.append(
        "round-trip targets: probes back to back and while a block is awaited; other round trips add threads"
    )
    report.notes.append("throughput is end to end: from push to verified, control message included; medians")
    _show(report)
    if plot_path is not None:
        from bench.transfer_plot import draw

        draw(report.rows, plot_path)
        write(f"wrote {plot_path}")
    return finish(report, json_path=json_path, check=check)


def _batch_blocks(block_bytes: int) -> int:
    return max(1, min(BATCH_BLOCKS_MAX, BATCH_BYTES // block_bytes))


def _measure_cold(linked: Pair, effort: Effort) -> list[Row]:
    """The first transfer over links that have just been made."""
    rows: list[Row] = []
    for _ in range(effort.cold_repeats):
        connect_s = linked.relink()
        first = linked.move(KV_BLOCK_BYTES, 1, verify=True)
        second = linked.move(KV_BLOCK_BYTES, 1, verify=True)
        rows.append(
            {
                "kind": "cold",
                "backend": "ucx",
                "block_bytes": KV_BLOCK_BYTES,
                "connect_ms": _ms(connect_s),
                "first_ms": _ms(first.total_s),
                "second_ms": _ms(second.total_s),
            }
        )
    return rows


def _measure_size(linked: Pair, block_bytes: int, num_blocks: int, effort: Effort, *, kind: str = "size") -> list[Row]:
    """Throughput without and with verification, in turn with memcpy and digest of the same bytes."""
    plain: list[Sample] = []
    verified: list[Sample] = []
    references: list[Referenced] = []
    for _ in range(effort.repeats):
        plain.append(linked.move(block_bytes, num_blocks, verify=False))
        references.append(linked.reference(block_bytes, num_blocks))
        verified.append(linked.move(block_bytes, num_blocks, verify=True))
    size = block_bytes * num_blocks
    memcpy_s = median(reference.memcpy_s for reference in references)
    digest_s = median(reference.digest_s for reference in references)
    return [
        {
            "kind": kind,
            "backend": "ucx",
            "block_bytes": block_bytes,
            "num_blocks": num_blocks,
            "verified": is_verified,
            "ms": _ms(median(sample.total_s for sample in samples)),
            "receive_ms": _ms(median(sample.receive_s for sample in samples)),
            "gb_per_s": _gb_per_s(size, median(sample.total_s for sample in samples)),
            "cpu_s_per_gib": round(median(sample.cpu_s for sample in samples) * GIB / size, 4),
            "memcpy_gb_per_s": _gb_per_s(size, memcpy_s),
            "digest_gb_per_s": _gb_per_s(size, digest_s),
        }
        for is_verified, samples in ((False, plain), (True, verified))
    ]


def _measure_prompt(linked: Pair, num_tokens: int, effort: Effort) -> Row:
    """What a prompt of ``num_tokens`` costs to hand over, verified."""
    num_blocks = num_tokens // KV_BLOCK_TOKENS
    size = num_blocks * KV_BLOCK_BYTES
    total_s = median(
        linked.move(KV_BLOCK_BYTES, num_blocks, verify=True).total_s for _ in range(max(3, effort.repeats // 2))
    )
    return {
        "kind": "prompt",
        "backend": "ucx",
        "tokens": num_tokens,
        "bytes": size,
        "ms": _ms(total_s),
        "gb_per_s": _gb_per_s(size, total_s),
    }


def _measure_latency(linked: Pair, block_bytes: int, effort: Effort) -> Row:
    num_repeats = effort.latency_repeats if block_bytes <= MIB else max(20, effort.latency_repeats // 10)
    samples = linked.latencies(block_bytes, num_repeats)
    return {
        "kind": "latency",
        "backend": "ucx",
        "block_bytes": block_bytes,
        "repeats": num_repeats,
        **percentiles_us(samples),
    }


def _measure_round_trips(linked: Pair, effort: Effort) -> list[Row]:
    """64 bytes there and back as callers see them: one that waits on a thread, and one that awaits on an event loop."""
    repeats = effort.latency_repeats
    return [
        _latency_row("round_trip", linked.round_trips(repeats)),
        _latency_row("asyncio_round_trip", linked.asyncio_round_trips(repeats)),
    ]


def _measure_probes(linked: Pair, effort: Effort) -> list[Row]:
    """64 bytes there and back between the transports' own threads: awake, while a block is awaited, and asleep."""
    repeats = effort.latency_repeats
    return [
        _latency_row("probe", linked.probes(repeats)),
        _latency_row("awaited_probe", linked.awaited_probes(repeats)),
        _latency_row("idle_probe", linked.idle_probes(max(100, repeats // 10))),
    ]


def _latency_row(kind: str, samples: list[float]) -> Row:
    return {
        "kind": kind,
        "backend": "ucx",
        "block_bytes": ROUND_TRIP_BYTES,
        "repeats": len(samples),
        **percentiles_us(samples),
    }


def _targets(rows: list[Row]) -> list[Any]:
    targets = []
    for block_bytes, name, at_least in ((KV_BLOCK_BYTES, "368640B", 0.5), (4 * MIB, "4MiB", 0.65)):
        id = f"same_host_{name}_verified_vs_memcpy"
        row = next(
            (row for row in rows if row["kind"] == "size" and row["block_bytes"] == block_bytes and row["verified"]),
            None,
        )
        if row is None:
            targets.append(make_unmeasured(id, unit="GB/s", at_least=at_least, reason="size not measured"))
            continue
        targets.append(
            make_target(id, ours=row["gb_per_s"], reference=row["memcpy_gb_per_s"], unit="GB/s", at_least=at_least)
        )
    for id, kind, limit_us in (
        ("round_trip_64B_p50", "probe", 60.0),
        ("round_trip_64B_awaited_p50", "awaited_probe", 25.0),
    ):
        trip = next(row for row in rows if row["kind"] == kind)
        targets.append(
            make_target(id, ours=trip["p50_us"], reference=limit_us, unit="us", at_least=1.0, smaller_is_better=True)
        )
    return targets


def _show(report: Report) -> None:
    def rows(*kinds: str) -> list[Row]:
        return [row for row in report.rows if row["kind"] in kinds]

    report.show(
        "First transfer over a fresh link", ["block_bytes", "connect_ms", "first_ms", "second_ms"], rows("cold")
    )
    columns = ["backend", "block_bytes", "num_blocks", "verified", "ms", "gb_per_s", "memcpy_gb_per_s"]
    columns += ["digest_gb_per_s", "cpu_s_per_gib"]
    report.show("Throughput by block size, and by blocks in flight", columns, rows("size", "window", "inproc"))
    report.show("KV of a prompt, verified", ["tokens", "bytes", "ms", "gb_per_s"], rows("prompt"))
    report.show(
        "Other systems, and ours in turn with them",
        ["backend", "setting", "block_bytes", "num_blocks", "verified", "ms", "gb_per_s", "ours_ms", "ours_gb_per_s"],
        rows("peer"),
    )
    report.show(
        "Between network namespaces over TCP, verified",
        ["backend", "block_bytes", "num_blocks", "ms", "gb_per_s", "cpu_s_per_gib"],
        rows("network"),
    )
    columns = ["kind", "block_bytes", "repeats", "p50_us", "p99_us", "p999_us"]
    report.show(
        "Single blocks one way, and 64 bytes there and back",
        columns,
        rows("latency", "round_trip", "asyncio_round_trip", "probe", "awaited_probe", "idle_probe"),
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 4)


def _gb_per_s(size_bytes: int, seconds: float) -> float:
    return round(size_bytes / seconds / 1e9, 3)
