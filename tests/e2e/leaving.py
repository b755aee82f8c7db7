"""Clients on plain sockets, which can leave, stall or look at single bytes as no library would."""

from __future__ import annotations

import socket
from typing import Any

from .asking import raw_body
from .cluster import Cluster, poll_until


def send(cluster: Cluster, **body: Any) -> socket.socket:
    """Sends a streamed completion over a plain socket and returns it, unread."""
    data = raw_body(stream=True, **body)
    connection = socket.create_connection(("127.0.0.1", cluster.port), timeout=30)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def stream_in(cluster: Cluster, *phases: str) -> str:
    """Waits until the only stream is in one of ``phases``; returns its request id."""

    def found() -> str | None:
        return next((s["request_id"] for s in cluster.status()["streams"] if s["phase"] in phases), None)

    return str(poll_until(found, deadline_s=20, what=f"a stream in {phases}"))
