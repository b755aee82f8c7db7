"""``kopir bench serve``: what the way through proxy, ingress, relay and hand-off costs, request by request.

Starts a cluster of its own (or measures one that runs) and loads the same engine into this process, so that each
prompt is timed twice in one run, in turn: over HTTP, and by calling the engine directly. Nothing is cached: every
prompt is new. ``added`` is the difference of both; it carries the noise of two computations, each many times larger
than itself. ``outside`` is what one request spent outside of compute and hand-off: proxy, ingress, queue, look-up and
relay. The split of a request comes from its own journal, measured by the workers that did the work.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from rich.progress import Progress

from bench.clusters import kopir_cluster
from bench.report import Report, Target, finish, make_target, quantile
from cluster import machine
from cluster.plan import thread_environment
from kvstore.core.messages import SamplingParams
from workers.model import hub

REQUEST_DEADLINE_S = 120.0
READY_LIMIT_S = 30.0
OVERHEAD_LIMIT_MS = 10.0
HAND_OFF_LIMIT_MS = 10.0
HAND_OFF_TOKENS = 1024
NS_PER_MS = 1e6


def run_serve(
    *, quick: bool, json_path: Path | None, check: bool, seed: int, url: str | None, settings: list[str]
) -> int:
    """Runs the bench; returns the exit status."""
    report = Report.start("serve", seed=seed)
    lengths = (128, HAND_OFF_TOKENS) if quick else (16, 128, 512, HAND_OFF_TOKENS)
    repetitions = 5 if quick else 15
    with contextlib.ExitStack() as stack:
        if url is None:
            cluster = stack.enter_context(kopir_cluster(settings))
            url = cluster.url
            report.rows.append({"what": "start", "ready_s": cluster.ready_s})
            report.targets.append(_limit("endpoint_ready_s", cluster.ready_s, READY_LIMIT_S, "s"))
        measure = _Measurement(url, seed)
        for num_tokens in lengths:
            report.rows.append(measure.row(num_tokens, repetitions))
        report.rows.append(measure.cached_row(HAND_OFF_TOKENS, repetitions))
    rows = {row["prompt_tokens"]: row for row in report.rows if row["what"] == "ttft"}
    report.targets.append(_limit("ingress_relay_added_ttft_ms", rows[128]["outside_ms_p50"], OVERHEAD_LIMIT_MS, "ms"))
    exposed_ms = rows[HAND_OFF_TOKENS]["exposed_hand_off_ms_p50"]
    report.targets.append(_limit("hand_off_exposed_1024_tokens_ms", exposed_ms, HAND_OFF_LIMIT_MS, "ms"))
    measured = [row for row in report.rows if row["what"].startswith("ttft")]
    report.show("Time to first token (medians, ms)", list(_TIMES), [_named(row, _TIMES) for row in measured])
    report.show("Where it goes (medians, ms)", list(_PARTS), [_named(row, _PARTS) for row in measured])
    return finish(report, json_path=json_path, check=check)


_TIMES = {
    "tokens": "prompt_tokens",
    "cached": "cached_tokens_p50",
    "http": "http_ms_p50",
    "http p90": "http_ms_p90",
    "direct": "direct_ms_p50",
    "added": "added_ms_p50",
    "outside": "outside_ms_p50",
}
_PARTS = {
    "tokens": "prompt_tokens",
    "cached": "cached_tokens_p50",
    "admit": "admission_ms_p50",
    "lookup": "lookup_ms_p50",
    "queue": "queue_ms_p50",
    "compute": "compute_ms_p50",
    "hand-off": "exposed_hand_off_ms_p50",
    "http+relay": "relay_ms_p50",
    "step": "step_ms_p50",
}


def _named(row: dict[str, Any], columns: dict[str, str]) -> dict[str, Any]:
    cells = {name: row.get(key) for name, key in columns.items()}
    return {name: round(cell, 1) if isinstance(cell, float) else cell for name, cell in cells.items()}


class _Measurement:
    """Times single requests over HTTP and directly, in turn, on prompts that nobody has seen before."""

    def __init__(self, url: str, seed: int) -> None:
        self._client = httpx.Client(base_url=url, timeout=REQUEST_DEADLINE_S)
        self._random = random.Random(seed)
        self._direct = _direct_engine()
        self._model = self._client.get("/v1/models").json()["data"][0]["id"]

    def row(self, num_tokens: int, repetitions: int) -> dict[str, Any]:
        """Returns the medians over fresh prompts of one length."""
        samples = []
        with Progress(transient=True) as progress:
            for number in progress.track(range(repetitions + 1), description=f"{num_tokens} tokens"):
                prompt = [self._random.randrange(100, 48_000) for _ in range(num_tokens)]
                direct_ms = self._direct(prompt)
                sample = self.request(prompt) | {"direct_ms": direct_ms}
                # The first of each length pays for pages and caches on both sides.
                if number:
                    samples.append(sample)
        return _medians(samples, num_tokens, cached=False)

    def cached_row(self, num_tokens: int, repetitions: int) -> dict[str, Any]:
        """Returns the medians for a prompt whose blocks are all in the store."""
        prompt = [self._random.randrange(100, 48_000) for _ in range(num_tokens)]
        self.request(prompt)
        return _medians([self.request(prompt) for _ in range(repetitions)], num_tokens, cached=True)

    def request(self, prompt: list[int]) -> dict[str, float]:
        """Runs one streamed request; returns its times in milliseconds."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": 4, "temperature": 0, "stream": True}
        started = time.perf_counter()
        first_s = None
        with self._client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            for _ in response.iter_bytes():
                first_s = first_s or time.perf_counter() - started
        total_s = time.perf_counter() - started
        assert first_s is not None, "an answer without a byte"
        record = self._client.get(f"/v1/requests/{response.headers['x-request-id']}").json()
        return _split(record, http_ms=first_s * 1e3, total_ms=total_s * 1e3)


