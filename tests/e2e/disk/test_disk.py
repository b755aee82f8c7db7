"""The whole pair over a slab that is always too small and a disk below it: right answers, whatever the disk does.

Cases: F03 (a failed load and its sharers), F05 (a full disk). F10 is in ``tests/component/test_disk.py``.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from kvstore.store.disk.file import FILE_NAME
from kvstore.store.disk.layout import Superblock, header_offset, read_header, read_superblock, slots_start

from ..asking import Answer, ask
from ..cluster import Cluster, poll_until
from ..conftest import RunCluster, mounted_tmpfs
from ..golden import Golden, make_prompt
from .conftest import BLOCK_BYTES, HOST_BLOCKS, make_config

NODE = "node-0"


def disk_tier(cluster: Cluster) -> dict[str, Any]:
    (node,) = cluster.status()["store"]
    return next(tier for tier in node["tiers"] if tier["name"] == "disk")


def wait_on_disk(cluster: Cluster, blocks: int) -> None:
    cluster.wait_idle()
    poll_until(lambda: disk_tier(cluster)["used_blocks"] >= blocks, deadline_s=20, what=f"{blocks} blocks on the disk")


def by_tier(cluster: Cluster, answer: Answer) -> dict[str, int]:
    record = cluster.record(answer.request_id)
    event = next(event for event in record["events"] if event["event"] == "prefill_began")
    return dict(event["cached_by_tier"])


def damage_payload(path: Path, slot: int, superblock: Superblock) -> None:
    """Flips one bit of a stored block."""
    with path.open("r+b") as file:
        file.seek(slots_start(superblock.num_slots) + slot * BLOCK_BYTES + 4000)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 4]))


def headers(path: Path) -> tuple[Superblock, dict[int, int]]:
    """Returns the superblock and {slot: generation} of the blocks in a disk file."""
    data = path.read_bytes()
    superblock = read_superblock(data)
    found = {}
    for slot in range(superblock.num_slots):
        block = read_header(data[header_offset(slot) : header_offset(slot + 1)], slot, superblock)
        if block is not None:
            found[slot] = block.generation
    return superblock, found


def test_a_prompt_larger_than_the_slab_comes_from_the_disk(
    tiny: Cluster, client: openai.OpenAI, golden: Golden
) -> None:
    """Sixteen blocks through a slab of six: same tokens, and the cached ones are reported as the disk's."""
    prompt = make_prompt(301, 256)
    assert ask(client, prompt=prompt, max_tokens=8).text == golden.run(prompt, 8).text
    wait_on_disk(tiny, 16)
    again = ask(client, prompt=prompt, max_tokens=8)
    assert again.text == golden.run(prompt, 8).text and again.cached_tokens == 255
    tiers = by_tier(tiny, again)
    assert sum(tiers.values()) == 255 and tiers["disk"] >= 16 * (16 - HOST_BLOCKS) - 1


def test_constant_eviction_changes_no_answer(tiny: Cluster, client: openai.OpenAI, golden: Golden) -> None:
    """Prompts that push each other out of the slab, streamed and whole, cold and cached."""
    prompts = [make_prompt(310 + number, 96 + 16 * number) for number in range(4)]
    for _ in range(2):
        for number, prompt in enumerate(prompts):
            answer = ask(client, stream=number % 2 == 0, prompt=prompt, max_tokens=12)
            assert answer.text == golden.run(prompt, 12).text
    tiny.wait_idle()
    assert disk_tier(tiny)["state"] == "on"


