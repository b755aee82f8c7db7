"""Writes of a stream: several events to one, at a pace, and no further ahead of the client than the window."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from cluster.ingress.api.app import create_app
from cluster.ingress.api.backend import Ended, GenerationEvent, TokenBatch
from cluster.ingress.api.pace import PAUSE_S_MAX, WritePace
from cluster.ingress.api.services import ApiLimits
from cluster.ingress.api.stream import HELD_EVENTS_MAX
from cluster.ingress.api.tokenizer import TokenizerBundle
from cluster.ingress.api.window import EDGE_HEADER, WINDOW_BYTES, WRITTEN

from .fakes import MODEL_ID, FakeBackend, FakeGeneration, batches

NUM_TOKENS = 20 * HELD_EVENTS_MAX


class ReadyGeneration(FakeGeneration):
    """Everything is here already."""

    def take_ready(self) -> TokenBatch | None:
        if self._script and isinstance(self._script[0], TokenBatch):
            batch = self._script.pop(0)
            assert isinstance(batch, TokenBatch)
            return batch
        return None

    @property
    def num_taken(self) -> int:
        return NUM_TOKENS + 1 - len(self._script)


class ReadyBackend(FakeBackend):
    """Its generations have everything ready."""

    async def submit(self, *args: Any, **kwargs: Any) -> ReadyGeneration:
        generation = await super().submit(*args, **kwargs)
        assert isinstance(generation, FakeGeneration)
        ready = ReadyGeneration(generation.request_id, generation._script, 0)
        self.generations[-1] = ready
        return ready


class Client:
    """One request, spoken in ASGI messages; ``reports`` is what the proxy's outer layer says."""

    def __init__(
        self, bundle: TokenizerBundle, token_ids: list[int], *, has_edge: bool, client_stall_s: float = 60.0
    ) -> None:
        self.backend = ReadyBackend(vocab_size=len(bundle.table), max_model_len=2 * NUM_TOKENS)
        script: list[GenerationEvent] = [*batches(token_ids), Ended("length")]
        self.backend.script = list(script)
        self._app = create_app(self.backend, bundle, limits=ApiLimits(client_stall_s=client_stall_s))
        self._has_edge = has_edge
        self.reports: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        fields = {"model": MODEL_ID, "prompt": "hi", "max_tokens": NUM_TOKENS, "stream": True}
        self.reports.put_nowait({"type": "http.request", "body": json.dumps(fields).encode()})
        self.writes: list[bytes] = []
        self.marks: list[int] = []
        """Tokens that counted as delivered when each write began."""
        self.wrote = asyncio.Event()

    async def run(self) -> None:
        headers = [(EDGE_HEADER.encode(), b"1")] if self._has_edge else []
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "headers": headers,
        }
        await self._app(scope, self.reports.get, self._send)

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            self.writes.append(message["body"])
            told = [call[1] for call in self.backend.last.calls if call[0] == "delivered"]
            self.marks.append(max(told, default=0))
            self.wrote.set()

    @property
    def text(self) -> str:
        events = b"".join(self.writes).decode().split("\n\n")
        chunks = [json.loads(event[6:]) for event in events if event.startswith("data: {")]
        return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])

    def num_events(self) -> int:
        return b"".join(self.writes).count(b'data: {"id"')


@pytest.fixture
def token_ids(bundle: TokenizerBundle) -> list[int]:
    """Ids of single characters, so that each has an event of its own."""
    ids = [token_id for token_id in range(len(bundle.table)) if len(bundle.table.text_bytes(token_id)) == 1]
    plain = [token_id for token_id in ids if bundle.table.text_bytes(token_id).isalnum()]
    return (plain * NUM_TOKENS)[:NUM_TOKENS]


async def test_events_that_are_ready_share_a_write_one_for_each_token(
    bundle: TokenizerBundle, token_ids: list[int]
) -> None:
    """What a write holds is bounded, the text is whole, and nothing counts as delivered before it was written."""
    client = Client(bundle, token_ids, has_edge=False)
    await asyncio.wait_for(client.run(), 10)
    assert client.num_events() == NUM_TOKENS + 1, "one event for each token, and the finish"
    assert client.text == bundle.table.decode(token_ids)
    sizes = [write.count(b'data: {"id"') for write in client.writes]
    assert sizes[0] == 1, "the first write waits for nothing"
    assert max(sizes) == HELD_EVENTS_MAX + 1
    written = 0
    for size, mark in zip(sizes, client.marks, strict=True):
        assert mark <= written, "delivered before it was written"
        written += size
    assert ("delivered", NUM_TOKENS) in client.backend.last.calls


async def test_stream_takes_no_tokens_beyond_its_window(bundle: TokenizerBundle, token_ids: list[int]) -> None:
    """A client that reads nothing stops its stream; each report lets it go on, and the end comes whole."""
    client = Client(bundle, token_ids, has_edge=True)
    running = asyncio.create_task(client.run())
    num_bytes = 0
    while num_bytes <= WINDOW_BYTES and not running.done():
        client.wrote.clear()
        await asyncio.wait((running, asyncio.create_task(client.wrote.wait())), return_when="FIRST_COMPLETED")
        num_bytes = sum(map(len, client.writes))
    if running.done():
        pytest.fail(f"{num_bytes} bytes are no test of a window of {WINDOW_BYTES}")
    await asyncio.sleep(3 * PAUSE_S_MAX)
    stands_at = client.backend.last.num_taken
    assert stands_at < NUM_TOKENS
    assert sum(map(len, client.writes)) == num_bytes, "it went on beyond its window"
    client.reports.put_nowait({"type": WRITTEN, "bytes": num_bytes})
    client.reports.put_nowait({"type": WRITTEN, "bytes": WINDOW_BYTES})
    while not running.done():
        client.reports.put_nowait({"type": WRITTEN, "bytes": WINDOW_BYTES})
        await asyncio.wait((running,), timeout=PAUSE_S_MAX)
    running.result()
    assert client.text == bundle.table.decode(token_ids)


async def test_client_that_takes_nothing_any_more_is_ended(bundle: TokenizerBundle, token_ids: list[int]) -> None:
    """Decode is told to stop, the stream ends with its reason; a report in time puts that off, as often as it comes."""
    client = Client(bundle, token_ids, has_edge=True, client_stall_s=0.6)
    running = asyncio.create_task(client.run())
    for _ in range(8):
        await asyncio.sleep(0.1)
        assert not running.done(), "it took something every now and then"
        client.reports.put_nowait({"type": WRITTEN, "bytes": 1})
    await asyncio.wait_for(running, 10)
    assert ("cancel", "client_stalled") in client.backend.last.calls
    assert client.backend.last.num_taken < NUM_TOKENS
    last = json.loads(client.writes[-1].decode().removesuffix("\n\n").rpartition("data: ")[2])["error"]
    assert (last["code"], last["reason"]) == ("upstream_decode_interrupted", "client_stalled")
    assert last["delivered_output_tokens"] == client.num_events()
    assert b"[DONE]" not in client.writes[-1]


def test_pause_grows_with_the_streams_and_has_a_limit() -> None:
    """One stream hardly waits; many share what the way to the proxy can carry; nobody waits visibly."""
    pace = WritePace()
    assert pace.pause_s == 0.0
    pauses = []
    for _ in range(1000):
        pace.joined()
        pauses.append(pace.pause_s)
    assert pauses[0] < 0.001 < PAUSE_S_MAX == pauses[-1]
    assert pauses == sorted(pauses)
    for _ in range(1000):
        pace.left()
    assert pace.pause_s == 0.0
