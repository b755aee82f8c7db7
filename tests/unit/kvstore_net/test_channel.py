"""The channel: authenticated on both sides, bounded before allocation, typed on arrival."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import socket
import struct
import subprocess
import sys

import msgspec
import pytest

from kvstore.core.messages import Cancel, StatusAsk, ToIngress, ToWorker
from kvstore.errors import AuthenticationError, DeadlineExceeded, PeerLost, ProtocolError
from kvstore.net import channel as net
from kvstore.net.handshake import Hello, PeerInfo
from kvstore.net.host import ProcessWatch, host_identity, new_incarnation

SECRET = b"0123456789abcdef0123456789abcdef"


def make_peer(name: str) -> PeerInfo:
    return PeerInfo(
        role="worker", peer_id=name, incarnation=new_incarnation(), pid=os.getpid(), host_identity=host_identity()
    )


class Server:
    """Keeps every channel it accepts and every message or error each one saw."""

    def __init__(self) -> None:
        self.channels: asyncio.Queue[net.Channel] = asyncio.Queue()
        self.seen: asyncio.Queue[object] = asyncio.Queue()

    async def on_channel(self, channel: net.Channel) -> None:
        self.channels.put_nowait(channel)
        while True:
            try:
                self.seen.put_nowait(await channel.recv())
            except (PeerLost, ProtocolError) as error:
                self.seen.put_nowait(error)
                return

    async def start(self) -> net.ChannelServer:
        return await net.serve(
            "127.0.0.1", 0, secret=SECRET, me=make_peer("server"), decode=ToWorker, on_channel=self.on_channel
        )


async def test_messages_travel_both_ways_and_each_side_knows_the_other() -> None:
    """Both ends learn who the other is, and typed messages arrive equal and in order."""
    server = Server()
    listener = await server.start()
    me = make_peer("client")
    client = await net.connect("127.0.0.1", listener.port, secret=SECRET, me=me, decode=ToWorker)
    accepted = await server.channels.get()
    assert (client.peer.peer_id, accepted.peer) == ("server", me)
    sent = [Cancel(attempt_id=f"att-{i}", epoch=i, reason="client_gone") for i in range(50)]
    for message in sent:
        await client.send(message)
    assert [await server.seen.get() for _ in sent] == sent
    await accepted.send(StatusAsk(nonce=7))
    assert await client.recv() == StatusAsk(nonce=7)
    await client.close()
    await listener.close()


async def test_wrong_secret_is_refused_on_both_sides() -> None:
    """A client with another secret does not accept the server, and the server counts it."""
    server = Server()
    listener = await server.start()
    with pytest.raises(AuthenticationError):
        await net.connect("127.0.0.1", listener.port, secret=b"x" * 32, me=make_peer("evil"), decode=ToIngress)
    await until(lambda: listener.rejected >= 1)
    assert server.channels.empty()
    await listener.close()


async def raw_connection(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port)


async def until(condition) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


def frame(payload: bytes) -> bytes:
    return struct.pack("<I", len(payload)) + payload


class Marker:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


@pytest.mark.parametrize("kind", ["noise", "huge length", "pickle", "other version", "half a hello"])
async def test_hostile_bytes_close_the_connection_and_are_counted(kind: str, tmp_path) -> None:
    """F60: noise, giant lengths and pickles end with a closed connection, a count, and no side effect."""
    marker = tmp_path / "marker"
    server = Server()
    listener = await server.start()
    reader, writer = await raw_connection(listener.port)
    hello = msgspec.msgpack.encode(Hello(99, b"n" * 32, make_peer("old")))
    writer.write(
        {
            "noise": os.urandom(1024),
            "huge length": struct.pack("<I", 0xFFFFFFFF) + b"x",
            "pickle": frame(pickle.dumps(Marker(str(marker)))),
            "other version": frame(hello),
            "half a hello": frame(hello)[:20],
        }[kind]
    )
    if kind == "half a hello":
        writer.write_eof()
    async with asyncio.timeout(net.HANDSHAKE_DEADLINE_S + 1):
        await reader.read()
    await until(lambda: listener.rejected == 1)
    assert not marker.exists()
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    # The server still serves honest peers.
    good = await net.connect("127.0.0.1", listener.port, secret=SECRET, me=make_peer("good"), decode=ToWorker)
    await good.close()
    await listener.close()


async def test_a_closed_server_leaves_no_task_to_a_loop_that_stops() -> None:
    """A server that closes while a channel is about to end returns after that channel's socket is closed."""
    server = Server()
    listener = await server.start()
    before = asyncio.all_tasks()
    client = await net.connect("127.0.0.1", listener.port, secret=SECRET, me=make_peer("client"), decode=ToWorker)
    client.abort()
    assert isinstance(await server.seen.get(), PeerLost)
    await listener.close()
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("num_steps", range(10))
def test_a_server_that_closes_leaves_no_connection_half_accepted(num_steps: int) -> None:
    """Wherever a new connection stands when the server closes, its socket is closed and no task is left."""
    accepted: list[net.Channel] = []

    async def keep(channel: net.Channel) -> None:
        accepted.append(channel)
        await asyncio.sleep(3600)

    async def close_early() -> socket.socket:
        listener = await net.serve(
            "127.0.0.1", 0, secret=SECRET, me=make_peer("server"), decode=ToWorker, on_channel=keep
        )
        dialling = socket.create_connection((listener.host, listener.port))
        for _ in range(num_steps):
            await asyncio.sleep(0)
        await listener.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return dialling

    # A plain loop, not ``asyncio.run``: nothing cancels for the server what it forgot.
    loop = asyncio.new_event_loop()
    with loop.run_until_complete(close_early()) as dialling:
        dialling.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            assert dialling.recv(1) == b""
    assert not asyncio.all_tasks(loop)
    loop.close()
    assert not accepted


