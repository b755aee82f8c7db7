"""Hosts that the network cuts off: network namespaces on a switch that loses frames without a word.

Each host has a prefill and a decode worker; the ingress is a host as well. Nothing tells the ingress of a cut: only
leases do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from bench.hosts import Host, Hosts, hosts
from bench.kills import Seen, check, read
from bench.process_cluster import ProcessCluster
from cluster.config import load
from cluster.core.attempts import Phase
from kvstore.core.messages import GenerationSpec
from kvstore.errors import EnvironmentProblem
from workers.paced import expected_tokens

pytestmark = [pytest.mark.ucx, pytest.mark.asyncio(loop_scope="module")]

LEASE_MS = 1500
NUM_TOKENS = 60
MOMENT_DEADLINE_S = 20.0
SETTINGS = (
    "workers.engine=paced",
    "workers.paced.step_ms=30",
    "workers.paced.prefill_ms_per_token=1",
    "workers.prefill.replicas=2",
    "workers.decode.replicas=2",
    "workers.prefill.pool_blocks=64",
    "workers.decode.pool_blocks=64",
    "max_model_len=512",
    "kv.host_bytes=64MiB",
    "attempts.cluster_retry_tokens_per_s=1000",
    f"attempts.lease_ms={LEASE_MS}",
)


@pytest.fixture(scope="module")
def switch() -> Iterator[Hosts]:
    """Five hosts beside this one: two for one cluster, three for the other."""
    with ExitStack() as stack:
        try:
            made = stack.enter_context(hosts(5))
        except EnvironmentProblem as problem:
            pytest.skip(f"no network namespaces here: {problem}")
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def twins(switch: Hosts, model_folder: Path) -> AsyncIterator[Net]:
    """Two hosts with all that a request needs, each."""
    async with Net(switch, {"prefill-0": 0, "decode-0": 0, "prefill-1": 1, "decode-1": 1}, model_folder) as net:
        yield net


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def far_pair(switch: Hosts, model_folder: Path) -> AsyncIterator[Net]:
    """The blocks of one pair cross the network; the other pair shares a third host."""
    async with Net(switch, {"prefill-0": 2, "decode-0": 3, "prefill-1": 4, "decode-1": 4}, model_folder) as net:
        yield net


class Net:
    """A cluster over hosts, and one request after another."""

    def __init__(self, switch: Hosts, layout: dict[str, int], model: Path) -> None:
        self.switch = switch
        self.host_of = {name: switch.hosts[number] for name, number in layout.items()}
        self.cluster = ProcessCluster(
            load(None, SETTINGS),
            model,
            address=switch.address,
            places={name: host.place for name, host in self.host_of.items()},
        )
        self._number = 0

    async def __aenter__(self) -> Net:
        await self.cluster.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.cluster.close()

    def host_of_role(self, seen: Seen, role: str) -> Host:
        current = self.machine(seen).current
        assert current is not None
        return self.host_of[current.workers[role].worker_id]

    def machine(self, seen: Seen):
        return self.cluster.backend._running[seen.request_id].machine

    async def ask(self, *, num_prompt: int = 200, stream: bool = True) -> tuple[Seen, asyncio.Future[Seen]]:
        self._number += 1
        prompt = tuple(
            10 + (self._number * 104729 + i * 31) % (self.cluster.vocab_size - 10) for i in range(num_prompt)
        )
        spec = GenerationSpec(prompt_token_ids=prompt, max_tokens=NUM_TOKENS)
        seen = Seen(f"n{self._number}", spec, stream=stream)
        generation = await self.cluster.submit(spec, seen.request_id, stream=stream)
        return seen, asyncio.ensure_future(read(generation, seen))

    async def until_prefilling(self, seen: Seen) -> None:
        async with asyncio.timeout(MOMENT_DEADLINE_S):
            while self.machine(seen).phase is not Phase.PREFILLING:
                await asyncio.sleep(0.001)

    async def until_delivered(self, seen: Seen, num_tokens: int) -> None:
        async with asyncio.timeout(MOMENT_DEADLINE_S):
            while len(seen.tokens) < num_tokens:
                await asyncio.sleep(0.001)

    async def check(self, seen: Seen) -> None:
        """Asserts what every client may rely on, and that every host is at rest once it is back."""
        await self.cluster.wait_connected()
        await self.cluster.at_rest()
        record = await self.cluster.backend.request_record(seen.request_id, tenant="t")
        assert record is not None
        check(seen, record, expected_tokens(seen.spec.prompt_token_ids, NUM_TOKENS, self.cluster.vocab_size))


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("fault", ["cut", "mute", "deaf"])
async def test_a_host_cut_off_before_the_first_delta(twins: Net, fault: str, role: str) -> None:
    """One complete answer from the other host, after the lease of the cut one; it never publishes again."""
    # A host that can still send would deliver its tokens: whoever wants all at once has got nothing yet.
    seen, reading = await twins.ask(stream=fault != "deaf")
    await twins.until_prefilling(seen)
    with twins.switch.broken(fault, twins.host_of_role(seen, role)):
        await reading
    assert (seen.ending, seen.num_restarts) == ("finished", 1), seen
    await twins.check(seen)


@pytest.mark.parametrize("fault", ["cut", "mute", "deaf"])
async def test_a_decode_host_cut_off_after_the_first_delta(twins: Net, fault: str) -> None:
    """The client is told that its answer was cut; nothing runs again; the host gives its blocks back."""
    seen, reading = await twins.ask()
    await twins.until_delivered(seen, 5)
    with twins.switch.broken(fault, twins.host_of_role(seen, "decode")):
        await reading
    assert (seen.ending, seen.num_restarts) == ("interrupted", 0), seen
    assert 5 <= len(seen.tokens) < NUM_TOKENS
    await twins.check(seen)


@pytest.mark.parametrize("fault", ["cut", "mute", "deaf"])
async def test_a_cut_shorter_than_the_lease_is_not_noticed(twins: Net, fault: str) -> None:
    """The stream waits and goes on: no other attempt, no token lost or doubled."""
    seen, reading = await twins.ask()
    await twins.until_delivered(seen, 5)
    with twins.switch.broken(fault, twins.host_of_role(seen, "decode")):
        await asyncio.sleep(LEASE_MS / 1e3 / 5)
    await reading
    assert (seen.ending, seen.num_restarts) == ("finished", 0), seen
    await twins.check(seen)


async def test_workers_that_do_not_hear_each_other(far_pair: Net) -> None:
    """Both are alive and leased: the hand-over fails by its deadline, and another pair answers."""
    while True:
        seen, reading = await far_pair.ask()
        await far_pair.until_prefilling(seen)
        workers = {ref.worker_id for ref in far_pair.machine(seen).current.workers.values()}
        if workers == {"prefill-0", "decode-0"}:
            break
        await reading
    with far_pair.switch.broken("apart", *far_pair.switch.hosts[2:4]):
        await reading
    assert (seen.ending, seen.num_restarts) == ("finished", 1), seen
    await far_pair.check(seen)


async def test_a_slow_link_is_not_a_dead_one(far_pair: Net) -> None:
    """Blocks that take a second on their way are waited for: the first attempt answers."""
    with far_pair.switch.slow(far_pair.switch.hosts[2], "30mbit"):
        for _ in range(3):
            seen, reading = await far_pair.ask()
            await reading
            assert (seen.ending, seen.num_restarts) == ("finished", 0), seen
            await far_pair.check(seen)
