# mypy: ignore-errors
# Runs in an environment of its own that has no type stubs.
"""Mooncake Store as a block store of this host. Needs a running master.

    mooncake_store_peer.py tcp  MASTER_PORT METADATA_PORT     objects in the segment of another process, over loopback
    mooncake_store_peer.py best MASTER_PORT METADATA_PORT     objects in this process's own segment, copied by memcpy

One line in, one line out:

    {"do": "blocks", "block_bytes": B, "num_blocks": N}   -> {"put_s", "get_s"}: one batched call each, for N new blocks
    {"do": "exists", "num_keys": N}                       -> {"single_s", "batch_s"}: one key alone; N keys at once
"""

import multiprocessing
import os
import sys
import time
from statistics import median

from protocol import POOL_BYTES, Pool, answer

SEGMENT_BYTES = 768 << 20
BUFFER_BYTES = 64 << 20
SINGLES = 50


def open_store(segment_bytes):
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    master, metadata = sys.argv[2:4]
    servers = f"http://127.0.0.1:{metadata}/metadata", f"127.0.0.1:{master}"
    code = store.setup("127.0.0.1", servers[0], segment_bytes, BUFFER_BYTES, "tcp", "", servers[1])
    if code != 0:
        raise SystemExit(f"Mooncake setup failed: {code}")
    return store


def own(pipe):
    store = open_store(SEGMENT_BYTES)
    pipe.send(store is not None)
    pipe.recv()


class Peer:
    def __init__(self, store):
        self.store = store
        self.source, self.target = Pool(seed=1), Pool()
        for pool in (self.source, self.target):
            store.register_buffer(pool.memory.ctypes.data, POOL_BYTES)
        self.count = 0
        self.keys = []

    def blocks(self, block_bytes, num_blocks):
        keys = [f"block-{self.count + index}" for index in range(num_blocks)]
        self.count += num_blocks
        starts = [self.source.take(block_bytes) for _ in keys]
        ends = [self.target.take(block_bytes) for _ in keys]
        sources = [self.source.memory.ctypes.data + start for start in starts]
        targets = [self.target.memory.ctypes.data + end for end in ends]
        sizes = [block_bytes] * num_blocks
        before = time.perf_counter()
        put = self.store.batch_put_from(keys, sources, sizes)
        between = time.perf_counter()
        got = self.store.batch_get_into(keys, targets, sizes)
        after = time.perf_counter()
        if any(code != 0 for code in put) or any(size != block_bytes for size in got):
            raise SystemExit(f"Mooncake put {put}, get {got}")
        for start, end in zip(starts, ends, strict=True):
            if (self.source.memory[start : start + 64] != self.target.memory[end : end + 64]).any():
                raise SystemExit("Mooncake returned other bytes")
        self.keys = keys
        return {"put_s": between - before, "get_s": after - between}

    def exists(self, num_keys):
        wanted = [self.keys[index % len(self.keys)] for index in range(num_keys)]
        singles = []
        for index in range(SINGLES):
            before = time.perf_counter()
            found = self.store.is_exist(wanted[index % num_keys])
            singles.append(time.perf_counter() - before)
            if found != 1:
                raise SystemExit(f"Mooncake does not find its key: {found}")
        before = time.perf_counter()
        found = self.store.batch_is_exist(wanted)
        batch_s = time.perf_counter() - before
        if any(one != 1 for one in found):
            raise SystemExit("Mooncake does not find its keys")
        return {"single_s": median(singles), "batch_s": batch_s}

    def handle(self, step):
        if step["do"] == "exists":
            return self.exists(step["num_keys"])
        return self.blocks(step["block_bytes"], step["num_blocks"])


def main():
    if sys.argv[1] == "best":
        os.environ["MC_STORE_MEMCPY"] = "1"
        store = open_store(SEGMENT_BYTES)
    else:
        os.environ["MC_STORE_MEMCPY"] = "0"
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        owner = context.Process(target=own, args=(theirs,), daemon=True)
        owner.start()
        ours.recv()
        store = open_store(0)
    answer(Peer(store).handle)
    os._exit(0)


if __name__ == "__main__":
    main()
