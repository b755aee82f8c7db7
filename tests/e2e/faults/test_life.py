"""Starts that cannot be, ends by hand, and a second start right behind. Runs after the kills: it ends their cluster."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Iterator

import httpx
import pytest

from ..asking import ask, events, raw_body
from ..cluster import KOPIR, MARK, SHARED_MEMORY, Cluster, Place, abandoned_files, poll_until
from ..golden import Golden, make_prompt
from .conftest import CONFIG

REFUSAL_DEADLINE_S = 30.0


@pytest.fixture
def place() -> Iterator[Place]:
    """Folders for a serve that will not come up."""
    place = Place()
    yield place
    for pid in place.processes():
        subprocess.run(["kill", "-9", str(pid)], check=False)
    place.close()


def refused(place: Place, *arguments: str) -> str:
    """Starts ``kopir serve``; asserts one line, a failing status and nothing left. Returns the line."""
    before = abandoned_files()
    done = subprocess.run(
        [KOPIR, "serve", *arguments],
        env=place.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=REFUSAL_DEADLINE_S,
        check=False,
    )
    assert done.returncode in (1, 2), done
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("kopir: error: ")
    poll_until(lambda: not place.processes(), deadline_s=5, what=f"nothing is left of {MARK}")
    assert abandoned_files() <= before
    assert not list(place.folder.glob("run/kopir/*.json"))
    return line


def test_port_in_use_is_one_line(place: Place) -> None:
    """Another server has the port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = str(taken.getsockname()[1])
        line = refused(place, "--port", port)
    assert port in line and "--port" in line


def test_missing_model_is_one_line(place: Place) -> None:
    """A folder that is not there."""
    assert "no-such-model" in refused(place, "--port", "0", "--model", str(place.folder / "no-such-model"))


def test_too_little_shared_memory_is_one_line(place: Place) -> None:
    """A slab larger than the file system for it."""
    line = refused(place, "--port", "0", "--set", "kv.host_bytes=900GiB")
    assert "kv.host_bytes" in line and str(SHARED_MEMORY) in line


def test_too_little_memory_is_one_line(place: Place) -> None:
    """Pools larger than the machine."""
    line = refused(place, "--port", "0", "--set", "workers.decode.pool_blocks=16000000")
    assert "not enough memory" in line


def test_unknown_setting_is_one_line(place: Place) -> None:
    """A misspelt key, with the right one beside it."""
    assert "pool_blocks" in refused(place, "--port", "0", "--set", "workers.decode.pool_block=64")


def test_interrupt_ends_everything_and_a_second_start_works_at_once(prey: Cluster, golden_bf16: Golden) -> None:
    """Ctrl-C in mid-stream: the client is told, all is gone within five seconds, the same port serves again."""
    body = raw_body(prompt=make_prompt(110, 30), max_tokens=900, ignore_eos=True, stream=True)
    with (
        httpx.Client(base_url=prey.url, timeout=30) as http,
        http.stream("POST", "/v1/completions", content=body) as answer,
    ):
        assert answer.status_code == 200
        parts = answer.iter_raw()
        received = next(parts)
        prey.stop(signal.SIGINT)
        received += b"".join(parts)
    last = events(received)[-1]
    assert last["error"]["code"] == "upstream_decode_interrupted" and last["error"]["reason"] == "shutdown"
    again = Cluster(prey.place, CONFIG, port=prey.port)
    try:
        prompt = make_prompt(111, 30)
        with again.client() as client:
            assert ask(client, prompt=prompt, max_tokens=8).text == golden_bf16.run(prompt, 8).text
        down = again.kopir("down")
        assert down.returncode == 0, down.stderr
        assert again.process.wait(5) == 0
        poll_until(lambda: not again.place.processes(), deadline_s=5, what="kopir down leaves nothing")
    except BaseException:
        again.kill()
        raise
    finally:
        again.http.close()
