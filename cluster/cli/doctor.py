"""``kopir doctor``: checks this machine and says what to do.

Each check is a pure function from measured facts (``cluster.machine``) to a finding; ``run_checks`` measures.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer

from cluster.cli.common import JsonOption, make_console, make_table, write, write_json

if TYPE_CHECKING:
    from cluster.config import Config

GIB = 1 << 30
MIB = 1 << 20
MEMORY_BYTES_MIN = 3 * GIB
"""Two pools, two copies of the packaged model and a small slab."""
MEMLOCK_BYTES_MIN = 64 * MIB

Status = Literal["ok", "warn", "fail"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One check: ``fail`` means Kopir will not run, ``warn`` that it will, but worse."""

    check: str
    status: Status
    found: str
    advice: str = ""


def doctor(
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="Check for this configuration.")] = None,
    as_json: JsonOption = False,
) -> int:
    """Check this machine: memory, ports, GPU, transports, model. Exit status 1 if something fails."""
    from cluster.config import load

    findings = run_checks(load(config))
    if as_json:
        write_json({"ok": all(one.status != "fail" for one in findings), "checks": msgspec.to_builtins(findings)})
    else:
        rows: list[list[object]] = [[one.check, one.status, one.found, one.advice or None] for one in findings]
        make_console().print(make_table("This machine", ["check", "status", "found", "what to do"], rows))
        counts = {status: sum(one.status == status for one in findings) for status in ("ok", "warn", "fail")}
        write(", ".join(f"{count} {status}" for status, count in counts.items()))
    return 1 if any(one.status == "fail" for one in findings) else 0


def run_checks(config: Config) -> list[Finding]:
    """Measures this machine and returns one finding for each check, in a fixed order."""
    from cluster import machine, runfile

    running = [info.url for info in runfile.find_all()]
    return [
        check_python(sys.version_info[:2]),
        check_memory(machine.memory_bytes(), machine.usable_cores()),
        check_shared_memory(machine.shared_memory_bytes(), config.kv.host_bytes),
        check_cma(machine.cma_error(), machine.ptrace_scope()),
        check_memlock(machine.memlock_bytes(), machine.needs_locked_memory()),
        check_port(
            config.server.host, config.server.port, machine.port_error(config.server.host, config.server.port), running
        ),
        check_ray_token(config.cluster.address, os.environ, Path.home()),
        check_gpu(machine.gpu_driver(), machine.gpu_names(), _torch_build()),
        check_native_decoder(_why_no_native_decoder()),
        check_ucx(*machine.ucx_transports()),
        check_model(config.model, _cached_models()),
    ]


def check_python(version: tuple[int, ...]) -> Finding:
    """Python 3.11 to 3.13."""
    is_fit = (3, 11) <= version <= (3, 13)
    advice = "" if is_fit else "use Python 3.11, 3.12 or 3.13"
    return Finding(check="python", status="ok" if is_fit else "fail", found=".".join(map(str, version)), advice=advice)


def check_memory(memory: tuple[int, int], cores: int) -> Finding:
    """Room for pools, weights and the slab. ``memory`` is (total, available) in bytes."""
    from cluster.machine import readable_bytes

    total, available = memory
    found = f"{readable_bytes(available)} of {readable_bytes(total)} available, {cores} cores"
    if available < MEMORY_BYTES_MIN:
        advice = (
            f"free memory up to {readable_bytes(MEMORY_BYTES_MIN)}, or lower workers.*.pool_blocks and kv.host_bytes"
        )
        return Finding(check="memory", status="warn", found=found, advice=advice)
    return Finding(check="memory", status="ok", found=found)


def check_shared_memory(shared: tuple[int, int], host_bytes: int) -> Finding:
    """The slab must fit. ``shared`` is (total, free) in bytes."""
    from cluster.machine import readable_bytes

    total, free = shared
    found = f"{readable_bytes(free)} of {readable_bytes(total)} free in /dev/shm"
    if free < host_bytes:
        advice = (
            f"kv.host_bytes asks for {readable_bytes(host_bytes)}: lower it, or run "
            "`mount -o remount,size=4G /dev/shm` (in a container: --shm-size 4g)"
        )
        return Finding(check="shared memory", status="fail", found=found, advice=advice)
    return Finding(check="shared memory", status="ok", found=found)


def check_cma(reason: str | None, scope: int | None) -> Finding:
    """Cross-memory attach between siblings; without it blocks go over TCP, many times slower."""
    yama = "no Yama" if scope is None else f"ptrace_scope {scope}"
    if reason is None:
        return Finding(check="cross-memory attach", status="ok", found=f"works ({yama})")
    advice = "transfers on this machine will be slow; "
    advice += (
        "run `sysctl kernel.yama.ptrace_scope=0`"
        if scope
        else "allow process_vm_readv (in a container: --cap-add SYS_PTRACE)"
    )
    return Finding(check="cross-memory attach", status="warn", found=f"{reason} ({yama})", advice=advice)


