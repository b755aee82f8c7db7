"""Runs ``scan.cu`` on the CPU through ``shim.h``: the source that ships to a GPU is the source that CI tests.

Owns the compilation and the calls. It is for tests and for machines without a GPU; the NumPy scanner is faster.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from kernels.layout import KVLayout, LayoutError
from kernels.raw_scan import SOURCE, RawScanner
from kernels.scan import NumpyScanner

COMPILE_DEADLINE_S: Final = 120.0
HOST_NAMES: Final = {"kopir_scan": "kopir_host_scan", "kopir_digest": "kopir_host_digest"}


def compile_shim(folder: Path) -> Path:
    """Returns the library compiled from ``scan.cu`` with the host's C++ compiler. Modifies: ``folder``.

    Raises LayoutError when there is no compiler or the source does not compile, with the compiler's own words.
    """
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise LayoutError("compiler", "c++", "no C++ compiler in PATH")
    library = folder / "scan_shim.so"
    command = [compiler, "-O2", "-std=c++17", "-shared", "-fPIC", "-Wall", "-Werror", "-fno-strict-aliasing"]
    command += ["-DKOPIR_HOST_SHIM", "-x", "c++", str(SOURCE), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_DEADLINE_S, check=False)
    if done.returncode:
        raise LayoutError("compiler", compiler, done.stderr[-2000:])
    return library


class ShimScanner(RawScanner):
    """The CUDA kernels over numpy pools. Not thread-safe: the shim's thread indices are global."""

    name = "shim"

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._host = NumpyScanner()

    def admit(self, pool: Any, layout: KVLayout) -> int:
        return self._host.admit(pool, layout)

    def fetch(self, pool: Any, slots: Sequence[int]) -> np.ndarray:
        return self._host.fetch(pool, slots)

    def _there(self, array: np.ndarray) -> np.ndarray:
        return array

    def _here(self, array: Any) -> np.ndarray:
        return np.asarray(array)

    def _launch(self, kernel: str, grid: int, threads: int, arguments: Sequence[Any]) -> None:
        call = getattr(self._library, HOST_NAMES[kernel])
        call.restype = None
        values = [
            ctypes.c_longlong(argument) if isinstance(argument, int) else ctypes.c_void_p(argument.ctypes.data)
            for argument in arguments
        ]
        call(ctypes.c_uint(grid), ctypes.c_uint(threads), *values)
