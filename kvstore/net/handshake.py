"""Mutual authentication at the start of every channel.

Both sides prove that they know the cluster secret over fresh nonces, and learn who the other one is and
which wire version it speaks. The secret itself never travels. Bytes after the handshake are not encrypted.

    client -> server   Hello    {v, nonce, me}
    server -> client   Challenge{v, nonce, me, mac}   mac = HMAC(secret, "server", both nonces, both identities)
    client -> server   Proof    {mac}                 mac = HMAC(secret, "client", both nonces, both identities)
    server -> client   Welcome  {}
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kvstore.core.messages import WIRE_VERSION
from kvstore.errors import AuthenticationError, ProtocolError

NONCE_BYTES = 32
MAX_HANDSHAKE_BYTES = 4096
SECRET_BYTES_MIN = 16
LEASE_ROLE = "lease"
"""Role of a worker's second connection to an ingress: lease asks and grants, nothing else."""

_Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
_Mac = Annotated[bytes, Meta(min_length=32, max_length=32)]
_Name = Annotated[str, Meta(max_length=256)]


class PeerInfo(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who is at one end of a channel."""

    role: _Name
    peer_id: _Name
    incarnation: _Name
    pid: Annotated[int, Meta(ge=0)]
    host_identity: Annotated[str, Meta(max_length=512)]


class Hello(Struct, frozen=True, tag_field="t", tag=True):
    v: int
    nonce: _Nonce
    me: PeerInfo


class Challenge(Struct, frozen=True, tag_field="t", tag=True):
    v: int
    nonce: _Nonce
    me: PeerInfo
    mac: _Mac


class Proof(Struct, frozen=True, tag_field="t", tag=True):
    mac: _Mac


class Welcome(Struct, frozen=True, tag_field="t", tag=True):
    pass


def new_nonce() -> bytes:
    """Returns 32 random bytes."""
    return secrets.token_bytes(NONCE_BYTES)


def mac(secret: bytes, side: str, hello: Hello, server_nonce: bytes, server: PeerInfo) -> bytes:
    """Returns the 32-byte proof of one side (``client`` or ``server``) over everything both have said."""
    transcript = msgspec.msgpack.encode((side, hello.v, hello.nonce, server_nonce, hello.me, server))
    return hmac.new(secret, transcript, hashlib.sha256).digest()


def check_mac(expected: bytes, got: bytes) -> None:
    """Raises: AuthenticationError when the proof is wrong."""
    if not hmac.compare_digest(expected, got):
        raise AuthenticationError("the other side does not know the cluster secret")


def check_version(version: int) -> None:
    """Raises: ProtocolError naming both versions when they differ."""
    if version != WIRE_VERSION:
        raise ProtocolError(f"wire version {version} at the other side, {WIRE_VERSION} here")


def check_secret(secret: bytes) -> None:
    """Raises: ValueError when the cluster secret is too short to be one."""
    if len(secret) < SECRET_BYTES_MIN:
        raise ValueError(f"cluster secret: at least {SECRET_BYTES_MIN} bytes are needed (got {len(secret)})")
