"""How ``kopir status``, ``request`` and ``down`` find the cluster that ``kopir serve`` started.

Owns one small JSON file for each running serve: ``run-<pid>.json`` in ``$XDG_RUNTIME_DIR/kopir`` or, without that
variable, ``kopir-<uid>`` in the folder for temporary files. Folder 0700, file 0600, both refused when they belong to
somebody else. Life cycle: written when the endpoint is up -> read by other commands -> removed at the end. A file
whose process is gone (pid dead, or the pid was given to a process with another start time) is stale and is ignored.

Holds no secret: the cluster secret never goes here.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import msgspec

from kvstore.errors import EnvironmentProblem

MAX_RUN_FILE_BYTES = 64 * 1024


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One running serve. ``start_ticks`` tells its process from a later one with the same pid."""

    url: str
    """Base of the endpoint, without ``/v1``."""
    ray_address: str
    pid: int
    start_ticks: int
    """Start of the process in clock ticks since boot (field 22 of ``/proc/<pid>/stat``)."""
    started_at: str
    """UTC, ISO 8601; for people."""
    drain_s: float = 0.0
    """How long a stop may wait for what runs."""


def run_folder() -> Path:
    """Returns the folder of run files; it need not exist."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "kopir"
    return Path(tempfile.gettempdir()) / f"kopir-{os.getuid()}"


def start_ticks(pid: int) -> int | None:
    """Returns when process ``pid`` started, in clock ticks since boot, or None if it is not running."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    # The name in parentheses may hold spaces and parentheses itself; fields count from behind the last one.
    state, *rest = text.rpartition(")")[2].split()
    return None if state in ("Z", "X") else int(rest[18])


def write(*, url: str, ray_address: str, started_at: str, drain_s: float = 0.0, pid: int | None = None) -> Path:
    """Writes the run file of process ``pid`` (default: this one) and returns its path.

    Raises: EnvironmentProblem if the folder cannot be used or the process is not running.
    """
    pid = os.getpid() if pid is None else pid
    ticks = start_ticks(pid)
    if ticks is None:
        raise EnvironmentProblem(f"cannot write a run file for process {pid}: it is not running")
    info = RunInfo(url=url, ray_address=ray_address, pid=pid, start_ticks=ticks, started_at=started_at, drain_s=drain_s)
    folder = run_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_strangers(folder)
        path = folder / f"run-{pid}.json"
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=".run-")  # Made with mode 0600.
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.encode(info))
        Path(temporary).replace(path)
    except OSError as error:
        raise EnvironmentProblem(f"cannot write the run file in {folder}: {error.strerror}") from error
    return path


def read(path: Path) -> RunInfo | None:
    """Returns what a run file says, or None if it is missing, not ours or not readable as one."""
    try:
        facts = path.lstat()
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_size > MAX_RUN_FILE_BYTES:
            return None
        return msgspec.json.decode(path.read_bytes(), type=RunInfo)
    except (OSError, msgspec.DecodeError):
        return None


def is_running(info: RunInfo) -> bool:
    """Returns True while the process that wrote the file is alive."""
    return start_ticks(info.pid) == info.start_ticks


def find_all() -> list[RunInfo]:
    """Returns every serve of this user that is running, the newest first. Stale files are removed."""
    folder = run_folder()
    try:
        _refuse_strangers(folder)
        paths = sorted(folder.glob("run-*.json"))
    except (OSError, EnvironmentProblem):
        return []
    running: list[RunInfo] = []
    for path in paths:
        info = read(path)
        if info is not None and is_running(info):
            running.append(info)
        elif info is not None:
            path.unlink(missing_ok=True)
    return sorted(running, key=lambda info: info.start_ticks, reverse=True)


def find() -> RunInfo | None:
    """Returns the newest running serve, or None."""
    return next(iter(find_all()), None)


def remove(pid: int | None = None) -> None:
    """Removes the run file of process ``pid`` (default: this one); nothing happens if there is none."""
    (run_folder() / f"run-{os.getpid() if pid is None else pid}.json").unlink(missing_ok=True)


def _refuse_strangers(folder: Path) -> None:
    """Raises EnvironmentProblem if the folder could have been planted: a link, another owner, open to others."""
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        raise EnvironmentProblem(f"{folder} is not a folder of this user alone; remove it or set XDG_RUNTIME_DIR")
