"""A directory, a store node or a worker of one, driven line by line over its standard input.

store_node_process.py directory HOST                                    -> prints its port; "blocks"
store_node_process.py node NAME HOST DIRECTORY_HOST PORT SHM_DIR        -> prints its port; "counters"
store_node_process.py worker HOST PORT                                  -> "ready"; "put N..", "load N..", "others"
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from pathlib import Path

from kvstore.core.ids import BlockHash
from kvstore.net.handshake import PeerInfo
from kvstore.net.host import host_identity, new_incarnation
from kvstore.store.client import PutBlock, StoreClient
from kvstore.store.directory_server import DirectoryHost
from kvstore.store.host import StoreHost

SECRET = bytes(range(32))
BLOCK_BYTES = 368_640
LEASE_MS = 1_000
DEADLINE_S = 20.0
LOAD_DEADLINE_S = 1.0


def block_hash_of(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


def content(number: int) -> bytes:
    """Returns what block ``number`` holds: different in every block and at every position."""
    return random.Random(number).randbytes(BLOCK_BYTES)


def run_directory(host: str) -> None:
    directory = DirectoryHost(incarnation=new_incarnation(), secret=SECRET, lease_ms=LEASE_MS)
    print(directory.start(host)[1], flush=True)
    for _ in sys.stdin:
        nodes = directory.status()["nodes"]
        print(
            *(f"{name.removeprefix('store-')}={sum(nodes[name].values())}" for name in sorted(nodes)), flush=True
        )  # fmt: skip
    directory.close()


def run_node(name: str, host: str, directory_host: str, directory_port: int, shm_dir: Path) -> None:
    node = StoreHost(
        node=name, incarnation=new_incarnation(), secret=SECRET, block_bytes=BLOCK_BYTES, num_blocks=16, shm_dir=shm_dir
    )
    _, port = node.start(host)
    node.set_directory(directory_host, directory_port)
    print(port, flush=True)
    for _ in sys.stdin:
        counters = node.status()["counters"]
        print(f"fetched={counters['fetched_blocks']} wire_corrupt={counters['wire_corrupt_blocks']}", flush=True)
    node.close()


async def run_worker(host: str, port: int) -> None:
    me = PeerInfo(
        role="prefill", peer_id="worker", incarnation=new_incarnation(), pid=os.getpid(), host_identity=host_identity()
    )
    client = StoreClient(me=me, secret=SECRET, block_bytes=BLOCK_BYTES, call_deadline_s=DEADLINE_S)
    client.start(host, port)
    assert await client.wait_connected(DEADLINE_S), client.refusal
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        command, *words = line.split()
        print(await carry_out(client, command, [int(word) for word in words]), flush=True)
    await client.close()


async def carry_out(client: StoreClient, command: str, numbers: list[int]) -> str:
    hashes = [block_hash_of(number) for number in numbers]
    if command == "others":
        stat = await client.stat()
        return "lost" if stat is None else str(stat.counters["other_nodes"])
    if command == "put":
        result = await client.put_blocks([PutBlock(block_hash_of(number), content(number)) for number in numbers])
        return f"stored {result.stored}"
    assert command == "load", command
    buffers = [bytearray(BLOCK_BYTES) for _ in numbers]
    loaded = await client.load_blocks(hashes, buffers.__getitem__, deadline_s=LOAD_DEADLINE_S)
    good = all(buffers[index] == content(numbers[index]) for index in range(loaded.num_loaded))
    return f"loaded {loaded.num_loaded} fetched {loaded.num_fetched} {'right' if good else 'WRONG'}"


def main() -> None:
    role, *rest = sys.argv[1:]
    if role == "directory":
        run_directory(rest[0])
    elif role == "node":
        run_node(rest[0], rest[1], rest[2], int(rest[3]), Path(rest[4]))
    else:
        asyncio.run(run_worker(rest[0], int(rest[1])))


if __name__ == "__main__":
    main()
