"""Blocks over TCP between two network namespaces, beside what UCX's own ``ucx_perftest`` reaches on the same cable."""

from __future__ import annotations

import os
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.network import Place, cable
from bench.report import Row, Target, make_target, make_unmeasured
from kvstore.errors import EnvironmentProblem

if TYPE_CHECKING:
    from bench.transfer import Pair

MIB, GIB = 1 << 20, 1 << 30
BLOCK_BYTES = 4 * MIB
TARGET_ID = "network_4MiB_verified_vs_ucx_perftest"
AT_LEAST = 0.7
PERFTEST_MESSAGES, PERFTEST_WARM = 100, 10
PERFTEST_DEADLINE_S = 30.0
SERVER_START_S = 5.0
PERFTEST_PORT = 13337


def measure_network(
    linked: Pair, shapes: tuple[tuple[int, int], ...], *, repeats: int
) -> tuple[list[Row], list[Target]]:
    """Returns rows of kind ``network`` for each (block_bytes, num_blocks), and the target against ``ucx_perftest``.

    Leaves ``linked`` connected over the network. Where namespaces cannot be made, the target says why.
    """
    try:
        with cable() as ends:
            connect_s = linked.relink(ends)
            return _measure(linked, ends, shapes, repeats=repeats, connect_s=connect_s)
    except EnvironmentProblem as error:
        return [], [make_unmeasured(TARGET_ID, unit="GB/s", at_least=AT_LEAST, reason=str(error))]


def _measure(
    linked: Pair, ends: tuple[Place, Place], shapes: tuple[tuple[int, int], ...], *, repeats: int, connect_s: float
) -> tuple[list[Row], list[Target]]:
    rows: list[Row] = []
    native: list[float] = []
    ours: list[float] = []
    for block_bytes, num_blocks in shapes:
        samples = []
        for _ in range(repeats):
            samples.append(linked.move(block_bytes, num_blocks, verify=True))
            if block_bytes == BLOCK_BYTES:
                native.append(_perftest(ends))
        size = block_bytes * num_blocks
        total_s = median(sample.total_s for sample in samples)
        rows.append(
            {
                "kind": "network",
                "backend": "ucx",
                "block_bytes": block_bytes,
                "num_blocks": num_blocks,
                "verified": True,
                "connect_ms": round(connect_s * 1e3, 3),
                "ms": round(total_s * 1e3, 4),
                "gb_per_s": round(size / total_s / 1e9, 3),
                "cpu_s_per_gib": round(median(sample.cpu_s for sample in samples) * GIB / size, 4),
            }
        )
        if block_bytes == BLOCK_BYTES:
            ours.append(size / total_s / 1e9)
    if not ours or not native:
        return rows, [make_unmeasured(TARGET_ID, unit="GB/s", at_least=AT_LEAST, reason="no blocks of 4 MiB")]
    rows.append({"kind": "network", "backend": "ucx_perftest", "block_bytes": BLOCK_BYTES, "gb_per_s": median(native)})
    return rows, [make_target(TARGET_ID, ours=ours[0], reference=median(native), unit="GB/s", at_least=AT_LEAST)]


def _perftest(ends: tuple[Place, Place]) -> float:
    """Runs one tag bandwidth test of UCX itself over the cable. Returns GB/s. Raises: EnvironmentProblem."""
    program, environment = _perftest_program()
    server = subprocess.Popen(
        _inside(ends[1], program, "-p", str(PERFTEST_PORT)),
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for_server(ends)
        options = ["-t", "tag_bw", "-f", "-p", str(PERFTEST_PORT), "-s", str(BLOCK_BYTES)]
        options += ["-n", str(PERFTEST_MESSAGES), "-w", str(PERFTEST_WARM)]
        done = subprocess.run(
            _inside(ends[0], program, *options, ends[1].host),
            env=environment,
            capture_output=True,
            text=True,
            timeout=PERFTEST_DEADLINE_S,
        )
        # The final line ends with bandwidth average, overall (MiB/s), message rate average, overall.
        mib_per_s = float(done.stdout.split()[-3])
    except (IndexError, ValueError, subprocess.TimeoutExpired) as error:
        raise EnvironmentProblem(f"ucx_perftest gave no figure: {error}") from error
    finally:
        server.kill()
        server.wait(PERFTEST_DEADLINE_S)
    return mib_per_s * MIB / 1e9


def _perftest_program() -> tuple[str, dict[str, str]]:
    spec = find_spec("libucx")
    folder = Path(spec.origin).parent if spec is not None and spec.origin else None
    if folder is None or not (folder / "bin" / "ucx_perftest").is_file():
        raise EnvironmentProblem("this build of UCX brings no ucx_perftest")
    variables: dict[str, Any] = {
        "LD_LIBRARY_PATH": str(folder / "lib"),
        "UCX_TLS": "tcp,self",
        "UCX_WARN_UNUSED_ENV_VARS": "n",
    }
    return str(folder / "bin" / "ucx_perftest"), os.environ | variables


def _inside(end: Place, *command: str) -> list[str]:
    return ["ip", "netns", "exec", end.namespace, *command]


def _wait_for_server(ends: tuple[Place, Place]) -> None:
    """Returns once the server listens, which its namespace's socket table shows without a connection of ours."""
    deadline = time.monotonic() + SERVER_START_S
    mark = f":{PERFTEST_PORT:04X} 00000000:0000 0A"
    while time.monotonic() < deadline:
        table = subprocess.run(
            _inside(ends[1], "cat", "/proc/net/tcp"), capture_output=True, text=True, timeout=10
        ).stdout
        if mark in table:
            return
        time.sleep(0.01)
    raise EnvironmentProblem("ucx_perftest does not listen")
