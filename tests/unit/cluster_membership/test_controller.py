"""The controller over processes that die, hang and come back only at the second try. No Ray: its calls are played."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from msgspec import structs
from ray.exceptions import ActorDiedError, ActorUnavailableError

from cluster.actors import calls, controller, ingress, store, worker
from cluster.view import ClusterPlan, ClusterView, DrainReport, StoreAddress, StoreSpec, WorkersWanted
from kvstore.core.identity import Fingerprint
from kvstore.errors import EnvironmentProblem, FatalError
from workers.spec import IngressAddress, WorkerJoin, WorkerSpec

SETTLE_S = 10.0
FINGERPRINT = Fingerprint(
    weights_digest="w",
    tokenizer_digest="t",
    chat_template_digest="c",
    model_type="llama",
    num_layers=1,
    hidden_size=8,
    num_attention_heads=1,
    num_kv_heads=1,
    head_size=8,
    rope="r",
    kv_dtype="float32",
    block_tokens=16,
    kv_layout="layer,kv,head,token,dim",
    numerics="n",
).to_dict()


def unavailable() -> ActorUnavailableError:
    return ActorUnavailableError("connection reset", None)


class Method:
    """``method.remote(...)`` as Ray has it; the error of the actor's ``fails[name]`` comes first."""

    def __init__(self, actor: PlayedActor, name: str, play: Callable[..., Awaitable[Any]]) -> None:
        self._actor, self._name, self._play = actor, name, play

    def remote(self, *arguments: Any) -> asyncio.Future[Any]:
        async def call() -> Any:
            self._actor.calls.append((self._name, *arguments))
            if self._name in self._actor.fails:
                raise self._actor.fails[self._name]
            return await self._play(*arguments)

        return asyncio.ensure_future(call())


