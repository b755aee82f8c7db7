"""The UCX library as the transport needs it: lanes of endpoints, tagged messages, progress, sleep and wake.

Owns the UCX contexts and workers and the descriptors to sleep on. Everything but ``wake`` is called on the thread that
made the device. Nothing of UCX is loaded before a device is made, and its errors end here: every failure to act is
``EnvironmentProblem`` or ``PeerLost``, and a completed request ends as one of ``RequestEnd``.

A lane is a context with a worker of its own. The *local* lane moves blocks by shared memory and cross-memory attach and
opens no socket; the *network* lane moves them over TCP and listens. Two lanes, because UCX would take shared memory
between two network namespaces of one machine too, where a cut network must cut this path as well.

On the local lane each peer gets a worker of its own to write to (``open_inbox``). What comes over shared memory lies
in one queue per worker, in which a sender first takes a place and then fills it: one that is killed in between leaves
a hole that nothing behind it ever passes. So nobody else may stand in that queue.

Endpoint error handling is on in both. Without it, UCX ends the whole process when the peer dies while its memory is
being read. With it, UCX refuses cross-memory attach unless told that keys can be revoked; we revoke nothing, because
source blocks stay untouched until nobody reads them.

Sleeping is safe against a lost wake-up: UCX arms its descriptor only when no event waits, commands arrive on a
descriptor of their own, and every sleep while something is in flight is bounded by the caller.
"""

from __future__ import annotations

import logging
import math
import os
import select
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from kvstore.errors import EnvironmentProblem, PeerLost
from kvstore.transport.peer_memory import MemoryAddress, OwnMemory, PeerMemory
from kvstore.transport.pieces import PIECE_BYTES
from kvstore.transport.transfers import Direction, RequestEnd

logger = logging.getLogger(__name__)

FD_SETSIZE = 1024

LOCAL_CONFIG = {
    "TLS": "posix,cma,self",
    "RNDV_SCHEME": "get_zcopy",  # the receiver copies: a stopped sender that wakes up has nothing to write
    "POSIX_ERROR_HANDLING": "y",
    "CMA_MEMORY_INVALIDATE": "y",
    "KEEPALIVE_INTERVAL": "1s",
}
NETWORK_CONFIG = {
    "TLS": "tcp,self",
    "RNDV_SCHEME": "am",
    "TCP_PUT_ENABLE": "n",  # else a peer writes at raw addresses, also after its receiver gave up
    "TCP_TX_SEG_SIZE": "256k",  # fewer, larger pieces: about 1.2 times the throughput of the default
    "TCP_RX_SEG_SIZE": "256k",
}
CANCEL_STEPS = 100
"""Steps of a device that closes, in which UCX lets go of what was cancelled; it does not say when it is done."""


class Address(msgspec.Struct, frozen=True, array_like=True):
    """What a peer needs to connect: the UCX worker address of each lane; no network lane, no address.

    ``piece_bytes``: how blocks are cut; both sides must do it alike.
    """

    local: bytes
    network: bytes | None
    piece_bytes: int
    memory: MemoryAddress
    """For peers on this host."""


@dataclass(slots=True)
class _Lane:
    """One UCX context and worker. It is looked after once it has an endpoint."""

    context: Any
    worker: Any
    address: bytes
    is_used: bool = False


@dataclass(frozen=True, slots=True)
class Prepared:
    """Memory as UCX wants it, for messages that go out again and again: to prepare costs more than to send."""

    array: np.ndarray
    handle: Any


