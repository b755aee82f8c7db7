"""Reads server-sent events from bytes as they arrive.

Owns the bytes of the event that is not complete yet. Knows nothing of JSON or of chat. An event under way when the
connection ends is not an event and is dropped, as the standard says.
"""

from __future__ import annotations

from collections.abc import Iterator

MAX_EVENT_BYTES = 16 * 1024 * 1024


class SseDecoder:
    """Bytes in, the data of whole events out. Source: WHATWG HTML, section "Server-sent events".

    Lines end with LF or CRLF (the server's and every common server's choice); comments and other fields are skipped.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._data: list[bytes] = []
        self._data_bytes = 0

    def feed(self, chunk: bytes) -> Iterator[str]:
        """Yields the data of each event that ``chunk`` completes, in order.

        Raises: ValueError if an event is larger than ``MAX_EVENT_BYTES``.
        """
        self._buffer += chunk
        start = 0
        while (end := self._buffer.find(b"\n", start)) >= 0:
            line = bytes(self._buffer[start:end]).removesuffix(b"\r")
            start = end + 1
            if line:
                self._take(line)
            elif self._data:
                yield b"\n".join(self._data).decode("utf-8", errors="replace")
                self._data, self._data_bytes = [], 0
        del self._buffer[:start]
        if len(self._buffer) + self._data_bytes > MAX_EVENT_BYTES:
            raise ValueError(f"an event is larger than {MAX_EVENT_BYTES} bytes")

    def _take(self, line: bytes) -> None:
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" "))
            self._data_bytes += len(value)
