"""``kopir bench``: one command per bench. Each prints a table, and with ``--json FILE`` writes the same as JSON.

Benches import what they need when they are called, so that the help stays fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

QuickOption = Annotated[bool, typer.Option("--quick", help="Fewer sizes and repetitions; figures are rougher.")]
JsonFileOption = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the results as JSON.")]
PlotOption = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw the curve as PNG.")]
CheckOption = Annotated[bool, typer.Option("--check", help="Exit status 1 when a target is not ok.")]
SeedOption = Annotated[int, typer.Option("--seed", metavar="N", help="Seed of the contents that are moved.")]

app = typer.Typer(
    add_completion=False,
    help="Measure this machine: what Kopir reaches, beside references from the same run.",
    no_args_is_help=True,
    epilog="Example: kopir bench transfer --quick",
)


@app.callback()
def _bench() -> None:
    """Keeps the commands a group, also while there is only one."""


@app.command(epilog="Example: kopir bench transfer --json transfer.json --plot transfer.png")
def transfer(
    quick: QuickOption = False,
    json_path: JsonFileOption = None,
    plot: PlotOption = None,
    check: CheckOption = False,
    seed: SeedOption = 1,
    peers: Annotated[
        bool, typer.Option("--peers", help="Also NIXL, Mooncake and Ray objects (make bench-peers first).")
    ] = False,
) -> int:
    """Measure block transfer by size, with and without verification, against memcpy and the digest alone."""
    from bench.transfer import run_transfer

    return run_transfer(quick=quick, json_path=json_path, plot_path=plot, check=check, seed=seed, has_peers=peers)


@app.command(epilog="Example: kopir bench serve --json serve.json")
def serve(
    quick: QuickOption = False,
    json_path: JsonFileOption = None,
    check: CheckOption = False,
    seed: SeedOption = 1,
    url: Annotated[str | None, typer.Option("--url", metavar="URL", help="Measure this endpoint instead.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Configuration of the cluster; repeatable.")
    ] = None,
) -> int:
    """Measure time to first token over HTTP and its parts, against calling the engine directly."""
    from bench.serve import run_serve

    return run_serve(quick=quick, json_path=json_path, check=check, seed=seed, url=url, settings=settings or [])


@app.command(epilog="Example: kopir bench engine --peers vllm --json engine.json")
def engine(
    quick: QuickOption = False,
    json_path: JsonFileOption = None,
    check: CheckOption = False,
    seed: SeedOption = 1,
    peers: Annotated[
        str | None,
        typer.Option(
            "--peers", metavar="NAMES", help="vllm, transformers, both with a comma, or all (make bench-peers first)."
        ),
    ] = None,
    serving: Annotated[bool, typer.Option(help="Also start servers: start to ready, pair against combined.")] = True,
) -> int:
    """Measure prefill, decode, cached prompts, memory and start, beside vLLM and transformers."""
    from bench.engine import run_engine

    return run_engine(quick=quick, json_path=json_path, check=check, seed=seed, peers=peers, serving=serving)


@app.command(epilog="Example: kopir bench kernels --json kernels.json")
def kernels(
    quick: QuickOption = False,
    json_path: JsonFileOption = None,
    check: CheckOption = False,
    seed: SeedOption = 1,
) -> int:
    """Measure the layout checker on the host beside one copy and one digest of the same 64 MiB."""
    from bench.kernels import run_kernels

    return run_kernels(quick=quick, json_path=json_path, check=check, seed=seed)


@app.command(epilog="Example: kopir bench tiers --json tiers.json")
def tiers(
    quick: QuickOption = False,
    json_path: JsonFileOption = None,
    check: CheckOption = False,
    seed: SeedOption = 1,
    folder: Annotated[
        Path | None,
        typer.Option("--folder", metavar="DIR", help="Where the disk tier lies: 5 GiB. Default: temporary."),
    ] = None,
) -> int:
    """Measure a long prompt cold, from the host tier and from the disk, and the recovery of a full disk tier."""
    from bench.store_tiers import run_tiers

    return run_tiers(quick=quick, json_path=json_path, check=check, seed=seed, folder=folder)


@app.command(epilog="Example: kopir bench failover --json failover.json --check")
def failover(
    quick: QuickOption = False,
    json_path: JsonFileOption = None,
    plot: PlotOption = None,
    check: CheckOption = False,
    seed: SeedOption = 1,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Configuration of the cluster; repeatable.")
    ] = None,
) -> int:
    """Measure what a killed or stopped worker costs a request, before and after its first delta."""
    from bench.failover import run_failover

    return run_failover(
        quick=quick, json_path=json_path, plot_path=plot, check=check, seed=seed, settings=settings or []
    )


@app.command(epilog="Example: kopir bench store --peers --json store.json")
def store(
    quick: QuickOption = False,
    json_path: JsonFileOption = None,
    check: CheckOption = False,
    seed: SeedOption = 1,
    peers: Annotated[bool, typer.Option("--peers", help="Also Mooncake Store (make bench-peers first).")] = False,
) -> int:
    """Measure put, get and exists of blocks, a verified local hit, and memory and look-ups of a million blocks."""
    from bench.store import run_store

    return run_store(quick=quick, json_path=json_path, check=check, seed=seed, has_peers=peers)


@app.command(epilog="Example: kopir bench hitrate --trace trace.jsonl --capacity 1000 --capacity 30000")
def hitrate(
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="JSONL with hash_ids per prompt; a sample without.")
    ] = None,
    capacities: Annotated[
        list[int] | None, typer.Option("--capacity", metavar="BLOCKS", help="Size of the tier; repeatable.")
    ] = None,
    json_path: JsonFileOption = None,
    check: CheckOption = False,
) -> int:
    """Replay a trace: prefix hits by LRU, S3-FIFO, ARC, our policy and the offline optimum."""
    from bench.hitrate import run_hitrate

    return run_hitrate(trace=trace, capacities=capacities or [], json_path=json_path, check=check)


@app.command(epilog="Example: kopir bench routing --trace trace.jsonl --workers 2 --workers 4 --check")
def routing(
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="JSONL with hash_ids per prompt; a sample without.")
    ] = None,
    workers: Annotated[
        list[int] | None, typer.Option("--workers", metavar="N", help="Prefill and decode workers; repeatable.")
    ] = None,
    device_blocks: Annotated[int, typer.Option("--device-blocks", help="Blocks of each worker's own pool.")] = 2048,
    host_blocks: Annotated[int, typer.Option("--host-blocks", help="Blocks of each worker's host slab.")] = 8192,
    prefill_ms_per_token: Annotated[
        float, typer.Option("--prefill-ms-per-token", help="Pace of the simulated workers.")
    ] = 1.0,
    json_path: JsonFileOption = None,
    check: CheckOption = False,
    seed: SeedOption = 1,
) -> int:
    """Replay a trace through the router: tokens in the chosen worker's own tiers, bytes moved, spread of load."""
    from bench.routing import run_routing

    return run_routing(
        trace=trace,
        workers=workers or [],
        device_blocks=device_blocks,
        host_blocks=host_blocks,
        prefill_ms_per_token=prefill_ms_per_token,
        seed=seed,
        json_path=json_path,
        check=check,
    )


