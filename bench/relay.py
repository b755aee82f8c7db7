"""``kopir bench relay``: what the way of a token from decode to a client's socket costs, and who holds back whom.

Starts a cluster whose engine takes no time (``paced``, zero step), so that all that is measured is relay, ingress and
proxy: events per second at several numbers of streams, one event per token; processor time per 1,000 tokens by
process; the time to the first token; and 500 clients that hardly read, with the memory of every process over time.
The clients are in this process and share the cores with the servers: the figures are those of a whole machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.clusters import Running, kopir_cluster
from bench.report import Report, Row, finish, make_target, quantile

TOKENS_PER_S_WANTED = 12_000
ADDED_TTFT_LIMIT_MS = 8.0
GROWTH_LIMIT = 1.1
SLOW_READERS = 500
BACKLOG_TOKENS = 256
MAX_TOKENS = 3_800
CONNECT_DEADLINE_S = 30.0
READ_BYTES = 1 << 16
SLOW_BUFFER_BYTES = 1 << 13
SLOW_SEGMENT_BYTES = 536
"""The system measures the buffer of a sender by its segments, which are large on loopback."""
SLOW_NAME = "m" * 4000
"""Of the model, in every event: buffers on the way would hold thousands of small ones."""
SLOW_SETTINGS = (f"served_model_name={SLOW_NAME}", "limits.client_stall_ms=600000")
EVENT = b'data: {"id"'
END_BYTES = 400
TICK_HZ = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
MIB = 1 << 20
SETTINGS = (
    "workers.engine=paced",
    "workers.paced.step_ms=0",
    "workers.paced.prefill_ms_per_token=0",
    "workers.prefill.replicas=0",
    "workers.decode.replicas=0",
    "workers.combined.replicas=1",
    "workers.combined.max_num_seqs=512",
    "workers.combined.pool_blocks=16384",
    "limits.max_queued_requests=1024",
    f"limits.max_stream_backlog_tokens={BACKLOG_TOKENS}",
    "kv.host_bytes=64MiB",
)


def run_relay(*, quick: bool, json_path: Path | None, check: bool, seed: int, settings: Sequence[str]) -> int:
    """Runs the bench; returns the exit status."""
    report = Report.start("relay", seed=seed)
    with kopir_cluster([*SETTINGS, *settings]) as cluster:
        bench = _Bench(cluster)
        bench.ttft(20)  # The first requests pay for imports and caches.
        report.rows.append(bench.ttft(50 if quick else 300))
        for num_streams in (1, 16) if quick else (1, 16, 64):
            report.rows.append(asyncio.run(bench.throughput(num_streams, seconds=3.0 if quick else 10.0)))
    with kopir_cluster([*SETTINGS, *SLOW_SETTINGS, *settings]) as cluster:
        bench = _Bench(cluster)
        bench.ttft(20)
        num_slow = 100 if quick else SLOW_READERS
        report.rows.append(asyncio.run(bench.slow_readers(num_slow, seconds=6.0 if quick else 30.0)))
    _show(report)
    _add_targets(report)
    return finish(report, json_path=json_path, check=check)


class _Bench:
    """Loads one endpoint over raw sockets: counting events must not cost more than making them."""

    def __init__(self, cluster: Running) -> None:
        self._cluster = cluster
        self._url = httpx.URL(cluster.url)
        self._http = httpx.Client(base_url=cluster.url, timeout=60)
        self._model = self._http.get("/v1/models").json()["data"][0]["id"]

    def ttft(self, repetitions: int) -> Row:
        """Returns the time to the first event of one request at a time; the engine takes none of it."""
        samples = []
        for number in range(repetitions):
            body = self._body(number, max_tokens=2)
            started = time.perf_counter()
            with self._http.stream("POST", "/v1/completions", content=body) as answer:
                answer.raise_for_status()
                first = next(answer.iter_raw())
                samples.append((time.perf_counter() - started) * 1e3)
                assert first.startswith(b"data: {"), first
        return {
            "what": "ttft",
            "requests": repetitions,
            "ttft_ms_p50": quantile(samples, 0.5),
            "ttft_ms_p90": quantile(samples, 0.9),
        }

    async def throughput(self, num_streams: int, *, seconds: float) -> Row:
        """Returns events per second of streams that follow each other, and what they cost."""
        counter = _Counter()
        until = time.monotonic() + seconds
        before, started = processes(self._cluster.pid), time.monotonic()

        async def keep(number: int) -> None:
            while time.monotonic() < until:
                await self._read_whole(number, counter)

        await asyncio.gather(*(keep(number) for number in range(num_streams)))
        took_s = time.monotonic() - started
        cpu_s = _cpu_since(before, processes(self._cluster.pid))
        thousands = counter.events / 1000
        return {
            "what": "throughput",
            "streams": num_streams,
            "events": counter.events,
            "tokens_per_s": counter.events / took_s,
            "events_per_read": counter.events / max(1, counter.reads),
            "cpu_s_per_1000_tokens": sum(cpu_s.values()) / thousands,
            "cpu_s_per_1000_tokens_by_process": {name: value / thousands for name, value in cpu_s.items()},
        }

    async def slow_readers(self, num_readers: int, *, seconds: float) -> Row:
        """Opens streams that are read a little each second; returns memory and tokens ahead of the clients."""
        sockets = await asyncio.gather(*(self._open(number, slow=True) for number in range(num_readers)))
        memory: list[dict[str, int]] = []
        read_bytes = 0
        try:
            for _ in range(int(seconds)):
                for reader, _ in sockets:
                    read_bytes += len(await asyncio.wait_for(reader.read(512), CONNECT_DEADLINE_S))
                await asyncio.sleep(1.0)
                memory.append({name: process.rss_bytes for name, process in processes(self._cluster.pid).items()})
            status = (await asyncio.to_thread(self._http.get, "/internal/status")).json()
            delivered = [stream["delivered_output_tokens"] for stream in status["streams"]]
        finally:
            for _, writer in sockets:
                writer.transport.abort()
        # The first seconds fill buffers that are bounded; what grows after them has no bound.
        settled = memory[len(memory) // 3 :]
        first, last = (sum(sample.values()) for sample in (settled[0], settled[-1]))
        return {
            "what": "slow_readers",
            "readers": num_readers,
            "seconds": seconds,
            "still_running": len(delivered),
            "read_bytes": read_bytes,
            "tokens_taken_p50": statistics.median(delivered) if delivered else None,
            "tokens_taken_max": max(delivered, default=None),
            "tokens_asked": MAX_TOKENS,
            "rss_mib_settled": first / MIB,
            "rss_mib_end": last / MIB,
            "rss_growth": last / first,
            "rss_mib_by_process": {name: value / MIB for name, value in settled[-1].items()},
        }

    def _body(self, number: int, *, max_tokens: int) -> bytes:
        prompt = [100 + number % 40_000] * 16
        fields: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        return json.dumps({"model": self._model, "temperature": 0, **fields}).encode()

    async def _open(self, number: int, *, slow: bool = False) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        connection = socket.socket()
        connection.setblocking(False)
        if slow:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER_BYTES)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SLOW_SEGMENT_BYTES)
        loop = asyncio.get_running_loop()
        await asyncio.wait_for(loop.sock_connect(connection, (self._url.host, self._url.port)), CONNECT_DEADLINE_S)
        limit = SLOW_BUFFER_BYTES if slow else READ_BYTES
        reader, writer = await asyncio.open_connection(sock=connection, limit=limit)
        body = self._body(number, max_tokens=MAX_TOKENS)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._url.host}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        return reader, writer

    async def _read_whole(self, number: int, counter: _Counter) -> None:
        reader, writer = await self._open(number)
        tail = end = b""
        try:
            while data := await asyncio.wait_for(reader.read(READ_BYTES), CONNECT_DEADLINE_S):
                # An event may be cut anywhere by a read: what could be the beginning of one is looked at again.
                seen = tail + data
                counter.events += seen.count(EVENT)
                counter.reads += 1
                tail = seen[1 - len(EVENT) :]
                end = (end + data[-END_BYTES:])[-END_BYTES:]
        finally:
            writer.close()
        if b"data: [DONE]" not in end:
            raise RuntimeError(f"stream {number} ended without [DONE], but with {end!r}")


@dataclass(slots=True)
class _Counter:
    events: int = 0
    reads: int = 0


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """Processor time so far and memory now."""

    cpu_s: float
    rss_bytes: int


def processes(root_pid: int) -> dict[str, ProcessUse]:
    """Returns what every process below ``root_pid`` uses, by the name that it gives itself; equal names are added."""
    stats: dict[int, tuple[int, float, int, str]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").split()
        except (OSError, IndexError):
            continue  # It ended while we looked.
        name = words[0].rpartition("/")[2] if words else "?"
        stats[int(entry.name)] = (
            int(fields[1]),
            (int(fields[11]) + int(fields[12])) / TICK_HZ,
            int(fields[21]) * PAGE_BYTES,
            name[:60],
        )
    found: dict[str, ProcessUse] = {}
    for pid, (_, cpu_s, rss_bytes, name) in stats.items():
        if _is_below(pid, root_pid, stats):
            known = found.get(name, ProcessUse(0.0, 0))
            found[name] = ProcessUse(known.cpu_s + cpu_s, known.rss_bytes + rss_bytes)
    return found


def _is_below(pid: int, root_pid: int, stats: dict[int, tuple[int, float, int, str]]) -> bool:
    while pid in stats:
        if pid == root_pid:
            return True
        pid = stats[pid][0]
    return False


def _cpu_since(before: dict[str, ProcessUse], after: dict[str, ProcessUse]) -> dict[str, float]:
    used = {name: use.cpu_s - before[name].cpu_s for name, use in after.items() if name in before}
    return {name: cpu_s for name, cpu_s in used.items() if cpu_s > 0}


def _show(report: Report) -> None:
    for what, title in (
        ("ttft", "Added time to first token"),
        ("throughput", "Relay"),
        ("slow_readers", "Slow readers"),
    ):
        rows = [
            {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
            for row in report.rows
            if row["what"] == what
        ]
        columns = [key for key, value in rows[0].items() if key != "what" and not isinstance(value, dict)]
        report.show(title, columns, rows)


def _add_targets(report: Report) -> None:
    best = max(row["tokens_per_s"] for row in report.rows if row["what"] == "throughput")
    report.targets.append(
        make_target("relay_tokens_per_s", ours=best, reference=TOKENS_PER_S_WANTED, unit="tokens/s", at_least=1.0)
    )
    (ttft,) = (row for row in report.rows if row["what"] == "ttft")
    (slow,) = (row for row in report.rows if row["what"] == "slow_readers")
    limits = (
        ("added_ttft_ms_p50", ttft["ttft_ms_p50"], ADDED_TTFT_LIMIT_MS, "ms"),
        ("slow_readers_memory_growth", slow["rss_growth"], GROWTH_LIMIT, "end over settled"),
    )
    for target_id, ours, limit, unit in limits:
        report.targets.append(
            make_target(target_id, ours=ours, reference=limit, unit=unit, at_least=1.0, smaller_is_better=True)
        )
    if slow["tokens_taken_max"] is not None:
        report.targets.append(
            make_target(
                "slow_readers_hold_decode_back",
                ours=max(1, slow["tokens_taken_max"]),
                reference=MAX_TOKENS,
                unit="tokens taken of those asked for",
                at_least=1.5,
                smaller_is_better=True,
            )
        )
