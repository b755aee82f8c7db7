"""A program that is one store node or one worker of it, driven line by line over its standard input.

    python store_process.py node   SECRET_HEX BLOCK_BYTES NUM_BLOCKS SHM_DIR   -> prints "HOST PORT", then answers
    python store_process.py worker SECRET_HEX BLOCK_BYTES HOST PORT LEASE_MS   -> prints "ready", then answers

Commands of a node: ``directory HOST PORT``, ``end``. Commands of a worker: ``put N...``, ``load N...``, ``match N...``
(keeps the lease), ``reserve N...`` (keeps the reservation), ``commit`` (of the kept reservation). Block N holds
``content(N)``.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from kvstore.core.ids import BlockHash
from kvstore.net.handshake import PeerInfo
from kvstore.net.host import host_identity, new_incarnation
from kvstore.store.client import PutBlock, StoreClient
from kvstore.store.host import StoreHost
from kvstore.store.session import LeasedPrefix, WriteReservation

CALL_DEADLINE_S = 20.0


def block_hash_of(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


def content(number: int, block_bytes: int) -> bytes:
    """Returns what block ``number`` holds: different in every block and at every position."""
    words = b"".join((number * 1_000_003 + index).to_bytes(8, "little") for index in range(-(-block_bytes // 8)))
    return words[:block_bytes]


def make_peer(name: str, role: str = "prefill") -> PeerInfo:
    return PeerInfo(
        role=role, peer_id=name, incarnation=new_incarnation(), pid=os.getpid(), host_identity=host_identity()
    )


def run_node(secret: bytes, block_bytes: int, num_blocks: int, shm_dir: Path) -> None:
    host = StoreHost(
        node="test",
        incarnation=new_incarnation(),
        secret=secret,
        block_bytes=block_bytes,
        num_blocks=num_blocks,
        shm_dir=shm_dir,
    )
    print(*host.start("127.0.0.1"), flush=True)
    for line in sys.stdin:
        command, *address = line.split()
        if command == "end":
            break
        assert command == "directory", line
        host.set_directory(address[0], int(address[1]))
        print("ok", flush=True)
    host.close()


class Worker:
    """Keeps at most one lease and one reservation between commands."""

    def __init__(self, client: StoreClient, block_bytes: int) -> None:
        self._client = client
        self._block_bytes = block_bytes
        self._lease: LeasedPrefix | None = None
        self._reservation: WriteReservation | None = None
        self._numbers: list[int] = []

    async def carry_out(self, command: str, numbers: list[int]) -> str:
        hashes = [block_hash_of(number) for number in numbers]
        if command == "put":
            contents = [content(number, self._block_bytes) for number in numbers]
            result = await self._client.put_blocks(list(map(PutBlock, hashes, contents)))
            return f"stored {result.stored}"
        if command == "load":
            buffers = [bytearray(self._block_bytes) for _ in numbers]
            loaded = await self._client.load_blocks(hashes, buffers.__getitem__, deadline_s=CALL_DEADLINE_S)
            good = all(
                buffers[index] == content(numbers[index], self._block_bytes) for index in range(loaded.num_loaded)
            )
            return f"loaded {loaded.num_loaded} {'right' if good else 'WRONG'}"
        if command == "match":
            self._lease = await self._client.match(hashes)
            return f"matched {0 if self._lease is None else len(self._lease)}"
        if command == "copy":
            assert self._lease is not None
            buffers = [bytearray(self._block_bytes) for _ in numbers]
            copied = await self._client.load_leased(self._lease, buffers.__getitem__)
            rights = [(content(number, self._block_bytes), bytes(self._block_bytes)) for number in numbers]
            good = all(bytes(buffer) in right for buffer, right in zip(buffers, rights, strict=True))
            return f"copied {copied.num_loaded} {copied.stopped_by} {'right' if good else 'WRONG'}"
        if command == "reserve":
            self._numbers = numbers
            self._reservation = await self._client.reserve(hashes)
            return "reserved none" if self._reservation is None else f"reserved {' '.join(self._reservation.statuses)}"
        assert command == "commit" and self._reservation is not None, command
        for index, number in enumerate(self._numbers):
            # A worker that was stopped between its check and its copy does exactly this: it writes first.
            self._reservation.view(index)[:] = content(number + 1_000, self._block_bytes)
            self._reservation.written(index, b"\0" * 16)
        return f"committed {await self._reservation.commit(deadline_s=CALL_DEADLINE_S)}"


async def run_worker(secret: bytes, block_bytes: int, host: str, port: int, *, lease_ms: int) -> None:
    client = StoreClient(
        me=make_peer("worker"),
        secret=secret,
        block_bytes=block_bytes,
        call_deadline_s=CALL_DEADLINE_S,
        lease_ms=lease_ms,
    )
    client.start(host, port)
    assert await client.wait_connected(CALL_DEADLINE_S), client.refusal
    worker = Worker(client, block_bytes)
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        command, *numbers = line.split()
        print(await worker.carry_out(command, [int(number) for number in numbers]), flush=True)
    await client.close()


def main() -> None:
    role, secret_hex, block_bytes, *rest = sys.argv[1:]
    secret = bytes.fromhex(secret_hex)
    if role == "node":
        run_node(secret, int(block_bytes), int(rest[0]), Path(rest[1]))
    else:
        asyncio.run(run_worker(secret, int(block_bytes), rest[0], int(rest[1]), lease_ms=int(rest[2])))


if __name__ == "__main__":
    main()
