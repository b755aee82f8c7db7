"""A scripted HTTP endpoint on a free port, and run files that stay inside the test's folder."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

Script = Callable[[BaseHTTPRequestHandler, bytes], None]


class Endpoint:
    """Answers each path by a script; remembers what was asked."""

    def __init__(self) -> None:
        self.scripts: dict[str, Script] = {}
        self.requests: list[tuple[str, str, bytes, dict[str, str]]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                outer.requests.append((self.command, self.path, body, dict(self.headers)))
                outer.scripts.get(self.path, answer_json({"error": {"message": "no such path"}}, status=404))(
                    self, body
                )

            do_GET = do_POST = _serve

            def log_message(self, format: str, *args: Any) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


def answer_json(value: object, *, status: int = 200) -> Script:
    """Returns a script that answers with one JSON document."""

    def script(handler: BaseHTTPRequestHandler, _body: bytes) -> None:
        data = json.dumps(value).encode()
        handler.send_response(status)
        handler.send_header("content-type", "application/json")
        handler.send_header("content-length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    return script


def answer_stream(*events: object, is_clean: bool = True, request_id: str = "req-7") -> Script:
    """Returns a script that streams events (text is sent as data as it is); not clean means a cut chunked body."""

    def script(handler: BaseHTTPRequestHandler, _body: bytes) -> None:
        handler.send_response(200)
        handler.send_header("content-type", "text/event-stream")
        handler.send_header("transfer-encoding", "chunked")
        handler.send_header("x-request-id", request_id)
        handler.send_header("connection", "close")
        handler.end_headers()
        for event in events:
            text = event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)
            data = f"data: {text}\n\n".encode()
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        if is_clean:
            handler.wfile.write(b"0\r\n\r\n")
        handler.close_connection = True

    return script


def delta(text: str | None = None, *, finish: str | None = None) -> dict[str, Any]:
    """Returns one chunk of a streamed chat answer."""
    content = {} if text is None else {"content": text}
    return {"choices": [{"index": 0, "delta": content, "finish_reason": finish}], "usage": None}


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    """A running endpoint that lists one model."""
    made = Endpoint()
    made.scripts["/v1/models"] = answer_json({"data": [{"id": "tiny"}]})
    yield made
    made.close()


@pytest.fixture(autouse=True)
def runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run files go to the test's own folder, and nothing outside is found."""
    folder = tmp_path / "runtime"
    folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("COLUMNS", "200")
    return folder
