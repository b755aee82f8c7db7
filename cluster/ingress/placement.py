"""Where the next attempt of a request runs: everything that the router must know, gathered, and its answer.

Owns the router of this ingress, what workers have announced, the connection to the directory and what is known of
each prompt. Decisions are ``cluster.core.prefix_router``'s; this asks, hashes and counts. A prompt is hashed and looked
up only where there is something to choose between.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.core.prefix_router import Decision, PrefixRouter, Prompt, held_by_tier, prefix_hint
from cluster.core.routing import Candidate, NoPair, elsewhere
from cluster.ingress.fleet import Fleet
from cluster.ingress.host_tiers import HostTiers
from cluster.ingress.relay import WorkerLink
from cluster.ingress.worker_caches import WorkerCaches
from cluster.view import DirectoryAddress
from kvstore.core.identity import prefix_hashes
from kvstore.core.ids import BlockHash
from kvstore.core.messages import CacheChanged, CacheSnapshot, GenerationSpec, PrefillDone
from kvstore.net.handshake import PeerInfo

MAX_BLOCKS_HASHED = 4096
"""Of a longer prompt only so many blocks are looked for: hashing it all would hold the loop up."""
WEIGHED_IN_JOURNAL_MAX = 8


@dataclass(frozen=True, slots=True)
class Placed:
    """What is known of one prompt, for all attempts of its request."""

    hashes: tuple[BlockHash, ...]
    host_prefixes: Mapping[str, int]
    """Store node -> blocks in its host slab, as of the first attempt."""
    hints: tuple[str, ...]


class Placement:
    """Chooses pairs for one ingress. Lives on its event loop."""

    def __init__(
        self, *, me: PeerInfo, secret: bytes, fleet: Fleet, block_tokens: int, clock_ns: Callable[[], int]
    ) -> None:
        self._fleet = fleet
        self._block_tokens = block_tokens
        self._clock_ns = clock_ns
        self._caches = WorkerCaches()
        self._host_tiers = HostTiers(me=me, secret=secret)
        self.router = PrefixRouter()

    # --- what others say --------------------------------------------------------------------------------------

    def set_directory(self, address: DirectoryAddress | None) -> None:
        """Names the directory that lives now."""
        self._host_tiers.set_address(address)

    def on_news(self, link: WorkerLink, news: CacheSnapshot | CacheChanged) -> None:
        """A worker has told which blocks its pool has."""
        self._caches.on_news(link, news)

    def on_prefill_done(self, incarnation: str, message: PrefillDone, num_prompt_tokens: int) -> None:
        """A prompt is computed and handed over. Modifies: rates and the worker's queue."""
        rates, num_cached = self.router.rates, message.cached_tokens
        rates.saw_prefill(incarnation, num_tokens=num_prompt_tokens - num_cached, duration_ns=message.compute_ns)
        self.prefill_ended(message.attempt_id, incarnation)

    def prefill_ended(self, attempt_id: str, incarnation: str) -> None:
        """The prefill side has nothing to do for an attempt any more. May be told more than once."""
        self.router.ended(attempt_id, incarnation, now_ns=self._clock_ns())

    def worker_gone(self, incarnation: str) -> None:
        """A life is proved over."""
        self.router.gone(incarnation)
        self._caches.gone(incarnation)

    def sweep(self) -> None:
        """Forgets some of what lives that are gone had announced."""
        self._caches.sweep()

    async def close(self) -> None:
        """Ends the connection to the directory."""
        await self._host_tiers.close()

    # --- the choice -------------------------------------------------------------------------------------------

    async def look_up(self, spec: GenerationSpec, *, tenant: str, cache_key: str | None) -> Placed:
        """Returns what is known of a prompt. Asks the directory, with a deadline, where there is a choice at all."""
        hints = () if cache_key is None else (f"key:{tenant}:{cache_key}",)
        fingerprint = self._caches.fingerprint
        if fingerprint is None or self._num_sources() < 2:
            return Placed((), {}, hints)
        head = spec.prompt_token_ids[: MAX_BLOCKS_HASHED * self._block_tokens]
        hashes = tuple(prefix_hashes(fingerprint, spec.tenant_salt, head, self._block_tokens))
        if hashes:
            hints = (*hints, prefix_hint(hashes))
        return Placed(hashes, await self._host_tiers.prefixes(hashes), hints)

    def choose(
        self,
        spec: GenerationSpec,
        placed: Placed,
        *,
        loads: Mapping[str, int],
        avoid: Collection[str],
        silent_nodes: Collection[str] = (),
    ) -> Decision | NoPair:
        """Returns the pair for the next attempt, with the numbers behind it.

        Args:
            loads: attempts of this ingress by life.
            avoid: lives that this request has failed on.
            silent_nodes: hosts that it lost a side on by silence.
        """
        num_prompt = len(spec.prompt_token_ids)
        candidates = [
            Candidate(ref, role, loads.get(ref.incarnation, 0), pool_blocks)
            for ref, role, pool_blocks in self._fleet.usable()
        ]
        candidates = elsewhere(candidates, silent_nodes)
        prompt = Prompt(
            num_tokens=num_prompt,
            block_tokens=self._block_tokens,
            total_blocks=-(-(num_prompt + spec.max_tokens - 1) // self._block_tokens),
            held=self._held(candidates, placed),
            hints=placed.hints,
        )
        return self.router.choose(candidates, prompt, now_ns=self._clock_ns(), avoid=avoid)

    def started(self, attempt_id: str, decision: Decision, placed: Placed) -> None:
        """The attempt begins on the pair that was chosen."""
        self.router.started(attempt_id, decision, hints=placed.hints, now_ns=self._clock_ns())

    def _held(self, candidates: Iterable[Candidate], placed: Placed) -> dict[str, dict[str, int]]:
        in_pools = self._caches.prefixes(placed.hashes)
        held = {}
        for candidate in candidates:
            life = candidate.ref.incarnation
            # A decode side is given blocks by prefill alone: what the slab of its node has does not help it.
            host = placed.host_prefixes.get(candidate.ref.node, 0) if candidate.role != "decode" else 0
            tiers = held_by_tier(device=in_pools.get(life, 0), host=host)
            if tiers:
                held[life] = tiers
        return held

    def _num_sources(self) -> int:
        return sum(role != "decode" for _, role, _ in self._fleet.usable())


def for_journal(decision: Decision) -> dict[str, Any]:
    """Returns a decision with its numbers as JSON-ready data."""
    return {
        "prefill": decision.pair.prefill.worker_id,
        "decode": decision.pair.decode.worker_id,
        "why": decision.why,
        "weighed": [estimate.to_dict() for estimate in decision.weighed[:WEIGHED_IN_JOURNAL_MAX]],
    }