async def test_unknown_message_is_a_protocol_error_not_a_crash() -> None:
    """A well-framed message of an unknown type ends this channel with a typed error."""
    server = Server()
    listener = await server.start()
    client = await net.connect("127.0.0.1", listener.port, secret=SECRET, me=make_peer("client"), decode=ToWorker)
    client._writer.write(frame(msgspec.msgpack.encode({"t": "Nonsense", "x": 1})))
    assert isinstance(await server.seen.get(), ProtocolError)
    with pytest.raises(PeerLost):
        await client.recv()
    await client.close()
    await listener.close()


async def test_nobody_listening_is_peer_lost_and_silence_hits_the_deadline() -> None:
    """A closed port is PeerLost at once; a port that accepts and says nothing ends at the deadline."""

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(mute, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    with pytest.raises(DeadlineExceeded):
        await net.connect("127.0.0.1", port, secret=SECRET, me=make_peer("c"), decode=ToWorker, deadline_s=0.2)
    silent.close()
    await silent.wait_closed()
    with pytest.raises(PeerLost):
        await net.connect("127.0.0.1", port, secret=SECRET, me=make_peer("c"), decode=ToWorker, deadline_s=2)


async def test_peer_end_is_peer_lost_for_recv_and_send() -> None:
    """When the other side closes, both directions say PeerLost."""
    server = Server()
    listener = await server.start()
    client = await net.connect("127.0.0.1", listener.port, secret=SECRET, me=make_peer("client"), decode=ToWorker)
    accepted = await server.channels.get()
    accepted.abort()
    with pytest.raises(PeerLost):
        await client.recv()
    await until(lambda: client.is_closing)
    with pytest.raises(PeerLost):
        client.send_nowait(StatusAsk(nonce=1))
    await client.close()
    await listener.close()


def test_short_secret_is_refused() -> None:
    """A secret below 16 bytes is an error of the caller, not a weak cluster."""
    with pytest.raises(ValueError, match="cluster secret"):
        net.ChannelServer(secret=b"short", me=make_peer("s"), decode=ToWorker, on_channel=Server().on_channel)


async def test_process_watch_sees_the_exit() -> None:
    """A pidfd tells of an exit without polling; a pid that does not exist is refused."""
    process = await asyncio.create_subprocess_exec("sleep", "60")
    watch = ProcessWatch(process.pid)
    assert not watch.is_gone()
    gone = asyncio.Event()
    asyncio.get_running_loop().add_reader(watch.fileno(), gone.set)
    process.kill()
    async with asyncio.timeout(5):
        await gone.wait()
    assert watch.is_gone()
    asyncio.get_running_loop().remove_reader(watch.fileno())
    watch.close()
    await process.wait()
    with pytest.raises(ProcessLookupError):
        ProcessWatch(process.pid)


def test_a_process_is_watched_among_many_descriptors() -> None:
    """Descriptor numbers beyond what ``select`` takes are ordinary in a process with many connections."""
    held = [os.dup(1) for _ in range(1100)]
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        watch = ProcessWatch(process.pid)
        assert watch.fileno() > 1024 and not watch.is_gone()
        watch.close()
    finally:
        for descriptor in held:
            os.close(descriptor)
        process.communicate(b"\n")
