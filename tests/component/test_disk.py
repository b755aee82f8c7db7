"""Whole requests over a small slab with a disk below it: tokens, tiers, and another model on the same folder."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from mini_cluster import MiniCluster, collect, make_spec, until
from safetensors.torch import load_file, save_file

from kvstore.core.messages import GenerationSpec
from kvstore.store.disk.file import DiskFile
from kvstore.store.disk.layout import file_bytes
from kvstore.store.host import DiskPlan

HOST_BLOCKS = 4
DISK_BLOCKS = 64
NUM_PROMPT = 208
"""Thirteen blocks."""


def on_disk(cluster: MiniCluster, folder: Path, *, host_blocks: int = HOST_BLOCKS) -> MiniCluster:
    cluster.host_blocks = host_blocks
    cluster.disk = DiskPlan(folder, file_bytes(cluster.layout.block_bytes, DISK_BLOCKS))
    return cluster


def disk_blocks(cluster: MiniCluster) -> int:
    assert cluster.store is not None
    return int(cluster.store.status()["tiers"][1]["used_blocks"])


async def run(cluster: MiniCluster, spec: GenerationSpec, name: str) -> int:
    """Runs one request, whose tokens must be those of a plain run; returns its cached tokens."""
    generation = await cluster.submit(spec, name)
    assert await collect(generation) == (cluster.golden(spec), "length")
    await cluster.at_rest()
    return generation.cached_tokens


async def test_a_prompt_of_thirteen_blocks_through_a_slab_of_four(
    make_cluster: Callable[..., MiniCluster], tmp_path: Path
) -> None:
    """Same tokens cold and from the disk; the journal says how much came from which tier."""
    cluster = on_disk(make_cluster(), tmp_path / "disk")
    await cluster.start("prefill", "decode", device_cache=False)
    spec = make_spec(NUM_PROMPT)
    assert await run(cluster, spec, "req-1") == 0
    await until(lambda: disk_blocks(cluster) >= 13)
    generation = await cluster.submit(spec, "req-2")
    assert await collect(generation) == (cluster.golden(spec), "length")
    assert generation.cached_tokens == NUM_PROMPT - 1
    events = generation.machine.journal.entries
    tiers = next(event for event in events if event["event"] == "prefill_began")["cached_by_tier"]
    assert sum(tiers.values()) == NUM_PROMPT - 1 and tiers["disk"] >= 16 * (13 - HOST_BLOCKS) - 1


async def test_a_disk_that_hangs_costs_its_grant_once(
    make_cluster: Callable[..., MiniCluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads that never end: right tokens all the same, and the next prompts do not ask the disk at all."""
    cluster = on_disk(make_cluster(), tmp_path / "disk")
    await cluster.start("prefill", "decode", device_cache=False)
    specs = [make_spec(NUM_PROMPT, salt=salt) for salt in range(1, 4)]
    for number, spec in enumerate(specs):
        assert await run(cluster, spec, f"req-{number}") == 0
    await until(lambda: disk_blocks(cluster) >= 3 * 13)
    gate, read, reads = threading.Event(), DiskFile.read, []

    def hang(self: DiskFile, slot: int, into: object) -> None:
        reads.append(slot)
        gate.wait()
        read(self, slot, into)

    monkeypatch.setattr(DiskFile, "read", hang)
    try:
        assert await run(cluster, specs[0], "slow") == 0
        asked = len(reads)
        assert asked
        assert await run(cluster, specs[1], "not asked") == 0
        assert len(reads) == asked
    finally:
        gate.set()


async def test_f10_other_weights_in_the_same_folder_hit_nothing(
    make_cluster: Callable[..., MiniCluster], tiny_model: Path, tmp_path: Path
) -> None:
    """Model B is A with one weight scaled by 1.01: cached 0 and B's tokens; going back to A hits again."""
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    weights = load_file(other / "model.safetensors")
    name = next(name for name in sorted(weights) if name.endswith("q_proj.weight"))
    weights[name] = weights[name] * 1.01
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    spec = make_spec(NUM_PROMPT)
    cached = []
    for number, model in enumerate((tiny_model, other, tiny_model, other)):
        cluster = on_disk(MiniCluster(model), tmp_path / "disk")
        try:
            await cluster.start("prefill", "decode", device_cache=False)
            cached.append(await run(cluster, spec, f"req-{number}"))
        finally:
            await cluster.close()
    assert cached == [0, 0, NUM_PROMPT - 1, NUM_PROMPT - 1]
