"""A disk tier that is killed, or loses power, at every single write and sync of its path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from disk_workload import (
    BLOCK_BYTES,
    NUM_SLOTS,
    SUPERBLOCK,
    Crash,
    SimulatedDisk,
    Workload,
    check_recovered,
    empty_image,
)

from kvstore.store.disk.file import DiskFile, open_disk

SEEDS = 6
POWER_CUTS_PER_STEP = 2
POINTS_MIN = 500
KILLS = 40
HELPER = Path(__file__).with_name("disk_kills.py")


def steps_of(seed: int, image: bytes) -> int:
    disk = SimulatedDisk(image)
    Workload(DiskFile(disk, SUPERBLOCK), seed=seed).run()
    return disk.num_steps


def test_a_power_cut_at_any_write_or_sync_leaves_only_whole_blocks_and_loses_nothing_promised() -> None:
    """Every step of several workloads, several outcomes of the disk's cache each; and a second life after it."""
    num_points = 0
    for seed in range(SEEDS):
        for crash_at in range(steps_of(seed, empty_image())):
            for variant in range(POWER_CUTS_PER_STEP):
                what = f"seed {seed} step {crash_at} variant {variant}"
                disk = SimulatedDisk(empty_image(), crash_at=crash_at, seed=crash_at * 31 + variant)
                workload = Workload(DiskFile(disk, SUPERBLOCK), seed=seed)
                with pytest.raises(Crash):
                    workload.run()
                restarted = SimulatedDisk(disk.after_crash())
                reopened = DiskFile(restarted, SUPERBLOCK)
                check_recovered(reopened, workload.promise.committed, what=what)
                second = Workload(reopened, seed=seed + 1000, num_batches=3)
                second.run()
                check_recovered(DiskFile(restarted, SUPERBLOCK), second.promise.committed, what=f"{what}, second life")
                num_points += 1
    assert num_points >= POINTS_MIN, num_points


def test_the_checker_finds_a_write_order_that_does_not_hold() -> None:
    """Planted bugs: no step waits for the one before, or old headers stay while their slot is written again."""

    class KeepsHeaders(DiskFile):
        def erase(self, slots):  # type: ignore[no-untyped-def]
            pass

    for broken, sync in ((DiskFile, False), (KeepsHeaders, True)):
        caught = 0
        for crash_at in range(steps_of(0, empty_image())):
            disk = SimulatedDisk(empty_image(), crash_at=crash_at, seed=crash_at)
            workload = Workload(broken(disk, SUPERBLOCK, sync=sync), seed=0)
            try:
                workload.run()
            except Crash:
                pass
            try:
                check_recovered(
                    DiskFile(SimulatedDisk(disk.after_crash()), SUPERBLOCK), workload.promise.committed, what="planted"
                )
            except AssertionError:
                caught += 1
        assert caught, f"{broken.__name__} sync={sync} was never noticed"


def test_a_process_killed_inside_any_write_leaves_only_whole_blocks(tmp_path: Path) -> None:
    """Real processes, a real file: SIGKILL halfway through write number k, for many k; then open and read."""
    env = {**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{HELPER.parent}"}
    done = subprocess.run(
        [sys.executable, str(HELPER), str(tmp_path), str(KILLS)], env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == KILLS, lines
    for number, line in enumerate(lines):
        promised = {int(part) for part in line.split(",") if part}
        disk = open_disk(tmp_path / str(number), block_bytes=BLOCK_BYTES, num_slots=NUM_SLOTS)
        try:
            check_recovered(disk, promised, what=f"killed in write {number}")
        finally:
            disk.close()
