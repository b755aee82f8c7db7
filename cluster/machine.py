"""What this machine offers: shared memory, cross-memory attach, memory, ports, GPU, UCX transports.

Owns single measurements as typed facts. ``kopir doctor`` turns them into advice, ``preflight`` into a refusal to
start. Each probe is bounded in time and leaves nothing behind. Nothing is cached, nothing happens at import.
"""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

from cluster.config import Config
from kvstore.errors import EnvironmentProblem

PROBE_TIMEOUT_S = 20.0
SHARED_MEMORY = Path("/dev/shm")

# The owner shows the address of a buffer and waits; the reader, a sibling as workers are, copies it out.
_CMA_OWNER = """
import ctypes, sys
buffer = ctypes.create_string_buffer(b"kopir-cma-probe!", 16)
print(ctypes.addressof(buffer), flush=True)
sys.stdin.read()
"""
_CMA_READER = """
import ctypes, sys
class IoVec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
libc = ctypes.CDLL(None, use_errno=True)
copy = ctypes.create_string_buffer(16)
mine, theirs = IoVec(ctypes.addressof(copy), 16), IoVec(int(sys.argv[2]), 16)
libc.process_vm_readv.restype = ctypes.c_ssize_t
one, flags = ctypes.c_ulong(1), ctypes.c_ulong(0)
count = libc.process_vm_readv(int(sys.argv[1]), ctypes.byref(mine), one, ctypes.byref(theirs), one, flags)
print(0 if count == 16 and copy.raw == b"kopir-cma-probe!" else ctypes.get_errno() or -1)
"""
# In a process of its own, because loading UCX on a broken machine may abort the process.
_UCX_PROBE = """
from ucxx._lib.libucxx import UCXContext
print(str(UCXContext({"TLS": "all"}).info))
"""


def shared_memory_bytes(path: Path = SHARED_MEMORY) -> tuple[int, int]:
    """Returns (total, free) bytes of the shared-memory file system; (0, 0) if there is none."""
    try:
        facts = os.statvfs(path)
    except OSError:
        return (0, 0)
    return (facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize)


def memory_bytes() -> tuple[int, int]:
    """Returns (total, available) bytes of memory, within the limits of this process's control group."""
    import psutil

    facts = psutil.virtual_memory()
    total, available = int(facts.total), int(facts.available)
    limit = _read_int(Path("/sys/fs/cgroup/memory.max"))
    used = _read_int(Path("/sys/fs/cgroup/memory.current"))
    if limit is not None and limit < total:
        total = limit
        available = min(available, max(0, limit - (used or 0)))
    return (total, available)


def usable_cores() -> int:
    """Returns the cores that this process may run on, at least 1."""
    return max(1, len(os.sched_getaffinity(0)))