def _split(record: dict[str, Any], *, http_ms: float, total_ms: float) -> dict[str, float]:
    at_ms: dict[str, float] = {}
    for event in record["events"]:
        name = event["phase"] if event["event"] == "phase" else event["event"]
        at_ms.setdefault(name, event["at_ns"] / NS_PER_MS)
    spans = next(event["spans_ns"] for event in record["events"] if event["event"] == "prefill_ended")
    lookup, queue, compute = (spans[name] / NS_PER_MS for name in ("lookup", "engine_queue", "compute"))
    # Between the end of compute and the first token at the ingress lie hand-off and relay.
    after_compute = at_ms["first_token"] - at_ms["prefilling"] - lookup - queue - compute
    return {
        "http_ms": http_ms,
        "admission_ms": at_ms["prefilling"],
        "lookup_ms": lookup,
        "queue_ms": queue,
        "compute_ms": compute,
        "hand_off_ms": spans["hand_off"] / NS_PER_MS,
        "exposed_hand_off_ms": after_compute,
        "relay_ms": http_ms - at_ms["first_token"],
        "outside_ms": http_ms - compute - after_compute,
        "step_ms": (total_ms - http_ms) / 3,
        "cached_tokens": record["cached_tokens"],
    }


def _medians(samples: list[dict[str, float]], num_tokens: int, *, cached: bool) -> dict[str, Any]:
    names = samples[0].keys()
    row: dict[str, Any] = {
        "what": "ttft" if not cached else "ttft_cached",
        "prompt_tokens": num_tokens,
        "cached": cached,
        "requests": len(samples),
    }
    for name in names:
        values = [sample[name] for sample in samples]
        row[f"{name}_p50"] = quantile(values, 0.5)
        row[f"{name}_p90"] = quantile(values, 0.9)
    if not cached:
        row["added_ms_p50"] = quantile([s["http_ms"] - s["direct_ms"] for s in samples], 0.5)
    return row


def _limit(target_id: str, measured: float, limit: float, unit: str) -> Target:
    """Returns a target for a figure that must stay below a limit; ratio = limit / measured."""
    return make_target(target_id, ours=measured, reference=limit, unit=unit, at_least=1.0, smaller_is_better=True)


def _direct_engine() -> Callable[[list[int]], float]:
    """Loads the engine here; returns a function that times prefill and first token of a prompt, in milliseconds."""
    # The same way of waiting as in a worker, or the two sides would not be comparable. Read when torch is loaded.
    threads = machine.usable_cores()
    os.environ.update(thread_environment(threads))
    from workers.engine import Engine
    from workers.kv_pool import KvPool
    from workers.model.decoder import load_decoder
    from workers.sampling import sample

    model = load_decoder(hub.resolve("smollm2-135m-instruct"), dtype="bfloat16", max_positions=4096)
    engine = Engine(model, KvPool(model.config.kv_layout(16, "bfloat16"), 128), threads=threads)
    engine.warm_up()

    def time_prompt(prompt: list[int]) -> float:
        started = time.perf_counter()
        for step in engine.prefill(prompt, range(-(-len(prompt) // 16))):
            if step.logits is not None:
                sample(step.logits, SamplingParams(), len(prompt), ())
        return (time.perf_counter() - started) * 1e3

    return time_prompt
