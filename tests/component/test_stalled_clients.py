"""Clients that stop reading, on a real connection behind the proxy's outer layer: decode stops, nothing stays held."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest
from mini_cluster import MiniCluster
from mini_http import make_prompt, serve

from cluster.ingress.api.proxy_edge import ProxyEdge
from cluster.ingress.api.services import ApiLimits

MODEL_ID = "m" * 4000
"""It is in every event, so that few of them fill the buffers of the system."""
MAX_TOKENS = 500
STALL_S = 1.0
SMALL_BUFFER_BYTES = 1 << 13
SMALL_SEGMENT_BYTES = 536
"""The system measures the buffer of a sender by its segments, which are large on loopback."""


class QueueWithoutBound:
    """What Serve has between ingress and proxy: a write returns at once, whatever the client does."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        queue: asyncio.Queue[Any] = asyncio.Queue()
        answering = asyncio.create_task(self._app(scope, receive, queue.put))
        answering.add_done_callback(lambda _: queue.put_nowait(None))
        while (message := await queue.get()) is not None:
            await send(message)
        await answering


def behind_proxy(app: Any) -> ProxyEdge:
    return ProxyEdge(QueueWithoutBound(app))


@pytest.fixture
async def cluster(make_cluster: Callable[..., MiniCluster]) -> MiniCluster:
    cluster = make_cluster(**{"limits.max_stream_backlog_tokens": 16})
    cluster.backend.model_id = MODEL_ID
    await cluster.start("prefill", "decode")
    return cluster


async def open_stream(url: str, number: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Asks for a long stream on a connection that takes little."""
    at = urlsplit(url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SMALL_SEGMENT_BYTES)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, (at.hostname, at.port))
    reader, writer = await asyncio.open_connection(sock=connection, limit=256)
    fields = {"model": MODEL_ID, "prompt": make_prompt(number, 20), "max_tokens": MAX_TOKENS}
    body = json.dumps({**fields, "ignore_eos": True, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {at.hostname}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    return reader, writer


def request_id_of(head: bytes) -> str:
    """Returns the id that the answer has in its headers."""
    lines = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:] if ": " in line)
    return lines["x-request-id"]


async def stalled(cluster: MiniCluster, request_id: str) -> dict[str, Any]:
    """Returns the record of a request once its client was given up."""
    found: dict[str, Any] = {}

    async def look() -> bool:
        record = await cluster.backend.request_record(request_id, tenant="default")
        found.update(record or {})
        return found["phase"] != "streaming" and found["interruption"] is not None

    async with asyncio.timeout(20):
        while not await look():
            await asyncio.sleep(0.02)
    return found


async def test_a_client_that_never_reads_is_given_up_and_cut_off(cluster: MiniCluster) -> None:
    """Its decode stops long before its end, its blocks are free, the reason is on record, the connection ends."""
    async with serve(cluster, limits=ApiLimits(client_stall_s=STALL_S), wrap=behind_proxy) as url:
        reader, writer = await open_stream(url, 1)
        request_id = request_id_of(await reader.readuntil(b"\r\n\r\n"))
        record = await stalled(cluster, request_id)
        assert record["phase"] == "cancelled" and record["interruption"]["reason"] == "client_stalled"
        assert 0 < record["delivered_output_tokens"] < MAX_TOKENS - 50
        await cluster.at_rest()
        async with asyncio.timeout(20):
            with pytest.raises(ConnectionResetError):
                while await asyncio.sleep(STALL_S / 4) is None:
                    writer.write(b" ")
                    await writer.drain()
        sums = {
            name: cluster.registry.get_sample_value(f"kopir_accounted_{name}_tokens_total") or 0
            for name in ("generated", "delivered")
        }
        lost = cluster.registry.get_sample_value("kopir_discarded_tokens_total", {"reason": "client_stalled"}) or 0
        assert sums["generated"] == sums["delivered"] + lost


async def test_a_client_that_reads_again_in_time_loses_nothing(cluster: MiniCluster) -> None:
    """Once it is given up, but not yet cut off, it reads what was on its way and then the reason; sooner, all of it."""
    async with serve(cluster, limits=ApiLimits(client_stall_s=STALL_S), wrap=behind_proxy) as url:
        late_reader, late_writer = await open_stream(url, 2)
        request_id = request_id_of(await late_reader.readuntil(b"\r\n\r\n"))
        record = await stalled(cluster, request_id)
        data = await asyncio.wait_for(late_reader.read(-1), 20)
        events = [line for line in data.split(b"\n") if b"data: " in line]
        error = json.loads(events[-1].partition(b"data: ")[2])["error"]
        assert (error["code"], error["reason"]) == ("upstream_decode_interrupted", "client_stalled")
        # Some tokens have no text of their own, and so no event.
        assert error["delivered_output_tokens"] == record["delivered_output_tokens"] >= len(events) - 1 > 0
        late_writer.close()
        reader, writer = await open_stream(url, 3)
        num_bytes, last = 0, b""
        async with asyncio.timeout(60):
            while part := await reader.read(1 << 15):
                num_bytes += len(part)
                last = part
                # So slow that it would be given up, if nothing of what it takes were seen.
                await asyncio.sleep(STALL_S / 16)
        assert b"[DONE]" in last and num_bytes > len(data)
        writer.close()
        await cluster.at_rest()
