"""``make gpu-check``: the CUDA paths on a real GPU, checked first and timed second, in under three minutes.

Checks that figures, digests and verdicts of the CUDA kernels equal the NumPy reference's, that the Triton mover
equals torch, then times both against a device copy of the same bytes. Without a GPU it says so and exits with 0; a
wrong result exits with 1, and so does a figure below its target.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from bench.report import Report, finish, make_target
from kernels.checker import Claim, LayoutChecker
from kernels.layout import DType, KVLayout, LayoutError
from kernels.movers.conversions import STANDARD
from kernels.movers.move import Backend, move, plan_move
from kernels.movers.pages import Pages
from kernels.pattern import block_keys, write_pattern
from kernels.scan import NumpyScanner, ScanRequest

NUM_CASES = 300
BACKENDS: tuple[Backend, ...] = ("torch", "triton")
POOL_BYTES = 1 << 30
REPEATS = 20
CHECKER_SHARE, MOVER_SHARE = 0.6, 0.8


def main(json_path: Path | None = None) -> int:
    """Runs everything; returns the exit status."""
    if not torch.cuda.is_available():
        print("gpu-check: no GPU here; the CUDA and Triton paths were not run, their figures stay unmeasured")
        return 0
    try:
        from kernels.cupy_scan import CupyScanner

        scanner = CupyScanner()
    except LayoutError as error:
        print(f"gpu-check: {error}")
        return 1
    report = Report.start("gpu_kernels", seed=1)
    report.notes.append(torch.cuda.get_device_name())
    _check_scanner(scanner, np.random.default_rng(1))
    _check_movers(np.random.default_rng(2))
    _time_all(scanner, report)
    report.show("CUDA paths", ["step", "ms", "GB_s"])
    return finish(report, json_path=json_path, check=True)


DTYPES: tuple[DType, ...] = ("float32", "bfloat16", "float16", "float8_e4m3")


def _check_scanner(scanner: Any, rng: np.random.Generator) -> None:
    """Same figures, digests and verdicts as the host, on clean and damaged pools of every dtype and order."""
    cupy = scanner._cupy
    for number in range(NUM_CASES):
        layout = KVLayout(
            3,
            4,
            int(rng.choice([6, 16, 64])),
            int(rng.choice([1, 4, 16])),
            DTYPES[number % 4],
            token_order="NHD" if number % 2 else "HND",
            kv_together=number % 3 > 0,
            row_align_bytes=32 if number % 5 == 0 else 1,
        )
        tokens = rng.integers(1, layout.block_tokens + 1, 4)
        pool = np.zeros((4, layout.block_bytes), np.uint8)
        write_pattern(pool, layout, seed=number, num_tokens=tokens)
        for _ in range(number % 3):
            pool[rng.integers(4), rng.integers(layout.block_bytes)] ^= np.uint8(1 << rng.integers(8))
        there = cupy.asarray(pool)
        for keys in (None, block_keys(layout, number, range(4))):
            request = ScanRequest(np.arange(4), tokens, 0, keys)
            mine, theirs = NumpyScanner().scan(pool, layout, request), scanner.scan(there, layout, request)
            assert np.array_equal(mine, theirs), (layout, mine, theirs)
        slots = np.arange(4)
        assert np.array_equal(NumpyScanner().digests(pool, slots), scanner.digests(there, slots)), layout
        claim = Claim(num_tokens=tokens, probe_seed=number)
        here = LayoutChecker(layout).check(pool, claim)
        assert here.violations == LayoutChecker(layout, scanner).check(there, claim).violations
    print(f"gpu-check: checker agrees with NumPy on {NUM_CASES} pools")


def _check_movers(rng: np.random.Generator) -> None:
    """The compiled Triton kernel gives the bits of the torch reference for every registered conversion."""
    for source_dtype in DTYPES:
        for target_dtype in DTYPES:
            try:
                conversion = STANDARD.find(source_dtype, target_dtype, allow_lossy=True)
            except LayoutError:
                continue
            one = KVLayout(2, 4, 48, 16, source_dtype)
            two = replace(one, dtype=target_dtype, block_tokens=32, token_order="NHD")
            pool = np.zeros((8, one.block_bytes), np.uint8)
            write_pattern(pool, one, seed=3)
            source = Pages(torch.from_numpy(pool).cuda(), one, torch.from_numpy(rng.permutation(8)).cuda())
            scales = torch.full((2, 2, 4), 0.5, device="cuda") if conversion.is_scaled else None
            found = []
            for backend in BACKENDS:
                target = torch.zeros(4, two.block_bytes, dtype=torch.uint8, device="cuda")
                pages = Pages(target, two, torch.arange(4, device="cuda"))
                move(plan_move(source, pages, 100, scales=scales, allow_lossy=True), backend=backend)
                found.append(target)
            assert torch.equal(*found), (source_dtype, target_dtype)
    print("gpu-check: movers agree with torch on every registered conversion")


def _time_all(scanner: Any, report: Report) -> None:
    layout = KVLayout(32, 8, 128, 16, "bfloat16")
    num_blocks = POOL_BYTES // layout.block_bytes
    data = torch.randn(num_blocks, layout.block_bytes // 2, dtype=torch.bfloat16, device="cuda")
    pool = data.view(torch.uint8)
    other = torch.empty_like(pool)
    copy_s = _seconds(lambda: other.copy_(pool))
    _row(report, "device copy", 2 * pool.nbytes, copy_s)

    there = scanner._cupy.asarray(pool)
    request = ScanRequest(np.arange(num_blocks), np.full(num_blocks, layout.block_tokens))
    scan_s = _seconds(lambda: scanner.scan(there, layout, request))
    _row(report, "checker, content", pool.nbytes, scan_s)
    _row(report, "checker, digest", pool.nbytes, _seconds(lambda: scanner.digests(there, request.slots)))
    # A copy reads and writes each byte, a check only reads it.
    _target(report, "checker_of_copy_bandwidth", pool.nbytes / scan_s, 2 * pool.nbytes / copy_s, CHECKER_SHARE)

    table = torch.randperm(num_blocks, device="cuda")
    source = Pages(pool, layout, table)
    for name, changed in (
        ("gather to one run", replace(layout, block_tokens=num_blocks * layout.block_tokens)),
        ("16 to 32 tokens a block", replace(layout, block_tokens=32)),
        ("HND to NHD", replace(layout, token_order="NHD")),
    ):
        target = other.view(-1, changed.block_bytes)
        pages = Pages(target, changed, torch.arange(len(target), device="cuda"))
        plan = plan_move(source, pages, num_blocks * layout.block_tokens)
        move_s = _seconds(partial(move, plan, backend="triton"))
        _row(report, name, 2 * pool.nbytes, move_s)
        _target(report, f"mover: {name}", 2 * pool.nbytes / move_s, 2 * pool.nbytes / copy_s, MOVER_SHARE)


def _event() -> Any:
    event: Any = torch.cuda.Event
    return event(enable_timing=True)


def _seconds(step: Callable[[], object]) -> float:
    """Returns the median time of a step on the device, after two turns to warm up."""
    times = []
    for turn in range(REPEATS + 2):
        start, end = _event(), _event()
        torch.cuda.synchronize()
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        if turn >= 2:
            times.append(start.elapsed_time(end) / 1e3)
    return float(median(times))


def _row(report: Report, step: str, num_bytes: int, seconds: float) -> None:
    report.rows.append({"step": step, "ms": round(seconds * 1e3, 3), "GB_s": round(num_bytes / seconds / 1e9, 1)})


def _target(report: Report, id: str, ours: float, reference: float, at_least: float) -> None:
    report.targets.append(make_target(id, ours=ours / 1e9, reference=reference / 1e9, unit="GB/s", at_least=at_least))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
