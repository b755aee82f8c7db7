"""The part of ``kopir bench engine`` that runs whole servers: start to ready, pair against combined, fluid streams."""

from __future__ import annotations

import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import httpx

from bench.clusters import kopir_cluster, other_server
from bench.peers.environments import find
from bench.report import Report, Row, make_target, make_unmeasured, quantile
from kvstore.errors import EnvironmentProblem

HAND_OFF_TOKENS = 1024
LONG_TOKENS = 2048
STREAM_TOKENS = 160
NUM_STREAMS = 2
REQUEST_DEADLINE_S = 120.0
MAX_PAIR_RATIO = 1.15
MAX_STALL_RATIO = 3.0
MAX_START_RATIO = 0.4
MANY = 16
MANY_TOKENS = 64
MAX_STREAM_RATIO = 1.3
PAIR: tuple[str, ...] = ()
COMBINED = ("workers.prefill.replicas=0", "workers.decode.replicas=0", "workers.combined.replicas=1")


def measure_serving(report: Report, *, folder: Path, has_vllm: bool, repeats: int, seed: int) -> None:
    """Adds rows and targets. Modifies: ``report``."""
    source = random.Random(seed + 1)
    vllm_s = _start_vllm(report, folder) if has_vllm else None
    with ExitStack() as stack:
        # Started one after the other: two starts at once would measure each other.
        pair = stack.enter_context(kopir_cluster(PAIR))
        combined = stack.enter_context(kopir_cluster(COMBINED))
        for name, server in (("pair", pair), ("combined", combined)):
            report.rows.append(_row(name, "start_to_ready", server.ready_s, "s"))
        _pair_against_combined(report, {"pair": _Client(pair.url), "combined": _Client(combined.url)}, source, repeats)
        _streams_against_whole(report, combined.url, source)
        _fluid_streams(report, _Client(combined.url), source, max(2, repeats // 3))
    at_least = 1 / MAX_START_RATIO
    if vllm_s is None:
        reason = "vLLM was not measured: --peers vllm"
        report.targets.append(make_unmeasured("start_to_ready_vs_vllm", unit="s", at_least=at_least, reason=reason))
        return
    report.targets.append(
        make_target(
            "start_to_ready_vs_vllm",
            ours=pair.ready_s,
            reference=vllm_s,
            unit="s",
            at_least=at_least,
            smaller_is_better=True,
        )
    )


def _start_vllm(report: Report, folder: Path) -> float | None:
    try:
        environment = find("vllm")
        variables = environment.variables | {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
        command = [str(environment.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
        command += ["--dtype", "bfloat16"]
        command += ["--max-model-len", "4096", "--max-num-seqs", "16", "--enforce-eager", "--host", "127.0.0.1"]
        with other_server(command, variables, "/health") as server:
            report.rows.append(_row("vllm", "start_to_ready", server.ready_s, "s"))
            return server.ready_s
    except EnvironmentProblem as error:
        report.notes.append(f"vllm serve: {error}")
        return None


class _Client:
    """Streams completions of token prompts and takes the time of every event."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=REQUEST_DEADLINE_S)
        self._model = self._client.get("/v1/models").json()["data"][0]["id"]

    def run(self, prompt: list[int], max_tokens: int, stream: bool) -> None:
        """Runs one request to its end, streamed or whole."""
        if stream:
            self.stream(prompt, max_tokens)
            return
        body = {"model": self._model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        self._client.post("/v1/completions", json=body).raise_for_status()

    def stream(self, prompt: list[int], max_tokens: int) -> list[float]:
        """Returns when each event came, in seconds since the request was sent."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        body["ignore_eos"] = True
        times: list[float] = []
        began = time.perf_counter()
        with self._client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if line.startswith("data: {") and json.loads(line[6:]).get("choices"):
                    times.append(time.perf_counter() - began)
        return times


def _pair_against_combined(report: Report, clients: dict[str, _Client], source: random.Random, repeats: int) -> None:
    times: dict[str, list[float]] = {name: [] for name in clients}
    for number in range(repeats + 1):
        for name, client in clients.items():
            first_s = client.stream(_prompt(source, HAND_OFF_TOKENS), 4)[0]
            # The first of each pays for pages and caches.
            if number:
                times[name].append(first_s * 1e3)
    medians = {name: quantile(values, 0.5) for name, values in times.items()}
    for name, value in medians.items():
        report.rows.append(_row(name, f"ttft_{HAND_OFF_TOKENS}", value, "ms"))
    report.targets.append(
        make_target(
            "pair_ttft_1024_vs_combined",
            ours=medians["pair"],
            reference=medians["combined"],
            unit="ms",
            at_least=round(1 / MAX_PAIR_RATIO, 3),
            smaller_is_better=True,
        )
    )


def _streams_against_whole(report: Report, url: str, source: random.Random) -> None:
    """F66: sixteen streams take hardly longer than sixteen whole answers: no event costs a call of its own."""
    walls: dict[str, float] = {}
    for name, stream in (("whole", False), ("stream", True)):
        client = _Client(url)
        prompts = [_prompt(source, 16) for _ in range(MANY)]
        began = time.perf_counter()
        with ThreadPoolExecutor(MANY) as threads:
            for done in [threads.submit(client.run, prompt, MANY_TOKENS, stream) for prompt in prompts]:
                done.result()
        walls[name] = time.perf_counter() - began
        report.rows.append(_row("combined", f"{name}_{MANY}x{MANY_TOKENS}", walls[name], "s"))
    report.targets.append(
        make_target(
            "streams_vs_whole_answers",
            ours=walls["stream"],
            reference=walls["whole"],
            unit="s",
            at_least=round(1 / MAX_STREAM_RATIO, 3),
            smaller_is_better=True,
        )
    )


def _fluid_streams(report: Report, client: _Client, source: random.Random, repeats: int) -> None:
    """Times between tokens of running streams, while nothing else runs and while a long prompt is computed."""
    idle = _gaps(client, source, num_prompts=0)
    busy = _gaps(client, source, num_prompts=repeats)
    figures = {"idle": quantile(idle, 0.99) * 1e3, "beside_prefill": quantile(busy, 0.99) * 1e3}
    for name, value in figures.items():
        report.rows.append(_row("combined", f"itl_p99_{name}", value, "ms"))
    report.targets.append(
        make_target(
            "itl_p99_beside_2048_prefill_vs_idle",
            ours=figures["beside_prefill"],
            reference=figures["idle"],
            unit="ms",
            at_least=round(1 / MAX_STALL_RATIO, 3),
            smaller_is_better=True,
        )
    )


def _gaps(client: _Client, source: random.Random, *, num_prompts: int) -> list[float]:
    """Returns the gaps of all streams; with ``num_prompts``, only those that overlap a long prompt's computing."""
    prompts = [_prompt(source, 64) for _ in range(NUM_STREAMS)]
    lines: list[list[float]] = [[] for _ in prompts]
    origin = time.perf_counter()

    def run(index: int) -> None:
        sent = time.perf_counter() - origin
        lines[index] = [sent + at for at in client.stream(prompts[index], STREAM_TOKENS * max(1, num_prompts))]

    threads = [threading.Thread(target=run, args=(index,)) for index in range(NUM_STREAMS)]
    for thread in threads:
        thread.start()
    spans = [(0.0, float("inf"))] if num_prompts == 0 else []
    for _ in range(num_prompts):
        time.sleep(0.5)
        sent = time.perf_counter() - origin
        spans.append((sent, sent + client.stream(_prompt(source, LONG_TOKENS), 1)[0]))
    for thread in threads:
        thread.join()
    return [
        after - before
        for line in lines
        for before, after in pairwise(line[1:])
        if any(first < after and before < end for first, end in spans)
    ]


def _prompt(source: random.Random, num_tokens: int) -> list[int]:
    return [source.randrange(100, 48_000) for _ in range(num_tokens)]


def _row(server: str, measure: str, value: float, unit: str) -> Row:
    return {"what": "serving", "server": server, "measure": measure, "value": round(value, 2), "unit": unit}
