"""What a failure costs: from the fault to the first delta and to the end, beside the bare run of the same request.

Every case kills or stops one worker process, or cuts its host off, at a known moment of one request. Two pairs of
workers, so that there is somewhere to go; the spans come from the request's own journal. With the paced engine (the
default) the time of prefill and steps is set, so that what is measured is the fail-over and not the cores of this
machine. For the cuts each pair has a host of its own: network namespaces, blocks over TCP. Then half of the workers are
killed under load, and what the other half completes is compared with what it completes alone. The last row says how
late leases are renewed by a pair that is full (``bench/renewals.py``).
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bench.half_killed import measure_half_killed
from bench.hosts import Hosts, hosts
from bench.kills import Seen, check, publishing_spans, read
from bench.process_cluster import ProcessCluster
from bench.renewals import COLUMNS as RENEWAL_COLUMNS
from bench.renewals import measure_renewals
from bench.report import Report, Row, Target, finish, make_target, make_unmeasured
from cluster.config import load
from cluster.core.attempts import Phase
from kvstore.core.messages import GenerationSpec
from kvstore.errors import EnvironmentProblem
from kvstore.net.host import boottime_ns
from workers.paced import expected_tokens

DISPATCH_MS_MAX = 150.0
INTERRUPTED_MS_MAX = 300.0
"""Also what may follow the end of a lease."""
NUM_PROMPT_TOKENS = 200
NUM_TOKENS = 40
MOMENT_DEADLINE_S = 20.0
SETTINGS = (
    "workers.engine=paced",
    "workers.paced.step_ms=10",
    "workers.paced.prefill_ms_per_token=1",
    "workers.prefill.replicas=2",
    "workers.decode.replicas=2",
    "workers.prefill.pool_blocks=128",
    "workers.decode.pool_blocks=128",
    "max_model_len=1024",
    "kv.host_bytes=256MiB",
    "attempts.cluster_retry_tokens_per_s=1000",
)
COLUMNS = ("case", "ending", "detect_ms", "fence_ms", "dispatch_ms", "first_delta_ms", "end_ms", "bare_first_delta_ms")

Moment = Literal["prefilling", "computed", "delivered"]


@dataclass(frozen=True, slots=True)
class Case:
    """A fault: who, how and when. ``computed``: tokens are at the ingress, none with the client."""

    name: str
    role: Literal["prefill", "decode"]
    moment: Moment
    number: signal.Signals | None
    """None: its host is cut off instead."""


CASES = (
    Case("kill P, prefill", "prefill", "prefilling", signal.SIGKILL),
    Case("kill D, prefill", "decode", "prefilling", signal.SIGKILL),
    Case("kill D, computed", "decode", "computed", signal.SIGKILL),
    Case("stop P, prefill", "prefill", "prefilling", signal.SIGSTOP),
    Case("kill D, delivered", "decode", "delivered", signal.SIGKILL),
    Case("stop D, delivered", "decode", "delivered", signal.SIGSTOP),
)
CUTS = (
    Case("cut P, prefill", "prefill", "prefilling", None),
    Case("cut D, prefill", "decode", "prefilling", None),
    Case("cut D, delivered", "decode", "delivered", None),
)
CUT = "cut"


def run_failover(
    *, quick: bool, json_path: Path | None, plot_path: Path | None, check: bool, seed: int, settings: Sequence[str]
) -> int:
    """Runs every case, prints the table and returns the exit status."""
    report = Report.start("failover", seed=seed)
    asyncio.run(_measure(report, quick=quick, settings=settings))
    report.show("Fail-over, milliseconds after the fault (worst of the repetitions)", COLUMNS, worst(report.rows))
    renewals = [row for row in report.rows if row["case"] == "renewal"]
    report.show("Renewal of leases under full load", RENEWAL_COLUMNS, renewals)
    if plot_path is not None:
        from bench.failover_plot import draw

        draw(worst(report.rows), plot_path)
    return finish(report, json_path=json_path, check=check)


async def _measure(report: Report, *, quick: bool, settings: Sequence[str]) -> None:
    from workers.model import hub

    config = load(None, [*SETTINGS, *settings])
    model = hub.pull(config.model)
    repetitions = 2 if quick else 5
    report.notes.append(f"engine {config.workers.engine}, lease {config.attempts.lease_ms} ms, two pairs of workers")
    report.rows += await _run(ProcessCluster(config, model), CASES, repetitions, seed=report.seed)
    report.targets += make_targets(report.rows, lease_ms=config.attempts.lease_ms)
    try:
        with hosts(2) as switch:
            places = {f"{role}-{n}": switch.hosts[n].place for n in range(2) for role in ("prefill", "decode")}
            cluster = ProcessCluster(config, model, address=switch.address, places=places)
            cuts = await _run(cluster, CUTS, repetitions, seed=report.seed, switch=switch)
    except EnvironmentProblem as problem:
        report.targets += [
            make_unmeasured(id, unit="ms", at_least=1.0, reason=str(problem))
            for id in ("cut_before_first_delta_less_reprefill", "cut_after_first_delta_to_event")
        ]
    else:
        report.rows += cuts
        report.targets += make_cut_targets(cuts, lease_ms=config.attempts.lease_ms)
    half = await measure_half_killed(config, model, quick=quick, seed=report.seed)
    report.rows += half.rows
    report.targets += half.targets
    row, target = await measure_renewals(model, quick=quick, seed=report.seed)
    report.rows.append(row)
    report.targets.append(target)


async def _run(
    cluster: ProcessCluster, cases: Sequence[Case], repetitions: int, *, seed: int, switch: Hosts | None = None
) -> list[Row]:
    try:
        await cluster.start()
        runner = Runner(cluster, seed, switch)
        await runner.bare()
        return [await runner.fault(case) for _ in range(repetitions) for case in cases]
    finally:
        await cluster.close()


class Runner:
    """Runs one request at a time on a cluster; every prompt is new, so that nothing of it is cached."""

    def __init__(self, cluster: ProcessCluster, seed: int, switch: Hosts | None = None) -> None:
        self._cluster = cluster
        self._switch = switch
        self._seed = seed
        self._number = 0

    async def bare(self) -> tuple[float, float]:
        """Returns (first delta, end) of an undisturbed run, in milliseconds after its submission."""
        seen, started_ns = self._next(stream=True), boottime_ns()
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        await read(await self._cluster.submit(seen.spec, seen.request_id), seen)
        assert seen.ending == "finished" and seen.first_delta_s and seen.ended_s, (seen, started_ns)
        await self._cluster.at_rest()
        return (seen.first_delta_s - started_s) * 1e3, (seen.ended_s - started_s) * 1e3

    async def fault(self, case: Case) -> Row:
        """Runs one request into a fault; returns a row of the report."""
        cluster, loop = self._cluster, asyncio.get_running_loop()
        bare_first_ms, bare_end_ms = await self.bare()
        seen = self._next(stream=case.moment != "computed")
        generation = await cluster.submit(seen.spec, seen.request_id, stream=seen.stream)
        machine = cluster.backend._running[seen.request_id].machine
        crossed = asyncio.Event()

        def on_delta(now: Seen) -> None:
            if len(now.tokens) >= 5:
                crossed.set()

        reading = asyncio.ensure_future(read(generation, seen, on_delta=on_delta))
        async with asyncio.timeout(MOMENT_DEADLINE_S):
            if case.moment == "delivered":
                await crossed.wait()
            wanted = Phase.PREFILLING if case.moment == "prefilling" else None
            while wanted is not None and machine.phase is not wanted:
                await asyncio.sleep(0.001)
            while case.moment == "computed" and (machine.current is None or machine.current.num_received < 5):
                await asyncio.sleep(0.001)
        assert machine.current is not None
        victim = machine.current.workers[case.role].worker_id
        fault_s, fault_ns = loop.time(), boottime_ns() - machine.admitted_ns
        await self._break(case, victim, reading)
        assert seen.ended_s is not None
        how = CUT if case.number is None else case.number.name
        row: Row = {"case": case.name, "moment": case.moment, "signal": how, "ending": seen.ending}
        row |= {"end_ms": (seen.ended_s - fault_s) * 1e3, "num_attempts": len(machine.attempts)}
        row |= {"bare_first_delta_ms": bare_first_ms, "bare_end_ms": bare_end_ms}
        if seen.num_restarts and seen.first_delta_s is not None:
            row["first_delta_ms"] = (seen.first_delta_s - fault_s) * 1e3
        await self._mend(case, victim)
        await cluster.wait_connected()
        await cluster.at_rest()
        record = await cluster.backend.request_record(seen.request_id, tenant="t")
        assert record is not None
        if self._cluster.config.workers.engine == "paced":
            check(seen, record, expected_tokens(seen.spec.prompt_token_ids, NUM_TOKENS, cluster.vocab_size))
        return {name: _rounded(value) for name, value in (row | _spans(record, fault_ns)).items()}

    async def _break(self, case: Case, victim: str, reading: asyncio.Future[Seen]) -> None:
        """Lets the fault happen and waits for the end of the answer."""
        if case.number is not None:
            self._cluster.kill(victim, case.number)
            await reading
            return
        assert self._switch is not None
        place = self._cluster.places[victim]
        with self._switch.broken("cut", next(host for host in self._switch.hosts if host.place == place)):
            await reading

    async def _mend(self, case: Case, victim: str) -> None:
        """A process is replaced once it is gone; a host that was cut off is back already."""
        if case.number is None:
            return
        if case.number is signal.SIGSTOP:
            self._cluster.kill(victim)
        while not self._cluster.lives[victim].is_gone:
            await asyncio.sleep(0.005)
        await self._cluster.replace(victim)

    def _next(self, *, stream: bool) -> Seen:
        self._number += 1
        start = self._seed * 7919 + self._number * 104729
        prompt = tuple(10 + (start + i * 31) % (self._cluster.vocab_size - 10) for i in range(NUM_PROMPT_TOKENS))
        return Seen(f"f{self._number}", GenerationSpec(prompt_token_ids=prompt, max_tokens=NUM_TOKENS), stream)


def _spans(record: dict[str, Any], fault_ns: int) -> Row:
    """Returns how long after the fault each step of the fail-over took, from the journal; in milliseconds."""
    entries = record["events"]
    lost_ns = next(entry["at_ns"] for entry in entries if entry["event"] == "attempt_ended")
    row: Row = {"detect_ms": (lost_ns - fault_ns) / 1e6}
    again = [e["at_ns"] for e in entries if e["event"] == "dispatched" and (e["epoch"], e["role"]) == (2, "prefill")]
    if again:
        fenced_ns = publishing_spans(record)[0][1]
        row["fence_ms"] = (fenced_ns - lost_ns) / 1e6
        row["dispatch_ms"] = (again[0] - fenced_ns) / 1e6
        row["fault_to_dispatch_ms"] = (again[0] - fault_ns) / 1e6
    return row


def worst(rows: Sequence[Row]) -> list[Row]:
    """Returns one row per case: the repetition that took longest to its end."""
    of_case = [[row for row in rows if row["case"] == case.name] for case in (*CASES, *CUTS)]
    return [max(found, key=lambda row: row["end_ms"]) for found in of_case if found]


def make_targets(rows: Sequence[Row], *, lease_ms: int) -> list[Target]:
    """Compares the worst of each kind of case with what was asked for."""

    early = [row for row in rows if row["moment"] != "delivered"]
    late = [row for row in rows if row["moment"] == "delivered"]
    killed, stopped = "SIGKILL", "SIGSTOP"
    assert all(row["ending"] == "finished" and row["num_attempts"] == 2 for row in early), "a retry did not finish"
    assert all(row["ending"] == "interrupted" and row["num_attempts"] == 1 for row in late), "a second run began"
    waited = [row["first_delta_ms"] - row["bare_first_delta_ms"] for row in early if row["signal"] == stopped]
    return [
        _limit(
            "kill_before_first_delta_to_dispatch",
            max(row["fault_to_dispatch_ms"] for row in early if row["signal"] == killed),
            DISPATCH_MS_MAX,
        ),
        _limit("stop_before_first_delta_less_reprefill", max(waited), lease_ms + INTERRUPTED_MS_MAX),
        _limit(
            "kill_after_first_delta_to_event",
            max(row["end_ms"] for row in late if row["signal"] == killed),
            INTERRUPTED_MS_MAX,
        ),
        _limit(
            "stop_after_first_delta_to_event",
            max(row["end_ms"] for row in late if row["signal"] == stopped),
            lease_ms + INTERRUPTED_MS_MAX,
        ),
    ]


def make_cut_targets(rows: Sequence[Row], *, lease_ms: int) -> list[Target]:
    """Compares the worst of each kind of cut with what was asked for."""
    early = [row for row in rows if row["moment"] != "delivered"]
    late = [row for row in rows if row["moment"] == "delivered"]
    assert all(row["ending"] == "finished" and row["num_attempts"] == 2 for row in early), "a retry did not finish"
    assert all(row["ending"] == "interrupted" and row["num_attempts"] == 1 for row in late), "a second run began"
    waited = [row["first_delta_ms"] - row["bare_first_delta_ms"] for row in early]
    at_most = lease_ms + INTERRUPTED_MS_MAX
    return [
        _limit("cut_before_first_delta_less_reprefill", max(waited), at_most),
        _limit("cut_after_first_delta_to_event", max(row["end_ms"] for row in late), at_most),
    ]


def _limit(id: str, ours: float, at_most: float) -> Target:
    return make_target(id, ours=ours, reference=at_most, unit="ms", at_least=1.0, smaller_is_better=True)


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value
