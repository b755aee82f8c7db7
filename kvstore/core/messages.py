"""Typed messages of the links between ingress, prefill worker and decode worker.

Owns the wire vocabulary. Each message is a MessagePack map with the type name under ``t``; framing and
authentication belong to ``kvstore.net``. A message never carries a lease with a dispatch: leases exist only
as the answer to an ask (``LeaseAsk`` -> ``LeaseGrant``). Unknown fields are refused.

Directions:

    ingress -> worker   Reserve, Prefill, Cancel, LeaseGrant, Credit, Resend, StatusAsk, CacheAsk
    worker  -> ingress  Reserved, Refused, PrefillStarted, PrefillDone, AttemptFault, CancelAck, Frame, LeaseAsk,
                        Status, CacheSnapshot, CacheChanged
    prefill -> decode   KvHello, BlocksPosted, HandOff, PrefillAbandoned
    decode  -> prefill  KvHelloReply, BlocksLanded, HandOffDone
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from kvstore.core.announcer import MAX_HASHES_PER_PART
from kvstore.core.ids import BLOCK_HASH_BYTES

WIRE_VERSION = 1

MAX_PROMPT_TOKENS = 1 << 20
MAX_BLOCKS_PER_MESSAGE = 1 << 16
MAX_STREAMS_PER_FRAME = 4096
MAX_GRAMMAR_CHARS = 1 << 18

TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Digest = Annotated[bytes, Meta(min_length=16, max_length=16)]
ShortText = Annotated[str, Meta(max_length=512)]
Hash = Annotated[bytes, Meta(min_length=BLOCK_HASH_BYTES, max_length=BLOCK_HASH_BYTES)]
Hashes = Annotated[tuple[Hash, ...], Meta(max_length=MAX_HASHES_PER_PART)]

FaultReason = Literal[
    "worker_exited",
    "network_cut",
    "lease_expired",
    "engine_fault",
    "deadline",
    "shutdown",
    "transfer_failed",
    "client_stalled",
]
RefusalCode = Literal["no_capacity", "draining", "never_fits", "fingerprint", "duplicate", "peer_unreachable"]
LandedResult = Literal["OK", "CORRUPT", "EXPIRED", "TIMEOUT", "PEER_LOST"]


class SamplingParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the next token is chosen. ``temperature`` 0 is greedy; state of a sampler = (seed, position)."""

    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] = 0.0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=0)] = 0
    """0 keeps every token."""
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] = 1.0
    """Above 1 makes tokens of prompt and answer less likely: a positive logit is divided by it, others multiplied."""
    logit_bias: dict[int, float] = {}
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    num_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    """None: no logprobs. 0: the chosen token's only. n: also the n best."""


class Grammar(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an answer may look like, in the text form of the grammar library (Lark, or JSON around a JSON schema)."""

    text: Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_CHARS)]
    eos_token_id: TokenId
    """The token that ends an answer; it is let through only where the grammar is fulfilled."""


class GenerationSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a worker needs to run one request; identical for every attempt of that request."""

    prompt_token_ids: Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=MAX_PROMPT_TOKENS)]
    max_tokens: Annotated[int, Meta(ge=1)]
    stop_token_ids: tuple[TokenId, ...] = ()
    """End-of-sequence ids included. The stop token itself is counted but never part of the text."""
    sampling: SamplingParams = SamplingParams()
    grammar: Grammar | None = None
    tenant_salt: bytes = b""


class TokenLogprobs(Struct, frozen=True, kw_only=True, array_like=True):
    """Natural-log probabilities of one generated token: the chosen one, then ``(token_id, logprob)`` best first."""

    logprob: float
    top: tuple[tuple[TokenId, float], ...] = ()


class DestinationBlock(Struct, frozen=True, array_like=True):
    """One reserved block of the decode pool: where it is, which life of the slot, and its never reused tag."""

    slot: Annotated[int, Meta(ge=0)]
    generation: Annotated[int, Meta(ge=0)]
    tag: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class Ticket(Struct, frozen=True, kw_only=True):
    """A decode worker's promise to take the KV blocks of one attempt, valid for one incarnation of that worker.

    The worker holds the first ``num_held_blocks`` blocks of the prompt already, and keeps them for this attempt: only
    the others travel. ``blocks`` are the destinations of those, in order.
    """

    attempt_id: str
    epoch: int
    worker_id: str
    incarnation: str
    kv_host: str
    kv_port: int
    blocks: Annotated[tuple[DestinationBlock, ...], Meta(max_length=MAX_BLOCKS_PER_MESSAGE)]
    num_held_blocks: Annotated[int, Meta(ge=0, le=MAX_BLOCKS_PER_MESSAGE)] = 0
    held_hash: bytes = b""
    """Hash of the last held block, which names all before it; empty when none is held."""


