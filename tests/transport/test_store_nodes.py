"""Two store nodes at the ends of a cable: a worker hits, over TCP, what a dead worker of the other node computed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bench.network import Place

HELPER = Path(__file__).with_name("store_node_process.py")
DEADLINE_S = 20.0


class Process:
    """A helper process inside a network namespace; its commands are lines, its answers too."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, place: Place, *arguments: object) -> Process:
        process = await asyncio.create_subprocess_exec(
            "ip", "netns", "exec", place.namespace, sys.executable, str(HELPER), *map(str, arguments),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        return cls(process)

    async def line(self) -> str:
        assert self.process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            return (await self.process.stdout.readline()).decode().strip()

    async def ask(self, command: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n".encode())
        return await self.line()

    async def until(self, command: str, answer: str) -> None:
        """Asks again and again until the answer is this one."""
        end_s = time.monotonic() + DEADLINE_S
        while (last := await self.ask(command)) != answer:
            assert time.monotonic() < end_s, f"{command}: {last}, never {answer}"

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.communicate()


@pytest.fixture
async def processes(cable_ends: tuple[Place, Place]) -> AsyncIterator[list[Process]]:
    """Processes that end before the cable does."""
    started: list[Process] = []
    try:
        yield started
    finally:
        for process in started:
            await process.kill()


async def test_a_second_node_serves_what_a_dead_worker_of_the_first_computed(
    cable_ends: tuple[Place, Place], processes: list[Process], tmp_path: Path
) -> None:
    """Its worker dies; the other node's worker loads the same bytes, then without the network; a cut is a miss."""
    left, right = cable_ends

    async def start(place: Place, *arguments: object) -> Process:
        processes.append(await Process.start(place, *arguments))
        return processes[-1]

    directory = await start(right, "directory", right.host)
    directory_port = await directory.line()
    nodes = {}
    for name, place in (("left", left), ("right", right)):
        (tmp_path / name).mkdir()
        nodes[name] = await start(place, "node", name, place.host, right.host, directory_port, tmp_path / name)
    ports = {name: await node.line() for name, node in nodes.items()}
    computing = await start(left, "worker", left.host, ports["left"])
    assert await computing.line() == "ready"
    assert await computing.ask("put 1 2 3 4") == "stored 4"
    assert await computing.ask("put 9") == "stored 1"
    await computing.kill()

    asking = await start(right, "worker", right.host, ports["right"])
    assert await asking.line() == "ready"
    await directory.until("blocks", "left=5 right=0")
    await asking.until("others", "1")
    assert await asking.ask("load 1 2 3 4 5") == "loaded 4 fetched 4 right"
    assert await nodes["right"].ask("counters") == "fetched=4 wire_corrupt=0"

    subprocess.run(["ip", "-n", left.namespace, "link", "set", left.device, "down"], check=True, timeout=10)
    assert await asking.ask("load 1 2 3 4") == "loaded 4 fetched 0 right"
    started_s = time.monotonic()
    assert await asking.ask("load 9") == "loaded 0 fetched 0 right"
    assert time.monotonic() - started_s < 2.0
    await directory.until("blocks", "right=4")
