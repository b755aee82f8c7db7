"""H5: a gateway is killed at every step around a tool call, on SQLite and PostgreSQL; the tool's own log decides."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.core.tool_events import call_id_of
from tests.tool_server import Plan, ToolServer
from tests.unit.ledger.tool_life import OWN_POINTS, TOOL_POINTS, live

POINTS = (*OWN_POINTS, *TOOL_POINTS)
DEADLINE_S = 60
SOAK = bool(os.environ.get("KOPIR_SOAK_TOOL_KILLS"))
# Forked from a server that has everything imported: a life takes a fraction of a second.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.unit.ledger.tool_life"])


class Gateway:
    """Lives after lives, over one ledger and one tool."""

    def __init__(self, ledger_url: str, folder: Path, server: ToolServer, name: str) -> None:
        self._server = server
        self._name = name
        self._url = ledger_url
        self._tools = folder / "tools.yaml"
        self._tools.write_text(yaml.safe_dump({"tools": [server.entry(name, timeout_ms=400)]}))
        self._num_lives = 0

    def live(self, point: str = "") -> tuple[str, Any] | None:
        """One life; returns what it told, None when it was killed."""
        self._num_lives += 1
        ours, theirs = PROCESSES.Pipe(duplex=False)
        started = threading.Event()
        arguments = (self._url, str(self._tools), self._name, f"req-{self._num_lives}", point, theirs)
        process = PROCESSES.Process(target=live, args=arguments)

        def kill() -> None:
            assert started.wait(DEADLINE_S) and process.pid is not None
            os.kill(process.pid, signal.SIGKILL)

        if point in TOOL_POINTS:
            self._server.plans[self._name] = [Plan(before=kill) if point == "tool_heard" else Plan(after=kill)]
        process.start()
        started.set()
        theirs.close()
        process.join(DEADLINE_S)
        self._server.plans[self._name] = []
        try:
            if process.exitcode == -signal.SIGKILL:
                return None
            assert process.exitcode == 0, process.exitcode
            told: tuple[str, Any] = ours.recv()
            return told
        finally:
            ours.close()
            process.close()


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("name", ["book", "pay"])
def test_one_action_wherever_it_dies(ledger_url: str, tmp_path: Path, name: str, point: str) -> None:
    """Killed before the intent, after it, with the call on its way, acted on, answered, before and after its result is
    stored: the next life finishes with the tool's result, and the tool has done it once, under the key of the first."""
    with ToolServer() as server:
        gateway = Gateway(ledger_url, tmp_path, server, name)
        assert gateway.live(point) is None
        told = gateway.live()
        (action,) = server.actions
        assert told is not None and told[0] == "finished" and f'"done": "{name}"' in told[1]
        assert action.key == f"t:req-1:{call_id_of('req-1', 0, 0)}"


@pytest.mark.parametrize("point", POINTS)
def test_what_only_a_person_can_find_out(ledger_url: str, tmp_path: Path, point: str) -> None:
    """`on_unknown: human`: never a second action, and never one after a doubt; who comes later hears of the doubt."""
    with ToolServer() as server:
        gateway = Gateway(ledger_url, tmp_path, server, "wire")
        assert gateway.live(point) is None
        told = gateway.live()
        if point in ("before_intent", "after_result"):
            assert told is not None and told[0] == "finished" and len(server.actions) == 1
        else:
            assert told == ("failed", "tool_outcome_unknown")
            # Between intent and call nothing was sent: nobody knows that but the tool.
            assert len(server.actions) == (0 if point == "after_intent" else 1)
        assert gateway.live() == told


SLICE = {("after_intent", "after_intent"), ("tool_acted", "tool_heard"), ("after_call", "before_result")}
PAIRS = [(first, second) for first in POINTS for second in POINTS if SOAK or (first, second) in SLICE]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_one_action_when_the_second_life_dies_too(ledger_url: str, tmp_path: Path, first: str, second: str) -> None:
    """The third finishes, whatever the two before had got to; all pairs of points under `make soak`."""
    with ToolServer() as server:
        gateway = Gateway(ledger_url, tmp_path, server, "pay")
        assert gateway.live(first) is None
        # What the first has done is not done again, so some points are never reached a second time.
        told = gateway.live(second) or gateway.live()
        assert told is not None and told[0] == "finished" and len(server.actions) == 1
