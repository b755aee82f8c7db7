"""Who this process is on which machine: host identity, incarnation, proof that another process is gone.

A host identity answers one question: may two processes share memory (shared-memory segments, cross-memory
attach)? The default is the boot id together with the network, IPC and PID namespaces; the configuration may
override it, because namespaces on one machine can share memory without sharing a network.
"""

from __future__ import annotations

import os
import secrets
import select
import time
from pathlib import Path

from kvstore.core.ids import Incarnation


def boottime_ns() -> int:
    """Returns CLOCK_BOOTTIME in nanoseconds: leases count the time that a machine was suspended, too."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def new_incarnation() -> Incarnation:
    """Returns a fresh random incarnation: 32 hex digits, compared for equality only."""
    return Incarnation(secrets.token_hex(16))


def host_identity(override: str = "auto") -> str:
    """Returns this host's identity, or ``override`` when it is not ``auto``.

    Returns: text such as ``<boot id>/net:[4026531840]/ipc:[...]/pid:[...]``; equal means memory may be shared.
    """
    if override != "auto":
        return override
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespaces = (str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("net", "ipc", "pid"))
    return "/".join((boot_id, *namespaces))


class ProcessWatch:
    """Proves the exit of a process of this host by its pidfd. Never polls, never signals.

    Life cycle: open while the process is known to be alive -> ``fileno`` becomes readable at its exit -> ``close``.
    """

    def __init__(self, pid: int) -> None:
        """Raises: ProcessLookupError if no such process is running."""
        self.pid = pid
        self._fd = os.pidfd_open(pid)

    def fileno(self) -> int:
        """Returns the descriptor for an event loop; readable means the process has exited."""
        return self._fd

    def is_gone(self) -> bool:
        """Returns True once the process has exited."""
        # Not select: it refuses descriptors from 1,024 on.
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        return bool(poller.poll(0))

    def close(self) -> None:
        """Closes the descriptor; safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