def test_f03_a_failed_load_and_four_sharers(
    tiny: Cluster, client: openai.OpenAI, golden: Golden, disk_folder: Path
) -> None:
    """Block 8 of a shared prefix is damaged on the disk: four requests at once and one after are right; it is gone."""
    shared = make_prompt(3, 256)
    _, before = headers(disk_folder / NODE / FILE_NAME)
    ask(client, prompt=shared, max_tokens=1)
    wait_on_disk(tiny, len(before) + 16)
    # Others push all of it out of the slab.
    for number in range(4):
        ask(client, prompt=make_prompt(330 + number, 96), max_tokens=1)
    tiny.wait_idle()
    path = disk_folder / NODE / FILE_NAME
    superblock, after = headers(path)
    new = sorted(set(after) - set(before), key=after.__getitem__)
    damaged_before = disk_tier(tiny)["counters"]["damaged_blocks"]
    assert len(new) >= 16
    # The first sixteen new ones are the shared prompt's, in the order in which they went down.
    damage_payload(path, new[8], superblock)
    answers: dict[int, Answer] = {}

    def send(number: int) -> None:
        with tiny.client() as own:
            answers[number] = ask(own, prompt=shared + make_prompt(number, 8), max_tokens=32)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(10, 14)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    for number in range(10, 14):
        assert answers[number].text == golden.run(shared + make_prompt(number, 8), 32).text
    assert ask(client, prompt=shared, max_tokens=16).text == golden.run(shared, 16).text
    assert disk_tier(tiny)["counters"]["damaged_blocks"] == damaged_before + 1
    assert disk_tier(tiny)["quarantined_blocks"] >= 1


def test_the_store_dies_and_its_disk_is_there_in_the_next_life(
    tiny: Cluster, client: openai.OpenAI, golden: Golden
) -> None:
    """SIGKILL to the store node: the next one recovers the index, the prompt is cached again, the answer the same."""
    prompt = make_prompt(340, 160)
    used = disk_tier(tiny)["used_blocks"]
    ask(client, prompt=prompt, max_tokens=4)
    wait_on_disk(tiny, used + 10)
    used = disk_tier(tiny)["used_blocks"]
    pid = tiny.status()["store"][0]["pid"]
    os.kill(pid, signal.SIGKILL)
    poll_until(
        lambda: (nodes := tiny.status()["store"]) and nodes[0]["pid"] not in (None, pid) and "tiers" in nodes[0],
        deadline_s=40,
        what="a new store node",
    )
    tiny.wait_ready()
    tier = disk_tier(tiny)
    assert tier["counters"]["recovered_blocks"] >= used - 1 and tier["state"] == "on"

    def cached() -> Answer | None:
        # The workers find the new node by themselves, a moment later.
        answer = ask(client, prompt=prompt, max_tokens=4)
        assert answer.text == golden.run(prompt, 4).text
        return answer if by_tier(tiny, answer).get("disk", 0) >= 16 * 9 else None

    poll_until(cached, deadline_s=30, what="the prompt comes from the disk of the earlier life")


@pytest.fixture
def small_file_system(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB; skipped where mounting is not permitted."""
    folder = tmp_path / "small"
    folder.mkdir()
    with mounted_tmpfs(folder, "3m"):
        yield folder


def test_f05_a_full_file_system(run_cluster: RunCluster, small_file_system: Path, golden: Golden) -> None:
    """The disk tier does not fit: it is off with a reason, every answer is right, small prompts are still cached."""
    prompt = make_prompt(5, 256)
    with run_cluster(make_config(small_file_system, "64MiB", host_blocks=32)) as cluster, cluster.client() as client:
        tier = disk_tier(cluster)
        assert tier["state"] == "off" and "No space left" in tier["why"] and tier["used_blocks"] == 0
        for _ in range(3):
            answer = ask(client, prompt=prompt, max_tokens=16)
            assert answer.text == golden.run(prompt, 16).text
            cluster.wait_idle()
        assert answer.cached_tokens == 255 and by_tier(cluster, answer) == {"host": 255}
        small = make_prompt(350, 48)
        ask(client, prompt=small, max_tokens=4)
        cluster.wait_idle()
        assert ask(client, prompt=small, max_tokens=4).cached_tokens == 47


def test_a_disk_for_four_blocks_holds_whole_blocks_only(
    run_cluster: RunCluster, small_file_system: Path, golden: Golden
) -> None:
    """Sixteen blocks through a disk of three: what is cached is at most what was written, and it is right."""
    prompt = make_prompt(5, 256)
    config = make_config(small_file_system, "3000000", host_blocks=4)
    with run_cluster(config) as cluster, cluster.client() as client:
        assert disk_tier(cluster)["state"] == "on" and disk_tier(cluster)["blocks"] in (3, 4)
        for _ in range(3):
            answer = ask(client, prompt=prompt, max_tokens=16)
            assert answer.text == golden.run(prompt, 16).text
            assert answer.cached_tokens <= 16 * (4 + disk_tier(cluster)["blocks"])
            cluster.wait_idle()
