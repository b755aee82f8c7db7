"""An authenticated, framed, typed MessagePack channel over one TCP connection.

Owns a socket and its framing. Byte layout of a frame: 4 bytes little-endian length n, then n bytes of
MessagePack. The length is checked before anything is allocated. Messages are validated against the union of
types this side accepts while they are decoded. No pickle, no retries, no reconnects: the owner decides those.

Life cycle: ``connect`` or ``serve`` -> handshake -> ``send``/``recv`` -> ``close``. A channel
belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import msgspec

from kvstore.core.messages import WIRE_VERSION
from kvstore.errors import AuthenticationError, DeadlineExceeded, KopirError, NoCapacity, PeerLost, ProtocolError
from kvstore.net import handshake
from kvstore.net.handshake import Challenge, Hello, PeerInfo, Proof, Welcome

MAX_FRAME_BYTES = 64 << 20
MAX_UNSENT_BYTES = 16 << 20
HANDSHAKE_DEADLINE_S = 5.0
CLOSE_DEADLINE_S = 1.0
MAX_HALF_OPEN = 64
BACKLOG = 100
ACCEPTS_PER_STEP = 16
ACCEPT_RETRY_S = 1.0
"""Pause after the process has run out of descriptors."""

_T = TypeVar("_T")
logger = logging.getLogger(__name__)
_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()


class Channel:
    """One end of an authenticated connection. ``peer`` is who the other end proved to be."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, peer: PeerInfo, decode: Any
    ) -> None:
        self.peer = peer
        self._reader = reader
        self._writer = writer
        self._decoder = msgspec.msgpack.Decoder(decode)

    def send_nowait(self, message: msgspec.Struct) -> None:
        """Queues one message without waiting.

        Raises: PeerLost if the channel is closed; NoCapacity if ``MAX_UNSENT_BYTES`` are waiting already.
        """
        transport = self._writer.transport
        if transport.is_closing():
            raise PeerLost(f"channel to {self.peer.peer_id} is closed")
        if transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            raise NoCapacity(f"{MAX_UNSENT_BYTES} bytes to {self.peer.peer_id} are still unsent")
        _write_frame(self._writer, message)

    async def send(self, message: msgspec.Struct) -> None:
        """Queues one message and waits while the other side reads too slowly. Raises: PeerLost, NoCapacity."""
        self.send_nowait(message)
        try:
            await self._writer.drain()
        except (ConnectionError, OSError) as error:
            raise PeerLost(f"channel to {self.peer.peer_id}: {error}") from error

    async def recv(self) -> Any:
        """Returns the next message. Raises: PeerLost at the end of the connection, ProtocolError on bad bytes."""
        try:
            payload = await _read_frame(self._reader, MAX_FRAME_BYTES)
        except PeerLost:
            self.abort()
            raise
        try:
            return self._decoder.decode(payload)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"message from {self.peer.peer_id}: {error}") from error

    @property
    def is_closing(self) -> bool:
        """True once either side has begun to close."""
        return self._writer.transport.is_closing()

    def fileno(self) -> int:
        """Returns the file descriptor of the connection, which stays this channel's: duplicate it to keep it."""
        return int(self._writer.get_extra_info("socket").fileno())

    def abort(self) -> None:
        """Closes at once; unsent bytes are lost."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """Sends what is queued, then closes; bounded by ``CLOSE_DEADLINE_S``."""
        await _close_writer(self._writer)


class ChannelServer:
    """Accepts channels on one address and hands each to ``on_channel`` after its handshake.

    ``rejected`` counts connections that failed the handshake. A rejected connection is closed without an answer.
    """

    def __init__(
        self, *, secret: bytes, me: PeerInfo, decode: Any, on_channel: Callable[[Channel], Awaitable[None]]
    ) -> None:
        handshake.check_secret(secret)
        self._secret = secret
        self._me = me
        self._decode = decode
        self._on_channel = on_channel
        self._listening: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._half_open = 0
        self.rejected = 0
        self.host = ""
        self.port = 0

    async def start(self, host: str, port: int = 0) -> None:
        """Listens on ``host``; port 0 lets the system choose. Raises: OSError if the address is taken."""
        loop = asyncio.get_running_loop()
        family, _, _, _, address = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
        self._listening = socket.create_server(address, family=family, backlog=BACKLOG)
        self._listening.setblocking(False)
        self.host, self.port = self._listening.getsockname()[:2]
        loop.add_reader(self._listening, self._accept)

    async def close(self) -> None:
        """Stops listening and ends every channel it accepted; no task and no open socket is left to the loop."""
        if self._listening is not None:
            asyncio.get_running_loop().remove_reader(self._listening)
            self._listening.close()
            self._listening = None
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self) -> None:
        # Accepted here and not by the loop's own server, which closes in the midst of an accept with a task half
        # done and a socket open: from the accept on, each connection has a task that ``close`` knows.
        loop = asyncio.get_running_loop()
        for _ in range(ACCEPTS_PER_STEP):
            if self._listening is None:
                return
            try:
                connection, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                logger.error("accept_failed port=%d error=%s", self.port, error)
                loop.remove_reader(self._listening)
                loop.call_later(ACCEPT_RETRY_S, self._accept_again)
                return
            task = loop.create_task(self._serve(connection))
            self._tasks.add(task)
            # A task that is cancelled before its first step runs none of its own code.
            task.add_done_callback(partial(self._ended, connection))

    def _accept_again(self) -> None:
        if self._listening is not None:
            asyncio.get_running_loop().add_reader(self._listening, self._accept)

    def _ended(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        connection.close()
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("channel_failed error=%r", error, exc_info=error)

    async def _serve(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            reader, writer = await asyncio.open_connection(sock=connection)
        except OSError:
            return
        try:
            channel = await self._authenticate(reader, writer)
            if channel is not None:
                await self._on_channel(channel)
        finally:
            # The task counts until its socket is closed: nothing half-ended is left to a loop that stops.
            await _abort_writer(writer)

    async def _authenticate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Channel | None:
        """Returns the channel, or None after closing a connection that could not prove itself."""
        if self._half_open >= MAX_HALF_OPEN:
            self.rejected += 1
            writer.transport.abort()
            return None
        self._half_open += 1
        try:
            async with asyncio.timeout(HANDSHAKE_DEADLINE_S):
                peer = await _serve_handshake(reader, writer, self._secret, self._me)
        except (KopirError, TimeoutError, OSError):
            self.rejected += 1
            writer.transport.abort()
            return None
        finally:
            self._half_open -= 1
        return Channel(reader, writer, peer=peer, decode=self._decode)


async def serve(
    host: str, port: int, *, secret: bytes, me: PeerInfo, decode: Any, on_channel: Callable[[Channel], Awaitable[None]]
) -> ChannelServer:
    """Starts a server. ``on_channel`` runs once per authenticated channel; the channel closes when it returns."""
    server = ChannelServer(secret=secret, me=me, decode=decode, on_channel=on_channel)
    await server.start(host, port)
    return server


async def connect(
    host: str, port: int, *, secret: bytes, me: PeerInfo, decode: Any, deadline_s: float = HANDSHAKE_DEADLINE_S
) -> Channel:
    """Opens an authenticated channel.

    Raises: DeadlineExceeded; PeerLost if nobody answers there; AuthenticationError; ProtocolError (version).
    """
    handshake.check_secret(secret)
    try:
        async with asyncio.timeout(deadline_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                peer = await _dial_handshake(reader, writer, secret, me)
            except BaseException:
                await _abort_writer(writer)
                raise
    except TimeoutError as error:
        raise DeadlineExceeded(f"no channel to {host}:{port} within {deadline_s} s") from error
    except OSError as error:
        raise PeerLost(f"no channel to {host}:{port}: {error}") from error
    return Channel(reader, writer, peer=peer, decode=decode)


async def adopt(connection: socket.socket, *, peer: PeerInfo, decode: Any) -> Channel:
    """Makes a channel of this loop from a connection whose handshake is over. Raises: PeerLost."""
    try:
        reader, writer = await asyncio.open_connection(sock=connection)
    except OSError as error:
        connection.close()
        raise PeerLost(f"channel to {peer.peer_id}: {error}") from error
    return Channel(reader, writer, peer=peer, decode=decode)


async def _dial_handshake(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, me: PeerInfo
) -> PeerInfo:
    hello = Hello(WIRE_VERSION, handshake.new_nonce(), me)
    _write_frame(writer, hello)
    challenge = await _read_typed(reader, Challenge)
    handshake.check_version(challenge.v)
    server = challenge.me
    handshake.check_mac(handshake.mac(secret, "server", hello, challenge.nonce, server), challenge.mac)
    _write_frame(writer, Proof(handshake.mac(secret, "client", hello, challenge.nonce, server)))
    try:
        await _read_typed(reader, Welcome)
    except PeerLost as error:
        raise AuthenticationError("the other side refused our proof") from error
    return server


async def _serve_handshake(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, me: PeerInfo
) -> PeerInfo:
    hello = await _read_typed(reader, Hello)
    nonce = handshake.new_nonce()
    _write_frame(writer, Challenge(WIRE_VERSION, nonce, me, handshake.mac(secret, "server", hello, nonce, me)))
    handshake.check_version(hello.v)
    proof = await _read_typed(reader, Proof)
    handshake.check_mac(handshake.mac(secret, "client", hello, nonce, me), proof.mac)
    _write_frame(writer, Welcome())
    return hello.me


def _write_frame(writer: asyncio.StreamWriter, message: msgspec.Struct) -> None:
    payload = _encoder.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise ProtocolError(f"{type(message).__name__} of {len(payload)} bytes is over {MAX_FRAME_BYTES}")
    writer.write(_LENGTH.pack(len(payload)) + payload)


async def _read_frame(reader: asyncio.StreamReader, max_bytes: int) -> bytes:
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > max_bytes:
            raise ProtocolError(f"frame of {length} bytes is over {max_bytes}")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError, OSError) as error:
        raise PeerLost(f"connection ended: {error}") from error


async def _read_typed(reader: asyncio.StreamReader, kind: type[_T]) -> _T:
    payload = await _read_frame(reader, handshake.MAX_HANDSHAKE_BYTES)
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"handshake: {error}") from error


async def _abort_writer(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    # The socket is closed one loop step after the abort.
    with suppress(ConnectionError, OSError):
        await writer.wait_closed()


async def _close_writer(writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError, OSError, TimeoutError):
        writer.close()
        async with asyncio.timeout(CLOSE_DEADLINE_S):
            await writer.wait_closed()
    await _abort_writer(writer)
