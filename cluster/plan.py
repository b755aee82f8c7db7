"""From a configuration to what the controller starts, and the checks that can be made before anything starts.

Pure apart from reading the model folder's ``config.json``. Options that this version does not carry out are refused
here by name: a setting that is silently ignored would be a lie.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from cluster.config import Config, thread_budget
from cluster.view import ClusterPlan, StoreSpec
from kernels.layout import KVLayout
from kvstore.errors import BadInput, EnvironmentProblem
from workers.spec import WorkerSpec

WORKER_OVERHEAD_BYTES = 600 << 20
"""What a worker process needs beside weights and pool: interpreter, libraries, activations."""
MIB = 1 << 20


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """What the plan needs to know of a model: shapes, and bytes of its weights files."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    max_positions: int
    weights_bytes: int


def read_model_shape(folder: Path) -> ModelShape:
    """Reads ``config.json`` of a model folder. Raises: EnvironmentProblem if it is missing or unreadable."""
    try:
        fields = msgspec.json.decode((folder / "config.json").read_bytes())
        heads = fields["num_attention_heads"]
        return ModelShape(
            num_layers=fields["num_hidden_layers"],
            num_kv_heads=fields.get("num_key_value_heads") or heads,
            head_size=fields.get("head_dim") or fields["hidden_size"] // heads,
            max_positions=fields["max_position_embeddings"],
            weights_bytes=sum(file.stat().st_size for file in folder.glob("*.safetensors")),
        )
    except (OSError, KeyError, TypeError, msgspec.DecodeError) as error:
        raise EnvironmentProblem(f"model: {folder} is no usable model folder ({error})") from error


def check_supported(config: Config) -> None:
    """Refuses what the configuration can say and this version cannot do. Raises: BadInput."""
    refusals = (
        ("workers.engine", config.workers.engine, config.workers.engine != "torch", "only torch is available yet"),
        ("kv.disk_path", config.kv.disk_path, config.kv.disk_path is not None, "there is no disk tier yet"),
        ("kv.eviction", config.kv.eviction, config.kv.eviction != "lru", "only lru is available yet"),
        ("kv.verify", config.kv.verify, config.kv.verify != "digest", "only digest is available yet"),
        (
            "server.keep_alive_ping_s",
            config.server.keep_alive_ping_s,
            config.server.keep_alive_ping_s > 0,
            "keep-alive pings are not available yet",
        ),
        ("server.retry_after_first_byte", True, config.server.retry_after_first_byte, "nothing is retried yet"),
        (
            "attempts.max_attempts",
            config.attempts.max_attempts,
            config.attempts.max_attempts != 1,
            "attempts are recorded, not yet retried: only 1 is available",
        ),
        ("auth.keys_file", config.auth.keys_file, config.auth.keys_file is not None, "there are no tenants yet"),
        (
            "server.host",
            config.server.host,
            config.server.host not in ("127.0.0.1", "localhost", "::1"),
            "without API keys the endpoint listens on loopback only",
        ),
    )
    for field, value, refused, why in refusals:
        if refused:
            raise BadInput(field, value, why)


def make_plan(config: Config, *, model_path: Path, model_revision: str, shape: ModelShape, cores: int) -> ClusterPlan:
    """Returns what the controller starts on one node. Raises: BadInput when values do not fit the model."""
    if config.max_model_len > shape.max_positions:
        raise BadInput("max_model_len", config.max_model_len, f"the model has {shape.max_positions} positions")
    layout = make_layout(config, shape)
    workers: list[WorkerSpec] = []
    budget = thread_budget(cores, config)
    for role in ("prefill", "decode", "combined"):
        section = getattr(config.workers, role)
        workers.extend(
            WorkerSpec(
                worker_id=f"{role}-{index}",
                role=role,
                incarnation="",
                node="node-0",
                model_path=str(model_path),
                model_revision=model_revision,
                dtype=config.dtype,
                max_model_len=config.max_model_len,
                block_tokens=config.kv.block_tokens,
                pool_blocks=section.pool_blocks,
                chunk_tokens=getattr(section, "chunk_tokens", config.workers.prefill.chunk_tokens),
                max_num_seqs=getattr(section, "max_num_seqs", config.workers.decode.max_num_seqs),
                max_waiting=config.limits.max_queued_requests,
                threads=budget[role],
                lease_ms=config.attempts.lease_ms,
                max_stream_backlog_tokens=config.limits.max_stream_backlog_tokens,
                host_identity=config.kv.host_identity,
            )
            for index in range(section.replicas)
        )
    store = StoreSpec(
        node="node-0",
        incarnation="",
        block_bytes=layout.block_bytes,
        num_blocks=config.kv.host_bytes // layout.block_bytes,
        bind_host="127.0.0.1",
        host_identity=config.kv.host_identity,
    )
    if store.num_blocks < 1:
        raise BadInput("kv.host_bytes", config.kv.host_bytes, f"one block needs {layout.block_bytes} bytes")
    return ClusterPlan(
        workers=tuple(workers),
        store=store,
        thread_environment={role: thread_environment(threads) for role, threads in budget.items()},
    )


def make_layout(config: Config, shape: ModelShape) -> KVLayout:
    """Returns the layout of a KV block of this model and configuration."""
    return KVLayout(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        block_tokens=config.kv.block_tokens,
        dtype=config.dtype,
    )


def bytes_needed(config: Config, shape: ModelShape) -> int:
    """Returns the memory that workers and slab will take, in bytes."""
    block_bytes = make_layout(config, shape).block_bytes
    weights_bytes = shape.weights_bytes * (2 if config.dtype == "float32" else 1)
    total = config.kv.host_bytes
    for section in (config.workers.prefill, config.workers.decode, config.workers.combined):
        total += section.replicas * (weights_bytes + section.pool_blocks * block_bytes + WORKER_OVERHEAD_BYTES)
    return total


def check_memory(needed_bytes: int, available_bytes: int) -> None:
    """Raises: EnvironmentProblem when the plan does not fit."""
    if needed_bytes > available_bytes:
        raise EnvironmentProblem(
            f"not enough memory: workers and store need about {needed_bytes // MIB} MiB, "
            f"{available_bytes // MIB} MiB are available; lower workers.*.pool_blocks or kv.host_bytes"
        )


def thread_environment(threads: int) -> dict[str, str]:
    """Returns the variables that must be set before torch is imported: thread count, and waiting without spinning."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "KMP_BLOCKTIME": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
