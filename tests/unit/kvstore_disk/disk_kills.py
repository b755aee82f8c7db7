"""A program that runs the disk workload in child processes, each killed inside another write.

python disk_kills.py FOLDER NUM_KILLS   -> one line per child: the numbers of the blocks that it had been promised
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from disk_workload import BLOCK_BYTES, NUM_SLOTS, MortalIo, Promise, Workload

from kvstore.store.disk.file import open_disk


def run_child(folder: Path, die_at: int, pipe: int) -> None:
    disk = open_disk(folder, block_bytes=BLOCK_BYTES, num_slots=NUM_SLOTS, make_io=lambda path: MortalIo(path, die_at))

    def tell(promise: Promise) -> None:
        os.write(pipe, f"{promise.line()}\n".encode())

    Workload(disk, seed=die_at % 5, num_batches=100).run(tell)


def main() -> None:
    folder, num_kills = Path(sys.argv[1]), int(sys.argv[2])
    for number in range(num_kills):
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read_end)
            run_child(folder / str(number), number, write_end)
            os._exit(3)
        os.close(write_end)
        with os.fdopen(read_end) as told:
            lines = told.read().splitlines()
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"child {number}: status {status}"
        # Only whole lines were told: the last one is what stood when it died.
        print(lines[-1] if lines else "", flush=True)


if __name__ == "__main__":
    main()
