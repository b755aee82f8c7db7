"""What a worker is told when it starts, and what it says about itself once it is up.

Owns nothing; both structures cross process borders as plain data.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

Role = Literal["prefill", "decode", "combined"]


class WorkerSpec(Struct, frozen=True, kw_only=True):
    """Everything one life of a worker needs. ``engine``: ``torch`` runs the model, ``paced`` none, at fixed times."""

    worker_id: str
    role: Role
    incarnation: str
    node: str
    model_path: str
    engine: Literal["torch", "paced"] = "torch"
    step_ms: Annotated[float, Meta(ge=0)] = 20.0
    prefill_ms_per_token: Annotated[float, Meta(ge=0)] = 1.0
    dtype: Literal["bfloat16", "float32"]
    max_model_len: Annotated[int, Meta(ge=16)]
    block_tokens: Annotated[int, Meta(ge=1)] = 16
    pool_blocks: Annotated[int, Meta(ge=2)]
    chunk_tokens: Annotated[int, Meta(ge=16)] = 512
    max_num_seqs: Annotated[int, Meta(ge=1)] = 64
    max_waiting: Annotated[int, Meta(ge=0)] = 256
    threads: Annotated[int, Meta(ge=1)]
    lease_ms: Annotated[int, Meta(ge=50)] = 2000
    max_stream_backlog_tokens: Annotated[int, Meta(ge=1)] = 4096
    transfer_deadline_ms: Annotated[int, Meta(ge=1)] = 5000
    bind_host: str = "127.0.0.1"
    host_identity: str = "auto"
    transport: Literal["ucx", "inproc"] = "ucx"
    verify: Literal["digest", "full"] = "digest"
    eviction: Literal["kopir", "lru", "s3fifo", "arc"] = "kopir"
    device_cache: bool = True
    """Complete blocks stay in the pool after their request, until the room is needed."""
    store_host: str | None = None
    store_port: int | None = None


class WorkerJoin(Struct, frozen=True, kw_only=True):
    """What a worker that is up tells the controller."""

    worker_id: str
    role: Role
    incarnation: str
    pid: int
    node: str
    host_identity: str
    kv_host: str
    kv_port: int
    fingerprint: dict[str, str]
    pool_blocks: int
    vocab_size: int
    max_model_len: int


class IngressAddress(Struct, frozen=True, kw_only=True):
    """Where an ingress listens for its workers."""

    ingress_id: str
    incarnation: str
    host: str
    port: int
    pid: int


class DecodeAddress(Struct, frozen=True, kw_only=True):
    """Where a decode worker listens for prefill peers."""

    worker_id: str
    incarnation: str
    kv_host: str
    kv_port: int
