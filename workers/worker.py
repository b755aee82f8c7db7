"""One worker process: engine, pool, links and the prefill and decode sides, put together.

Owns all of them and their order: model first, then transport and links, then requests. Runs without Ray; the actor
only forwards. Life cycle: ``Worker`` -> ``start`` -> serving -> ``close``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvstore.core.block_pool import BlockPool
from kvstore.core.eviction import make_policy
from kvstore.core.ids import BlockHash
from kvstore.core.messages import (
    BlocksLanded,
    BlocksPosted,
    CacheAsk,
    Cancel,
    Credit,
    Grammar,
    HandOff,
    HandOffDone,
    Prefill,
    PrefillAbandoned,
    Refused,
    Resend,
    Reserve,
    Status,
    StatusAsk,
)
from kvstore.errors import KopirError
from kvstore.net.handshake import PeerInfo
from kvstore.net.host import boottime_ns, host_identity
from kvstore.store.client import StoreClient
from kvstore.transport.base import Transport
from workers.cache_news import CacheNews
from workers.decode import DecodeSide
from workers.device_cache import DeviceCache
from workers.engine import Engine
from workers.engine_loop import AttemptKey, EngineLoop, ForwardEngine, NewToken
from workers.fatal import end_process
from workers.guide import GuideFactory
from workers.ingress_link import IngressLink
from workers.kv_link import KvDialer, KvIdentity, KvListener, KvPeer
from workers.kv_pool import KvPool
from workers.layout_proof import LayoutProof
from workers.loop_thread import LoopThread
from workers.model.config import ModelConfig, read_config
from workers.model.decoder import load_decoder
from workers.model.digests import model_digests
from workers.model.fingerprint import make_fingerprint
from workers.model.numerics import Numerics, probe
from workers.paced import PacedEngine, paced_numerics
from workers.prefill import PrefillSide
from workers.spec import DecodeAddress, IngressAddress, WorkerJoin, WorkerSpec

logger = logging.getLogger(__name__)

TICK_S = 0.1
LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})
CALL_DEADLINE_S = 10.0
PROBE_DEADLINE_S = 30.0


class Worker:
    """A prefill, decode or combined worker."""

    def __init__(
        self, spec: WorkerSpec, secret: bytes, *, on_fatal: Callable[[BaseException], None] = end_process
    ) -> None:
        """``on_fatal``: called from any thread, once, when this worker cannot go on."""
        self._spec = spec
        self._secret = secret
        self._on_fatal = on_fatal
        self._links = LoopThread("kopir-links")
        self._leases = LoopThread("kopir-leases")
        self._ingresses: dict[str, tuple[IngressLink, asyncio.Task[None]]] = {}
        self._stopped = threading.Event()
        self._closing = False
        self._me = PeerInfo(
            role=spec.role,
            peer_id=spec.worker_id,
            incarnation=spec.incarnation,
            pid=os.getpid(),
            host_identity=host_identity(spec.host_identity),
        )

    # --- called by the actor, from its threads --------------------------------------------------------------

    def start(self) -> WorkerJoin:
        """Loads the model and opens everything. Returns what the controller needs.

        Raises: EnvironmentProblem when memory or the transport is missing.
        """
        spec = self._spec
        folder = Path(spec.model_path)
        config = read_config(folder)
        layout = config.kv_layout(spec.block_tokens, spec.dtype)
        self._memory = KvPool(layout, spec.pool_blocks)
        self._pool = BlockPool(
            spec.pool_blocks,
            policy=make_policy(spec.eviction, spec.pool_blocks),
            keeps_cached=spec.device_cache,
        )
        # Pages of the pool are touched now, not by the first transfer into them.
        self._memory.tensor.zero_()
        engine, numerics = _make_engine(spec, config, self._memory)
        self._fingerprint = make_fingerprint(config, layout, digests=model_digests(folder), numerics=numerics)
        self._proof = LayoutProof(layout, self._secret)
        self._transport = _make_transport(spec)
        self._guides = GuideFactory(folder, config.vocab_size)
        self._engine = EngineLoop(
            engine,
            chunk_tokens=spec.chunk_tokens,
            clock_ns=boottime_ns,
            on_tokens=lambda tokens: self._links.call(self._on_tokens, tokens),
            on_decode_fault=lambda keys, error: self._links.call(self._on_engine_fault, keys, error),
            on_died=self._on_engine_died,
            guides=self._guides,
        )
        self._engine.start()
        kv_host, kv_port = self._links.run(self._open(), deadline_s=CALL_DEADLINE_S)
        return WorkerJoin(
            worker_id=spec.worker_id,
            role=spec.role,
            incarnation=spec.incarnation,
            pid=os.getpid(),
            node=spec.node,
            host_identity=self._me.host_identity,
            kv_host=kv_host,
            kv_port=kv_port,
            fingerprint=self._fingerprint.to_dict(),
            pool_blocks=spec.pool_blocks,
            vocab_size=config.vocab_size,
            max_model_len=spec.max_model_len,
        )

    def add_ingress(self, address: IngressAddress) -> None:
        """Dials an ingress and keeps the link up. Returns once it is connected, or after a deadline."""
        self._links.run(self._add_ingress(address), deadline_s=CALL_DEADLINE_S)

    def remove_ingress(self, incarnation: str) -> None:
        """Forgets an ingress that is proved gone; its attempts stop."""
        self._links.run(self._remove_ingress(incarnation), deadline_s=CALL_DEADLINE_S)

    def set_store(self, host: str, port: int) -> None:
        """Names the store node that lives now."""
        self._links.run(self._set_store(host, port), deadline_s=CALL_DEADLINE_S)

    def warm_decode_peer(self, address: DecodeAddress) -> None:
        """Opens the KV link to a decode worker. Raises: FingerprintMismatch, PeerLost, DeadlineExceeded."""
        self._links.run(self._dialer.link(address), deadline_s=CALL_DEADLINE_S)

    def peer_gone(self, incarnation: str) -> None:
        """Another worker or ingress is proved dead."""
        self._links.call(self._peer_gone, incarnation)

    def status(self) -> Status:
        """Returns what this worker does now, answered by its engine thread."""
        return self._links.run(self._status(0), deadline_s=PROBE_DEADLINE_S)

    def lease_lateness_ns(self) -> list[int]:
        """Returns how long after its due moment each of the last renewals was granted."""
        return [late_ns for link, _ in tuple(self._ingresses.values()) for late_ns in link.leases.lateness_ns()]

    def wait_until_stopped(self) -> str:
        """Blocks until ``close``."""
        self._stopped.wait()
        return "stopped"

    def close(self) -> None:
        """Ends every attempt with an honest fault, then links, engine and transport."""
        if self._closing:
            return
        self._closing = True
        self._links.run(self._close_links(), deadline_s=CALL_DEADLINE_S)
        self._engine.close()
        self._transport.close()
        self._links.close()
        self._leases.close()
        self._stopped.set()

    # --- on the link loop -----------------------------------------------------------------------------------

    async def _open(self) -> tuple[str, int]:
        spec = self._spec
        identity = KvIdentity(self._me, self._secret, self._fingerprint, self._transport, self._proof)
        self._dialer = KvDialer(identity, on_message=self._on_decode_message, on_lost=self._on_decode_lost)
        self._listener = KvListener(identity, on_message=self._on_prefill_message, on_lost=self._on_prefill_lost)
        is_sound = self._proof.is_sound if spec.verify == "full" else None
        self._store = StoreClient(
            me=self._me,
            secret=self._secret,
            block_bytes=self._memory.layout.block_bytes,
            fingerprint=self._fingerprint,
            is_sound=is_sound,
        )
        self._store.start(spec.store_host, spec.store_port)
        if spec.store_host is not None:
            await self._store.wait_connected(CALL_DEADLINE_S / 2)
        self._decode: DecodeSide | None = None
        self._prefill: PrefillSide | None = None
        self._device = DeviceCache(self._pool, self._memory, self._fingerprint.digest(), is_sound=is_sound)
        parts: dict[str, Any] = {
            "pool": self._pool,
            "memory": self._memory,
            "device": self._device,
            "store": self._store,
            "transport": self._transport,
            "engine": self._engine,
            "clock_ns": boottime_ns,
            "post": self._links.call,
        }
        if spec.role != "prefill":
            self._decode = DecodeSide(spec, **parts, proof=self._proof if spec.verify == "full" else None)
        if spec.role != "decode":
            self._prefill = PrefillSide(
                spec,
                **parts,
                dialer=self._dialer,
                local_decode=self._decode,
            )
        self._news = CacheNews(self._fingerprint.digest(), self._pool.cached_hashes)
        self._pool.on_cached(self._on_cached)
        kv_address = ("", 0)
        if self._decode is not None:
            kv_address = self._decode.kv_address = await self._listener.start(spec.bind_host)
        self._ticker = asyncio.create_task(self._tick())
        return kv_address

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._news.tell()
            if self._decode is not None:
                self._decode.on_tick()
            if self._prefill is not None:
                self._prefill.on_tick()

    async def _add_ingress(self, address: IngressAddress) -> None:
        if address.incarnation in self._ingresses:
            return
        link = IngressLink(
            address,
            me=self._me,
            secret=self._secret,
            lease_ms=self._spec.lease_ms,
            clock_ns=boottime_ns,
            lease_thread=self._leases,
            post=self._links.call,
            on_message=self._on_ingress_message,
            on_granted=self._on_granted,
            on_reconnected=self._on_reconnected,
            on_lease_expired=self._on_lease_expired,
        )
        self._news.begin(link)
        self._ingresses[address.incarnation] = (link, asyncio.create_task(link.run()))
        try:
            async with asyncio.timeout(CALL_DEADLINE_S / 2):
                await link.connected.wait()
        except TimeoutError:
            logger.warning("ingress_unreachable ingress=%s", address.ingress_id)
        self._news.tell()

    async def _remove_ingress(self, incarnation: str) -> None:
        link, task = self._ingresses.pop(incarnation, (None, None))
        if link is None or task is None:
            return
        task.cancel()
        self._news.end(link)
        for side in (self._decode, self._prefill):
            if side is not None:
                side.link_removed(link)

    async def _set_store(self, host: str, port: int) -> None:
        self._store.set_address(host, port)

    async def _close_links(self) -> None:
        self._ticker.cancel()
        if self._decode is not None:
            self._decode.close()
        if self._prefill is not None:
            await self._prefill.close()
        for _, task in self._ingresses.values():
            task.cancel()
        await self._dialer.close()
        await self._listener.close()
        await self._store.close()

    def _on_ingress_message(self, link: IngressLink, message: Any) -> None:
        if isinstance(message, Reserve | Prefill) and message.spec.grammar is not None:
            # Compiled on a thread while the prompt is on its way; a failure shows when the first token is chosen.
            asyncio.get_running_loop().run_in_executor(None, _prepare, self._guides, message.spec.grammar)
        match message:
            case Reserve() if self._decode is not None:
                self._decode.on_reserve(link, message)
            case Prefill() if self._prefill is not None:
                self._prefill.on_prefill(link, message)
            case Reserve() | Prefill():
                link.send(
                    Refused(
                        attempt_id=message.attempt_id,
                        epoch=message.epoch,
                        code="no_capacity",
                        message=f"a {self._spec.role} worker cannot do this",
                    )
                )
            case Cancel():
                self._on_cancel(link, message)
            case Credit() if self._decode is not None:
                self._decode.on_credit(message)
            case Resend() if self._decode is not None:
                self._decode.on_resend(link, message)
            case StatusAsk():
                self._answer_status(link, message.nonce)
            case CacheAsk():
                self._news.begin(link)
            case _:
                logger.warning("message_ignored type=%s", type(message).__name__)

    def _on_cancel(self, link: IngressLink, cancel: Cancel) -> None:
        # In a combined worker the prefill job ends first: it computes in the decode attempt's blocks.
        if self._prefill is not None and self._prefill.has(cancel):
            self._prefill.on_cancel(link, cancel, then=self._decode.on_cancel if self._decode is not None else None)
        elif self._decode is not None:
            self._decode.on_cancel(link, cancel)
        else:
            assert self._prefill is not None
            self._prefill.on_cancel(link, cancel)

    def _on_granted(self, link: IngressLink) -> None:
        if self._decode is not None:
            self._decode.on_lease_granted(link)

    def _on_reconnected(self, link: IngressLink) -> None:
        # The new connection is not marked as up yet: the next tick sends the snapshot.
        self._news.begin(link)
        if self._decode is not None:
            self._decode.on_reconnected(link)

    def _on_lease_expired(self, _link: IngressLink, keys: list[AttemptKey]) -> None:
        for side in (self._prefill, self._decode):
            if side is not None:
                side.on_lease_expired(keys)

    def _on_prefill_message(self, peer: KvPeer, message: Any) -> None:
        assert self._decode is not None
        match message:
            case BlocksPosted():
                self._decode.on_blocks_posted(peer, message)
            case HandOff():
                self._decode.on_hand_off(peer, message)
            case PrefillAbandoned():
                self._decode.on_prefill_abandoned(message)
            case _:
                logger.warning("message_ignored type=%s", type(message).__name__)

    def _on_prefill_lost(self, peer: KvPeer) -> None:
        if self._decode is not None:
            self._decode.on_peer_lost(peer)

    def _on_decode_message(self, _peer: KvPeer, message: Any) -> None:
        assert self._prefill is not None
        match message:
            case BlocksLanded():
                self._prefill.on_blocks_landed(message)
            case HandOffDone():
                self._prefill.on_hand_off_done(message)
            case _:
                logger.warning("message_ignored type=%s", type(message).__name__)

    def _on_decode_lost(self, peer: KvPeer) -> None:
        if self._prefill is not None:
            self._prefill.on_peer_lost(peer)

    def _on_tokens(self, tokens: list[NewToken]) -> None:
        assert self._decode is not None
        self._decode.on_tokens(tokens)

    def _on_engine_fault(self, keys: list[AttemptKey], error: Exception) -> None:
        assert self._decode is not None
        self._decode.on_engine_fault(keys, error)

    def _on_engine_died(self, error: Exception) -> None:
        # A step that outlives ``close`` finds its loop closed.
        if not self._closing:
            self._on_fatal(error)

    def _peer_gone(self, incarnation: str) -> None:
        # Its transfers end first: only then is the memory that they named nobody's but ours.
        ended = self._transport.peer_lost(incarnation, proved_dead=True)
        ended.add_done_callback(lambda _: self._links.call(self._tell_sides_gone, incarnation))

    def _on_cached(self, block_hash: BlockHash, is_here: bool) -> None:
        (self._news.added if is_here else self._news.removed)(block_hash)

    def _tell_sides_gone(self, incarnation: str) -> None:
        for side in (self._prefill, self._decode):
            if side is not None:
                side.peer_gone(incarnation)

    # --- status -----------------------------------------------------------------------------------------------

    def _answer_status(self, link: IngressLink, nonce: int) -> None:
        def answer(running: int, waiting: int) -> None:
            self._links.call(lambda: link.send(self._make_status(nonce, running, waiting)))

        self._engine.probe(answer)

    async def _status(self, nonce: int) -> Status:
        probed: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()
        self._engine.probe(lambda running, waiting: self._links.call(probed.set_result, (running, waiting)))
        running, waiting = await probed
        return self._make_status(nonce, running, waiting)

    def _make_status(self, nonce: int, running: int, waiting: int) -> Status:
        counts = self._pool.counts()
        counters: dict[str, int] = {
            **self._transport.stats(),
            **self._device.counters,
            **self._proof.counters,
            "rejected_connections": self._listener.rejected,
        }
        for side in (self._prefill, self._decode):
            if side is not None:
                running_there, waiting_there = side.load()
                running, waiting = max(running, running_there), max(waiting, waiting_there)
                counters |= side.counters | side.fenced()
        return Status(
            nonce=nonce,
            worker_id=self._spec.worker_id,
            role=self._spec.role,
            pid=os.getpid(),
            node=self._spec.node,
            incarnation=self._spec.incarnation,
            state="ready",
            pool_blocks=self._spec.pool_blocks,
            used_blocks=counts.reserved + counts.owned,
            quarantined_blocks=counts.quarantined,
            cached_blocks=counts.cached,
            running=running,
            waiting=waiting,
            leases=sum(link.num_leases for link, _ in self._ingresses.values()),
            counters=counters,
        )


def _prepare(guides: GuideFactory, grammar: Grammar) -> None:
    try:
        guides.prepare(grammar)
    except KopirError as error:
        logger.warning("grammar_unusable error=%s", error)


def _make_engine(spec: WorkerSpec, config: ModelConfig, memory: KvPool) -> tuple[ForwardEngine, Numerics]:
    """Loads the model and warms it up, or makes an engine that only keeps time."""
    if spec.engine == "paced":
        paced = PacedEngine(
            memory,
            vocab_size=config.vocab_size,
            max_positions=spec.max_model_len,
            step_ms=spec.step_ms,
            prefill_ms_per_token=spec.prefill_ms_per_token,
        )
        return paced, paced_numerics()
    model = load_decoder(Path(spec.model_path), dtype=spec.dtype, max_positions=spec.max_model_len)
    engine = Engine(model, memory, threads=spec.threads)
    engine.warm_up()
    return engine, probe(model, block_tokens=spec.block_tokens, dtype=spec.dtype, threads=spec.threads)


def _make_transport(spec: WorkerSpec) -> Transport:
    """Opens UCX. A worker that is bound to loopback has peers on this host only and opens no network socket."""
    from kvstore.transport.ucx import UcxTransport

    return UcxTransport(has_network=spec.bind_host not in LOOPBACK_HOSTS)
