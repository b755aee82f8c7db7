"""Runs the peers in turn with our own transport: one batch of each, again and again, medians at the end.

Throughputs of NIXL and ours are those of a reader that knows that the bytes are there; Mooncake's is a ``get``, Ray's
a value handed from actor to actor. Ours beside Mooncake and Ray is verified and includes the sender's call and the
control message. NIXL reads 64 MiB or more at a time out of registered memory, in its fastest setting.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import IO, TYPE_CHECKING, Any

from bench.peers.environments import Environment, find
from bench.peers.tied import end_group, tied
from bench.report import Row, Target, make_target, make_unmeasured
from kvstore.errors import EnvironmentProblem

if TYPE_CHECKING:
    from bench.transfer import Pair

MIB = 1 << 20
FOLDER = Path(__file__).parent
STOP_S = 10.0
BEST_OF = 3
NIXL_SETTINGS = ("default", "thread", "polled")
TRIALS = 5


@dataclass(frozen=True, slots=True)
class Aim:
    """What we want to reach against a peer: with blocks of which size, how many at a time, how many times as fast."""

    id: str
    peer: str
    block_bytes: int
    num_blocks: int
    at_least: float
    is_plain: bool
    """True: neither side verifies, and only the reading is timed."""


AIMS = (
    Aim("same_host_1MiB_vs_nixl_read", "nixl", MIB, 64, 0.95, True),
    Aim("same_host_4MiB_vs_nixl_read", "nixl", 4 * MIB, 16, 0.95, True),
    Aim("same_host_16MiB_vs_nixl_read", "nixl", 16 * MIB, 8, 0.95, True),
    Aim("same_host_4MiB_verified_vs_mooncake_get", "mooncake", 4 * MIB, 1, 3.0, False),
    Aim("same_host_4MiB_verified_vs_ray_objects", "ray", 4 * MIB, 1, 10.0, False),
)


class PeerProgram:
    """A peer program under way. ``measure`` returns seconds of one batch by kind."""

    def __init__(self, process: subprocess.Popen[str], setting: str = "") -> None:
        self._process = process
        self.setting = setting

    def measure(self, block_bytes: int, num_blocks: int) -> dict[str, float]:
        """Raises: EnvironmentProblem when the program has ended."""
        answer: dict[str, float] = self.ask({"block_bytes": block_bytes, "num_blocks": num_blocks})
        return answer

    def ask(self, question: Row) -> Any:
        """Returns the program's answer to one line. Raises: EnvironmentProblem when the program has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise EnvironmentProblem("the peer program has ended") from error
        return self.read()

    @property
    def pid(self) -> int:
        return self._process.pid

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stops the program and its children meanwhile: some of them use a core also while they have nothing to do."""
        os.killpg(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self._process.pid, signal.SIGCONT)

    def read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EnvironmentProblem("the peer program has ended")
        try:
            return json.loads(line)
        except ValueError as error:
            raise EnvironmentProblem(f"the peer program says {line[:200]!r}") from error


def measure_peers(linked: Pair, *, repeats: int) -> tuple[list[Row], list[Target]]:
    """Returns rows of kind ``peer`` and a target for each aim; one that cannot be measured says why."""
    rows: list[Row] = []
    targets: list[Target] = []
    for peer in dict.fromkeys(aim.peer for aim in AIMS):
        aims = [aim for aim in AIMS if aim.peer == peer]
        try:
            with _started(peer) as program:
                for aim in aims:
                    row = _measure(linked, program, aim, repeats=repeats) | {"setting": program.setting}
                    rows.append(row)
                    targets.append(
                        make_target(
                            aim.id,
                            ours=row["ours_gb_per_s"],
                            reference=row["gb_per_s"],
                            unit="GB/s",
                            at_least=aim.at_least,
                        )
                    )
        except EnvironmentProblem as error:
            measured = {target.id for target in targets}
            targets += [
                make_unmeasured(aim.id, unit="GB/s", at_least=aim.at_least, reason=str(error))
                for aim in aims
                if aim.id not in measured
            ]
    return rows, targets


def _measure(linked: Pair, program: PeerProgram, aim: Aim, *, repeats: int) -> Row:
    theirs: list[float] = []
    ours: list[float] = []
    program.measure(aim.block_bytes, aim.num_blocks)
    for _ in range(repeats):
        # Once unmeasured: the program has just been stopped, and should not pay for that.
        program.measure(aim.block_bytes, aim.num_blocks)
        # The best of three on both sides, each after one that is not counted.
        theirs.append(min(program.measure(aim.block_bytes, aim.num_blocks)["get_s"] for _ in range(BEST_OF)))
        with program.stopped():
            samples = [
                linked.move(aim.block_bytes, aim.num_blocks, verify=not aim.is_plain) for _ in range(1 + BEST_OF)
            ][1:]
        ours.append(min(sample.receive_s if aim.is_plain else sample.total_s for sample in samples))
    size = aim.block_bytes * aim.num_blocks
    return {
        "kind": "peer",
        "backend": aim.peer,
        "block_bytes": aim.block_bytes,
        "num_blocks": aim.num_blocks,
        "verified": not aim.is_plain,
        "ms": round(median(theirs) * 1e3, 4),
        "gb_per_s": round(size / median(theirs) / 1e9, 3),
        "ours_ms": round(median(ours) * 1e3, 4),
        "ours_gb_per_s": round(size / median(ours) / 1e9, 3),
    }


@contextmanager
def _started(name: str) -> Iterator[PeerProgram]:
    environment = find(name)
    with ExitStack() as stack:
        arguments = []
        if name == "mooncake":
            arguments = stack.enter_context(_mooncake_master(environment))
        elif name == "nixl":
            arguments = [_fastest_nixl(environment)]
        yield stack.enter_context(_program(name, environment, arguments))


@contextmanager
def _program(name: str, environment: Environment, arguments: list[str]) -> Iterator[PeerProgram]:
    command = [str(environment.python), str(FOLDER / f"{name}_peer.py"), *arguments]
    with running(command, environment, stdout=subprocess.PIPE) as process:
        program = PeerProgram(process, arguments[0] if name == "nixl" else "")
        program.read()
        yield program


def _fastest_nixl(environment: Environment) -> str:
    """Returns the setting with which NIXL reads 4 MiB blocks fastest; one that does not start is passed over.

    Raises: EnvironmentProblem when none starts.
    """
    seconds: dict[str, float] = {}
    for setting in NIXL_SETTINGS:
        try:
            with _program("nixl", environment, [setting]) as program:
                seconds[setting] = median(program.measure(4 * MIB, 8)["get_s"] for _ in range(TRIALS))
        except EnvironmentProblem:
            continue
    if not seconds:
        raise EnvironmentProblem("NIXL starts with none of its settings")
    return min(seconds, key=seconds.__getitem__)


@contextmanager
def mooncake_store(setting: str) -> Iterator[PeerProgram]:
    """Runs Mooncake as a block store, with a master of its own; ``setting``: ``tcp`` or ``best``, see its program.

    Raises: EnvironmentProblem when its environment is missing or it does not start.
    """
    environment = find("mooncake")
    with _mooncake_master(environment) as ports:
        command = [str(environment.python), str(FOLDER / "mooncake_store_peer.py"), setting, *ports]
        with running(command, environment, stdout=subprocess.PIPE) as process:
            program = PeerProgram(process)
            program.read()
            yield program


@contextmanager
def _mooncake_master(environment: Environment) -> Iterator[list[str]]:
    """Starts Mooncake's master with its own metadata server; gives their ports as the peer program wants them."""
    master, metadata, metrics = _free_ports(3)
    command = [
        str(environment.program("mooncake_master")),
        f"--rpc_port={master}",
        f"--metrics_port={metrics}",
        "--enable_http_metadata_server=true",
        "--http_metadata_server_host=127.0.0.1",
        f"--http_metadata_server_port={metadata}",
    ]
    with running(command, environment, stdout=subprocess.DEVNULL):
        yield [str(master), str(metadata)]


@contextmanager
def running(command: list[str], environment: Environment, *, stdout: int | IO[str]) -> Iterator[subprocess.Popen[str]]:
    """Runs a peer program in a process group of its own, and ends it: by the end of its input, else by force.

    When this process is killed, the kernel kills the program.
    """
    process = subprocess.Popen(
        command,
        env=environment.variables,
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        preexec_fn=tied(signal.SIGKILL),
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        try:
            process.stdin.close()
            process.wait(STOP_S if stdout == subprocess.PIPE else 0.1)
        except (OSError, subprocess.TimeoutExpired):
            pass
        finally:
            end_group(process)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for held in sockets:
            held.bind(("127.0.0.1", 0))
        return [held.getsockname()[1] for held in sockets]