@app.command(epilog="Example: kopir bench sim --seeds 3000 --processes 2 --json sim.json")
def sim(
    seeds: Annotated[int, typer.Option("--seeds", metavar="N", min=1, help="Seeds 0 to N.")] = 3000,
    processes: Annotated[int, typer.Option("--processes", metavar="N", min=1, help="Processes that share them.")] = 1,
    mutants: Annotated[bool, typer.Option(help="Also count the seeds until each planted bug is caught.")] = True,
    json_path: JsonFileOption = None,
    check: CheckOption = False,
) -> int:
    """Run many seeds of the simulator: violations, cells reached, events per second, planted bugs."""
    from bench.sim import run_sim

    return run_sim(num_seeds=seeds, processes=processes, mutants=mutants, json_path=json_path, check=check)


@app.command(epilog="Example: kopir bench relay --json relay.json --check")
def relay(
    quick: QuickOption = False,
    json_path: JsonFileOption = None,
    check: CheckOption = False,
    seed: SeedOption = 1,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Configuration of the cluster; repeatable.")
    ] = None,
) -> int:
    """Measure the way of a token to the client's socket: tokens/s, CPU per 1,000 tokens, TTFT, 500 slow readers."""
    from bench.relay import run_relay

    return run_relay(quick=quick, json_path=json_path, check=check, seed=seed, settings=settings or [])
