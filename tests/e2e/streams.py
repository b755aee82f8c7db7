"""A client that reads a stream on a thread while a test does something to the cluster."""

from __future__ import annotations

import threading

import httpx

from .asking import raw_body
from .cluster import Cluster
from .golden import make_prompt


class Stream:
    """One stream. ``error`` is what ended it, if it was not its own end."""

    def __init__(self, cluster: Cluster, *, max_tokens: int, seed: int = 7) -> None:
        self.request_id = ""
        self.received = b""
        self.error: httpx.HTTPError | None = None
        self._begun = threading.Event()
        body = raw_body(prompt=make_prompt(seed, 20), max_tokens=max_tokens, ignore_eos=True, stream=True)
        self._thread = threading.Thread(target=self._read, args=(cluster.url, body))
        self._thread.start()
        assert self._begun.wait(30), "no first delta"

    def _read(self, url: str, body: bytes) -> None:
        try:
            with (
                httpx.Client(base_url=url, timeout=60) as http,
                http.stream("POST", "/v1/completions", content=body) as answer,
            ):
                self.request_id = answer.headers["x-request-id"]
                for part in answer.iter_raw():
                    self.received += part
                    self._begun.set()
        except httpx.HTTPError as error:
            self.error = error
        finally:
            self._begun.set()

    def wait(self, deadline_s: float) -> None:
        self._thread.join(deadline_s)
        assert not self._thread.is_alive(), f"the stream has no end after {deadline_s} s"

    @property
    def is_whole(self) -> bool:
        return self.error is None and self.received.rstrip().endswith(b"data: [DONE]")
