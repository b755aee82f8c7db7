"""A whole cluster in one process, without Ray: real store, workers, transport, relay and driver on a tiny model."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import LlamaConfig, LlamaForCausalLM

from cluster.config import load
from cluster.ingress.api.backend import Ended, Generation, Interrupted, Restarted, TokenBatch
from cluster.ingress.backend import RelayBackend
from cluster.view import ClusterView, WorkerView
from kernels.layout import DType
from kvstore.core.messages import GenerationSpec, SamplingParams
from kvstore.net.handshake import PeerInfo
from kvstore.net.host import boottime_ns, host_identity, new_incarnation
from kvstore.store.host import DiskPlan, StoreHost
from workers.engine import Engine
from workers.guide import GuideFactory
from workers.kv_pool import KvPool
from workers.model.decoder import load_decoder
from workers.sampling import sample
from workers.spec import DecodeAddress, IngressAddress, WorkerJoin, WorkerSpec
from workers.worker import Worker

SECRET = b"a secret of thirty-two bytes!!!!"
BLOCK_TOKENS = 16
MAX_LEN = 512
VOCAB = 160
LEASE_MS = 2000
SETTLE_S = 20.0
FIXED = (f"max_model_len={MAX_LEN}", f"attempts.lease_ms={LEASE_MS}")


def write_tiny_model(folder: Path) -> Path:
    """Writes a random Llama of three layers, fp32, as any checkpoint is written; returns its folder."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=MAX_LEN,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    model.save_pretrained(folder)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def tiny_tokenizer() -> Tokenizer:
    """One token for each printable ASCII character and the newline, from id 3 on; 0 to 2 are control tokens."""
    chars = ["▁" if char == " " else char for char in map(chr, range(32, 127))]
    vocab = {token: number for number, token in enumerate(["<unk>", "<s>", "</s>", *chars, "<0x0A>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


class MiniCluster:
    """Everything of a serve but Ray and HTTP. Workers are named ``prefill-0``, ``decode-0``, ``combined-0`` ..."""

    def __init__(self, model: Path, *, dtype: DType = "float32", **settings: Any) -> None:
        overrides = [f"{key}={value}" for key, value in settings.items()]
        self.config = load(None, [*FIXED, f"dtype={dtype}", *overrides])
        self.model = model
        self.dtype = dtype
        decoder = load_decoder(model, dtype=dtype, max_positions=MAX_LEN)
        self.vocab_size = decoder.config.vocab_size
        self.layout = decoder.config.kv_layout(BLOCK_TOKENS, dtype)
        self.engine = Engine(decoder, KvPool(self.layout, MAX_LEN // BLOCK_TOKENS), threads=1)
        self.workers: dict[str, tuple[Worker, WorkerJoin]] = {}
        self.store: StoreHost | None = None
        self.host_blocks = 256
        self.disk: DiskPlan | None = None
        self.relay_through: Callable[[str, int], Awaitable[tuple[str, int]]] | None = None
        """Given the address of the relay, returns the one that workers are told. All three are read by ``start``."""
        self._store_address: tuple[str, int] = ("", 0)
        incarnation = new_incarnation()
        self._me = PeerInfo(
            role="ingress", peer_id="ingress-0", incarnation=incarnation, pid=os.getpid(), host_identity=host_identity()
        )
        self.registry = CollectorRegistry()
        self.backend = RelayBackend(
            self.config,
            me=self._me,
            secret=SECRET,
            model_id="tiny",
            created=0,
            vocab_size=self.vocab_size,
            system_fingerprint="test",
            model_revision="tiny@1",
            registry=self.registry,
            clock_ns=boottime_ns,
        )
        self._version = 0
        self._num_started: Counter[str] = Counter()
        self.gone: list[str] = []
        self.fatal: list[BaseException] = []
        """Why workers could not go on; in a cluster of processes each of these ends one."""

    async def start(self, *roles: str, **spec: Any) -> None:
        """Starts the store, one worker per role named, and the relay; returns when a request can be served."""
        self.store = StoreHost(
            node="node-0",
            incarnation=new_incarnation(),
            secret=SECRET,
            block_bytes=self.layout.block_bytes,
            num_blocks=self.host_blocks,
            disk=self.disk,
        )
        self._store_address = await asyncio.to_thread(self.store.start, "127.0.0.1")
        host, port = await self.backend.start("127.0.0.1")
        if self.relay_through is not None:
            host, port = await self.relay_through(host, port)
        self.address = IngressAddress(
            ingress_id="ingress-0", incarnation=self._me.incarnation, host=host, port=port, pid=os.getpid()
        )
        await asyncio.gather(*(self.add_worker(role, **spec) for role in roles))
        self.publish_view()
        await until(lambda: self.backend.ready().ready and len(self.backend._relay.links) == len(self.workers))

    async def add_worker(self, role: str, **changes: Any) -> Worker:
        """Starts one worker and connects it to everybody."""
        number = self._num_started[role]
        self._num_started[role] += 1
        fields: dict[str, Any] = {
            "model_path": str(self.model),
            "pool_blocks": 64,
            "chunk_tokens": 64,
            "max_num_seqs": 8,
            "threads": 1,
            "lease_ms": LEASE_MS,
            "max_stream_backlog_tokens": self.config.limits.max_stream_backlog_tokens,
        }
        spec = WorkerSpec(
            worker_id=f"{role}-{number}",
            role=role,
            incarnation=new_incarnation(),
            node="node-0",
            dtype=self.dtype,
            max_model_len=MAX_LEN,
            store_host=self._store_address[0],
            store_port=self._store_address[1],
            **(fields | changes),
        )
        worker = Worker(spec, SECRET, on_fatal=self.fatal.append)
        join = await asyncio.to_thread(worker.start)
        self.workers[spec.worker_id] = (worker, join)
        await asyncio.to_thread(worker.add_ingress, self.address)
        for other, other_join in tuple(self.workers.values()):
            pair = (worker, other_join) if role == "prefill" else (other, join)
            if {role, other_join.role} == {"prefill", "decode"}:
                await asyncio.to_thread(pair[0].warm_decode_peer, decode_address(pair[1]))
        return worker

    def publish_view(self, *, draining: Collection[str] = ()) -> None:
        """Tells the ingress who is there. ``draining``: names of workers that are given nothing new."""
        self._version += 1
        views = tuple(
            WorkerView(
                worker_id=join.worker_id,
                role=join.role,
                state="draining" if name in draining else "ready",
                incarnation=join.incarnation,
                pid=join.pid,
                node=join.node,
                host_identity=join.host_identity,
                pool_blocks=join.pool_blocks,
            )
            for name, (_, join) in self.workers.items()
            if join.incarnation not in self.gone
        )
        self.backend.set_view(ClusterView(version=self._version, workers=views, gone=tuple(self.gone)))

    def worker(self, name: str) -> Worker:
        return self.workers[name][0]

    async def statuses(self) -> dict[str, Any]:
        """Returns the status of each worker by name."""
        return {name: await asyncio.to_thread(worker.status) for name, (worker, _) in self.workers.items()}

    async def at_rest(self) -> None:
        """Waits until nothing is held or runs anywhere; fails after ``SETTLE_S``."""

        async def busy() -> dict[str, Any]:
            found = {}
            for name, status in (await self.statuses()).items():
                held = (status.used_blocks, status.quarantined_blocks, status.running, status.waiting, status.leases)
                if any(held):
                    found[name] = held
            return found

        deadline = time.monotonic() + SETTLE_S
        while left := (await busy() or self.backend.streams()):
            assert time.monotonic() < deadline, f"still held after {SETTLE_S} s: {left}"
            await asyncio.sleep(0.01)
        for worker, _ in self.workers.values():
            worker._pool.check_invariants()

    async def replace_worker(self, name: str) -> None:
        """Ends a worker and starts another of its role; returns when the ingress uses it and knows that one is gone."""
        worker, join = self.workers.pop(name)
        await asyncio.to_thread(worker.close)
        await self.add_worker(join.role)
        for other, _ in self.workers.values():
            other.peer_gone(join.incarnation)
        self.gone.append(join.incarnation)
        self.publish_view()
        await until(lambda: self.backend.ready().ready)

    def flush_pools(self) -> None:
        """Empties the device tier of every worker."""
        for worker, _ in self.workers.values():
            worker._links.call(worker._pool.flush)

    async def close(self) -> None:
        await self.backend.close()
        for worker, _ in self.workers.values():
            await asyncio.to_thread(worker.close)
        if self.store is not None:
            await asyncio.to_thread(self.store.close)
        assert not self.fatal, self.fatal

    # --- requests -------------------------------------------------------------------------------------------------

    async def submit(
        self, spec: GenerationSpec, request_id: str = "req-1", *, stream: bool = True, client_retries: int = 0
    ) -> Generation:
        return await self.backend.submit(
            spec, request_id=request_id, stream=stream, label=None, tenant="t", client_retries=client_retries
        )

    def golden(self, spec: GenerationSpec) -> list[int]:
        """Returns the tokens of a plain run of the engine in this thread: no cache, no batch, no hand-off."""
        tokens: list[int] = []
        guide = None if spec.grammar is None else GuideFactory(self.model, self.vocab_size).guide(spec.grammar, ())
        table = range(MAX_LEN // BLOCK_TOKENS)
        logits = [step.logits for step in self.engine.prefill(spec.prompt_token_ids, table)][-1]
        position = len(spec.prompt_token_ids)
        while True:
            allowed = guide.allowed() if guide is not None else None
            prompt = spec.prompt_token_ids
            tokens.append(sample(logits, spec.sampling, position, tokens, prompt_token_ids=prompt, allowed=allowed)[0])
            if tokens[-1] in spec.stop_token_ids or len(tokens) >= spec.max_tokens:
                return tokens
            if guide is not None:
                guide.consume(tokens[-1:])
            logits = self.engine.decode_step([(tokens[-1], position, table)])[0]
            position += 1


def make_spec(num_prompt: int = 40, max_tokens: int = 12, *, salt: int = 1, **sampling: Any) -> GenerationSpec:
    prompt = tuple((salt * 7919 + index * 31) % (VOCAB - 10) + 5 for index in range(num_prompt))
    return GenerationSpec(prompt_token_ids=prompt, max_tokens=max_tokens, sampling=SamplingParams(**sampling))


async def collect(generation: Generation) -> tuple[list[int], str]:
    """Reads a generation as the HTTP layer does; returns (tokens, how it ended)."""
    tokens: list[int] = []
    while True:
        event = await generation.next()
        match event:
            case TokenBatch():
                assert event.first_index == len(tokens), (event, len(tokens))
                if not tokens:
                    generation.mark_first_delta()
                tokens += event.token_ids
                generation.delivered(len(tokens))
            case Ended():
                generation.completed()
                return tokens, event.finish
            case Interrupted():
                return tokens, event.reason
            case Restarted():
                assert not generation.machine.first_delta_sent  # type: ignore[attr-defined]
                tokens.clear()


async def until(condition: Callable[[], object]) -> None:
    """Waits for a condition; fails after ``SETTLE_S``."""
    deadline = time.monotonic() + SETTLE_S
    while not condition():
        assert time.monotonic() < deadline, "condition did not come true"
        await asyncio.sleep(0.002)


def decode_address(join: WorkerJoin) -> DecodeAddress:
    return DecodeAddress(
        worker_id=join.worker_id, incarnation=join.incarnation, kv_host=join.kv_host, kv_port=join.kv_port
    )
