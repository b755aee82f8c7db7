"""Workers that come and go while the cluster serves: the part of the controller that carries a rollout out.

New ones are all up before one of them serves; only then do the others get nothing new, and each stops once every
ingress says that it has nothing there any more. Whatever keeps a new one from coming up, the old ones serve on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec
import ray
from ray.exceptions import ActorDiedError

from cluster.actors.calls import quiet, until_died
from cluster.core.drain import DrainWatch
from cluster.core.membership import Membership, SlotState
from cluster.core.rollout import Rollout, Running, plan_rollout
from cluster.plan import worker_kind
from cluster.view import Applied, ClusterPlan, WorkersWanted
from kvstore.errors import FatalError
from workers.spec import WorkerSpec

logger = logging.getLogger(__name__)

START_DEADLINE_S = 120.0
STOP_DEADLINE_S = 2.0


class WorkerChanges:
    """What is added to the controller; the attributes are its own."""

    _plan: ClusterPlan
    _membership: Membership
    _lives: dict[str, Any]
    _drains: DrainWatch
    _num_seats: int | None
    _change_lock: asyncio.Lock
    _spawn: Callable[[Any], None]
    _notify: Callable[[], Awaitable[None]]
    _new_life: Callable[[WorkerSpec], Any]
    _join: Callable[[Any], Awaitable[None]]
    _admit: Callable[[Any], Awaitable[None]]
    _wait_until: Callable[[Callable[[], bool], float], Awaitable[bool]]

    async def apply(self, wanted: WorkersWanted) -> Applied:
        """Goes from the workers that run to those that are wanted; returns once the new ones serve.

        Raises: FatalError when a new worker does not come up; nothing has changed then.
        """
        async with self._change_lock:
            before, rollout = self._plan, self._rollout(wanted)
            self._plan = msgspec.structs.replace(before, thread_environment=wanted.thread_environment)
            try:
                await self._start_all([_named(wanted.workers[index], name) for name, index in rollout.start])
            except FatalError:
                self._plan = before
                raise
            self._num_seats = wanted.num_seats
            for name in rollout.take_back:
                self._membership.ready(name, self._membership.slots[name].incarnation)
            leaving = [life for name in rollout.leave if (life := self._begin_leave(name)) is not None]
            self._membership.version += 1
            await self._notify()
            for life in leaving:
                self._spawn(self._leave(life, wanted.drain_s))
            return Applied(
                started=tuple(name for name, _ in rollout.start),
                taken_back=rollout.take_back,
                leaving=rollout.leave,
            )

    def _rollout(self, wanted: WorkersWanted) -> Rollout:
        running = {}
        for name, slot in self._membership.slots.items():
            is_leaving = slot.state is SlotState.DRAINING
            # What was given up, or may not serve, is nobody that could stay.
            is_useless = slot.state is SlotState.REFUSED or (
                slot.state is SlotState.LOST and slot.restart_at_ns is None
            )
            kind = None if is_useless else worker_kind(self._lives[name].spec)
            running[name] = Running(slot.role, kind, is_leaving)
        return plan_rollout(running, [(spec.role, worker_kind(spec)) for spec in wanted.workers])

    async def _start_all(self, specs: list[WorkerSpec]) -> None:
        """Starts workers side by side; all serve at the end, or none is left. Raises: FatalError."""
        lives = [self._new_life(spec) for spec in specs]
        await self._notify()
        failures = await asyncio.gather(*(self._try(life, self._join) for life in lives))
        if not any(failures):
            failures = [await self._try(life, self._admit) for life in lives]
        for life, failure in zip(lives, failures, strict=True):
            slot = self._membership.slots[life.spec.worker_id]
            if failure is None and slot.state is not SlotState.READY:
                differs = f"its fingerprint differs in {', '.join(slot.refused_fields)}"
                failures[lives.index(life)] = differs if slot.refused_fields else f"it is {slot.state.value}"
        told = [f"{life.spec.worker_id}: {why}" for life, why in zip(lives, failures, strict=True) if why is not None]
        if told:
            await asyncio.gather(*(self._discard_new(life) for life in lives))
            raise FatalError(f"not started, and nothing was changed: {'; '.join(told)}")

    async def _try(self, life: Any, step: Callable[[Any], Awaitable[None]]) -> str | None:
        """Returns why a step of a new life failed, or None."""
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                await step(life)
        except TimeoutError:
            return f"not up within {START_DEADLINE_S:.0f} s"
        except ActorDiedError:
            return "its process died"
        except Exception as error:
            cause = getattr(error, "cause", None) or error
            return " ".join(str(cause).split())[-300:] or type(cause).__name__
        return None

    async def _discard_new(self, life: Any) -> None:
        ray.kill(life.actor, no_restart=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_DEADLINE_S):
                await until_died(life.actor)
        await self._removed(life)

    # --- going ----------------------------------------------------------------------------------------------

    def _begin_leave(self, name: str) -> Any | None:
        """The worker gets nothing new. Returns its life, or None for one that is not up: its slot just ends."""
        life, slot = self._lives[name], self._membership.slots[name]
        if slot.state is not SlotState.READY:
            ray.kill(life.actor, no_restart=True)
            self._membership.removed(name, slot.incarnation)
            del self._lives[name]
            return None
        self._membership.draining(name, slot.incarnation)
        return life

    async def _leave(self, life: Any, drain_s: float) -> None:
        """Waits until nobody has anything on a leaving worker, or its time is over; then stops it."""
        name, incarnation = life.spec.worker_id, life.spec.incarnation
        version = self._membership.version

        def is_over() -> bool:
            return not self._is_leaving(life) or self._drains.is_released(incarnation, version)

        is_free = await self._wait_until(is_over, drain_s)
        if not self._is_leaving(life):
            return  # It was taken back, or it died.
        logger.info("worker_leaves worker=%s free=%s", name, is_free)
        # What still runs there is told by the worker itself why it ends.
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_DEADLINE_S):
                await quiet(life.actor.stop.remote())
        ray.kill(life.actor, no_restart=True)
        await self._removed(life)

    def _is_leaving(self, life: Any) -> bool:
        slot = self._membership.slots.get(life.spec.worker_id)
        return slot is not None and slot.incarnation == life.spec.incarnation and slot.state is SlotState.DRAINING

    async def _removed(self, life: Any) -> None:
        """A life is over and its slot with it. Harmless when that is known."""
        spec = life.spec
        if not self._membership.removed(spec.worker_id, spec.incarnation):
            return
        del self._lives[spec.worker_id]
        await self._notify()
        others = [other for other in self._lives.values() if other.join is not None]
        await asyncio.gather(*(quiet(other.actor.peer_gone.remote(spec.incarnation)) for other in others))


def _named(spec: WorkerSpec, worker_id: str) -> WorkerSpec:
    return msgspec.structs.replace(spec, worker_id=worker_id)
