# mypy: ignore-errors
# Runs in an environment of its own that has no type stubs.
"""Mooncake Store: objects in the segment of another process of this host, over TCP loopback. Needs a running master.

mooncake_peer.py MASTER_PORT METADATA_PORT
"""

import multiprocessing
import os
import sys
import time

from protocol import POOL_BYTES, Pool, serve

SEGMENT_BYTES = 1 << 30
BUFFER_BYTES = 256 << 20


def open_store(segment_bytes):
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    master, metadata = sys.argv[1:3]
    servers = f"http://127.0.0.1:{metadata}/metadata", f"127.0.0.1:{master}"
    code = store.setup("127.0.0.1", servers[0], segment_bytes, BUFFER_BYTES, "tcp", "", servers[1])
    if code != 0:
        raise SystemExit(f"Mooncake setup failed: {code}")
    return store


def own(pipe):
    store = open_store(SEGMENT_BYTES)
    pipe.send(store is not None)
    pipe.recv()


def main():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    owner = context.Process(target=own, args=(theirs,), daemon=True)
    owner.start()
    ours.recv()
    store = open_store(0)
    source, target = Pool(seed=1), Pool()
    for pool in (source, target):
        store.register_buffer(pool.memory.ctypes.data, POOL_BYTES)
    count = 0

    def measure(block_bytes, num_blocks):
        nonlocal count
        put_s = get_s = 0.0
        for _ in range(num_blocks):
            key = f"block-{count}"
            count += 1
            start, end = source.take(block_bytes), target.take(block_bytes)
            before = time.perf_counter()
            put = store.put_from(key, source.memory.ctypes.data + start, block_bytes)
            between = time.perf_counter()
            got = store.get_into(key, target.memory.ctypes.data + end, block_bytes)
            after = time.perf_counter()
            put_s, get_s = put_s + between - before, get_s + after - between
            if put != 0 or got != block_bytes:
                raise SystemExit(f"Mooncake put {put}, get {got}")
            if (source.memory[start : start + 64] != target.memory[end : end + 64]).any():
                raise SystemExit("Mooncake returned other bytes")
            store.remove(key)
        return {"get_s": get_s, "put_s": put_s}

    serve(measure)
    os._exit(0)


if __name__ == "__main__":
    main()
