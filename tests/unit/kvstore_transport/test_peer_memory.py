"""Reading another process's memory: the right process or an error, never bytes of somebody else."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
import pytest

from kvstore.errors import PeerLost
from kvstore.transport.peer_memory import SEGMENTS_MAX, MemoryAddress, OwnMemory, PeerMemory, address_of

SIZE = 3 << 20


def own(connection: Connection) -> None:
    memory = OwnMemory()
    block = np.arange(SIZE, dtype=np.uint32).view(np.uint8)
    connection.send((memory.address, address_of(block)))
    connection.recv()


@pytest.fixture
def owner() -> Iterator[tuple[Any, MemoryAddress, int]]:
    """A process, where it can be found, and the address of a block of ``4 * SIZE`` bytes."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=own, args=(theirs,), daemon=True)
    process.start()
    address, block = ours.recv()
    yield process, address, block
    process.kill()
    process.join(10)


def test_bytes_of_another_process_arrive(owner: tuple[Any, MemoryAddress, int]) -> None:
    _process, address, block = owner
    memory = PeerMemory(address)
    into = np.zeros(4 * SIZE, np.uint8)
    memory.copy(address_of(into), block, into.nbytes)
    memory.check_alive()
    assert (into.view(np.uint32) == np.arange(SIZE, dtype=np.uint32)).all()
    memory.close()


def test_many_segments_arrive_each_at_its_place(owner: tuple[Any, MemoryAddress, int]) -> None:
    """As many as one call takes, out of order; what is not named stays untouched."""
    _process, address, block = owner
    memory = PeerMemory(address)
    into = np.zeros(2 * SEGMENTS_MAX, np.uint32)
    words = np.random.default_rng(3).permutation(SIZE)[:SEGMENTS_MAX]
    start = address_of(into.view(np.uint8))
    memory.copy_all([(start + 8 * index, block + 4 * int(word), 4) for index, word in enumerate(words)])
    memory.check_alive()
    assert (into[::2] == words).all() and not into[1::2].any()
    memory.close()


def test_a_segment_that_is_not_there_is_an_error_among_others_that_are(owner: tuple[Any, MemoryAddress, int]) -> None:
    """The kernel stops at it and says how far it came; asked for the rest, it refuses."""
    _process, address, block = owner
    memory = PeerMemory(address)
    into = np.zeros(8, np.uint32)
    start = address_of(into.view(np.uint8))
    with pytest.raises(PeerLost, match="cannot be read"):
        memory.copy_all([(start, block + 4, 4), (start + 4, 4096, 4), (start + 8, block + 12, 4)])
    assert into.tolist() == [1, 0, 0, 0, 0, 0, 0, 0]
    memory.close()


def test_another_process_with_the_same_id_is_not_read(owner: tuple[Any, MemoryAddress, int]) -> None:
    """The mark decides: a process that has other bytes there, or nothing there, is another one."""
    _process, address, _block = owner
    with pytest.raises(PeerLost, match="another one"):
        PeerMemory(msgspec.structs.replace(address, mark=bytes(16)))
    with pytest.raises(PeerLost, match="cannot be read"):
        PeerMemory(msgspec.structs.replace(address, mark_address=4096))


def test_a_process_that_ended_is_an_error_and_not_old_bytes(owner: tuple[Any, MemoryAddress, int]) -> None:
    """Dead but not yet taken leave of, and gone for good: both say so, when read and when asked."""
    process, address, block = owner
    memory = PeerMemory(address)
    into = np.zeros(4096, np.uint8)
    process.kill()
    process.join(10)
    with pytest.raises(PeerLost, match="has ended"):
        memory.check_alive()
    with pytest.raises(PeerLost):
        memory.copy(address_of(into), block, into.nbytes)
    memory.close()
    with pytest.raises(PeerLost):
        PeerMemory(address)


def test_memory_that_is_not_there_is_an_error(owner: tuple[Any, MemoryAddress, int]) -> None:
    _process, address, _block = owner
    memory = PeerMemory(address)
    into = np.zeros(4096, np.uint8)
    with pytest.raises(PeerLost, match="cannot be read"):
        memory.copy(address_of(into), 4096, into.nbytes)
    memory.check_alive()
    memory.close()


@pytest.mark.parametrize("pid", [-1, 0, 1 << 31, 1 << 40])
def test_an_impossible_process_is_an_error(pid: int) -> None:
    with pytest.raises(PeerLost):
        PeerMemory(MemoryAddress(pid, 4096, bytes(16)))
