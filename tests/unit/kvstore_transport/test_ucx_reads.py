"""What is read by one call: small blocks together, large ones alone, neighbours as one segment."""

from __future__ import annotations

import numpy as np

from kvstore.digest import block_digest
from kvstore.transport.peer_memory import SEGMENTS_MAX, OwnMemory, PeerMemory, Segment, address_of
from kvstore.transport.ucx_reads import READ_PIECE_BYTES, DirectReceive, _runs

SOURCE = 1 << 40


def make_ready(sizes: list[int], *, gap_bytes: int, source_gap_bytes: int) -> list[tuple[DirectReceive, int, int]]:
    """Blocks one after the other at both ends, with gaps."""
    memory = np.zeros(sum(sizes) + gap_bytes * len(sizes), np.uint8)
    ready, start, source = [], 0, SOURCE
    for tag, size in enumerate(sizes):
        ready.append((DirectReceive(tag, memory[start : start + size], is_verified=True), source, size))
        start, source = start + size + gap_bytes, source + size + source_gap_bytes
    return ready


def runs_of(ready: list[tuple[DirectReceive, int, int]]) -> list[tuple[list[int], list[Segment]]]:
    return [([receive.tag for receive in receives], segments) for receives, segments in _runs(ready)]


def test_neighbours_at_both_ends_become_one_segment() -> None:
    ready = make_ready([100, 200, 300], gap_bytes=0, source_gap_bytes=0)
    assert runs_of(ready) == [([0, 1, 2], [(address_of(ready[0][0].buffer), SOURCE, 600)])]


def test_neighbours_at_one_end_only_stay_apart() -> None:
    for gaps in ((8, 0), (0, 8)):
        ready = make_ready([100, 200], gap_bytes=gaps[0], source_gap_bytes=gaps[1])
        expected = [(address_of(receive.buffer), source, size) for receive, source, size in ready]
        assert runs_of(ready) == [([0, 1], expected)]


def test_a_run_holds_no_more_than_a_piece_and_a_large_block_is_alone() -> None:
    half = READ_PIECE_BYTES // 2
    ready = make_ready([half, half, half, 3 * READ_PIECE_BYTES, half], gap_bytes=8, source_gap_bytes=8)
    assert [tags for tags, _ in runs_of(ready)] == [[0, 1], [2], [3], [4]]


def test_a_run_has_no_more_segments_than_the_kernel_takes() -> None:
    ready = make_ready([8] * (SEGMENTS_MAX + 1), gap_bytes=8, source_gap_bytes=8)
    assert [len(segments) for _, segments in runs_of(ready)] == [SEGMENTS_MAX, 1]


def test_no_blocks_are_no_run() -> None:
    assert runs_of([]) == []


def test_a_large_block_is_read_in_pieces_and_has_the_digest_of_the_whole() -> None:
    source = np.random.default_rng(5).integers(0, 256, 2 * READ_PIECE_BYTES + 17, np.uint8)
    mark = OwnMemory()
    memory = PeerMemory(mark.address)
    receive = DirectReceive(1, np.zeros_like(source), is_verified=True)
    receive.read_in_pieces(memory, address_of(source))
    receive.completed = True
    assert (receive.buffer == source).all() and receive.digest() == block_digest(source)
    memory.close()
