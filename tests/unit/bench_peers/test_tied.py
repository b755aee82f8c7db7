"""What a bench starts ends with it, however it ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

from bench.peers.tied import end_group, ended_by_sigterm

DEADLINE_S = 20.0
BENCH = """
import signal, subprocess, sys
from bench.peers.tied import tied
child = subprocess.Popen(
    [sys.executable, "-c", "import signal; signal.pause()"],
    stdout=subprocess.DEVNULL, start_new_session=True, preexec_fn=tied(signal.SIGKILL),
)
print(child.pid, flush=True)
signal.pause()
"""


def has_ended(pidfd: int) -> bool:
    """Waits for the end of a process that is not our child."""
    return bool(select.select([pidfd], [], [], DEADLINE_S)[0])


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_killed_bench_takes_its_programs_along(is_stopped: bool) -> None:
    """Also a program that the bench has stopped, which would never see the end of its input."""
    with subprocess.Popen([sys.executable, "-c", BENCH], stdout=subprocess.PIPE, text=True) as bench:
        assert bench.stdout is not None
        pid = int(bench.stdout.readline())
        pidfd = os.pidfd_open(pid)
        try:
            if is_stopped:
                os.kill(pid, signal.SIGSTOP)
            bench.kill()
            bench.wait(DEADLINE_S)
            assert has_ended(pidfd)
        finally:
            os.close(pidfd)


def test_the_end_of_a_group_reaches_stopped_grandchildren() -> None:
    command = "import subprocess, sys; c = subprocess.Popen(['sleep', '600']); print(c.pid, flush=True); c.wait()"
    process = subprocess.Popen(
        [sys.executable, "-c", command], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    pidfd = os.pidfd_open(int(process.stdout.readline()))
    try:
        os.killpg(process.pid, signal.SIGSTOP)
        end_group(process)
        assert process.returncode == -signal.SIGKILL
        assert has_ended(pidfd)
    finally:
        os.close(pidfd)
        process.stdout.close()


def test_the_end_of_a_group_that_is_gone_is_quiet() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], text=True, start_new_session=True)
    process.wait(DEADLINE_S)
    end_group(process)
    assert process.returncode == 0


def test_sigterm_unwinds_and_its_old_handler_returns() -> None:
    before, left = signal.getsignal(signal.SIGTERM), []
    with pytest.raises(SystemExit) as caught, ended_by_sigterm():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        finally:
            left.append(True)
    assert caught.value.code == 128 + signal.SIGTERM
    assert left
    assert signal.getsignal(signal.SIGTERM) is before
