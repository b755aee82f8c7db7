"""The CUDA source under the host shim: same figures, same digests and same verdicts as the NumPy reference."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kernels.checker import LayoutChecker
from kernels.layout import KVLayout
from kernels.pattern import block_keys
from kernels.raw_scan import CHUNK_BYTES, SOURCE
from kernels.scan import NumpyScanner, ScanRequest
from kernels.shim_scan import ShimScanner, compile_shim
from tests.unit.kernels_checker.pools import DAMAGES, random_layout, random_pool

NUM_CASES = int(os.environ.get("KOPIR_SOAK_POOLS", "1500"))


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> ShimScanner:
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        pytest.skip("no C++ compiler in PATH: the CUDA source cannot run on this machine's CPU")
    return ShimScanner(compile_shim(tmp_path_factory.mktemp("shim")))


@pytest.mark.timeout(600)
def test_every_figure_and_verdict_agrees(shim: ShimScanner) -> None:
    """Random pools, clean and damaged, with and without the pattern: both scanners measure and judge the same."""
    rng = np.random.default_rng(41)
    for number in range(NUM_CASES):
        if number % len(DAMAGES) == 0:
            layout = random_layout(rng)
        pool = random_pool(rng, layout)
        DAMAGES[number % len(DAMAGES)](pool, rng)
        slots = np.arange(len(pool.bytes))
        keys = block_keys(layout, pool.claim.probe_seed or 0, range(len(pool.bytes)))
        for chosen in (keys, None):
            request = ScanRequest(slots, pool.tokens, pool.claim.fill, chosen)
            assert np.array_equal(
                shim.scan(pool.bytes, layout, request), NumpyScanner().scan(pool.bytes, layout, request)
            ), (number, layout)
        one = LayoutChecker(layout).check(pool.bytes, pool.claim)
        other = LayoutChecker(layout, shim).check(pool.bytes, pool.claim)
        assert one.violations == other.violations
        assert (one.scanner, other.scanner) == ("numpy", "shim")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16", "float8_e4m3"])
def test_large_blocks_agree_on_the_vector_path(shim: ShimScanner, dtype) -> None:
    """Blocks of several chunks: one NaN in each sixteenth byte's place is counted once and found at its offset."""
    layout = KVLayout(4, 4, 64, 32, dtype)
    assert layout.block_bytes > CHUNK_BYTES / 2
    rng = np.random.default_rng(2)
    data = rng.integers(0, 0x3C, (3, layout.block_bytes), dtype=np.uint8)
    request = ScanRequest(np.array([2, 0, 1]), np.full(3, layout.block_tokens))
    elements = data.view(f"u{layout.item_bytes}")
    for place in [*range(16), elements.shape[1] - 1]:
        elements[1, place] = 0x7FFFFFFF >> (32 - 8 * layout.item_bytes)
        mine, theirs = (scanner.scan(data, layout, request) for scanner in (NumpyScanner(), shim))
        assert np.array_equal(mine, theirs)
        assert mine[2, 0] == 1 and mine[2, 1] == place * layout.item_bytes
        elements[1, place] = 0


@pytest.mark.parametrize("size", [1, 16, 240, 241, 256, 1023, 1024, 1025, 1088, 4096, 4097, 5_003, 131_072, 368_640])
def test_digests_are_those_of_xxhash(shim: ShimScanner, size: int) -> None:
    """xxh3-128 of the kernel equals the library's, for any length and start."""
    pool = np.random.default_rng(size).integers(0, 256, (4, size), dtype=np.uint8)
    slots = np.array([3, 0, 2])
    assert [row.tobytes() for row in shim.digests(pool, slots)] == [
        xxhash.xxh3_128_digest(pool[slot]) for slot in slots
    ]


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_the_source_compiles_for_gpus(architecture: str, tmp_path: Path) -> None:
    """nvcc accepts the very source that runs here."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc in PATH: the CUDA source is only compiled for the CPU here")
    command = [nvcc, "-cubin", f"-arch={architecture}", "-std=c++17", str(SOURCE), "-o", str(tmp_path / "scan.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
    kernels = (tmp_path / "scan.cubin").read_bytes()
    assert b"kopir_scan" in kernels and b"kopir_digest" in kernels
