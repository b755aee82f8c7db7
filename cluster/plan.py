"""From a configuration to what the controller starts, and the checks that can be made before anything starts.

Pure. Options that this version does not carry out are refused
here by name: a setting that is silently ignored would be a lie.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from cluster.config import Config, thread_budget
from cluster.view import ClusterPlan, StoreSpec
from kvstore.errors import BadInput
from kvstore.store.disk.layout import num_slots_in
from workers.model.config import ModelConfig
from workers.spec import WorkerSpec


def check_supported(config: Config) -> None:
    """Refuses what the configuration can say and this version cannot do. Raises: BadInput."""
    refusals = (
        ("kv.verify", config.kv.verify, config.kv.verify == "none", "only digest and full are available yet"),
        (
            "server.host",
            config.server.host,
            config.auth.keys_file is None and config.server.host not in ("127.0.0.1", "localhost", "::1"),
            "without API keys (auth.keys_file) the endpoint listens on loopback only",
        ),
    )
    for field, value, refused, why in refusals:
        if refused:
            raise BadInput(field, value, why)


def make_plan(config: Config, *, model_path: Path, model: ModelConfig, cores: int) -> ClusterPlan:
    """Returns what the controller starts on one node. Raises: BadInput when values do not fit the model."""
    if config.max_model_len > model.max_positions:
        raise BadInput("max_model_len", config.max_model_len, f"the model has {model.max_positions} positions")
    layout = model.kv_layout(config.kv.block_tokens, config.dtype)
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
                engine=config.workers.engine,
                step_ms=config.workers.paced.step_ms,
                prefill_ms_per_token=config.workers.paced.prefill_ms_per_token,
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
                verify="full" if config.kv.verify == "full" else "digest",
                eviction=config.kv.eviction,
                device_cache=config.kv.device_cache,
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
        keys_file=config.auth.keys_file,
        keys_reload_s=config.auth.reload_s,
        # The store node runs in a folder of Ray's: what is relative here must not be relative there.
        disk_path=None if config.kv.disk_path is None else str(Path(config.kv.disk_path).absolute() / "node-0"),
        disk_bytes=config.kv.disk_bytes,
        disk_sync=config.kv.disk_sync,
        eviction=config.kv.eviction,
    )
    if store.disk_path is not None and num_slots_in(store.disk_bytes, layout.block_bytes) < 1:
        raise BadInput("kv.disk_bytes", store.disk_bytes, f"one block needs {layout.block_bytes} bytes and a header")
    if store.num_blocks < 1:
        raise BadInput("kv.host_bytes", config.kv.host_bytes, f"one block needs {layout.block_bytes} bytes")
    return ClusterPlan(
        workers=tuple(workers),
        store=store,
        thread_environment={role: thread_environment(threads) for role, threads in budget.items()},
    )


def worker_kind(spec: WorkerSpec) -> WorkerSpec:
    """Returns what makes two workers alike: everything but name, life, and the threads that follow from the numbers."""
    return msgspec.structs.replace(spec, worker_id="", incarnation="", threads=1, store_host=None, store_port=None)


def weight_bytes(config: Config, folder: Path) -> int:
    """Returns the bytes that the model's weights take in one process; the files hold two bytes per weight."""
    on_disk = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return on_disk * 2 if config.dtype == "float32" else on_disk


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
