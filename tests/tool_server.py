"""A tool over HTTP with a log of its own: what it really did, whatever its callers think.

Owns a server on loopback in threads of this process. ``POST /NAME`` acts; a name in ``remembers`` acts once for each
idempotency key and gives the first answer again. ``GET /NAME/by-key/KEY`` says what became of a key. ``plans`` makes
the next calls of a name go wrong.
"""

from __future__ import annotations

import json
import socket
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import unquote


@dataclass(frozen=True)
class Action:
    """One thing that a tool did."""

    name: str
    key: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """How one call goes: ``before`` and ``after`` the action, and what is answered (None: the connection is closed)."""

    acts: bool = True
    before: Callable[[], None] = lambda: None
    after: Callable[[], None] = lambda: None
    status: int | None = 200
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)


LOST = Plan(status=None)
"""Done, and nobody hears of it."""
CUT = Plan(acts=False, status=None)
"""Not done, and nobody hears of it."""


class ToolServer:
    """Runs while the ``with`` block does."""

    def __init__(self, *, remembers: frozenset[str] = frozenset({"book"})) -> None:
        self.actions: list[Action] = []
        self.calls: list[tuple[str, dict[str, str]]] = []
        """(name, headers) of every call that came in."""
        self.lookups: list[str] = []
        self.plans: dict[str, list[Plan]] = defaultdict(list)
        self.lookup_statuses: list[int] = []
        """What the next look-ups answer whatever is true."""
        self._remembers = remembers
        self._results: dict[tuple[str, str], bytes] = {}
        self._lock = threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                owner._post(self)

            def do_GET(self) -> None:
                owner._get(self)

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing on stderr."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def done(self, name: str) -> list[Action]:
        """Returns what was done under a name."""
        with self._lock:
            return [action for action in self.actions if action.name == name]

    def entry(self, name: str, **changes: Any) -> dict[str, Any]:
        """Returns a tool of this server as the tools file has it."""
        on_unknown = {"book": "repeat_with_key", "pay": "lookup", "wire": "human"}.get(name)
        lookup = {"lookup_url": f"{self.url}/{name}/by-key/{{key}}"} if on_unknown == "lookup" else {}
        known = {} if on_unknown is None else {"on_unknown": on_unknown}
        base = {
            "name": name,
            "url": f"{self.url}/{name}",
            "timeout_ms": 2000,
            "side_effects": on_unknown is not None,
            "parameters": {
                "type": "object",
                "properties": {"room": {"enum": ["A7", "B2"]}},
                "required": ["room"],
                "additionalProperties": False,
            },
        }
        return base | known | lookup | changes

    def __enter__(self) -> ToolServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _post(self, handler: BaseHTTPRequestHandler) -> None:
        name = handler.path.strip("/")
        arguments = json.loads(handler.rfile.read(int(handler.headers["content-length"])))
        key = handler.headers.get("idempotency-key", "")
        with self._lock:
            self.calls.append((name, {k.lower(): v for k, v in handler.headers.items()}))
            plan = self.plans[name].pop(0) if self.plans[name] else Plan()
        plan.before()
        with self._lock:
            if plan.acts and not (name in self._remembers and (name, key) in self._results):
                self.actions.append(Action(name, key, arguments))
                self._results[name, key] = plan.body or json.dumps({"done": name, "number": len(self.actions)}).encode()
            result = self._results.get((name, key), b"")
        plan.after()
        if plan.status is None:
            handler.close_connection = True
            handler.connection.shutdown(socket.SHUT_RDWR)
            return
        self._answer(handler, plan.status, plan.body if plan.body is not None else result, plan.headers)

    def _get(self, handler: BaseHTTPRequestHandler) -> None:
        name, _, key = handler.path.strip("/").partition("/by-key/")
        with self._lock:
            self.lookups.append(name)
            result = self._results.get((name, unquote(key)))
            status = self.lookup_statuses.pop(0) if self.lookup_statuses else 200 if result is not None else 404
        self._answer(handler, status, result or b"", {})

    @staticmethod
    def _answer(handler: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str]) -> None:
        try:
            handler.send_response(status)
            for name, value in headers.items():
                handler.send_header(name, value)
            handler.send_header("content-length", str(len(body)))
            handler.end_headers()
            handler.wfile.write(body)
        except OSError:
            pass  # The caller is gone, which some plans are about.
