"""One prompt at a prefill worker: what it holds and how far it is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvstore.core.block_pool import CachedBlock
from kvstore.core.ids import BlockDigest, BlockHash
from kvstore.core.messages import HandOffDone, Prefill, TokenLogprobs
from kvstore.errors import KopirError
from kvstore.transport.base import TransferResult
from workers.engine_loop import AttemptKey
from workers.ingress_link import IngressLink
from workers.kv_link import KvPeer


class PrefillFailed(KopirError):
    """A job cannot go on; the message goes to the ingress."""


class ComputeFailed(PrefillFailed):
    """The engine failed under a job; no peer has part in it."""


class LinkFailed(PrefillFailed):
    """The way to the decode worker could not be opened; either end may be the one that ails."""


@dataclass(slots=True)
class Job:
    """One prefill under way."""

    request: Prefill
    link: IngressLink
    accepted_ns: int
    block_table: Sequence[int] = ()
    holds_blocks: bool = False
    is_borrowing: bool = False
    """It computes in blocks of this worker's own decode side."""
    peer: KvPeer | None = None
    hashes: list[BlockHash] = field(default_factory=list)
    digests: list[BlockDigest] = field(default_factory=list)
    """Digests of blocks [0, n) in order; a block has one once it will not change any more."""
    shared: tuple[CachedBlock, ...] = ()
    """The first blocks of the prompt, which were in the pool already."""
    num_cached_blocks: int = 0
    cached_tokens: int = 0
    num_final: int = 0
    """Blocks [0, num_final) will not change any more; they have a digest and, with a peer, were pushed."""
    pushes: list[tuple[Future[list[TransferResult]], range]] = field(default_factory=list)
    computed: asyncio.Future[tuple[int, TokenLogprobs | None]] | None = None
    handed_off: asyncio.Future[HandOffDone] | None = None
    started_ns: int = 0
    engine_started_ns: int = 0
    done_ns: int = 0
    task: asyncio.Task[None] | None = None
    in_engine: bool = False
    cancelled: bool = False

    @property
    def key(self) -> AttemptKey:
        return self.request.attempt_id, self.request.epoch

    @property
    def num_full(self) -> int:
        """Blocks that are final and full, so that others may use them."""
        return min(len(self.digests), len(self.hashes))

    @property
    def num_held_blocks(self) -> int:
        """Blocks that decode has already; they are not pushed."""
        return self.request.ticket.num_held_blocks

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.spec.prompt_token_ids)
