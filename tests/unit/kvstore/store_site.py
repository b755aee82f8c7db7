"""One store node with the clients and helper processes of a test, and what tests of it share."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from store_process import block_hash_of, content, make_peer

from kvstore.core.ids import TenantId
from kvstore.net.handshake import PeerInfo
from kvstore.net.host import new_incarnation
from kvstore.store.client import LoadResult, PutBlock, StoreClient
from kvstore.store.host import DiskPlan, StoreHost
from kvstore.store.looker import StoreLooker, look_at
from kvstore.store.messages import BlockInfo, BlocksVerified, StoreStat, TierName

BLOCK_BYTES = 5000
SECRET = bytes(32)
DEADLINE_S = 20.0
HELPER = Path(__file__).with_name("store_process.py")


class Process:
    """One helper process; its commands are lines, its answers too."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def line(self) -> str:
        assert self.process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            return (await self.process.stdout.readline()).decode().strip()

    async def ask(self, command: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n".encode())
        return await self.line()

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.communicate()


class Site:
    """One store node in this process, and everything that was started beside it."""

    def __init__(self, shm_dir: Path) -> None:
        self.shm_dir = shm_dir
        self._processes: list[Process] = []
        self._clients: list[StoreClient] = []
        self._hosts: list[StoreHost] = []
        self.address = ("", 0)

    def start_host(
        self,
        num_blocks: int = 16,
        *,
        node: str = "test",
        quotas: Mapping[TenantId, int] | None = None,
        disk: DiskPlan | None = None,
    ) -> StoreHost:
        host = StoreHost(
            node=node, incarnation=new_incarnation(), secret=SECRET, block_bytes=BLOCK_BYTES, num_blocks=num_blocks,
            shm_dir=self.shm_dir, quotas=quotas, disk=disk,
        )  # fmt: skip
        self.address = host.start("127.0.0.1")
        self._hosts.append(host)
        return host

    async def client(self, *, me: PeerInfo | None = None, **options: object) -> StoreClient:
        """A connected client in this process."""
        client = self.make_client(me=me, **options)
        client.start(*self.address)
        assert await client.wait_connected(DEADLINE_S), client.refusal
        return client

    def make_client(self, *, me: PeerInfo | None = None, **options: object) -> StoreClient:
        arguments = {"block_bytes": BLOCK_BYTES, "call_deadline_s": DEADLINE_S, "lease_ms": 60_000, **options}
        client = StoreClient(me=me or make_peer("in-process"), secret=SECRET, **arguments)  # type: ignore[arg-type]
        self._clients.append(client)
        return client

    async def worker(self, *, lease_ms: int = 60_000) -> Process:
        host, port = self.address
        worker = await self._spawn("worker", SECRET.hex(), BLOCK_BYTES, host, port, lease_ms)
        assert await worker.line() == "ready"
        return worker

    async def node(self, num_blocks: int = 16) -> Process:
        """A node process of its own, which can be killed."""
        node = await self._spawn("node", SECRET.hex(), BLOCK_BYTES, num_blocks, self.shm_dir)
        host, port = (await node.line()).split()
        self.address = (host, int(port))
        return node

    async def close(self) -> None:
        for process in self._processes:
            await process.kill()
        for client in self._clients:
            await client.close()
        for host in self._hosts:
            host.close()

    async def _spawn(self, *arguments: object) -> Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(HELPER), *map(str, arguments), stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        self._processes.append(Process(process))
        return self._processes[-1]


async def until(look: Callable[[], Awaitable[StoreStat | None]], accept: Callable[[StoreStat], bool]) -> StoreStat:
    """Asks again and again, one round trip at a time, until the answer is accepted; fails after ``DEADLINE_S``."""
    stat = None
    end_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < end_s:
        stat = await look()
        if stat is not None and accept(stat):
            return stat
    raise AssertionError(f"not within {DEADLINE_S} s: {stat}")


def looking(client: StoreClient) -> AbstractAsyncContextManager[StoreLooker]:
    """A connection of an operator to the node of this client."""
    assert client._address is not None
    return look_at(*client._address, secret=SECRET)


async def blocks_in(client: StoreClient, tier: TierName) -> list[BlockInfo]:
    async with looking(client) as looker:
        return [block async for block in looker.blocks(tier)]


async def verified(client: StoreClient, tier: TierName) -> BlocksVerified:
    """One part: a tier of at most 64 slots."""
    async with looking(client) as looker:
        (part,) = [part async for part in looker.verify(tier)]
        return part


def blocks(*numbers: int) -> list[PutBlock]:
    return [PutBlock(block_hash_of(number), content(number, BLOCK_BYTES)) for number in numbers]


async def load(client: StoreClient, *numbers: int) -> tuple[LoadResult, list[bytes]]:
    """Loads a prefix; returns the result and the bytes of the blocks that count as loaded."""
    buffers = [bytearray(BLOCK_BYTES) for _ in numbers]
    result = await client.load_blocks(list(map(block_hash_of, numbers)), buffers.__getitem__, deadline_s=DEADLINE_S)
    return result, [bytes(buffer) for buffer in buffers[: result.num_loaded]]
