"""The slab file: shared, allocated at once, unlinked by its node, and by nobody else."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.errors import EnvironmentProblem, ProtocolError
from kvstore.store import slab as slab_module
from kvstore.store.slab import HEADER_BYTES, Slab, create_slab, open_slab, remove_dead_slabs, slot_stride_bytes

BLOCK_BYTES = 1000
HELPER = Path(__file__).with_name("store_process.py")


def make_slab(shm_dir: Path, num_blocks: int = 3) -> Slab:
    return create_slab(
        incarnation=secrets.token_hex(16), block_bytes=BLOCK_BYTES, num_blocks=num_blocks, shm_dir=shm_dir
    )


def start_node(shm_dir: Path) -> subprocess.Popen[str]:
    """Starts a node process and waits until its slab exists."""
    process = subprocess.Popen(
        [sys.executable, str(HELPER), "node", "00" * 32, str(BLOCK_BYTES), "2", str(shm_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("127.0.0.1 ")
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_two_mappings_share_every_slot(tmp_path: Path) -> None:
    """What one side writes into a slot the other reads there, and nowhere else; strides are cache lines."""
    assert slot_stride_bytes(BLOCK_BYTES) == 1024
    owner = make_slab(tmp_path)
    reader = open_slab(owner.path)
    for slot in range(3):
        owner.slot(slot)[:] = bytes([slot + 1]) * BLOCK_BYTES
    assert [bytes(reader.slot(slot)) for slot in range(3)] == [bytes([n]) * BLOCK_BYTES for n in (1, 2, 3)]
    assert (reader.incarnation, reader.block_bytes, reader.num_blocks) == (owner.incarnation, BLOCK_BYTES, 3)
    for slot in (-1, 3):
        with pytest.raises(IndexError):
            reader.slot(slot)
    reader.close()
    owner.close()


def test_a_view_outlives_the_slab(tmp_path: Path) -> None:
    """The memory goes with its last view, so a late look is never a crash."""
    owner = make_slab(tmp_path)
    view = owner.slot(0)
    view[:3] = b"abc"
    owner.close()
    assert bytes(view[:3]) == b"abc"


def test_the_owner_unlinks_and_a_reader_does_not(tmp_path: Path) -> None:
    """Closing a reader leaves the file; closing the owner removes it."""
    owner = make_slab(tmp_path)
    open_slab(owner.path).close()
    assert owner.path.exists()
    owner.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", [signal.SIGKILL, None])
def test_the_end_of_a_reader_process_leaves_the_slab(tmp_path: Path, how: signal.Signals | None) -> None:
    """Neither an orderly nor a violent end of a reader unlinks the file."""
    owner = make_slab(tmp_path)
    program = (
        f"from pathlib import Path; from kvstore.store.slab import open_slab; import os; "
        f"s = open_slab(Path({str(owner.path)!r})); s.slot(0)[:1] = b'x'; "
        + (f"os.kill(os.getpid(), {int(how)})" if how else "")
    )
    subprocess.run([sys.executable, "-c", program], check=how is None, timeout=60)
    assert owner.path.exists()
    assert bytes(owner.slot(0)[:1]) == b"x"
    owner.close()


def test_slabs_of_dead_nodes_are_removed_and_those_of_living_nodes_stay(tmp_path: Path) -> None:
    """A killed node leaves its file behind; the next node removes exactly that one."""
    living, dead = start_node(tmp_path), start_node(tmp_path)
    try:
        before = set(tmp_path.iterdir())
        assert len(before) == 2
        assert remove_dead_slabs(tmp_path) == ()
        end(dead)
        owner = make_slab(tmp_path)
        after = set(tmp_path.iterdir())
        assert len(before & after) == 1
        assert after - before == {owner.path}
        owner.close()
    finally:
        end(living)
        end(dead)
    assert len(remove_dead_slabs(tmp_path)) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_node_that_ends_in_order_leaves_nothing_in_shared_memory() -> None:
    """The real shared-memory folder is as it was before the node."""
    names = {path.name for path in slab_module.SHM_DIR.iterdir()}
    node = start_node(slab_module.SHM_DIR)
    slabs = {path.name for path in slab_module.SHM_DIR.glob("kopir-slab-*")} - names
    node.communicate("end\n", timeout=60)
    assert node.returncode == 0
    assert len(slabs) == 1
    assert not slabs & {path.name for path in slab_module.SHM_DIR.iterdir()}


def test_too_little_shared_memory_is_one_clear_line(tmp_path: Path) -> None:
    """The message names the field, both sizes and what to do; nothing is left behind."""
    with pytest.raises(EnvironmentProblem) as caught:
        create_slab(incarnation="x", block_bytes=1 << 20, num_blocks=1 << 24, shm_dir=tmp_path)
    text = str(caught.value)
    assert "store.host_bytes" in text and "16778368.0 MiB" in text and "lower store.host_bytes" in text
    assert "\n" not in text
    assert list(tmp_path.iterdir()) == []


def test_too_little_memory_is_refused_before_anything_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slab larger than the available memory is refused although the file system would take it."""
    monkeypatch.setattr(slab_module, "_available_memory_bytes", lambda: 100)
    with pytest.raises(EnvironmentProblem, match=r"store\.host_bytes: .* of memory are available"):
        make_slab(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_missing_shared_memory_is_one_clear_line(tmp_path: Path) -> None:
    """Without the folder there is no slab."""
    with pytest.raises(EnvironmentProblem, match="is missing"):
        make_slab(tmp_path / "nowhere")


def test_a_full_file_system_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENOSPC while allocating is an EnvironmentProblem and removes what was begun."""

    def no_space(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(EnvironmentProblem, match="ran out"):
        make_slab(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["truncated", "garbage", "huge_length", "empty"])
def test_a_damaged_file_is_not_mapped(tmp_path: Path, damage: str) -> None:
    """A file that is not a whole slab of this version is refused."""
    owner = make_slab(tmp_path)
    path = tmp_path / "copy"
    data = bytearray(owner.path.read_bytes())
    owner.close()
    if damage == "truncated":
        del data[-100:]
    elif damage == "garbage":
        data[4:40] = os.urandom(36)
    elif damage == "huge_length":
        data[:4] = b"\xff" * 4
    else:
        del data[HEADER_BYTES // 2 :]
    path.write_bytes(data)
    with pytest.raises(ProtocolError):
        open_slab(path)


def test_a_slab_that_is_gone_is_an_environment_problem(tmp_path: Path) -> None:
    """The client treats it as a lost store."""
    with pytest.raises(EnvironmentProblem, match="cannot be opened"):
        open_slab(tmp_path / "kopir-slab-gone")
