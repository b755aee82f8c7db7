"""Compiles the C++ decoder for this processor, once, and loads it.

Owns the compiled files in the cache folder, named after their sources and flags: whoever changes either gets another
file. Several processes may ask at once: one compiles, the others wait. Where there is no compiler, or the processor is
of another kind, there is no library, and the reason is told. It never decides who uses the library.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from workers.model.hub import default_cache_dir

logger = logging.getLogger(__name__)

FOLDER: Final = Path(__file__).parent
MAIN_SOURCE: Final = FOLDER / "decoder.cc"
SOURCES: Final = ("attention.h", "decoder.cc", "products.h", "simd.h", "team.h")
COMPILERS: Final = ("c++", "g++", "clang++")
COMPILE_DEADLINE_S: Final = 180.0
# Nothing may be fused or reordered that the source does not fuse or reorder: bits depend on it.
FLAGS: Final = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-strict-aliasing", "-w")
_AVX512: Final = ("avx512f", "avx512bw", "avx512vl", "avx512dq")
INSTRUCTION_SETS: Final[dict[str, tuple[str, ...]]] = {
    "avx512bf16": (*_AVX512, "avx512bf16", "avx2", "fma"),
    "avx512": (*_AVX512, "avx2", "fma"),
    "avx2": ("avx2", "fma"),
}
"""From the fastest to the slowest, each with the compiler's names of what it needs."""


class NoLibrary(Exception):
    """There is no native library here; the message says why."""


@dataclass(frozen=True, slots=True)
class Library:
    """The loaded library. ``name`` tells what it was compiled from and for."""

    calls: ctypes.CDLL
    name: str
    has_bf16: bool


@functools.cache
def processor_flags() -> frozenset[str]:
    """Returns the instruction sets that the kernel reports, by the compiler's names."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    flags = next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")
    return frozenset(name.replace("avx512_", "avx512") for name in flags.split())


def best_instruction_set() -> str:
    """Returns the fastest of ``INSTRUCTION_SETS`` that this processor has. Raises NoLibrary when it has none."""
    if platform.machine() != "x86_64":
        raise NoLibrary(f"no native decoder for processors of the kind {platform.machine()}")
    for name, needed in INSTRUCTION_SETS.items():
        if processor_flags().issuperset(needed):
            return name
    raise NoLibrary("the processor has no AVX2")


def load_library(instruction_set: str | None = None, *, cache_dir: Path | None = None) -> Library:
    """Returns the library, compiled now if it is not in the cache. ``instruction_set`` None takes the fastest.

    Raises NoLibrary when this machine cannot have one.
    """
    return _load(instruction_set or best_instruction_set(), _folder(cache_dir))


def why_missing(*, cache_dir: Path | None = None) -> str | None:
    """Returns why ``load_library`` would fail here, without compiling; None when it should not."""
    try:
        name = _name(best_instruction_set())
        if not _path(_folder(cache_dir), name).exists():
            _compiler()
    except NoLibrary as error:
        return str(error)
    return None


def _folder(cache_dir: Path | None) -> Path:
    return (cache_dir or default_cache_dir()) / "native"


def _options(instruction_set: str) -> list[str]:
    return [*FLAGS, *(f"-m{flag}" for flag in INSTRUCTION_SETS[instruction_set])]


def _name(instruction_set: str) -> str:
    digest = hashlib.blake2b(" ".join(_options(instruction_set)).encode(), digest_size=8)
    for source in SOURCES:
        digest.update((FOLDER / source).read_bytes())
    return f"{instruction_set}-{digest.hexdigest()}"


def _path(folder: Path, name: str) -> Path:
    return folder / f"decoder-{name}.so"


def _compiler() -> str:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise NoLibrary("no C++ compiler in PATH (Debian, Ubuntu: apt install g++)")
    return compiler


@functools.cache
def _load(instruction_set: str, folder: Path) -> Library:
    name = _name(instruction_set)
    path = _path(folder, name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            _compile(_options(instruction_set), path)
        calls = ctypes.CDLL(str(path))
    except OSError as error:
        raise NoLibrary(f"{path}: {error.strerror or error}") from error
    calls.kopir_new.restype = ctypes.c_void_p
    return Library(calls, name, bool(calls.kopir_has_bf16()))


def _compile(options: list[str], path: Path) -> None:
    """Compiles into ``path``, which appears whole or not at all."""
    compiler = _compiler()
    with (path.parent / "lock").open("w") as lock, tempfile.TemporaryDirectory(dir=path.parent) as draft_folder:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return
        draft = Path(draft_folder) / path.name
        command = [compiler, *options, str(MAIN_SOURCE), "-o", str(draft)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_DEADLINE_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise NoLibrary(f"{compiler} took more than {COMPILE_DEADLINE_S:.0f} s") from error
        if done.returncode:
            raise NoLibrary(f"{compiler} cannot compile the decoder: {done.stderr[-1000:]}")
        draft.replace(path)
    logger.info("native_decoder_compiled path=%s", path)


if __name__ == "__main__":
    # `make setup` compiles ahead, so that no start of a worker waits for it. Without a library all works, slower.
    try:
        print(f"native decoder: {load_library().name}")  # noqa: T201
    except NoLibrary as error:
        print(f"native decoder: none, torch computes instead ({error})")  # noqa: T201