class PlayedActor:
    """One life of a process behind a handle."""

    def __init__(self, spec: Any = None, _secret: bytes = b"") -> None:
        self.spec = spec
        self.calls: list[tuple[Any, ...]] = []
        self.fails: dict[str, BaseException] = {}
        self.broken = asyncio.Event()
        """The call that watches breaks off, without a death."""
        self.dead = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("play_"):
            return self.play_any
        return Method(self, name, getattr(self, f"play_{name.strip('_')}"))

    async def play_any(self, *_: Any) -> None:
        if self.dead.is_set():
            raise ActorDiedError

    async def play_wait_until_stopped(self) -> None:
        ends = [asyncio.ensure_future(event.wait()) for event in (self.dead, self.broken)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        raise ActorDiedError if self.dead.is_set() else unavailable()

    async def play_start(self, *_: Any) -> Any:
        spec = self.spec
        if isinstance(spec, StoreSpec):
            return StoreAddress(incarnation=spec.incarnation, host="h", port=1, pid=1)
        return WorkerJoin(
            worker_id=spec.worker_id,
            role=spec.role,
            incarnation=spec.incarnation,
            pid=7,
            node="n",
            host_identity="h",
            kv_host="h",
            kv_port=1,
            fingerprint=FINGERPRINT,
            pool_blocks=8,
            vocab_size=10,
            max_model_len=64,
        )


class Stage:
    """The lives that the controller started, in order, and what the next ones fail at."""

    def __init__(self) -> None:
        self.lives: list[PlayedActor] = []
        self.next_fails: list[dict[str, BaseException]] = []

    def options(self, **_: Any) -> Stage:
        return self

    def remote(self, spec: Any, secret: bytes) -> PlayedActor:
        life = PlayedActor(spec, secret)
        if self.next_fails:
            life.fails = self.next_fails.pop(0)
        self.lives.append(life)
        return life


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Stage:
    """Stands for the worker processes; a restart and a look take no time."""
    stage = Stage()
    monkeypatch.setattr(worker, "WorkerActor", stage)
    monkeypatch.setattr(controller.ray, "kill", lambda actor, **_: actor.dead.set())
    monkeypatch.setattr(calls, "LOOK_AGAIN_S", 0.001)
    monkeypatch.setattr(controller, "RESTART_PAUSE_S", 0.001)
    return stage


def make_plan(**fields: Any) -> ClusterPlan:
    spec = WorkerSpec(
        worker_id="decode-0",
        role="decode",
        incarnation="template",
        node="n",
        model_path="m",
        dtype="float32",
        max_model_len=64,
        pool_blocks=8,
        threads=1,
    )
    return ClusterPlan(workers=(spec,), store=None, thread_environment={}, **fields)


ADDRESS = IngressAddress(ingress_id="ingress-0", incarnation="i0", host="h", port=1, pid=1)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(SETTLE_S):
        while not condition():
            await asyncio.sleep(0.001)


def state(process: controller.ControllerProcess) -> str:
    (view,) = process._view().workers
    return view.state


async def test_a_watch_that_breaks_off_proves_no_death(workers: Stage) -> None:
    """B3: Ray cannot reach the worker for a while; it is neither called gone nor replaced until it has died."""
    process = controller.ControllerProcess(make_plan(), b"s")
    await process.start()
    (life,) = workers.lives
    life.fails["__ray_ready__"] = unavailable()
    life.broken.set()
    await until(lambda: sum(call[0] == "__ray_ready__" for call in life.calls) >= 3)
    assert state(process) == "ready" and process._view().gone == ()
    del life.fails["__ray_ready__"]
    seen = len(life.calls)
    await until(lambda: len(life.calls) >= seen + 3)
    assert state(process) == "ready" and process._view().gone == ()
    life.dead.set()
    await until(lambda: process._view().gone == (life.spec.incarnation,))
    await until(lambda: len(workers.lives) == 2 and state(process) == "ready")


@pytest.mark.parametrize("method", ["start", "add_ingress"])
@pytest.mark.parametrize("error", [EnvironmentProblem("no memory"), TimeoutError(), unavailable(), ActorDiedError()])
async def test_a_replacement_that_does_not_come_up_is_replaced(
    workers: Stage, method: str, error: BaseException
) -> None:
    """No slot is left in ``starting`` or ``joining``, whatever went wrong on the way."""
    process = controller.ControllerProcess(make_plan(), b"s")
    await process.start()
    await process.register_ingress(ADDRESS, PlayedActor())
    workers.next_fails = [{method: error}]
    workers.lives[0].dead.set()
    await until(lambda: len(workers.lives) == 3 and state(process) == "ready")
    assert workers.lives[1].dead.is_set(), "a life that is given up may not go on"
    assert process._view().gone == tuple(life.spec.incarnation for life in workers.lives[:2])


async def test_a_first_start_that_fails_is_told(workers: Stage) -> None:
    """Nobody serves with a configuration that cannot work."""
    workers.next_fails = [{"start": EnvironmentProblem("no memory")}]
    with pytest.raises(EnvironmentProblem):
        await controller.ControllerProcess(make_plan(), b"s").start()


async def test_a_store_node_is_started_until_one_is_up(workers: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replacements fail in different ways; the third serves, and the workers hear of it."""
    stores, directories = Stage(), Stage()
    monkeypatch.setattr(store, "StoreActor", stores)
    monkeypatch.setattr(controller.directory, "DirectoryActor", directories)
    spec = StoreSpec(node="n", incarnation="t", block_bytes=1, num_blocks=1, bind_host="h", host_identity="h")
    process = controller.ControllerProcess(make_plan(), b"s")
    process._plan = ClusterPlan(workers=process._plan.workers, store=spec, thread_environment={})
    monkeypatch.setattr(process, "_start_directory", lambda: asyncio.sleep(0))
    await process.start()
    stores.next_fails = [{"start": EnvironmentProblem("no shared memory")}, {"start": ActorDiedError()}]
    stores.lives[0].dead.set()
    await until(lambda: len(stores.lives) == 4 and process._store is stores.lives[3])
    await until(lambda: ("set_store", "h", 1) in workers.lives[0].calls)


async def test_a_dead_ingress_is_forgotten_by_everybody(workers: Stage) -> None:
    """B8: workers stop dialling it; one that cannot be reached is not dead."""
    process = controller.ControllerProcess(make_plan(), b"s")
    await process.start()
    actor = PlayedActor()
    actor.fails["__ray_ready__"] = unavailable()
    await process.register_ingress(ADDRESS, actor)
    await until(lambda: len(actor.calls) >= 3)
    assert ("remove_ingress", "i0") not in workers.lives[0].calls
    actor.fails.clear()
    actor.dead.set()
    await until(lambda: ("remove_ingress", "i0") in workers.lives[0].calls)
    assert (await process.status())["ingress"] == []


@pytest.mark.parametrize("error", [ActorDiedError(), unavailable(), TimeoutError(), RuntimeError("anything")])
async def test_an_ingress_follows_the_membership_whatever_one_answer_was(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ingress whose watch ended would go on with workers that are gone."""
    monkeypatch.setattr(ingress, "CONTROLLER_RETRY_S", 0.001)
    followed = PlayedActor()
    newest = ClusterView(version=7, workers=(), gone=())

    async def watch(_: int) -> ClusterView:
        followed.fails.clear()
        return newest

    followed.play_watch = watch
    failing = PlayedActor()
    failing.fails["watch"] = error
    monkeypatch.setattr(ingress.ray, "get_actor", lambda *_, **__: followed)
    replica = object.__new__(ingress.IngressReplica)
    replica._controller = failing
    views: list[ClusterView] = []

    class App:
        view_version = 0

        def set_view(self, view: ClusterView) -> None:
            views.append(view)
            raise asyncio.CancelledError  # The test has seen enough.

    replica._ingress = App()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(replica._watch(), SETTLE_S)
    assert views == [newest]


async def test_a_drain_waits_for_every_ingress_and_for_no_dead_one(workers: Stage) -> None:
    """Each hears of it at once; the drain is over when all have nothing left, or when its time is."""
    process = controller.ControllerProcess(make_plan(), b"s")
    await process.start()
    others = {name: PlayedActor() for name in ("i0", "i1")}
    for name, actor in others.items():
        await process.register_ingress(structs.replace(ADDRESS, incarnation=name), actor)
    before = process._view().version
    heard = asyncio.ensure_future(process.watch(before))
    drain = asyncio.ensure_future(process.drain(SETTLE_S))
    view = await heard
    assert view.stops_in_s is not None and 0 < view.stops_in_s <= SETTLE_S and view.is_draining
    await process.drain_report(DrainReport(ingress="i0", version=view.version, num_open=1, busy=()))
    await process.drain_report(DrainReport(ingress="i0", version=view.version, num_open=0, busy=()))
    assert not drain.done()
    others["i1"].dead.set()
    assert await asyncio.wait_for(drain, SETTLE_S) is True
    await process.register_ingress(structs.replace(ADDRESS, incarnation="i2"), PlayedActor())
    assert await process.drain(0.01) is False


def wanted(process: controller.ControllerProcess, number: int, **fields: Any) -> WorkersWanted:
    (template,) = process._plan.workers
    specs = (structs.replace(template, **fields),) * number
    return WorkersWanted(workers=specs, thread_environment={}, num_seats=number, drain_s=SETTLE_S)


def states(process: controller.ControllerProcess) -> dict[str, str]:
    return {view.worker_id: view.state for view in process._view().workers}


async def test_scaling_down_waits_for_every_ingress_and_up_takes_back(workers: Stage) -> None:
    """F56: the one that goes is stopped once no ingress has anything on it, not before; one that leaves can stay."""
    process = controller.ControllerProcess(make_plan(), b"s")
    await process.start()
    await process.register_ingress(ADDRESS, PlayedActor())
    assert (await process.apply(wanted(process, 2))).started == ("decode-1",)
    assert states(process) == {"decode-0": "ready", "decode-1": "ready"} and process._view().num_seats == 2
    second = workers.lives[1]
    assert (await process.apply(wanted(process, 1))).leaving == ("decode-1",)
    assert states(process)["decode-1"] == "draining" and process._view().is_draining
    assert (await process.apply(wanted(process, 2))).taken_back == ("decode-1",)
    assert states(process)["decode-1"] == "ready" and not second.dead.is_set()
    await process.apply(wanted(process, 1))
    version, life = process._view().version, second.spec.incarnation
    await process.drain_report(DrainReport(ingress="i0", version=version, num_open=1, busy=(life,)))
    await process.drain_report(DrainReport(ingress="i0", version=version - 1, num_open=0, busy=()))
    assert states(process)["decode-1"] == "draining" and ("stop",) not in second.calls
    await process.drain_report(DrainReport(ingress="i0", version=version, num_open=1, busy=()))
    await until(lambda: states(process) == {"decode-0": "ready"})
    assert ("stop",) in second.calls and second.dead.is_set() and process._view().gone == (life,)
    assert ("peer_gone", life) in workers.lives[0].calls
    assert len(workers.lives) == 2, "nobody takes the place of one that was to go"


async def test_one_that_dies_while_it_leaves_is_not_replaced(workers: Stage) -> None:
    """Its slot is gone with it."""
    process = controller.ControllerProcess(make_plan(), b"s")
    await process.start()
    await process.register_ingress(ADDRESS, PlayedActor())
    await process.apply(wanted(process, 2))
    await process.apply(wanted(process, 1))
    workers.lives[1].dead.set()
    await until(lambda: states(process) == {"decode-0": "ready"})
    assert len(workers.lives) == 2 and process._view().gone == (workers.lives[1].spec.incarnation,)


@pytest.mark.parametrize("method", ["start", "add_ingress"])
@pytest.mark.parametrize("error", [EnvironmentProblem("no memory"), TimeoutError(), ActorDiedError()])
async def test_a_rollout_that_fails_changes_nothing(workers: Stage, method: str, error: BaseException) -> None:
    """F56: the old ones serve on, none of the new ones is left, not even one that had come up."""
    process = controller.ControllerProcess(make_plan(), b"s")
    await process.start()
    await process.register_ingress(ADDRESS, PlayedActor())
    workers.next_fails = [{}, {method: error}]
    with pytest.raises(FatalError, match=r"decode-2: .*(no memory|not up within|process died)"):
        await process.apply(wanted(process, 2, pool_blocks=16))
    assert states(process) == {"decode-0": "ready"} and not workers.lives[0].dead.is_set()
    assert all(life.dead.is_set() for life in workers.lives[1:]) and len(workers.lives) == 3
    assert process._view().num_seats is None
    assert (await process.apply(wanted(process, 1, pool_blocks=16))).leaving == ("decode-0",), "the next one may work"
