"""Runs ``scan.cu`` on a GPU through CuPy: pools are checked where they lie, in one launch each.

Owns the compiled module of one device. CuPy is imported when a scanner is made, so that a machine without a GPU
never needs it. Nothing but figures and the blocks of a diagnosis comes back to the host.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels.layout import KVLayout, LayoutError
from kernels.raw_scan import SOURCE, RawScanner
from kernels.scan import check_shape


def admit_device_array(pool: Any, layout: KVLayout, device_id: int) -> int:
    """Returns the number of blocks of a pool in a GPU's memory.

    Raises LayoutError for host memory, another GPU's memory or an array that is no pool of this layout.
    """
    if not hasattr(pool, "__cuda_array_interface__"):
        raise LayoutError("pool.device", type(pool).__name__, "this scanner reads GPU memory, not the host's")
    where = getattr(getattr(pool, "device", None), "id", device_id)
    if where != device_id:
        raise LayoutError("pool.device", where, f"this scanner runs on GPU {device_id}")
    return check_shape(pool, layout, contiguous=pool.__cuda_array_interface__.get("strides") is None)


class CupyScanner(RawScanner):
    """The CUDA kernels over CuPy pools on one GPU.

    Raises LayoutError when there is no CuPy or no such GPU.
    """

    name = "cupy"

    def __init__(self, device_id: int = 0) -> None:
        try:
            self._cupy = importlib.import_module("cupy")
            count = int(self._cupy.cuda.runtime.getDeviceCount())
        except Exception as error:  # CuPy raises its own types, which cannot be named without it
            raise LayoutError("scanner", "cupy", f"needs CuPy and a GPU: {error}") from error
        if not 0 <= device_id < count:
            raise LayoutError("device_id", device_id, f"there are {count} GPUs")
        self.device_id = device_id
        with self._cupy.cuda.Device(device_id):
            self._module = self._cupy.RawModule(code=SOURCE.read_text(), options=("-std=c++17",))

    def admit(self, pool: Any, layout: KVLayout) -> int:
        return admit_device_array(pool, layout, self.device_id)

    def fetch(self, pool: Any, slots: Sequence[int]) -> np.ndarray:
        with self._cupy.cuda.Device(self.device_id):
            return np.stack([self._cupy.asnumpy(pool[slot]) for slot in slots])

    def _there(self, array: np.ndarray) -> Any:
        with self._cupy.cuda.Device(self.device_id):
            return self._cupy.asarray(array)

    def _here(self, array: Any) -> np.ndarray:
        return np.asarray(self._cupy.asnumpy(array))

    def _launch(self, kernel: str, grid: int, threads: int, arguments: Sequence[Any]) -> None:
        values = tuple(np.int64(value) if isinstance(value, int) else value for value in arguments)
        with self._cupy.cuda.Device(self.device_id):
            self._module.get_function(kernel)((grid,), (threads,), values)
