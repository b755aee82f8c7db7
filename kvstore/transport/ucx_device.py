"""The UCX library as the transport needs it: one worker, endpoints, tagged messages, progress, sleep and wake.

Owns the UCX context and worker and the descriptors to sleep on. Everything but ``wake`` is called on the thread that
made the device. Nothing of UCX is loaded before a device is made, and its errors end here: every failure to act is
``EnvironmentProblem`` or ``PeerLost``, and a completed request ends as one of ``RequestEnd``.

Sleeping is safe against a lost wake-up: UCX arms its descriptor only when no event waits, commands arrive on a
descriptor of their own, and every sleep while something is in flight is bounded by the caller.
"""

from __future__ import annotations

import os
import select
from typing import Any

import numpy as np

from kvstore.errors import EnvironmentProblem, PeerLost
from kvstore.transport.transfers import RequestEnd

UCX_CONFIG = {"RNDV_SCHEME": "get_zcopy"}
"""The receiver copies: a stopped sender that wakes up has nothing to write."""


class UcxDevice:
    """See the module. Life cycle: made -> used on one thread -> ``close``."""

    def __init__(self) -> None:
        """Raises: EnvironmentProblem when UCX cannot be loaded or opened."""
        # UCX warns about variables of other libraries on stdout, which belongs to whoever runs us.
        os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
        try:
            from ucxx._lib import libucxx
            from ucxx._lib.arr import Array

            self._lib = libucxx
            self._array = Array
            self._context = libucxx.UCXContext(UCX_CONFIG)
            self._worker = libucxx.UCXWorker(self._context)
            self._worker.init_blocking_progress_mode()
            self.address = bytes(libucxx.UCXAddress.create_from_worker(self._worker))
        except Exception as error:
            raise EnvironmentProblem(f"UCX cannot be used: {error}") from error
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._epoll.register(self._worker.epoll_file_descriptor, select.EPOLLIN)
        self._closed = False

    def connect(self, address: bytes, *, same_host: bool) -> Any:
        """Returns an endpoint to the worker at ``address``. Raises: PeerLost.

        Error handling is on between hosts only: with it, UCX refuses shared memory and cross-memory attach.
        """
        try:
            return self._lib.UCXEndpoint.create_from_worker_address(
                self._worker, self._lib.UCXAddress.create_from_buffer(address), endpoint_error_handling=not same_host
            )
        except Exception as error:
            raise PeerLost(f"UCX refuses the peer's address: {error}") from error

    def send(self, endpoint: Any, buffer: np.ndarray, tag: int) -> Any:
        """Posts a send. ``buffer``: contiguous uint8, alive until the request has completed. Raises: PeerLost."""
        try:
            return endpoint.tag_send(self._array(buffer), tag=self._lib.UCXXTag(tag))
        except Exception as error:
            raise PeerLost(f"UCX cannot send: {error}") from error

    def receive(self, endpoint: Any, buffer: np.ndarray, tag: int) -> Any:
        """Posts a receive, see ``send``. Raises: PeerLost."""
        try:
            return endpoint.tag_recv(self._array(buffer), tag=self._lib.UCXXTag(tag))
        except Exception as error:
            raise PeerLost(f"UCX cannot receive: {error}") from error

    def close_endpoint(self, endpoint: Any) -> Any:
        """Starts to close; returns a request, or None when the endpoint is closed already.

        Dropping an endpoint is not enough: a posted receive would stay and take the next message with its tag.
        """
        try:
            return endpoint.close()
        except Exception:
            # It closed by itself, after an error of the connection.
            return None

    def ended(self, request: Any) -> RequestEnd:
        """Returns how a completed request ended."""
        try:
            request.check_error()
        except Exception as error:
            # More bytes came than were asked for: UCX has then finished with the memory.
            truncated = isinstance(error, self._lib.UCXMessageTruncatedError)
            return RequestEnd.DAMAGED if truncated else RequestEnd.BROKEN
        return RequestEnd.DONE

    def progress(self) -> bool:
        """Moves the next piece. Returns True when something moved."""
        return bool(self._worker.progress_once())

    def sleep(self, timeout_s: float) -> None:
        """Sleeps until a command or a network event comes, at most ``timeout_s``; not at all when an event waits."""
        if not self._worker.arm():
            return
        if any(fd == self._wake_fd for fd, _events in self._epoll.poll(timeout_s)):
            try:
                os.eventfd_read(self._wake_fd)
            except BlockingIOError:
                pass

    def wake(self) -> None:
        """Ends a sleep, or the next one. Any thread; must not race ``close``."""
        os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Frees worker, context and descriptors. Endpoints must be closed."""
        if self._closed:
            return
        self._closed = True
        self._epoll.close()
        os.close(self._wake_fd)
        self._worker = self._context = None
