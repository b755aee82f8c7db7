"""``kopir chat`` and ``kopir status --watch`` as programs of their own on a real terminal (a pty), and without one."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from .conftest import Endpoint, answer_json, answer_stream, delta
from .test_status import STATUS

KOPIR = str(Path(sys.executable).with_name("kopir"))
DEADLINE_S = 60.0
PRESSES_MAX = 20
CTRL_C, CTRL_D = b"\x03", b"\x04"
PATH = "/v1/chat/completions"
CODES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A program on a pty of ``columns``: what it shows, what is typed, and how it leaves the terminal."""

    def __init__(self, *arguments: str, columns: int = 80) -> None:
        self._ours, self._theirs = pty.openpty()
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.before = termios.tcgetattr(self._theirs)
        environment = {
            name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")
        }
        self.process = subprocess.Popen(
            [KOPIR, *arguments],
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            env=environment | {"TERM": "xterm-256color"},
            preexec_fn=self._make_controlling,
        )
        self.shown = b""

    def _make_controlling(self) -> None:
        """In the child: the pty is its controlling terminal, so that Ctrl-C arrives as a signal."""
        os.setsid()
        fcntl.ioctl(self._theirs, termios.TIOCSCTTY, 0)

    def type(self, data: bytes) -> None:
        os.write(self._ours, data)

    def until(self, condition: Callable[[bytes], object], what: str) -> bytes:
        """Reads until what was shown fits; returns all of it."""
        end_s = time.monotonic() + DEADLINE_S
        while not condition(self.shown):
            left_s = end_s - time.monotonic()
            assert left_s > 0 and self._read(left_s), f"{what}: not shown; seen {self.shown!r}"
        return self.shown

    def ended(self) -> int:
        """Reads to the end; returns the exit status."""
        end_s = time.monotonic() + DEADLINE_S
        while self.process.poll() is None:
            assert time.monotonic() < end_s, f"it does not end; seen {self.shown!r}"
            self._read(0.05)
        while self._read(0.0):
            pass
        return int(self.process.returncode)

    @property
    def settings(self) -> list[Any]:
        return termios.tcgetattr(self._theirs)

    def _read(self, timeout_s: float) -> bool:
        if not select.select([self._ours], [], [], timeout_s)[0]:
            return False
        try:
            data = os.read(self._ours, 65536)
        except OSError:
            return False
        self.shown += data
        return bool(data)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(DEADLINE_S)
        os.close(self._ours)
        os.close(self._theirs)


@contextmanager
def terminal(*arguments: str, columns: int = 80) -> Iterator[Terminal]:
    made = Terminal(*arguments, columns=columns)
    try:
        yield made
    finally:
        made.close()


