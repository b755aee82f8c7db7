"""One process rewrites a slab again and again while others read it without asking.

    python shared_reading.py SHM_DIR SECONDS     -> prints "copied=N missed=N corrupt=N wrong=N lives=N"

A slot is given to another block as soon as it can be, the worst case for readers. Block N holds the content of N.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from store_process import block_hash_of, content

from kvstore.core.eviction import LruPolicy
from kvstore.core.slab_index import HolderId, SlabIndex
from kvstore.digest import block_digest
from kvstore.store.shared_reader import CopyResult, SharedReader
from kvstore.store.slab import create_slab, open_slab

BLOCK_BYTES = 64 << 10
NUM_SLOTS = 4
NUM_BLOCKS = 12
NUM_READERS = 2
WRITER = HolderId("writer")


def read(path: Path, seed: int, stop: Any, ready: Any, results: Any) -> None:
    """Copies blocks in random order and compares each copy that counts."""
    slab = open_slab(path)
    reader = SharedReader(slab)
    contents = [content(number, BLOCK_BYTES) for number in range(NUM_BLOCKS)]
    dice = random.Random(seed)
    counts: Counter[str] = Counter()
    buffer = bytearray(BLOCK_BYTES)
    ready.wait(20)
    while not stop.is_set():
        number = dice.randrange(NUM_BLOCKS)
        result, _ = reader.copy(block_hash_of(number), buffer)
        counts[result.value] += 1
        if result is CopyResult.COPIED and buffer != contents[number]:
            counts["wrong"] += 1
    results.put(counts)


def write(index: SlabIndex, slab: Any, dice: random.Random) -> int:
    """Puts one block that is not there, in the place of the oldest. Returns how many lives began."""
    number = dice.randrange(NUM_BLOCKS)
    block_hash = block_hash_of(number)
    if block_hash in index:
        return 0
    (outcome,) = index.reserve([block_hash], writer=WRITER, deadline_ns=1)
    data = content(number, BLOCK_BYTES)
    slab.slot(outcome.slot)[:] = data
    index.commit(block_hash, slot=outcome.slot, generation=outcome.generation, digest=block_digest(data), writer=WRITER)
    return 1


def main() -> None:
    shm_dir, seconds = Path(sys.argv[1]), float(sys.argv[2])
    slab = create_slab(incarnation="shared", block_bytes=BLOCK_BYTES, num_blocks=NUM_SLOTS, shm_dir=shm_dir)
    index = SlabIndex(NUM_SLOTS, policy=LruPolicy(NUM_SLOTS), table=slab.table)
    context = multiprocessing.get_context("spawn")
    stop, ready, results = context.Event(), context.Barrier(NUM_READERS + 1), context.Queue()
    readers = [
        context.Process(target=read, args=(slab.path, seed, stop, ready, results)) for seed in range(NUM_READERS)
    ]
    for process in readers:
        process.start()
    ready.wait(20)
    dice, lives, end_s = random.Random(9), 0, time.monotonic() + seconds
    total: Counter[str] = Counter()
    while time.monotonic() < end_s or lives < 200:
        lives += write(index, slab, dice)
    stop.set()
    for process in readers:
        total += results.get(timeout=20)
        process.join(20)
    slab.close()
    names = {"copied": "copied", "missed": "miss", "corrupt": "corrupt", "wrong": "wrong"}
    print(*(f"{name}={total[key]}" for name, key in names.items()), f"lives={lives}")


if __name__ == "__main__":
    main()
