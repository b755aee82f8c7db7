"""A PostgreSQL server of its own for the tests: a fresh data folder, a Unix socket, no TCP port."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

START_DEADLINE_S = 60


def find_programs() -> Path | None:
    """Returns the folder of ``initdb`` and ``pg_ctl``; None where PostgreSQL is not installed."""
    candidates = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    on_path = shutil.which("initdb")
    if on_path is not None:
        candidates.append(Path(on_path).resolve().parent)
    return next(
        (folder for folder in candidates if (folder / "initdb").exists() and (folder / "pg_ctl").exists()), None
    )


class PostgresServer:
    """Runs while the ``with`` block does. PostgreSQL refuses to run as root: then an account without rights runs it."""

    def __init__(self, programs: Path) -> None:
        self._programs = programs
        # Not pytest's own folder: the path of a Unix socket must stay short.
        self.folder = Path(tempfile.mkdtemp(prefix="kpg-"))
        self._user = "postgres" if os.geteuid() == 0 else None

    @property
    def url(self) -> str:
        user = self._user or pwd.getpwuid(os.geteuid()).pw_name
        return f"postgresql+psycopg://{user}@/postgres?host={self.folder}"

    def __enter__(self) -> PostgresServer:
        if self._user is not None:
            shutil.chown(self.folder, self._user)
        self._call("initdb", "-D", str(self.folder / "data"), "--auth=trust", "--no-sync", "-E", "UTF8")
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def stop(self) -> None:
        """Stops the server at once; harmless when it is stopped."""
        if (self.folder / "data" / "postmaster.pid").exists():
            self._call("pg_ctl", "-D", str(self.folder / "data"), "-m", "immediate", "-w", "stop")

    def start(self) -> None:
        """Starts the server on its data; returns when it takes connections."""
        data, log = str(self.folder / "data"), str(self.folder / "log")
        options = f"-c listen_addresses='' -c unix_socket_directories='{self.folder}' -c fsync=off"
        self._call("pg_ctl", "-D", data, "-l", log, "-w", "-o", options, "start")

    def _call(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [str(self._programs / program), *arguments],
            check=True,
            timeout=START_DEADLINE_S,
            user=self._user,
            group=self._user,
            extra_groups=[] if self._user else None,
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