# --- ingress -> worker --------------------------------------------------------------------------------------


class Reserve(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """Asks a decode worker to reserve blocks for an attempt and to expect its hand-off."""

    request_id: str
    attempt_id: str
    epoch: int
    spec: GenerationSpec
    reservation_ms: int


class Prefill(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """Asks a prefill worker to compute the prompt's KV, push it under ``ticket`` and sample the first token."""

    request_id: str
    attempt_id: str
    epoch: int
    spec: GenerationSpec
    ticket: Ticket


class Cancel(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """Stops an attempt. It counts as alive until ``CancelAck`` arrives or its lease has run out."""

    attempt_id: str
    epoch: int
    reason: ShortText


class LeaseGrant(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """Answer to a ``LeaseAsk``; an attempt that is not listed is revoked."""

    nonce: int
    duration_ms: int
    granted: tuple[tuple[str, int], ...]
    """(attempt_id, epoch) pairs."""


class LeaseReady(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """The ingress's lease thread has taken the connection over: asks may be sent on it from now on."""


class Credit(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """The worker may publish token indexes below ``max_index`` for this stream."""

    attempt_id: str
    epoch: int
    max_index: int


class Resend(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """A lost link is back: publish again what was published from ``next_index`` on; frames may have died with it."""

    attempt_id: str
    epoch: int
    next_index: int


class StatusAsk(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """Asks for a ``Status``; also the probe behind ``/readyz``."""

    nonce: int


class CacheAsk(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """Changes of the worker's cached blocks were missed: asks for a snapshot."""


# --- worker -> ingress --------------------------------------------------------------------------------------


class Reserved(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """The decode worker holds the ticket's blocks until hand-off, cancel or the end of the reservation."""

    attempt_id: str
    epoch: int
    ticket: Ticket


class Refused(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """A worker will not start this attempt; nothing was reserved."""

    attempt_id: str
    epoch: int
    code: RefusalCode
    message: ShortText


class PrefillStarted(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """The prefill left its queue; ``cached_tokens`` were loaded from the store, by tier."""

    attempt_id: str
    epoch: int
    queued_ns: int
    cached_tokens: int
    cached_by_tier: dict[str, int] = {}


class PrefillDone(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """The prompt is computed, handed over and acknowledged by decode. Durations come from the worker's own clock."""

    attempt_id: str
    epoch: int
    cached_tokens: int
    lookup_ns: int
    engine_queue_ns: int
    compute_ns: int
    hand_off_ns: int
    """From the end of prefill compute until decode acknowledged every block."""
    pushed_bytes: int
    held_blocks: int = 0
    """Blocks of the prompt that decode had already: they did not travel."""


class AttemptFault(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """The attempt ended on this worker by a fault; it will publish nothing more."""

    attempt_id: str
    epoch: int
    reason: FaultReason
    message: ShortText


class CancelAck(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """The attempt publishes and hands over nothing more; ``num_generated`` tokens had been computed.

    At a decode worker its blocks are free or quarantined; those of a prefill follow when its step has ended.
    """

    attempt_id: str
    epoch: int
    num_generated: int


class StreamDelta(Struct, frozen=True, kw_only=True):
    """New tokens of one stream. ``first_index`` continues exactly what the ingress has; a gap is a fault."""

    request_id: str
    attempt_id: str
    epoch: int
    first_index: int
    token_ids: tuple[TokenId, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    end: Literal["stop", "length"] | None = None
    """``stop``: the last token is a stop token. ``length``: ``max_tokens`` or the context is full."""


class Frame(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """All new tokens of one decode step for one ingress."""

    v: int
    worker_id: str
    incarnation: str
    seq: int
    streams: Annotated[tuple[StreamDelta, ...], Meta(max_length=MAX_STREAMS_PER_FRAME)]


class LeaseAsk(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """A holder asks to go on publishing for these attempts; the nonce is never reused in an incarnation."""

    nonce: int
    attempts: tuple[tuple[str, int], ...]
    """(attempt_id, epoch) pairs."""


class Status(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """What a worker is doing, answered by its engine loop and not by its socket thread alone."""

    nonce: int
    worker_id: str
    role: Literal["prefill", "decode", "combined"]
    pid: int
    node: str
    incarnation: str
    state: Literal["starting", "joining", "ready", "draining", "refused", "lost"]
    pool_blocks: int
    used_blocks: int
    quarantined_blocks: int
    running: int
    waiting: int
    leases: int = 0
    cached_blocks: int = 0
    """Complete blocks that nobody holds: as good as free, and kept for the next hit until then."""
    counters: dict[str, int] = {}


class CacheSnapshot(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """Part of the blocks that a worker's own pool could serve after announcement ``sequence``; part 0 replaces all."""

    sequence: Annotated[int, Meta(ge=0)]
    part: Annotated[int, Meta(ge=0)]
    is_last: bool
    fingerprint: Annotated[bytes, Meta(min_length=32, max_length=32)]
    """Digest of the fingerprint, which the names of its blocks are made with."""
    hashes: Hashes


class CacheChanged(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """What came into a worker's own pool and what left it since announcement ``sequence - 1``."""

    sequence: Annotated[int, Meta(ge=1)]
    added: Hashes
    removed: Hashes


# --- prefill <-> decode -------------------------------------------------------------------------------------


class KvHello(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """First message of a KV link: who pushes, with which transport address and which fingerprint."""

    worker_id: str
    incarnation: str
    pid: int
    host_identity: str
    transport: str
    address: bytes
    fingerprint: dict[str, str]


class KvHelloReply(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """Accepts the link, or refuses it naming each fingerprint field that differs."""

    accepted: bool
    worker_id: str
    incarnation: str
    pid: int
    host_identity: str
    address: bytes
    differing_fields: tuple[str, ...] = ()
    challenge: bytes = b""
    probe_tag: int = 0


class KvProbeResult(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """Verdict of the decode side on the probe block that it challenged its peer to push under ``probe_tag``."""

    accepted: bool
    violations: tuple[str, ...] = ()


class PostedBlock(Struct, frozen=True, array_like=True):
    """One block under way: its index in the ticket, the tag it was sent with, its digest, its valid tokens."""

    index: Annotated[int, Meta(ge=0)]
    tag: int
    digest: Digest
    num_tokens: Annotated[int, Meta(ge=1)]


class BlocksPosted(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """These blocks were just posted to the transport; the digests travel here, beside and not with the bytes."""

    attempt_id: str
    epoch: int
    blocks: Annotated[tuple[PostedBlock, ...], Meta(max_length=MAX_BLOCKS_PER_MESSAGE)]


class BlocksLanded(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """Result per block: index and one of OK, CORRUPT, EXPIRED, TIMEOUT, PEER_LOST."""

    attempt_id: str
    epoch: int
    results: tuple[tuple[int, LandedResult], ...]


class HandOff(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """Prefill is complete: all blocks were posted before this, and this is the first generated token (index 0)."""

    attempt_id: str
    epoch: int
    first_token_id: TokenId
    logprobs: TokenLogprobs | None = None
    cached_tokens: int = 0


class HandOffDone(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """Decode owns the attempt now; prefill may let its blocks go."""

    attempt_id: str
    epoch: int
    accepted: bool
    message: ShortText = ""


class PrefillAbandoned(Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """Prefill gives the attempt up; sends that were posted may still complete, so decode quarantines their slots."""

    attempt_id: str
    epoch: int
    reason: ShortText


ToWorker = Reserve | Prefill | Cancel | LeaseGrant | Credit | Resend | StatusAsk | CacheAsk
ToIngress = (
    Reserved
    | Refused
    | PrefillStarted
    | PrefillDone
    | AttemptFault
    | CancelAck
    | Frame
    | LeaseAsk
    | Status
    | CacheSnapshot
    | CacheChanged
)
ToDecode = KvHello | BlocksPosted | HandOff | PrefillAbandoned
ToPrefill = KvHelloReply | KvProbeResult | BlocksLanded | HandOffDone


def encode(message: Struct) -> bytes:
    """Returns the MessagePack bytes of one message."""
    return msgspec.msgpack.encode(message)
