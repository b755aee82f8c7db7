"""``kopir bench engine``: how fast the engine computes, beside vLLM and transformers on the same prompts.

Three parts. *Engine alone*: prefill, decode and a fully cached prompt, each engine in a process of its own with both
cores and nothing around it; the engines take turns, prompt by prompt, and stand still while another is measured.
*Serving*: a prefill/decode pair against a combined worker, over HTTP, request by request in turn. *Start*: from the
command to the first moment at which a request would be answered, with warm file caches.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.progress import Progress

from bench.engine_serving import measure_serving
from bench.peers.drive import PeerProgram, running
from bench.peers.environments import Environment, find
from bench.peers.tied import ended_by_sigterm
from bench.report import Report, Row, Target, finish, make_target, make_unmeasured, quantile
from cluster import machine
from cluster.plan import thread_environment
from kvstore.errors import BadInput, EnvironmentProblem
from workers.model import hub
from workers.model.config import ModelConfig, read_config

MODEL = "smollm2-135m-instruct"
MAX_MODEL_LEN = 4096
PEERS = ("vllm", "transformers")
FOLDER = Path(__file__).parent
PREFILL_TOKENS = (512, 1024, 2048)
CACHED_TOKENS = 2048
BATCHES = (1, 4, 8, 16)
DECODE_PROMPT_TOKENS = 128
DECODE_TOKENS = 64
QUICK_DECODE_TOKENS = 16
DECODE_AT_LEAST = {1: 1.1, 4: 1.2, 8: 1.2, 16: 1.2}
MIB = 1 << 20
MEMORY_LIMIT_MIB = 600.0
US = "kopir"


def parse_peers(text: str | None) -> tuple[str, ...]:
    """Returns the peers named by ``--peers``. Raises: BadInput for one that is not known."""
    names = tuple(name for name in (text or "").split(",") if name)
    names = PEERS if names == ("all",) else names
    for name in names:
        if name not in PEERS:
            raise BadInput("--peers", name, f"known are {', '.join(PEERS)}, all")
    return names


def run_engine(*, quick: bool, json_path: Path | None, check: bool, seed: int, peers: str | None, serving: bool) -> int:
    """Runs the bench; returns the exit status."""
    names = parse_peers(peers)
    report = Report.start("engine", seed=seed)
    folder = hub.resolve(MODEL)
    with ended_by_sigterm(), ExitStack() as stack:
        engines = {US: stack.enter_context(_started(US, folder))}
        for name in names:
            try:
                engines[name] = stack.enter_context(_started(name, folder))
            except EnvironmentProblem as error:
                report.notes.append(f"{name}: {error}")
        alone = _Alone(report, engines, read_config(folder), seed)
        alone.run(repeats=1 if quick else 3, decode_tokens=QUICK_DECODE_TOKENS if quick else DECODE_TOKENS)
    _add_targets(report)
    if serving:
        with ended_by_sigterm():
            measure_serving(report, folder=folder, has_vllm="vllm" in engines, repeats=3 if quick else 9, seed=seed)
    _show(report)
    return finish(report, json_path=json_path, check=check)


class _Alone:
    """The engines, one process each, asked in turn."""

    def __init__(self, report: Report, engines: dict[str, PeerProgram], config: ModelConfig, seed: int) -> None:
        self._report = report
        self._engines = engines
        self._config = config
        self._random = random.Random(seed)
        self._products_gflops = 0.0

    def run(self, *, repeats: int, decode_tokens: int) -> None:
        self._warm_up()
        products = self._ask(US, {"products": True})
        self._products_gflops = products["gflops"]
        row = {"what": "products", "gflops": round(self._products_gflops, 1), "kernels": products["kernels"]}
        self._report.rows.append(row)
        with Progress(transient=True) as progress:
            for num_tokens in progress.track(PREFILL_TOKENS, description="prefill"):
                self._prefill(num_tokens, repeats)
            for batch in progress.track(BATCHES, description="decode"):
                self._decode(batch, repeats, decode_tokens)
        last = self._ask(US, {"prompts": [self._prompt(16)], "tokens": 1})
        self._report.rows.append(
            {
                "what": "memory",
                "peak_mib": round(last["peak_bytes"] / MIB, 1),
                "weights_mib": round(last["weights_bytes"] / MIB, 1),
                "pool_mib": round(last["pool_bytes"] / MIB, 1),
            }
        )

    def _warm_up(self) -> None:
        # Buffers, kernels that are built at first use, and memory that is touched for the first time.
        for name in self._engines:
            for batch in BATCHES:
                self._ask(name, {"prompts": [self._prompt(32) for _ in range(batch)], "tokens": 3})
            self._ask(name, {"prompts": [self._prompt(CACHED_TOKENS)], "tokens": 1})

    def _prefill(self, num_tokens: int, repeats: int) -> None:
        is_cached = num_tokens == CACHED_TOKENS
        times: dict[str, list[float]] = {name: [] for name in self._engines}
        cached: dict[str, list[float]] = {name: [] for name in self._engines if name != "transformers"}
        for _ in range(repeats):
            question: Row = {"prompts": [self._prompt(num_tokens)], "tokens": 1}
            for name in self._engines:
                times[name].append(self._ask(name, question)["first_s"])
                if is_cached and name in cached:
                    cached[name].append(self._ask(name, question | {"cached": True})["first_s"])
        for name, values in times.items():
            self._report.rows.append(self._prefill_row(name, num_tokens, values))
        for name, values in cached.items():
            if values:
                row = {"what": "cached", "engine": name, "prompt_tokens": num_tokens}
                self._report.rows.append(row | {"ttft_ms": _ms(values, 0.5)})

    def _prefill_row(self, name: str, num_tokens: int, values: list[float]) -> Row:
        seconds = quantile(values, 0.5)
        gflops = prefill_flops(self._config, num_tokens) / seconds / 1e9
        return {
            "what": "prefill",
            "engine": name,
            "prompt_tokens": num_tokens,
            "ttft_ms": _ms(values, 0.5),
            "ttft_ms_min": _ms(values, 0.01),
            "tok_per_s": round(num_tokens / seconds, 1),
            "share_of_products_rate": round(gflops / self._products_gflops, 3),
        }

    def _decode(self, batch: int, repeats: int, num_tokens: int) -> None:
        steps: dict[str, list[float]] = {name: [] for name in self._engines}
        for _ in range(repeats):
            prompts = [self._prompt(DECODE_PROMPT_TOKENS) for _ in range(batch)]
            for name in self._engines:
                answer = self._ask(name, {"prompts": prompts, "tokens": num_tokens})
                steps[name] += answer["steps_s"]
        for name, values in steps.items():
            self._report.rows.append(
                {
                    "what": "decode",
                    "engine": name,
                    "batch": batch,
                    "tok_per_s": round(batch / quantile(values, 0.5), 1),
                    "tok_per_s_mean": round(batch * len(values) / sum(values), 1),
                    "itl_ms_p50": _ms(values, 0.5),
                    "itl_ms_p90": _ms(values, 0.9),
                    "itl_ms_p99": _ms(values, 0.99),
                }
            )

    def _prompt(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(100, 48_000) for _ in range(num_tokens)]

    def _ask(self, name: str, question: Row) -> Any:
        """Asks one engine while the others stand still."""
        with ExitStack() as stack:
            for other, engine in self._engines.items():
                if other != name:
                    stack.enter_context(engine.stopped())
            return self._engines[name].ask(question)


def prefill_flops(config: ModelConfig, num_tokens: int) -> float:
    """Returns the multiplications and additions of a prompt: all layers, causal attention, one row of logits."""
    hidden, head = config.hidden_size, config.head_size
    q_size, kv_size = config.num_heads * head, config.num_kv_heads * head
    weights = hidden * (q_size + 2 * kv_size) + q_size * hidden + 3 * hidden * config.intermediate_size
    attention = 2 * q_size * num_tokens * (num_tokens + 1) / 2
    return 2.0 * (config.num_layers * (weights * num_tokens + attention) + config.vocab_size * hidden)


@contextmanager
def _started(name: str, folder: Path) -> Iterator[PeerProgram]:
    cores = sorted(os.sched_getaffinity(0))
    if name == US:
        environment = Environment(Path(sys.executable), os.environ | thread_environment(machine.usable_cores()))
        arguments = ["-m", "bench.engine_program", str(folder), str(MAX_MODEL_LEN), str(len(cores))]
    elif name == "vllm":
        environment = find("vllm")

        arguments = [str(FOLDER / "peers" / "vllm_peer.py"), str(folder), str(MAX_MODEL_LEN)]
    else:
        environment = Environment(Path(sys.executable), dict(os.environ))
        arguments = [str(FOLDER / "peers" / "transformers_peer.py"), str(folder)]
    with running([str(environment.python), *arguments], environment, stdout=subprocess.PIPE) as process:
        program = PeerProgram(process)
        program.read()
        yield program


def _add_targets(report: Report) -> None:
    prefill = {(row["engine"], row["prompt_tokens"]): row for row in report.rows if row["what"] == "prefill"}
    decode = {(row["engine"], row["batch"]): row for row in report.rows if row["what"] == "decode"}
    cached = {row["engine"]: row["ttft_ms"] for row in report.rows if row["what"] == "cached"}
    for num_tokens in PREFILL_TOKENS:
        peers = [row["ttft_ms"] for (name, count), row in prefill.items() if name != US and count == num_tokens]
        ours = prefill[US, num_tokens]["ttft_ms"]
        report.targets.append(_against(f"prefill_{num_tokens}_ttft", ours, min(peers, default=None), "ms", 1.0))
    for batch, at_least in DECODE_AT_LEAST.items():
        peer = decode.get(("vllm", batch))
        ours = decode[US, batch]["tok_per_s"]
        reference = None if peer is None else peer["tok_per_s"]
        report.targets.append(_against(f"decode_batch_{batch}_vs_vllm", ours, reference, "tok/s", at_least))
    report.targets.append(_against("cached_2048_ttft_vs_vllm", cached[US], cached.get("vllm"), "ms", 1 / 0.4))
    memory = next(row for row in report.rows if row["what"] == "memory")
    beyond = memory["peak_mib"] - memory["weights_mib"] - memory["pool_mib"]
    report.targets.append(_against("memory_beyond_weights_and_pool", beyond, MEMORY_LIMIT_MIB, "MiB", 1.0))


def _against(target_id: str, ours: float, reference: float | None, unit: str, at_least: float) -> Target:
    if reference is None:
        reason = "no peer was measured: --peers vllm,transformers"
        return make_unmeasured(target_id, unit=unit, at_least=at_least, reason=reason)
    is_time = unit != "tok/s"
    return make_target(
        target_id, ours=ours, reference=reference, unit=unit, at_least=at_least, smaller_is_better=is_time
    )


def _ms(seconds: list[float], fraction: float) -> float:
    return round(quantile(seconds, fraction) * 1e3, 2)


def _show(report: Report) -> None:
    kinds = {kind: [row for row in report.rows if row["what"] == kind] for kind in {r["what"] for r in report.rows}}
    report.show(
        "Prefill",
        ["engine", "prompt_tokens", "ttft_ms", "tok_per_s", "share_of_products_rate"],
        kinds["prefill"] + kinds["cached"],
    )
    columns = ["engine", "batch", "tok_per_s", "itl_ms_p50", "itl_ms_p90", "itl_ms_p99"]
    report.show("Decode", columns, kinds["decode"])
    if "serving" in kinds:
        report.show("Over HTTP", ["server", "measure", "value", "unit"], kinds["serving"])
