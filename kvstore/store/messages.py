"""Typed messages between a store node and its clients, over ``kvstore.net``.

Owns the vocabulary of the store protocol. Clients on the node's host copy the bytes of
blocks to and from the slab themselves. Each request that has an answer carries a call number ``n`` that the answer
repeats; numbers are the client's and mean nothing else. A lease exists only as the answer to an ask: the
client counts its length from the moment it sent the ask, the node from the moment it answered.

    client -> node   Attach, Match, BringUp, ReleaseLease, Touched, ReserveBlocks, CommitBlocks, AbortBlocks,
                     ReportCorrupt, WritesEnded, UpdateWeights, StatAsk, LeasesAsk, ListBlocks, VerifyBlocks,
                     CollectGarbage, EventsAsk, FetchMissing
    node -> client   Attached, AttachRefused, Superseded, Matched, BroughtUp, BlocksReserved, BlocksCommitted,
                     WeightsUpdated, StoreStat, LeaseList, BlockList, BlocksVerified, GarbageCollected, OthersKnown,
                     EventList, MissingFetched
    node -> node     Attach, FetchBlocks; back: Attached, BlocksOffered, then BlockPiece until all are sent

Only between nodes do the bytes of blocks travel on a channel.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from kvstore.core.ids import BLOCK_DIGEST_BYTES, BLOCK_HASH_BYTES

STORE_VERSION = 4
MAX_HASHES_PER_MESSAGE = 1 << 16
MAX_LEASE_MS = 60_000
MAX_FINGERPRINT_FIELDS = 64
MAX_LEASES_LISTED = 1 << 16
MAX_BLOCKS_LISTED = 4096
MAX_EVENTS_LISTED = 4096
EVENTS_WAIT_MS_MAX = 60_000
MAX_BLOCKS_VERIFIED = 1024
MAX_VIOLATIONS = 8 * MAX_BLOCKS_VERIFIED
DEFAULT_NAMESPACE = "default"
PIECE_BYTES_MAX = 1 << 20
MAX_BLOCKS_PER_FETCH = 256
FETCH_MS_MAX = 60_000

Hash = Annotated[bytes, Meta(min_length=BLOCK_HASH_BYTES, max_length=BLOCK_HASH_BYTES)]
Digest = Annotated[bytes, Meta(min_length=BLOCK_DIGEST_BYTES, max_length=BLOCK_DIGEST_BYTES)]
Hashes = Annotated[tuple[Hash, ...], Meta(max_length=MAX_HASHES_PER_MESSAGE)]
CallNumber = Annotated[int, Meta(ge=0)]
LeaseMs = Annotated[int, Meta(ge=1, le=MAX_LEASE_MS)]
Slot = Annotated[int, Meta(ge=0)]
Generation = Annotated[int, Meta(ge=0)]
Name = Annotated[str, Meta(min_length=1, max_length=128)]
TierName = Literal["host", "disk"]
Tenant = Annotated[str, Meta(max_length=64)]
FieldTexts = Annotated[
    dict[Annotated[str, Meta(max_length=128)], Annotated[str, Meta(max_length=1 << 20)]],
    Meta(max_length=MAX_FINGERPRINT_FIELDS),
]
FieldNames = Annotated[tuple[Annotated[str, Meta(max_length=128)], ...], Meta(max_length=2 * MAX_FINGERPRINT_FIELDS)]


class SlotRef(Struct, frozen=True, array_like=True):
    """One slot of the slab, in the life that ``generation`` names, for one block."""

    block_hash: Hash
    slot: Slot
    generation: Generation


class MatchedBlock(Struct, frozen=True, array_like=True):
    """One leased block: where it is and the digest that its bytes must have."""

    slot: Slot
    generation: Generation
    digest: Digest


class ReservedBlock(Struct, frozen=True, array_like=True):
    """Answer for one hash; ``slot`` and ``generation`` mean something only when it is granted."""

    status: Literal["granted", "present", "in_progress", "no_room", "over_quota"]
    slot: Slot = 0
    generation: Generation = 0


class WrittenBlock(Struct, frozen=True, array_like=True):
    """One block whose bytes are in its slot, with their digest."""

    block_hash: Hash
    slot: Slot
    generation: Generation
    digest: Digest


MatchedBlocks = Annotated[tuple[MatchedBlock, ...], Meta(max_length=MAX_HASHES_PER_MESSAGE)]
ReservedBlocks = Annotated[tuple[ReservedBlock, ...], Meta(max_length=MAX_HASHES_PER_MESSAGE)]
WrittenBlocks = Annotated[tuple[WrittenBlock, ...], Meta(max_length=MAX_HASHES_PER_MESSAGE)]
SlotRefs = Annotated[tuple[SlotRef, ...], Meta(max_length=MAX_HASHES_PER_MESSAGE)]


# --- client -> node -----------------------------------------------------------------------------------------


class Attach(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """First message of a connection: what the client expects of the slab, and whose blocks it computes and reads."""

    n: CallNumber
    version: int = STORE_VERSION
    client_id: Annotated[str, Meta(min_length=1, max_length=128)]
    """Random, the same for every connection of one client object of one process."""
    block_bytes: Annotated[int, Meta(ge=1)] | None
    """None: the client only looks (``StatAsk``, ``LeasesAsk``); it may hold nothing and need not be on this host."""
    namespace: Name = DEFAULT_NAMESPACE
    fingerprint: FieldTexts = {}
    """By field, as ``Fingerprint.to_dict`` gives it: everybody in a namespace has the same."""


class Match(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """Asks for the longest prefix of ``hashes``, pinned under one lease."""

    n: CallNumber
    hashes: Hashes
    lease_ms: LeaseMs


class BringUp(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """Like ``Match``; blocks that are only on a lower tier are brought up first, as far as ``deadline_ms`` allows."""

    n: CallNumber
    hashes: Hashes
    lease_ms: LeaseMs
    deadline_ms: LeaseMs
    ends_prompt: bool
    """The last of ``hashes`` is the last block of the prompt, not of a part of it."""


class ReleaseLease(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """Ends a read lease early. No answer; an unknown lease is ignored."""

    lease_id: Annotated[int, Meta(ge=0)]


class Touched(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """What the client read without asking since it last said so. No answer."""

    blocks: SlotRefs
    """Copied blocks, oldest load first, within a load leaf first."""
    tails: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=MAX_HASHES_PER_MESSAGE)] = ()
    """Which of ``blocks`` (by their place) are the last ones of their prompts."""
    num_missed: Annotated[int, Meta(ge=0)] = 0
    """Blocks that were looked for and found in no tier of any node."""


class ReserveBlocks(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """Asks for one writable slot per hash, parents before leaves."""

    n: CallNumber
    hashes: Hashes
    lease_ms: LeaseMs
    tenant: Tenant = ""
    """Whom the blocks are charged to, see ``kvstore.core.quota.tenant_of``."""
    parent: Hash | None = None
    """The block before the first one in their prompt; None: the first is the first of the prompt."""


class CommitBlocks(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """These blocks are written; the client will not touch their slots again. Parents before leaves."""

    n: CallNumber
    blocks: WrittenBlocks


class AbortBlocks(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """The client gives these reservations up and will not touch their slots again. No answer."""

    blocks: SlotRefs


class ReportCorrupt(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """The bytes of a leased block did not have its digest. No answer."""

    block: SlotRef


class WritesEnded(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """Nothing that earlier connections of this client reserved is being written any more. No answer."""


class UpdateWeights(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """The weights of the client's namespace were changed in place: its fingerprint is another one from now on."""

    n: CallNumber
    fingerprint: FieldTexts