class UcxDevice:
    """See the module. Life cycle: made -> used on one thread -> ``close``."""

    def __init__(self, *, has_network: bool = True, network_devices: tuple[str, ...] = ()) -> None:
        """Opens the lanes. ``network_devices``: interfaces to listen on, for example ``("eth0",)``; empty means all.

        Raises: EnvironmentProblem when UCX cannot be loaded or opened.
        """
        # UCX warns about variables of other libraries on stdout, which belongs to whoever runs us.
        os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
        network_config = NETWORK_CONFIG | ({"NET_DEVICES": ",".join(network_devices)} if network_devices else {})
        try:
            from ucxx._lib import libucxx
            from ucxx._lib.arr import Array

            self._lib = libucxx
            self._array = Array
            self._lanes = {True: self._open_lane(LOCAL_CONFIG)}
            if has_network:
                self._lanes[False] = self._open_lane(network_config)
        except Exception as error:
            raise EnvironmentProblem(f"UCX cannot be used: {error}") from error
        self._memory = OwnMemory()
        self.address = self._address_by(self._lanes[True])
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._inboxes: dict[str, _Lane] = {}
        """Local lanes by the peer that writes to them; each shares the context of the first."""
        self._used: list[Any] = []
        """Workers of the lanes that are in use."""
        self._closed = False

    def _address_by(self, local: _Lane) -> bytes:
        network = self._lanes.get(False)
        return msgspec.msgpack.encode(
            Address(local.address, None if network is None else network.address, PIECE_BYTES, self._memory.address)
        )

    def open_inbox(self, peer: str) -> bytes:
        """Returns the address for one peer alone. Raises: PeerLost when UCX has no more of them."""
        if peer not in self._inboxes:
            try:
                self._inboxes[peer] = self._make_lane(self._lanes[True].context)
            except Exception as error:
                raise PeerLost(f"UCX opens no inbox for {peer}: {error}") from error
        return self._address_by(self._inboxes[peer])

    def address_for(self, peer: str) -> bytes:
        """Returns the address by which ``peer`` knows this device: its inbox's, if it has one."""
        lane = self._inboxes.get(peer)
        return self.address if lane is None else self._address_by(lane)

    def close_inbox(self, peer: str) -> None:
        """Drops what a peer that is proved dead wrote to. Its endpoints must be closed."""
        lane = self._inboxes.pop(peer, None)
        if lane is None or not lane.is_used:
            return
        self._epoll.unregister(lane.worker.epoll_file_descriptor)
        lane.worker.cancel_inflight_requests()
        for _ in range(CANCEL_STEPS):
            lane.worker.progress_once()
        self._used.remove(lane.worker)

    def connect(self, peer: str, address: bytes, *, same_host: bool) -> Any:
        """Returns an endpoint to the device at ``address``, over the lane for ``same_host``. Raises: PeerLost."""
        theirs = _decoded(address)
        if theirs.piece_bytes != PIECE_BYTES:
            raise PeerLost(f"the peer cuts blocks at {theirs.piece_bytes} bytes, this side at {PIECE_BYTES}")
        lane, worker_address = self._lanes.get(same_host), theirs.local if same_host else theirs.network
        if same_host:
            lane = self._inboxes.get(peer, lane)
        if lane is None or worker_address is None:
            raise PeerLost("one side has no network lane")
        try:
            endpoint = self._lib.UCXEndpoint.create_from_worker_address(
                lane.worker, self._lib.UCXAddress.create_from_buffer(worker_address), endpoint_error_handling=True
            )
        except Exception as error:
            raise PeerLost(f"UCX refuses the peer's address: {error}") from error
        if not lane.is_used:
            lane.is_used = True
            self._used.append(lane.worker)
            self._epoll.register(lane.worker.epoll_file_descriptor, select.EPOLLIN)
        return endpoint

    @staticmethod
    def open_memory(address: bytes) -> PeerMemory | None:
        """Returns the memory of the process of the device at ``address``, or None where it cannot be read."""
        try:
            return PeerMemory(_decoded(address).memory)
        except PeerLost as error:
            logger.info("memory_not_readable error=%s", error)
            return None

    def prepare(self, num_bytes: int) -> Prepared:
        """Returns zeros to send from or to receive into, any number of times."""
        array = np.zeros(num_bytes, np.uint8)
        return Prepared(array, self._array(array))

    def send(self, endpoint: Any, buffer: np.ndarray | Prepared, tag: int) -> Any:
        """Posts a send. ``buffer``: contiguous uint8, alive until the request has completed. Raises: PeerLost."""
        handle = buffer.handle if isinstance(buffer, Prepared) else self._array(buffer)
        try:
            return endpoint.tag_send(handle, tag=self._lib.UCXXTag(tag))
        except Exception as error:
            raise PeerLost(f"UCX cannot send: {error}") from error

    def receive(self, endpoint: Any, buffer: np.ndarray | Prepared, tag: int) -> Any:
        """Posts a receive, see ``send``. Raises: PeerLost."""
        handle = buffer.handle if isinstance(buffer, Prepared) else self._array(buffer)
        try:
            return endpoint.tag_recv(handle, tag=self._lib.UCXXTag(tag))
        except Exception as error:
            raise PeerLost(f"UCX cannot receive: {error}") from error

    def is_alive(self, endpoint: Any) -> bool:
        """Returns False once UCX has noticed that the connection is broken."""
        return bool(endpoint.alive)

    def close_endpoint(self, endpoint: Any) -> Any:
        """Starts to close; returns a request, or None when the endpoint is closed already.

        Dropping an endpoint is not enough: a posted receive would stay and take the next message with its tag.
        """
        try:
            if not endpoint.alive:
                # Nothing is left to wait for, and the request that ``close`` returned would point to nothing.
                endpoint.close_blocking()
                return None
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

    @staticmethod
    def is_settled_by_end(direction: Direction, *, same_host: bool) -> bool:
        """Returns whether nobody touches the memory of a request any more once it has completed, however it ended.

        Destinations are written by this process alone, and by TCP's own copies sources are read by it alone. A local
        source is read by the peer, which may do so until it is dead.
        """
        return direction is Direction.RECEIVE or not same_host

    def progress(self) -> bool:
        """Moves the next piece. Returns True when something moved."""
        moved = False
        for worker in self._used:
            moved |= bool(worker.progress_once())
        return moved

    def sleep(self, timeout_s: float) -> None:
        """Sleeps until a command or a network event comes, at most ``timeout_s``; not at all when an event waits."""
        for worker in self._used:
            if not worker.arm():
                return
        if any(fd == self._wake_fd for fd, _events in self._epoll.poll(timeout_s)):
            self._take_wake()

    def nap(self, timeout_s: float) -> None:
        """Sleeps ``timeout_s`` or until a command comes. The network wakes nobody, and nobody pays for waking us."""
        if self._wake_poll(timeout_s):
            self._take_wake()

    def wake(self) -> None:
        """Ends a sleep, or the next one. Any thread; must not race ``close``."""
        os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Frees workers, contexts and descriptors. Endpoints must be closed."""
        if self._closed:
            return
        self._closed = True
        for worker in self._used:
            # A posted receive keeps its worker, and a worker its memory and descriptors for as long as the process.
            worker.cancel_inflight_requests()
        for _ in range(CANCEL_STEPS):
            self.progress()
        self._epoll.close()
        os.close(self._wake_fd)
        self._used.clear()
        self._inboxes.clear()
        self._lanes.clear()

    def _wake_poll(self, timeout_s: float) -> bool:
        # Of the three calls that wait for a descriptor, only select knows less than a millisecond, and only this one
        # cannot take the high numbers that a process with many connections hands out.
        if self._wake_fd < FD_SETSIZE:
            readable, _, _ = select.select([self._wake_fd], [], [], timeout_s)
            return bool(readable)
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        return bool(poller.poll(math.ceil(timeout_s * 1e3)))

    def _take_wake(self) -> None:
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            pass

    def _open_lane(self, config: dict[str, str]) -> _Lane:
        features = (self._lib.Feature.TAG, self._lib.Feature.WAKEUP)
        return self._make_lane(self._lib.UCXContext(config, features))

    def _make_lane(self, context: Any) -> _Lane:
        worker = self._lib.UCXWorker(context)
        worker.init_blocking_progress_mode()
        return _Lane(context, worker, bytes(self._lib.UCXAddress.create_from_worker(worker)))


def _decoded(address: bytes) -> Address:
    """Raises: PeerLost."""
    try:
        return msgspec.msgpack.decode(address, type=Address)
    except msgspec.MsgspecError as error:
        raise PeerLost(f"not a transport address: {error}") from error
