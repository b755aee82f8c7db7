# mypy: ignore-errors
# Runs in an environment of its own that has no type stubs.
"""Ray's object store: a value put by one actor, read by another, as a caller of both sees it."""

import os
import time

import numpy as np
import ray
from protocol import Pool, serve


@ray.remote(num_cpus=0.1)
class Owner:
    def __init__(self):
        self.pool = Pool(seed=1)

    def make(self, block_bytes):
        start = self.pool.take(block_bytes)
        return self.pool.memory[start : start + block_bytes]


@ray.remote(num_cpus=0.1)
class Reader:
    def __init__(self):
        self.pool = Pool()

    def read(self, block):
        start = self.pool.take(block.nbytes)
        np.copyto(self.pool.memory[start : start + block.nbytes], block)


def main():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 30)
    owner, reader = Owner.remote(), Reader.remote()
    ray.get(reader.read.remote(owner.make.remote(1024)))

    def measure(block_bytes, num_blocks):
        seconds = 0.0
        for _ in range(num_blocks):
            before = time.perf_counter()
            ray.get(reader.read.remote(owner.make.remote(block_bytes)))
            seconds += time.perf_counter() - before
        return {"get_s": seconds}

    serve(measure)
    ray.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
