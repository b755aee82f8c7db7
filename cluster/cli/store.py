"""``kopir store``: the store on its own. Serve it without Ray, look at it, verify it, tidy it up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.cli.common import JsonOption, make_console, make_table, write, write_json
from kvstore.errors import BadInput, EnvironmentProblem

if TYPE_CHECKING:
    from kvstore.store.looker import StoreLooker

app = typer.Typer(
    help="The KV store on its own: serve, look, verify, tidy up.",
    no_args_is_help=True,
    epilog="Example: kopir store serve --block-bytes 368640 --set auth.cluster_secret_file=secret",
)

TIERS = ("host", "disk")
AddressOption = Annotated[
    str | None,
    typer.Option("--address", metavar="HOST:PORT", help="Store node. Default: the `kopir store serve` of this user."),
]
SecretOption = Annotated[
    Path | None, typer.Option("--secret-file", metavar="FILE", help="Secret that the node shares with its clients.")
]
TierOption = Annotated[str | None, typer.Option("--tier", metavar="TIER", help="`host` or `disk`. Default: both.")]


@app.command(epilog="Example: kopir store serve --block-bytes 368640 --port 7700 --set auth.cluster_secret_file=secret")
def serve(
    block_bytes: Annotated[
        int, typer.Option("--block-bytes", metavar="N", min=1, max=1 << 32, help="Bytes of one block.")
    ],
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML file; its sections `kv` and `auth` are used.")
    ] = None,
    host: Annotated[str, typer.Option(metavar="HOST", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="P", min=0, max=65535, help="TCP port; 0 takes any free port.")] = 0,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any key of the configuration; repeatable.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Serve one store node without Ray. Ctrl-C stops it. Its clients: `kvstore.store.client`."""
    from cluster.config import load
    from cluster.store_service import StoreRunInfo, serve_store

    def announce(info: StoreRunInfo) -> None:
        if as_json:
            write_json(
                {"host": info.host, "port": info.port, "pid": info.pid, "incarnation": info.incarnation}, indent=None
            )
        else:
            write(
                f"Kopir store is ready at {info.host}:{info.port}; look at it with `kopir store stat`; Ctrl-C stops it."
            )

    settings = load(config, overrides or ())
    return serve_store(settings, block_bytes=block_bytes, host=host, port=port, on_ready=announce)