def cma_error() -> str | None:
    """Tries a cross-memory read between two sibling processes. Returns None if it works, else the system's reason."""
    python = [sys.executable, "-I", "-S", "-c"]
    with subprocess.Popen([*python, _CMA_OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            address = owner.stdout.readline().strip()
            arguments = [*python, _CMA_READER, str(owner.pid), address]
            reader = subprocess.run(arguments, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            return "the probe did not end in time"
        finally:
            owner.kill()
    code = reader.stdout.strip()
    if code == "0":
        return None
    number = int(code) if code.lstrip("-").isdigit() else -1
    return f"{errno.errorcode.get(number, 'failed')}: {os.strerror(number) if number > 0 else 'wrong bytes'}"


def ptrace_scope() -> int | None:
    """Returns Yama's ``ptrace_scope`` (0 to 3), or None if the kernel has no Yama."""
    return _read_int(Path("/proc/sys/kernel/yama/ptrace_scope"))


def memlock_bytes() -> int | None:
    """Returns the limit of locked memory in bytes, None for unlimited."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def port_error(host: str, port: int) -> str | None:
    """Returns None if a server can listen on ``host:port``, else the system's reason. Port 0 is always free."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # As servers do: a connection that is only waiting out its time does not block the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        return error.strerror or str(error)
    return None


def needs_locked_memory() -> bool:
    """Returns True if this machine has what registers memory: a GPU or an RDMA device."""
    return gpu_driver() is not None or any(Path("/sys/class/infiniband").glob("*"))


def gpu_driver() -> str | None:
    """Returns the version of NVIDIA's kernel driver, or None without one."""
    text = _read_text(Path("/proc/driver/nvidia/version")) or ""
    for word in text.split():
        if word.count(".") >= 1 and word.replace(".", "").isdigit():
            return word
    return None


def gpu_names() -> list[str]:
    """Returns the names of the NVIDIA GPUs that the driver shows."""
    names: list[str] = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        lines = (_read_text(path) or "").splitlines()
        names.extend(line.partition(":")[2].strip() for line in lines if line.startswith("Model:"))
    return names


def ucx_transports() -> tuple[tuple[str, ...], str]:
    """Returns (transports that UCX offers here, reason why there are none)."""
    try:
        arguments = [sys.executable, "-c", _UCX_PROBE]
        probe = subprocess.run(arguments, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return ((), "UCX did not start in time")
    if probe.returncode != 0:
        lines = probe.stderr.strip().splitlines()
        return ((), lines[-1] if lines else f"exit status {probe.returncode}")
    components = [line.split(":")[1].strip() for line in probe.stdout.splitlines() if " component " in _head(line)]
    return (tuple(components), "" if components else "UCX shows no transport")


def preflight(config: Config, *, block_bytes: int = 0, weight_bytes: int = 0) -> None:
    """Refuses to start what this machine cannot hold.

    Args:
        block_bytes: size of one KV block, 0 if not known yet (then only ports and shared memory are checked).
        weight_bytes: size of the model's weights in one process.

    Raises: EnvironmentProblem in one line that says what to do.
    """
    reason = port_error(config.server.host, config.server.port)
    if reason is not None:
        raise EnvironmentProblem(
            f"cannot listen on {config.server.host}:{config.server.port}: {reason}; "
            "choose another with --port (0 takes any), or stop the other server (`kopir down` if it is Kopir)"
        )
    total, free = shared_memory_bytes()
    if free < config.kv.host_bytes:
        raise EnvironmentProblem(
            f"{SHARED_MEMORY} has {readable_bytes(free)} free of {readable_bytes(total)}, but kv.host_bytes asks for "
            f"{readable_bytes(config.kv.host_bytes)}; lower kv.host_bytes, or enlarge it "
            f"(mount -o remount,size=4G {SHARED_MEMORY}; in a container --shm-size)"
        )
    if block_bytes > 0:
        needed = needed_bytes(config, block_bytes=block_bytes, weight_bytes=weight_bytes)
        _, available = memory_bytes()
        if available < needed:
            raise EnvironmentProblem(
                f"not enough memory: {readable_bytes(needed)} needed for pools, weights and host slab, "
                f"{readable_bytes(available)} available; lower workers.*.pool_blocks or kv.host_bytes"
            )


def needed_bytes(config: Config, *, block_bytes: int, weight_bytes: int) -> int:
    """Returns the memory that all workers of this machine and the store's slab take when full."""
    workers = config.workers
    sections = (workers.prefill, workers.decode, workers.combined)
    per_worker = sum(section.replicas * (section.pool_blocks * block_bytes + weight_bytes) for section in sections)
    return per_worker + config.kv.host_bytes


def readable_bytes(size: int) -> str:
    """Returns a size for people, in the largest unit that leaves at least 1: ``22.9 GiB``, ``1000 bytes``."""
    value, unit = float(size), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f}".removesuffix(".0") + f" {unit}"


def _head(line: str) -> str:
    return line.partition(":")[0]


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _read_int(path: Path) -> int | None:
    text = (_read_text(path) or "").strip()
    return int(text) if text.isdigit() else None
