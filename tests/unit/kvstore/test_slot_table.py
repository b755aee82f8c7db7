"""The table in shared memory: a dictionary for its owner, never a lie for those who look while it changes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.ids import BlockDigest, BlockHash
from kvstore.core.slot_table import RECORD_BYTES, SlotRecord, SlotTable, num_buckets_of, table_bytes

HELPER = Path(__file__).with_name("shared_reading.py")


def h(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


def d(number: int) -> BlockDigest:
    return BlockDigest(number.to_bytes(16, "big"))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 4).map(lambda n: 16 * n + 13)), max_size=60))
def test_it_is_a_dictionary(events: list[tuple[int, int]]) -> None:
    """Any order of inserts and removals, with hashes that all collide and wrap around, against a dict."""
    table, model = SlotTable(8), dict[int, BlockHash]()
    assert num_buckets_of(8) == 16
    for slot, number in events:
        if slot in model:
            table.remove(slot)
            del model[slot]
        elif h(number) not in model.values():
            table.insert(slot, h(number), d(number), generation=number)
            model[slot] = h(number)
        table.check_invariants()
        assert {slot: table.hash_at(slot) for slot in table.slots()} == model
        assert len(table) == len(model)
        for found, block_hash in model.items():
            number = int.from_bytes(block_hash, "big")
            assert table.look_up(block_hash) == SlotRecord(found, block_hash, d(number), number)
    assert table.look_up(h(999)) is None


def test_another_table_over_the_same_bytes_sees_what_the_owner_wrote() -> None:
    """A reader's table is made over the owner's buffer; 80 bytes per slot at most."""
    buffer = memoryview(bytearray(table_bytes(1000)))
    assert buffer.nbytes <= 80 * 1000 + 1000
    owner, reader = SlotTable(1000, buffer), SlotTable(1000, buffer)
    owner.insert(7, h(1), d(2), generation=3)
    assert reader.look_up(h(1)) == SlotRecord(7, h(1), d(2), 3)
    owner.remove(7)
    assert reader.look_up(h(1)) is None and reader.find(h(1)) is None


@pytest.mark.parametrize("cut", range(8, RECORD_BYTES, 8))
def test_half_of_one_life_and_half_of_another_is_no_record(cut: int) -> None:
    """However a record is torn between two lives of its slot, it does not prove itself."""
    lives = []
    for number in (1, 2):
        buffer = memoryview(bytearray(table_bytes(1)))
        SlotTable(1, buffer).insert(0, h(number), d(number), generation=number)
        lives.append(bytes(buffer[-RECORD_BYTES:]))
    buffer[-RECORD_BYTES:] = lives[0][:cut] + lives[1][cut:]
    torn = SlotTable(1, buffer)
    # Hashes and digests of this test differ in their last bytes only.
    expected = {16: h(2), 8: h(2), 24: h(2)}.get(cut)
    record = torn.read(0)
    assert (record.block_hash if record else None) == expected
    buffer[-RECORD_BYTES:] = bytes(RECORD_BYTES)
    assert torn.read(0) is None


def test_readers_of_other_processes_never_get_wrong_bytes(tmp_path: Path) -> None:
    """Two processes read as fast as they can while the owner gives the same few slots to ever new blocks.

    Every copy that a reader counts is checked against what the block must hold, byte for byte.
    """
    done = subprocess.run(
        [sys.executable, str(HELPER), str(tmp_path), "1.5"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    figures = dict(pair.split("=") for pair in done.stdout.split())
    assert int(figures["wrong"]) == 0
    assert int(figures["corrupt"]) == 0
    assert int(figures["copied"]) > 100
    assert int(figures["lives"]) > 100
