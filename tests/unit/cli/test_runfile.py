"""Run files: written for one user, found while the process lives, never trusted from strangers."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cluster import runfile
from kvstore.errors import EnvironmentProblem


def make_run(pid: int | None = None, url: str = "http://127.0.0.1:8000") -> Path:
    return runfile.write(url=url, ray_address="local", started_at="2030-01-01T00:00:00Z", pid=pid)


def make_sleeper() -> subprocess.Popen[bytes]:
    """A process that lives until its stdin is closed."""
    return subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)


def end(process: subprocess.Popen[bytes]) -> None:
    process.communicate()


def test_what_is_written_is_found_and_removed(runtime_folder: Path) -> None:
    """Folder 0700, file 0600, gone after remove; removing twice is fine."""
    path = make_run()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    info = runfile.find()
    assert info is not None
    assert (info.url, info.pid, info.start_ticks) == (
        "http://127.0.0.1:8000",
        os.getpid(),
        runfile.start_ticks(os.getpid()),
    )
    assert runfile.is_running(info)
    runfile.remove()
    runfile.remove()
    assert runfile.find() is None
    assert list(path.parent.iterdir()) == []


def test_a_dead_process_is_not_found_and_its_file_goes() -> None:
    """After a crash nobody has to clean up by hand."""
    sleeper = make_sleeper()
    path = make_run(sleeper.pid)
    assert runfile.find() is not None
    end(sleeper)
    assert runfile.find() is None
    assert not path.exists()


def test_a_zombie_counts_as_dead() -> None:
    """A process that ended but was not waited for serves nobody."""
    sleeper = make_sleeper()
    assert sleeper.stdin is not None
    sleeper.stdin.close()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert runfile.start_ticks(sleeper.pid) is None
    end(sleeper)


def test_a_reused_pid_is_not_taken_for_the_old_process() -> None:
    """Same pid, other start time: stale."""
    path = make_run()
    path.write_text(path.read_text().replace('"start_ticks":', '"start_ticks":9'))
    assert runfile.read(path) is not None
    assert runfile.find() is None


def test_the_newest_of_several_is_found_first() -> None:
    """Two serves of one user can run side by side."""
    make_run(url="http://127.0.0.1:1")
    sleeper = make_sleeper()
    make_run(sleeper.pid, url="http://127.0.0.1:2")
    found = runfile.find_all()
    end(sleeper)
    assert [info.url for info in found] == ["http://127.0.0.1:2", "http://127.0.0.1:1"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"url": 5}', b"x" * 100_000])
def test_garbage_is_ignored(content: bytes) -> None:
    """A damaged file is not found, and is left for a person to see."""
    path = make_run()
    path.write_bytes(content)
    assert runfile.read(path) is None
    assert runfile.find() is None
    assert path.exists()


def test_a_folder_that_others_can_write_is_refused(runtime_folder: Path) -> None:
    """Somebody else could have planted the file."""
    folder = runtime_folder / "kopir"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(EnvironmentProblem, match="not a folder of this user alone"):
        make_run()
    assert runfile.find_all() == []


def test_links_are_refused(runtime_folder: Path, tmp_path: Path) -> None:
    """Neither the folder nor a file may be a link."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (runtime_folder / "kopir").symlink_to(elsewhere)
    with pytest.raises(EnvironmentProblem):
        make_run()
    link = elsewhere / "run-1.json"
    link.symlink_to("/dev/null")
    assert runfile.read(link) is None


def test_without_a_runtime_folder_the_name_has_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Users of one machine do not share a folder."""
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert runfile.run_folder().name == f"kopir-{os.getuid()}"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/does/not/exist")
    assert runfile.run_folder().name == f"kopir-{os.getuid()}"


def test_a_process_that_is_not_there_cannot_be_written() -> None:
    """The file would be stale from the start."""
    with pytest.raises(EnvironmentProblem, match="not running"):
        make_run(pid=(1 << 22) + 5)