def check_memlock(limit: int | None, is_needed: bool) -> Finding:
    """Locked memory is needed for pinned buffers and RDMA only."""
    from cluster.machine import readable_bytes

    if limit is None or limit >= MEMLOCK_BYTES_MIN:
        found = "unlimited" if limit is None else readable_bytes(limit)
        return Finding(check="locked memory", status="ok", found=found)
    if not is_needed:
        found = f"{readable_bytes(limit)}; only a GPU or RDMA needs more"
        return Finding(check="locked memory", status="ok", found=found)
    advice = "pinned buffers and RDMA need more: raise `ulimit -l`"
    return Finding(check="locked memory", status="warn", found=readable_bytes(limit), advice=advice)


def check_port(host: str, port: int, reason: str | None, running: list[str]) -> Finding:
    """The endpoint's port is free, or it is Kopir that has it."""
    place = f"{host}:{port}"
    if reason is None:
        return Finding(check="port", status="ok", found=f"{place} is free")
    if any(url.endswith(f":{port}") for url in running):
        return Finding(check="port", status="ok", found=f"{place} is served by Kopir now")
    advice = "choose another with --port, or stop the program that has it"
    return Finding(check="port", status="fail", found=f"{place}: {reason}", advice=advice)


def check_ray_token(address: str, environment: Any, home: Path) -> Finding:
    """Nodes of one Ray cluster need one token; a local cluster makes its own, unless that is switched off."""
    mode = environment.get("RAY_AUTH_MODE")
    open_to_all = "whoever reaches a port of Ray or Serve can run code (docs/security.md)"
    if address == "local":
        if mode in (None, "token"):
            return Finding(check="ray token", status="ok", found="each local cluster makes its own")
        found = f"RAY_AUTH_MODE={mode}: {open_to_all}"
        return Finding(check="ray token", status="warn", found=found, advice="unset RAY_AUTH_MODE, or set it to token")
    has_token = bool(environment.get("RAY_AUTH_TOKEN") or environment.get("RAY_AUTH_TOKEN_PATH"))
    has_token = has_token or (home / ".ray" / "auth_token").is_file()
    if mode == "token" and has_token:
        return Finding(check="ray token", status="ok", found="token mode with a token")
    advice = "set RAY_AUTH_MODE=token and the same RAY_AUTH_TOKEN on every node"
    found = f"no token for the cluster at {address}: {open_to_all}"
    return Finding(check="ray token", status="warn", found=found, advice=advice)


def check_gpu(driver: str | None, names: list[str], torch_build: str | None) -> Finding:
    """A GPU wants a driver for CUDA 12 or 13 and a torch build that can use it."""
    if torch_build is None:
        return Finding(check="gpu", status="fail", found="torch is not installed", advice="run `make setup`")
    if driver is None:
        return Finding(check="gpu", status="ok", found=f"none; torch {torch_build} runs on the CPU")
    found = f"{', '.join(names) or 'GPU'}, driver {driver}, torch {torch_build}"
    if int(driver.split(".")[0]) < 525:
        return Finding(check="gpu", status="warn", found=found, advice="install driver 525 or newer (580 for CUDA 13)")
    if torch_build.endswith("+cpu"):
        advice = "this torch cannot use the GPU: remove .venv and run `make setup`"
        return Finding(check="gpu", status="warn", found=found, advice=advice)
    return Finding(check="gpu", status="ok", found=found)


def check_native_decoder(reason: str | None) -> Finding:
    """The decoder in C++ is compiled on the machine; without it torch computes the same model, several times slower."""
    if reason is None:
        return Finding(check="native decoder", status="ok", found="compiled, or a compiler is there")
    advice = "Without it models run in torch: several times slower on a CPU, otherwise alike"
    return Finding(check="native decoder", status="warn", found=reason, advice=advice)


def check_ucx(transports: tuple[str, ...], reason: str) -> Finding:
    """Blocks need TCP at least; shared memory and CMA make them fast."""
    if not transports:
        advice = "run `make setup`; it installs ucxx and UCX"
        return Finding(check="ucx", status="fail", found=reason, advice=advice)
    found = ", ".join(transports)
    if "tcp" not in transports:
        return Finding(check="ucx", status="fail", found=found, advice="TCP is missing: unset UCX_TLS")
    if not {"posix", "sysv"} & set(transports) or "cma" not in transports:
        advice = "shared memory or CMA is missing: transfers on this machine will be slow; see cross-memory attach"
        return Finding(check="ucx", status="warn", found=found, advice=advice)
    return Finding(check="ucx", status="ok", found=found)


def check_model(model: str, cached: list[str] | None) -> Finding:
    """The model of the configuration is a folder or in the cache."""
    if Path(model).is_dir():
        return Finding(check="model", status="ok", found=f"folder {model}")
    if cached is not None and model in cached:
        return Finding(check="model", status="ok", found=f"{model} is in the cache")
    found = f"{model} is not in the cache"
    return Finding(check="model", status="warn", found=found, advice=f"run `kopir model pull {model}`")


def _torch_build() -> str | None:
    """The version of torch without importing it (which takes seconds)."""
    import importlib.metadata

    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def _why_no_native_decoder() -> str | None:
    from workers.model.native.library import why_missing

    return why_missing()


def _cached_models() -> list[str] | None:
    from workers.model import hub

    return [str(getattr(entry, "name", entry)) for entry in hub.ls()]


def register(app: typer.Typer) -> None:
    """Adds the command to the root group."""
    app.command(epilog="Example: kopir doctor    or: kopir doctor --json")(doctor)
