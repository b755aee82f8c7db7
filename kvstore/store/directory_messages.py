"""Typed messages between the directory and the nodes that announce to it, over ``kvstore.net``.

Who speaks is known from the channel's handshake: the peer's id is the node's name, its incarnation the life.

    node -> directory   JoinDirectory, Announce, AnnounceAll, Renew, Leave, Locate
    directory -> node   Told (after JoinDirectory and Renew, and whenever something is to be done), Located
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from kvstore.core.announcer import MAX_HASHES_PER_PART
from kvstore.core.directory import MAX_NODES, MAX_TIERS_PER_NODE
from kvstore.core.ids import BLOCK_HASH_BYTES

MAX_PREFIXES = 64
MAX_LOCATED_BLOCKS = 1 << 16

Hash = Annotated[bytes, Meta(min_length=BLOCK_HASH_BYTES, max_length=BLOCK_HASH_BYTES)]
Part = Annotated[tuple[Hash, ...], Meta(max_length=MAX_HASHES_PER_PART)]
Prefix = Annotated[tuple[Hash, ...], Meta(max_length=MAX_LOCATED_BLOCKS)]
Count = Annotated[int, Meta(ge=0)]
Text = Annotated[str, Meta(max_length=256)]
Tier = Annotated[str, Meta(min_length=1, max_length=32)]


class TierPart(Struct, frozen=True, array_like=True):
    """What came into a tier and what left it."""

    tier: Tier
    added: Part
    removed: Part


Tiers = Annotated[tuple[TierPart, ...], Meta(max_length=MAX_TIERS_PER_NODE)]


# --- node -> directory --------------------------------------------------------------------------------------


class JoinDirectory(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """First message of a node that has blocks: where others fetch them, and the number of its latest announcement."""

    host: Text
    port: Annotated[int, Meta(ge=1, le=65535)]
    sequence: Count


class Announce(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """What changed since announcement ``sequence - 1``."""

    sequence: Count
    changes: Tiers


class AnnounceAll(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """Part of everything the node had after announcement ``sequence``. Part 0 replaces what was announced before."""

    sequence: Count
    part: Count
    is_last: bool
    changes: Tiers


class Renew(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """The node lives."""


class Leave(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """The node ends. No answer."""


class Locate(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """Asks where the longest prefix of each list can be had, from other nodes than the asking one."""

    n: Count
    prefixes: Annotated[tuple[Prefix, ...], Meta(max_length=MAX_PREFIXES)]


# --- directory -> node --------------------------------------------------------------------------------------


class Told(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """What the directory made of the latest message, see ``kvstore.core.directory.Heard``; who is there besides."""

    heard: Literal["ok", "resync", "unknown", "refused"]
    num_others: Count
    lease_ms: Annotated[int, Meta(ge=1)]
    """A node that is not heard of for so long is taken for dead."""


class PlaceInfo(Struct, frozen=True, array_like=True):
    """A tier of one life of one node, and where the node listens."""

    node: Text
    incarnation: Text
    tier: Tier
    host: Text
    port: int


class Run(Struct, frozen=True, array_like=True):
    """So many blocks of a prefix, one after the other, are each in all of these places (indexes into ``places``)."""

    num_blocks: Annotated[int, Meta(ge=1)]
    places: Annotated[tuple[Count, ...], Meta(max_length=MAX_NODES * MAX_TIERS_PER_NODE)]


Runs = Annotated[tuple[Run, ...], Meta(max_length=MAX_LOCATED_BLOCKS)]


class Located(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """For each prefix of the ask, in order: its runs from the first block on; none for a miss."""

    n: Count
    places: Annotated[tuple[PlaceInfo, ...], Meta(max_length=MAX_NODES * MAX_TIERS_PER_NODE)]
    prefixes: Annotated[tuple[Runs, ...], Meta(max_length=MAX_PREFIXES)]


ToDirectory = JoinDirectory | Announce | AnnounceAll | Renew | Leave | Locate
"""What a directory accepts."""

FromDirectory = Told | Located
"""What a node accepts from the directory."""