class SlowAnswer:
    """A stream that sends one piece, then waits to be let on or to be left."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.was_left = threading.Event()

    def __call__(self, handler: BaseHTTPRequestHandler, _body: bytes) -> None:
        handler.send_response(200)
        handler.send_header("content-type", "text/event-stream")
        handler.send_header("connection", "close")
        handler.end_headers()
        handler.wfile.write(b"data: " + json.dumps(delta("First")).encode() + b"\n\n")
        handler.wfile.flush()
        end_s = time.monotonic() + DEADLINE_S
        while not self.go_on.wait(0.01) and time.monotonic() < end_s:
            if select.select([handler.connection], [], [], 0)[0] and not handler.connection.recv(1):
                self.was_left.set()
                break
        else:
            for event in (json.dumps(delta(" second")), json.dumps(delta(finish="stop")), "[DONE]"):
                handler.wfile.write(f"data: {event}\n\n".encode())
        handler.close_connection = True


def test_chat_streams_and_ctrl_c_stops_the_answer_only(endpoint: Endpoint) -> None:
    """A piece is seen before the next is sent; Ctrl-C hangs up and the conversation goes on; Ctrl-D ends it well."""
    slow = SlowAnswer()
    endpoint.scripts[PATH] = slow
    with terminal("chat", "--url", endpoint.url) as screen:
        screen.until(lambda shown: b"\n> " in shown, "the prompt")
        screen.type(b"one\n")
        screen.until(lambda shown: b"First" in shown, "the first piece, while the second is held back")
        screen.type(CTRL_C)
        screen.until(lambda shown: b"stopped by you" in shown, "that the answer was stopped")
        assert slow.was_left.wait(DEADLINE_S), "the server was not told"
        endpoint.scripts[PATH] = answer_stream(delta("Whole"), delta(finish="stop"), "[DONE]")
        screen.type(b"two\n")
        screen.until(lambda shown: b"Whole" in shown, "the answer to the next question")
        screen.until(lambda shown: shown.count(b"\n> ") >= 3, "the prompt again")
        screen.type(CTRL_D)
        assert screen.ended() == 0
        assert screen.settings == screen.before
        assert b"Traceback" not in screen.shown
    history = json.loads([body for _, path, body, _ in endpoint.requests if path == PATH][-1])["messages"]
    assert [message["content"] for message in history] == ["one", "First", "two"]


def test_chat_ends_by_a_signal_with_the_terminal_as_it_was(endpoint: Endpoint) -> None:
    """Line editing changes the terminal's settings while it waits: they are put back."""
    with terminal("chat", "--url", endpoint.url) as screen:
        screen.until(lambda shown: b"\n> " in shown, "the prompt")
        # Python's line editor misses a signal between its prompt and its wait for a key; people press again.
        for _ in range(PRESSES_MAX):
            screen.type(CTRL_C)
            with suppress(subprocess.TimeoutExpired):
                screen.process.wait(1.0)
                break
        assert screen.ended() == 0
        assert screen.settings == screen.before


@pytest.mark.parametrize("columns", [80, 40])
def test_watch_redraws_and_gives_the_terminal_back(endpoint: Endpoint, columns: int) -> None:
    """It shows what changed; Ctrl-C ends it with 130, the old screen and the cursor back; no line is wider."""
    endpoint.scripts["/internal/status"] = answer_json({**STATUS, "leases": 1})
    with terminal("status", "--watch", "--interval", "0.1", "--url", endpoint.url, columns=columns) as screen:
        screen.until(lambda shown: b" 1 leases" in b" ".join(CODES.sub(b"", shown).split()), "the first state")
        assert b"\x1b[?1049h" in screen.shown and b"\x1b[?25l" in screen.shown
        endpoint.scripts["/internal/status"] = answer_json({**STATUS, "leases": 77})
        screen.until(lambda shown: b" 77 leases" in b" ".join(CODES.sub(b"", shown).split()), "the new state")
        frames = screen.shown.replace(b"\x1b[H", b"\n")  # Each is drawn from the upper left corner.
        screen.type(CTRL_C)
        assert screen.ended() == 130
        assert screen.settings == screen.before
        assert screen.shown.rindex(b"\x1b[?1049l") > screen.shown.rindex(b"\x1b[?1049h")
        assert screen.shown.rindex(b"\x1b[?25h") > screen.shown.rindex(b"\x1b[?25l")
        assert b"Traceback" not in screen.shown
        lines = CODES.sub(b"", frames).decode().replace("\r", "").split("\n")
        assert max(map(len, lines)) <= columns


def test_without_a_terminal_there_are_no_codes(endpoint: Endpoint) -> None:
    """Status and chat into a pipe are plain text; ``--watch --json`` is one document a line until it is stopped."""
    endpoint.scripts["/internal/status"] = answer_json(STATUS)
    endpoint.scripts[PATH] = answer_stream(delta("Hi"), delta(finish="stop"), "[DONE]")
    for arguments in (("status",), ("chat", "-m", "x")):
        done = subprocess.run(
            [KOPIR, *arguments, "--url", endpoint.url], capture_output=True, timeout=DEADLINE_S, check=True
        )
        assert b"\x1b" not in done.stdout + done.stderr and done.stdout
    command = [KOPIR, "status", "--watch", "--json", "--interval", "0.1", "--url", endpoint.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as watching:
        assert watching.stdout is not None and watching.stderr is not None
        assert [json.loads(watching.stdout.readline()) for _ in range(2)] == [STATUS, STATUS]
        watching.send_signal(signal.SIGINT)
        assert watching.wait(DEADLINE_S) == 130
        assert b"Traceback" not in watching.stderr.read()