class FetchMissing(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """Asks the node to bring blocks that its slab lacks from other nodes, as far as there is no gap."""

    n: CallNumber
    hashes: Hashes
    deadline_ms: Annotated[int, Meta(ge=1, le=FETCH_MS_MAX)]
    ends_prompt: bool
    tenant: Tenant = ""
    """Whom the blocks are charged to here."""


class FetchBlocks(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """A node asks another for the bytes of these blocks, in this order, up to the first it does not have."""

    n: CallNumber
    block_bytes: Annotated[int, Meta(ge=1)]
    hashes: Annotated[tuple[Hash, ...], Meta(max_length=MAX_BLOCKS_PER_FETCH)]


class LeasesAsk(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """Asks for ``LeaseList``."""

    n: CallNumber


class ListBlocks(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """Asks for the blocks of one tier, from ``start_slot`` on."""

    n: CallNumber
    tier: TierName
    start_slot: Slot = 0
    num_slots: Annotated[int, Meta(ge=1, le=MAX_BLOCKS_LISTED)] = MAX_BLOCKS_LISTED


class VerifyBlocks(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """Asks the node to read these slots, compare digests and check content. What is damaged is removed."""

    n: CallNumber
    tier: TierName
    start_slot: Slot = 0
    num_slots: Annotated[int, Meta(ge=1, le=MAX_BLOCKS_VERIFIED)] = 64


class CollectGarbage(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """Asks the node to end overdue leases and writes, and to put quarantined slots of the disk back into use."""

    n: CallNumber


class EventsAsk(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """Asks what came and left after event number ``after``; None: only for the number of the latest event."""

    n: CallNumber
    after: Annotated[int, Meta(ge=0)] | None
    wait_ms: Annotated[int, Meta(ge=0, le=EVENTS_WAIT_MS_MAX)] = 0
    """So long the node waits for the first one."""


class StatAsk(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """Asks for ``StoreStat``."""

    n: CallNumber


# --- node -> client -----------------------------------------------------------------------------------------


class Attached(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """Where the slab is and what it looks like. ``incarnation`` is the node's."""

    n: CallNumber
    incarnation: Annotated[str, Meta(max_length=128)]
    slab_path: Annotated[str, Meta(max_length=4096)]
    block_bytes: int
    num_blocks: int
    has_lower_tier: bool = False
    """Worth asking ``BringUp`` for what the slab does not have."""


class AttachRefused(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """The client cannot use this slab; the connection ends. ``field`` names what differs."""

    n: CallNumber
    field: Annotated[str, Meta(max_length=128)]
    message: Annotated[str, Meta(max_length=4096)]
    differing_fields: FieldNames = ()
    """Every field of the fingerprint that differs, when ``field`` is ``fingerprint``."""


class Superseded(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """The client's namespace has another fingerprint now. It is given nothing new; what it holds it may finish."""

    differing_fields: FieldNames


class WeightsUpdated(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """Answer to ``UpdateWeights``. False: the namespace's epoch was not lower."""

    n: CallNumber
    updated: bool


class OthersKnown(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """How many other nodes the directory knows: with none, ``FetchMissing`` would be in vain."""

    num_others: Annotated[int, Meta(ge=0)]


class MissingFetched(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """Answer to ``FetchMissing``: so many of its blocks, from the first on, were in the slab a moment ago.

    ``is_late``: its deadline ended the fetch.
    """

    n: CallNumber
    num_blocks: Annotated[int, Meta(ge=0)]
    is_late: bool = False


class BlocksOffered(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """Answer to ``FetchBlocks``: the digests of the blocks whose pieces follow; possibly of fewer than asked for."""

    n: CallNumber
    digests: Annotated[tuple[Digest, ...], Meta(max_length=MAX_BLOCKS_PER_FETCH)]


class BlockPiece(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """Bytes [start, start + len(data)) of offered block ``index``; blocks and pieces come in order."""

    n: CallNumber
    index: Annotated[int, Meta(ge=0, lt=MAX_BLOCKS_PER_FETCH)]
    start: Annotated[int, Meta(ge=0)]
    data: Annotated[bytes, Meta(max_length=PIECE_BYTES_MAX)]
    """Empty: the block was found damaged and does not come, nor does any after it."""


class Matched(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """The leased prefix, in order. No blocks, no lease."""

    n: CallNumber
    lease_id: int | None
    blocks: MatchedBlocks


class BroughtUp(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """Answer to ``BringUp``: the prefix that is in the slab now, leased. ``from_disk``: which blocks came up for it.

    ``is_late``: more was on its way when the deadline came; it arrives later.
    """

    n: CallNumber
    lease_id: int | None
    blocks: MatchedBlocks
    from_disk: Annotated[tuple[bool, ...], Meta(max_length=MAX_HASHES_PER_MESSAGE)] = ()
    is_late: bool = False


class BlocksReserved(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """One answer per hash of the ask, in order."""

    n: CallNumber
    blocks: ReservedBlocks


class BlocksCommitted(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """For each block of the ask, in order: is it visible now?"""

    n: CallNumber
    committed: Annotated[tuple[bool, ...], Meta(max_length=MAX_HASHES_PER_MESSAGE)]


class LeaseInfo(Struct, frozen=True, array_like=True):
    """One standing read lease: whose, how old, how long it still has, and how many blocks it pins."""

    lease_id: int
    holder: str
    """Name of the process, for example ``prefill-0``."""
    incarnation: str
    pid: int
    age_ms: int
    left_ms: int
    num_blocks: int


class LeaseList(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """The standing read leases, oldest first; ``num_leases`` counts also those that did not fit."""

    n: CallNumber
    num_leases: int
    leases: Annotated[tuple[LeaseInfo, ...], Meta(max_length=MAX_LEASES_LISTED)]


class BlockInfo(Struct, frozen=True, array_like=True):
    """One committed block of one tier."""

    block_hash: Hash
    slot: Slot
    generation: Generation
    digest: Digest
    tenant: str


class BlockList(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """Blocks in the order of their slots. ``next_slot``: where to go on; None at the end of the tier."""

    n: CallNumber
    blocks: Annotated[tuple[BlockInfo, ...], Meta(max_length=MAX_BLOCKS_LISTED)]
    next_slot: int | None


class BlockViolation(Struct, frozen=True, array_like=True):
    """One finding of the layout checker; what it does not know is None. ``kind``: see ``kernels.checker.Kind``."""

    block_hash: Hash
    slot: Slot
    kind: Name
    count: int = 1
    offset_bytes: int | None = None
    layer: int | None = None
    kv: int | None = None
    kv_head: int | None = None
    token: int | None = None
    detail: Annotated[str, Meta(max_length=1024)] = ""


class BlockEventInfo(Struct, frozen=True, array_like=True):
    """One block came into a tier (``is_added``) or left it."""

    tier: TierName
    block_hash: Hash
    is_added: bool


class EventList(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """The events up to number ``sequence``, in order. ``has_gap``: some are forgotten; ``sequence`` is the latest."""

    n: CallNumber
    sequence: Annotated[int, Meta(ge=0)]
    has_gap: bool = False
    events: Annotated[tuple[BlockEventInfo, ...], Meta(max_length=MAX_EVENTS_LISTED)] = ()


class BlocksVerified(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """How many blocks were read, which of them are damaged, and how many could not be read or left meanwhile."""

    n: CallNumber
    num_checked: int
    damaged: Annotated[tuple[SlotRef, ...], Meta(max_length=MAX_BLOCKS_VERIFIED)]
    num_skipped: int
    next_slot: int | None
    num_content: int = 0
    """Of the checked blocks: those whose layout is known, so that their content was checked and not only digests."""
    violations: Annotated[tuple[BlockViolation, ...], Meta(max_length=MAX_VIOLATIONS)] = ()
    """What is wrong with the damaged ones, in the order of their slots."""


class GarbageCollected(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """What ``CollectGarbage`` found."""

    n: CallNumber
    expired_leases: int
    expired_write_blocks: int
    released_slots: int


class TierStat(Struct, frozen=True, kw_only=True):
    """One tier of a node. ``state``: ``on``, ``read_only`` or ``off``; ``why`` says why it is not on."""

    name: TierName
    blocks: int
    used_blocks: int
    bytes: int
    state: str = "on"
    why: str = ""
    quarantined_blocks: int = 0
    counters: dict[str, int] = {}


class StoreStat(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """``free + used + writing + quarantined == total`` slots; ``pinned`` of them are under a read lease."""

    n: CallNumber
    incarnation: str
    block_bytes: int
    free: int
    used: int
    writing: int
    quarantined: int
    total: int
    pinned: int
    leases: int
    clients: int
    counters: dict[str, int]
    tenants: dict[str, dict[str, int]] = {}
    """Tenant -> tier -> bytes used."""
    quotas: dict[str, int] = {}
    """Tenant -> bytes it may use over all tiers."""
    tiers: tuple[TierStat, ...] = ()
    """From the fastest to the slowest."""


ToNode = (
    UpdateWeights
    | BringUp
    | ListBlocks
    | VerifyBlocks
    | CollectGarbage
    | EventsAsk
    | LeasesAsk
    | Attach
    | Match
    | ReleaseLease
    | Touched
    | ReserveBlocks
    | CommitBlocks
    | AbortBlocks
    | ReportCorrupt
    | WritesEnded
    | StatAsk
    | FetchMissing
    | FetchBlocks
)
"""What a store node accepts."""

ToClient = (
    Superseded
    | BroughtUp
    | BlockList
    | EventList
    | BlocksVerified
    | GarbageCollected
    | WeightsUpdated
    | LeaseList
    | Attached
    | AttachRefused
    | Matched
    | BlocksReserved
    | BlocksCommitted
    | StoreStat
    | OthersKnown
    | MissingFetched
)
"""What a store client accepts."""

ToFetcher = Attached | AttachRefused | BlocksOffered | BlockPiece
"""What a store node accepts of another one."""
