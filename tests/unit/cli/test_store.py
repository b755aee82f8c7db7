"""``kopir store``: a node of its own without Ray, looked at, verified and tidied up by commands."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.core.ids import BlockHash
from kvstore.net.handshake import PeerInfo
from kvstore.net.host import host_identity, new_incarnation
from kvstore.store.client import PutBlock, StoreClient
from kvstore.store.disk.layout import file_bytes, slots_start, stride_bytes

BLOCK_BYTES = 5000
NUM_SLOTS = 16
DEADLINE_S = 30.0
SECRET = b"a secret of thirty-two bytes!!!!"
KOPIR = Path(sys.executable).with_name("kopir")


class Store:
    """One ``kopir store serve`` process and commands beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.secret_file = folder / "secret"
        self.secret_file.write_bytes(SECRET)
        self.secret_file.chmod(0o600)
        runtime = folder / "run"
        runtime.mkdir(mode=0o700)
        self.environment = {**os.environ, "XDG_RUNTIME_DIR": str(runtime)}
        self.process: subprocess.Popen[str]
        self.start()

    def start(self) -> None:
        settings = {
            "auth.cluster_secret_file": self.secret_file,
            "kv.host_bytes": 4 * BLOCK_BYTES,
            "kv.disk_path": self.folder / "disk",
            "kv.disk_bytes": file_bytes(BLOCK_BYTES, NUM_SLOTS),
        }
        sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        self.process = subprocess.Popen(
            [KOPIR, "store", "serve", "--block-bytes", str(BLOCK_BYTES), "--json", *sets],
            env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.ready: dict[str, Any] = json.loads(self.process.stdout.readline() or self._complaint())

    def _complaint(self) -> str:
        raise AssertionError(f"no ready line: {self.process.communicate(timeout=DEADLINE_S)}")

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode

    def kopir(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [KOPIR, "store", *arguments], env=self.environment, capture_output=True, text=True, timeout=DEADLINE_S
        )

    def json(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        done = self.kopir(*arguments, "--json")
        assert done.returncode == code, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path)
    yield store
    if store.process.poll() is None:
        store.process.kill()
        store.process.communicate()


def content(number: int) -> bytes:
    return number.to_bytes(2, "big") * (BLOCK_BYTES // 2)


def hash_of(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


async def with_client(store: Store, numbers: list[int]) -> list[bool]:
    """Stores blocks four at a time, holds a lease of the last while it looks, loads all; returns what was right."""
    me = PeerInfo(
        role="prefill", peer_id="tester", incarnation=new_incarnation(), pid=os.getpid(), host_identity=host_identity()
    )
    client = StoreClient(me=me, secret=SECRET, block_bytes=BLOCK_BYTES, call_deadline_s=DEADLINE_S, lease_ms=60_000)
    client.start(store.ready["host"], store.ready["port"])
    assert await client.wait_connected(DEADLINE_S), client.refusal
    for start in range(0, len(numbers), 4):
        part = numbers[start : start + 4]
        assert (await client.put_blocks([PutBlock(hash_of(n), content(n)) for n in part])).stored == len(part)
        while (stat := await client.stat()) is None or stat.tiers[1].used_blocks < start + len(part):
            await asyncio.sleep(0)
    lease = await client.match([hash_of(numbers[-1])])
    assert lease is not None
    listed = await asyncio.to_thread(store.json, "stat", "--leases")
    assert [(held["holder"], held["num_blocks"]) for held in listed["leases_held"]] == [("tester", 1)]
    assert listed["leases_held"][0]["pid"] == os.getpid() and listed["leases_held"][0]["age_ms"] >= 0
    lease.release()
    buffers = [bytearray(BLOCK_BYTES) for _ in numbers]
    loaded = await client.load_blocks([hash_of(n) for n in numbers], buffers.__getitem__, deadline_s=DEADLINE_S)
    await client.close()
    right = [bytes(buffer) == content(n) for buffer, n in zip(buffers, numbers, strict=True)]
    assert loaded.num_loaded == sum(right)
    return right


def test_a_store_on_its_own_from_start_to_stop(store: Store) -> None:
    """Ready line, client, stat with leases, ls, verify of damage, gc, clean end; a second life has the blocks."""
    numbers = list(range(1, 13))
    assert all(asyncio.run(with_client(store, numbers)))
    stat = store.json("stat")
    assert [(tier["name"], tier["state"], tier["blocks"]) for tier in stat["tiers"]] == [
        ("host", "on", 4),
        ("disk", "on", NUM_SLOTS),
    ]
    assert stat["incarnation"] == store.ready["incarnation"]
    listed = store.json("ls", "--tier", "disk")["blocks"]
    assert sorted(int(block["hash"], 16) for block in listed) == numbers
    assert [row["damaged"] for row in store.json("verify")["tiers"]] == [[], []]
    slot = next(block["slot"] for block in listed if int(block["hash"], 16) == 3)
    with (store.folder / "disk" / "blocks.kopir").open("r+b") as file:
        file.seek(slots_start(NUM_SLOTS) + slot * stride_bytes(BLOCK_BYTES))
        file.write(b"\xee")
    found = store.json("verify", "--tier", "disk", code=1)["tiers"]
    assert [(row["checked"], [block["slot"] for block in row["damaged"]]) for row in found] == [(12, [slot])]
    (violation,) = found[0]["violations"]
    assert (violation["kind"], violation["slot"], int(violation["hash"], 16)) == ("digest", slot, 3)
    assert found[0]["content_checked"] == 0, "this client names no layout"
    assert store.json("gc")["released_slots"] == 1
    assert "12 blocks read" not in store.kopir("verify").stdout
    assert store.stop() == 0
    assert not list((store.folder / "run" / "kopir").glob("store-*")), "a run file is left"
    assert not list(Path("/dev/shm").glob(f"kopir-slab-{store.ready['incarnation']}*")), "a slab is left"
    store.start()
    blocks = store.json("ls")["blocks"]
    assert sorted(int(block["hash"], 16) for block in blocks) == [n for n in numbers if n != 3]
    assert store.stop() == 0


def test_what_is_missing_is_said_in_one_line(store: Store, tmp_path: Path) -> None:
    """A wrong secret, no node, a bad tier, a folder in use: one line that names it, and an exit status."""
    other = tmp_path / "other"
    other.write_bytes(b"another secret of thirty-two byte")
    other.chmod(0o600)
    done = store.kopir("stat", "--secret-file", str(other))
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    done = store.kopir("ls", "--tier", "tape")
    assert done.returncode == 2 and "--tier" in done.stderr
    done = store.kopir("stat", "--address", "127.0.0.1:1", "--secret-file", str(store.secret_file))
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    done = store.kopir("stat", "--address", "nowhere")
    assert done.returncode == 2 and "HOST:PORT" in done.stderr
    done = store.kopir(
        "serve", "--block-bytes", str(BLOCK_BYTES), "--set", f"auth.cluster_secret_file={store.secret_file}",
        "--set", f"kv.disk_path={store.folder / 'disk'}", "--set", "kv.disk_bytes=1MiB",
    )  # fmt: skip
    assert done.returncode == 1 and "in use by another store node" in done.stderr
    done = store.kopir("serve", "--block-bytes", str(BLOCK_BYTES))
    assert done.returncode == 2 and "auth.cluster_secret_file" in done.stderr
    assert store.stop() == 0
    done = store.kopir("stat")
    assert done.returncode == 1 and "no running store found" in done.stderr


def test_a_store_needs_neither_ray_nor_torch() -> None:
    """The store is usable on its own: nothing of the cluster's or the engine's libraries is imported."""
    code = (
        "import sys, cluster.store_service, cluster.cli.store, kvstore.store.client; "
        "assert not {'ray', 'torch', 'transformers', 'ucxx'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=DEADLINE_S).returncode == 0
