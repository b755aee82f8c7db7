# mypy: ignore-errors
# Runs in an environment of its own that has no type stubs.
"""NIXL READ from the memory of another process of this host into ours.

nixl_peer.py default     as it comes: its UCX then reads over TCP on one host, because errors of peers are handled
nixl_peer.py thread      errors of peers not handled, so that memory is read directly; agents have progress threads
nixl_peer.py polled      likewise, and only the reader polls
"""

import multiprocessing
import os
import sys
import time

from protocol import POOL_BYTES, Pool, serve

WARM_BYTES = 32 << 20


def make_agent(name, setting):
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    if setting == "default":
        return nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    agent = nixl_agent(name, nixl_agent_config(backends=[], enable_prog_thread=setting == "thread"))
    agent.create_backend("UCX", {"ucx_error_handling_mode": "none"})
    return agent


def own(pipe, setting):
    agent = make_agent("owner", setting)
    pool = Pool(seed=1)
    agent.register_memory([(pool.memory.ctypes.data, POOL_BYTES, 0, "pool")], "DRAM")
    pipe.send((agent.get_agent_metadata(), pool.memory.ctypes.data))
    pipe.recv()


def main():
    setting = sys.argv[1]
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    owner = context.Process(target=own, args=(theirs, setting), daemon=True)
    owner.start()
    agent = make_agent("reader", setting)
    here, there = Pool(), Pool()
    agent.register_memory([(here.memory.ctypes.data, POOL_BYTES, 0, "pool")], "DRAM")
    metadata, remote = ours.recv()
    peer = agent.add_remote_agent(metadata)

    def measure(block_bytes, num_blocks):
        size = block_bytes * num_blocks
        target, source = here.memory.ctypes.data + here.take(size), remote + there.take(size)
        starts = range(0, size, block_bytes)
        local = agent.get_xfer_descs([(target + start, block_bytes, 0) for start in starts], "DRAM")
        distant = agent.get_xfer_descs([(source + start, block_bytes, 0) for start in starts], "DRAM")
        before = time.perf_counter()
        handle = agent.initialize_xfer("READ", local, distant, peer)
        state = agent.transfer(handle)
        while state not in ("DONE", "ERR"):
            state = agent.check_xfer_state(handle)
        seconds = time.perf_counter() - before
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise SystemExit("NIXL READ failed")
        return {"get_s": seconds}

    # Once through both pools: the first reading of a page costs many times what later ones cost.
    for _ in range(POOL_BYTES // WARM_BYTES):
        measure(WARM_BYTES // 8, 8)
    serve(measure)
    os._exit(0)


if __name__ == "__main__":
    main()