@app.command(epilog="Example: kopir store stat --leases")
def stat(
    address: AddressOption = None,
    secret_file: SecretOption = None,
    leases: Annotated[bool, typer.Option("--leases", help="List read leases: holder, age, blocks.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show tiers, slots, tenants and, if asked, who holds read leases."""
    import msgspec

    async def ask(looker: StoreLooker) -> dict[str, Any]:
        facts: dict[str, Any] = msgspec.to_builtins(await looker.stat())
        del facts["n"]
        if leases:
            # An array in a message, names for people and scripts.
            facts["leases_held"] = [
                {name: getattr(lease, name) for name in lease.__struct_fields__}
                for lease in (await looker.leases()).leases
            ]
        return facts

    facts = _run(address, secret_file, ask)
    if as_json:
        write_json(facts)
        return
    console = make_console()
    names = ["name", "state", "used_blocks", "blocks", "quarantined_blocks", "bytes", "why"]
    console.print(make_table("Tiers", names, [[tier.get(name) for name in names] for tier in facts["tiers"]]))
    names = ["free", "used", "writing", "quarantined", "total", "pinned", "leases", "clients", "block_bytes"]
    console.print(make_table("Slab", names, [[facts[name] for name in names]]))
    tenants = [[tenant, tiers.get("host", 0), tiers.get("disk", 0)] for tenant, tiers in facts["tenants"].items()]
    console.print(make_table("Tenants (bytes)", ["tenant", "host", "disk"], tenants))
    if leases:
        names = ["lease_id", "holder", "pid", "age_ms", "left_ms", "num_blocks"]
        held = [[lease[name] for name in names] for lease in facts["leases_held"]]
        console.print(make_table("Read leases", names, held))


@app.command(epilog="Example: kopir store ls --tier disk --json")
def ls(
    address: AddressOption = None,
    secret_file: SecretOption = None,
    tier: TierOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the committed blocks: hash, slot, generation, digest, tenant."""
    tiers = _tiers(tier)

    async def ask(looker: StoreLooker) -> list[dict[str, Any]]:
        rows = []
        for name in tiers:
            async for block in looker.blocks(name):
                rows.append(
                    {
                        "tier": name,
                        "hash": block.block_hash.hex(),
                        "slot": block.slot,
                        "generation": block.generation,
                        "digest": block.digest.hex(),
                        "tenant": block.tenant,
                    }
                )
        return rows

    rows = _run(address, secret_file, ask)
    if as_json:
        write_json({"blocks": rows})
        return
    for row in rows:
        place = f"{row['tier']:4} {row['slot']:7} {row['generation']:9}"
        write(f"{place} {row['hash']} {row['digest']} {row['tenant'] or '-'}")


@app.command(epilog="Example: kopir store verify --tier disk")
def verify(
    address: AddressOption = None,
    secret_file: SecretOption = None,
    tier: TierOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read every block again: compare its digest, and check its content where a client named its layout.

    Finds NaN and infinity, memory nobody wrote, another order, swapped blocks and every other change of a byte. Damaged
    blocks are removed; exit status 1 if there was one.
    """
    tiers = _tiers(tier)

    async def ask(looker: StoreLooker) -> list[dict[str, Any]]:
        rows = []
        for name in tiers:
            row: dict[str, Any] = {"tier": name, "checked": 0, "content_checked": 0, "skipped": 0}
            damaged, violations = [], []
            async for part in looker.verify(name):
                row["checked"] += part.num_checked
                row["content_checked"] += part.num_content
                row["skipped"] += part.num_skipped
                damaged += [{"hash": ref.block_hash.hex(), "slot": ref.slot} for ref in part.damaged]
                violations += [_violation_facts(violation) for violation in part.violations]
            rows.append(row | {"damaged": damaged, "violations": violations})
        return rows

    rows = _run(address, secret_file, ask)
    if as_json:
        write_json({"tiers": rows})
    else:
        for row in rows:
            write(
                f"{row['tier']}: {row['checked']} blocks read, {row['content_checked']} of known layout, "
                f"{len(row['damaged'])} damaged, {row['skipped']} skipped"
            )
            for found in row["violations"]:
                write(f"  {_violation_line(found)}")
    if any(row["damaged"] for row in rows):
        raise typer.Exit(1)


def _violation_facts(violation: Any) -> dict[str, Any]:
    """Returns an array of a message as names for people and scripts."""
    facts = {name: getattr(violation, name) for name in violation.__struct_fields__}
    facts["hash"] = facts.pop("block_hash").hex()
    facts["kv"] = None if violation.kv is None else ("key", "value")[violation.kv]
    return facts


def _violation_line(found: dict[str, Any]) -> str:
    line = f"{found['kind']}: slot {found['slot']} {found['hash']}"
    if found["offset_bytes"] is not None:
        line += f" offset {found['offset_bytes']}"
    if found["layer"] is not None:
        line += f" layer {found['layer']} {found['kv']} head {found['kv_head']} token {found['token']}"
    return line + f" ({found['count']})" + (f": {found['detail']}" if found["detail"] else "")


@app.command(epilog="Example: kopir store gc")
def gc(address: AddressOption = None, secret_file: SecretOption = None, as_json: JsonOption = False) -> None:
    """End overdue leases and writes, and put quarantined disk slots back into use."""
    import msgspec

    async def ask(looker: StoreLooker) -> dict[str, Any]:
        facts: dict[str, Any] = msgspec.to_builtins(await looker.collect_garbage())
        del facts["n"]
        return facts

    facts = _run(address, secret_file, ask)
    if as_json:
        write_json(facts)
    else:
        write(", ".join(f"{name.replace('_', ' ')}: {number}" for name, number in facts.items()))


def _tiers(tier: str | None) -> tuple[Any, ...]:
    if tier is not None and tier not in TIERS:
        raise BadInput("--tier", tier, "expected host or disk")
    return TIERS if tier is None else (tier,)


def _run(address: str | None, secret_file: Path | None, ask: Callable[[StoreLooker], Awaitable[Any]]) -> Any:
    """Connects, asks, returns the answer. Raises: EnvironmentProblem if there is no node or no secret."""
    from cluster.store_service import find_store
    from kvstore.store.looker import look_at

    found = find_store() if address is None else None
    if address is None and found is None:
        raise EnvironmentProblem("no running store found; start `kopir store serve`, or name a node with --address")
    if found is not None:
        host, port, secret_file = found.host, found.port, secret_file or Path(found.secret_file)
    else:
        assert address is not None
        host, port = _parse_address(address)
    if secret_file is None:
        raise BadInput("--secret-file", None, "needed to prove who asks, when the node is named by --address")
    secret = _read_secret(secret_file)

    async def run() -> Any:
        async with look_at(host, port, secret=secret) as looker:
            return await ask(looker)

    return asyncio.run(run())


def _parse_address(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise BadInput("--address", address, "expected HOST:PORT")
    return host.strip("[]"), int(port)


def _read_secret(path: Path) -> bytes:
    from cluster.config import load
    from cluster.secret import cluster_secret

    return cluster_secret(load(None, [], values={"auth.cluster_secret_file": str(path)}))
