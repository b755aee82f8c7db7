# mypy: ignore-errors
# Runs in an environment of its own that has no type stubs.
"""What every peer program speaks over its standard streams; needs nothing but numpy, for it runs outside the product.

One line ``{"block_bytes": B, "num_blocks": N}`` in, one line ``{"get_s": seconds, ...}`` out, all seconds for the whole
batch. The first line out is ``{"ready": true}``. End of input ends the program.
"""

import json
import os
import sys

import numpy as np

POOL_BYTES = 256 << 20

# Libraries print to standard output, some while they are imported; the answers keep a stream of their own.
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


class Pool:
    """Memory that is walked through from end to end, so that no step finds its bytes in a cache."""

    def __init__(self, seed=None):
        self.memory = np.ones(POOL_BYTES, np.uint8)
        if seed is not None:
            self.memory[:] = np.frombuffer(np.random.default_rng(seed).bytes(POOL_BYTES), np.uint8)
        self.next = 0

    def take(self, size_bytes):
        """Returns the offset of the next ``size_bytes``."""
        if self.next + size_bytes > POOL_BYTES:
            self.next = 0
        start = self.next
        self.next += -(-size_bytes // 4096) * 4096
        return start


def serve(measure):
    """Answers each step with ``measure(block_bytes, num_blocks)`` until the input ends."""
    answer(lambda step: measure(step["block_bytes"], step["num_blocks"]))


def answer(handle):
    """Says that the program is ready, then answers each line of the input with ``handle(line)`` until it ends."""
    print(json.dumps({"ready": True}), file=ANSWERS, flush=True)
    for line in sys.stdin:
        print(json.dumps(handle(json.loads(line))), file=ANSWERS, flush=True)
