"""What the checker refuses to look at: each error names the field and the value."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kernels.checker import Claim, LayoutChecker, Sample, unwritten_pool
from kernels.cupy_scan import CupyScanner, admit_device_array
from kernels.layout import KVLayout, LayoutError
from kernels.pattern import write_pattern

LAYOUT = KVLayout(1, 2, 8, 4, "bfloat16")
POOL = np.zeros((3, LAYOUT.block_bytes), np.uint8)


class OnGpu:
    """An array that says it lies in a GPU's memory."""

    def __init__(self, device: int = 0, strides: tuple[int, ...] | None = None, shape=(3, LAYOUT.block_bytes)) -> None:
        self.__cuda_array_interface__ = {"shape": shape, "strides": strides}
        self.device = SimpleNamespace(id=device)
        self.dtype, self.shape, self.ndim, self.strides = "uint8", shape, len(shape), strides


@pytest.mark.parametrize(
    ("pool", "field"),
    [
        (POOL[:0], "pool.shape"),
        (POOL[:, :-2], "pool.shape"),
        (POOL.reshape(-1), "pool.shape"),
        (POOL.view(np.uint16), "pool.dtype"),
        (np.zeros((6, LAYOUT.block_bytes), np.uint8)[::2], "pool.strides"),
        (np.zeros((LAYOUT.block_bytes, 3), np.uint8).T, "pool.strides"),
        (torch.zeros(3, LAYOUT.block_bytes, dtype=torch.uint8), "pool.device"),
        (OnGpu(), "pool.device"),
        (bytes(LAYOUT.block_bytes), "pool.device"),
    ],
)
def test_a_pool_that_cannot_be_read_is_refused(pool, field: str) -> None:
    """Empty pools, wrong shapes and types, strided views and memory of another device."""
    with pytest.raises(LayoutError) as caught:
        LayoutChecker(LAYOUT).check(pool)
    assert caught.value.field == field and caught.value.why


@pytest.mark.parametrize(
    ("claim", "field"),
    [
        (Claim(num_tokens=[4, 0, 4]), "num_tokens"),
        (Claim(num_tokens=[4, 5, 4]), "num_tokens"),
        (Claim(num_tokens=[4, 4]), "num_tokens"),
        (Claim(num_tokens=[1.5, 4, 4]), "num_tokens"),
        (Claim(digests=[bytes(16)]), "digests"),
        (Claim(digests=[bytes(15)] * 3), "digests"),
        (Claim(probe_seed=-1), "seed"),
        (Claim(probe_seed=1 << 64), "seed"),
        (Claim(block_ids=[1, 2]), "block_ids"),
        (Claim(block_ids=[1, 2, -3]), "block_ids"),
        (Claim(fill=256), "fill"),
    ],
)
def test_a_claim_that_fits_no_pool_is_refused(claim: Claim, field: str) -> None:
    """Zero tokens, too many, missing digests, seeds and fills out of range."""
    with pytest.raises(LayoutError) as caught:
        LayoutChecker(LAYOUT).check(POOL, claim)
    assert caught.value.field == field


def test_read_only_pools_are_checked_but_never_written() -> None:
    """Checking only reads; writing the pattern into memory that is read-only is refused by name."""
    pool = POOL.copy()
    pool.flags.writeable = False
    assert LayoutChecker(LAYOUT).check(pool).is_clean
    with pytest.raises(LayoutError, match="read-only"):
        write_pattern(pool, LAYOUT, seed=1)


def test_samples_and_fresh_pools_need_a_size() -> None:
    for make in (lambda: Sample(0, 1), lambda: Sample(1, -1), lambda: unwritten_pool(LAYOUT, 0)):
        with pytest.raises(LayoutError):
            make()


def test_the_gpu_scanner_takes_only_its_own_memory() -> None:
    """Host memory, another GPU, strided views and empty pools are refused before any kernel runs."""
    assert admit_device_array(OnGpu(), LAYOUT, 0) == 3
    wrong = [(POOL, "pool.device"), (OnGpu(device=1), "pool.device"), (OnGpu(strides=(64, 2)), "pool.strides")]
    for pool, field in [*wrong, (OnGpu(shape=(0, LAYOUT.block_bytes)), "pool.shape")]:
        with pytest.raises(LayoutError) as caught:
            admit_device_array(pool, LAYOUT, 0)
        assert caught.value.field == field


def test_a_machine_without_a_gpu_says_so() -> None:
    """Making the GPU scanner fails early with a reason, never at the first check."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here: `make gpu-check` uses it")
    with pytest.raises(LayoutError, match="scanner"):
        CupyScanner()
