"""One attempt that holds blocks at a decode worker, from its reservation to its last token."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvstore.core.block_pool import CachedBlock
from kvstore.core.ids import BlockHash
from kvstore.core.messages import Reserve, StreamDelta
from workers.core.hand_off import HandOffTracker
from workers.engine_loop import AttemptKey, NewToken
from workers.ingress_link import IngressLink
from workers.kv_link import KvPeer

RING_TOKENS_MAX = 1024
"""Published tokens of one stream that can be sent once more after its link broke."""


@dataclass(slots=True)
class DecodeAttempt:
    """One attempt that holds blocks here."""

    request: Reserve
    link: IngressLink
    slots: tuple[int, ...]
    """Block table: the prompt's blocks, then those of generated tokens. Empty while the stream is preempted."""
    tracker: HandOffTracker
    arrival: int = 0
    """Its place in the order of arrival: a smaller number is older."""
    max_index: int = 0
    """Credit: token indexes below it may be computed."""
    output_token_ids: list[int] = field(default_factory=list)
    """What a preempted stream had generated; the engine's own while it runs."""
    peer: KvPeer | None = None
    decoding: bool = False
    num_generated: int = 0
    generated: list[int] = field(default_factory=list)
    """Every token so far, as it came from prefill or the engine."""
    hashes: list[BlockHash] = field(default_factory=list)
    """Of the full blocks of the prompt."""
    held: tuple[CachedBlock, ...] = ()
    """The first blocks of the prompt, which were here before and do not travel."""
    is_sound: bool = True
    """The engine has not failed under it."""
    is_whole: bool = False
    """It has left the engine, and its blocks hold all tokens but the last."""
    ended: bool = False
    pending: list[StreamDelta] = field(default_factory=list)
    """Tokens that wait for the first grant of a lease."""
    sent: deque[StreamDelta] = field(default_factory=lambda: deque(maxlen=RING_TOKENS_MAX))
    """The newest tokens that were due, one each, oldest first."""
    awaits_resend: bool = False
    """Its link broke: tokens are kept in ``sent`` until the ingress says which ones it lacks."""

    @property
    def key(self) -> AttemptKey:
        return self.request.attempt_id, self.request.epoch

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.spec.prompt_token_ids)

    def delta(self, token: NewToken) -> StreamDelta:
        """Returns one token of this attempt as it travels to the ingress."""
        return StreamDelta(
            request_id=self.request.request_id,
            attempt_id=self.key[0],
            epoch=self.key[1],
            first_index=token.index,
            token_ids=(token.token_id,),
            logprobs=(token.logprobs,) if token.logprobs is not None else None,
            end=token.end,
        )
