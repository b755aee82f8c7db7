"""What a running serve can become without a restart: other numbers and sizes of workers.

Owns the configuration that was asked for last and what was planned from it. A change is checked as at a start;
everything that no worker alone can follow is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from cluster import machine
from cluster import plan as planning
from cluster.config import Config, load, num_seats, overlay, settings_of
from cluster.control import ApplyRequest
from cluster.core.rollout import Running, plan_rollout
from cluster.view import Applied, ClusterPlan, WorkersWanted
from kvstore.errors import BadInput, EnvironmentProblem
from workers.model.config import ModelConfig

CHANGEABLE = "workers."
FIXED = frozenset({"workers.engine"})


class Applier:
    """Turns a request into workers. ``carry_out`` hands them to the controller."""

    def __init__(
        self,
        config: Config,
        plan: ClusterPlan,
        *,
        model_path: Path,
        model: ModelConfig,
        carry_out: Callable[[WorkersWanted], Applied],
    ) -> None:
        self._config = config
        self._plan = plan
        self._model_path = model_path
        self._model = model
        self._carry_out = carry_out

    def apply(self, request: ApplyRequest) -> dict[str, Any]:
        """Carries a change out; returns which workers came and go.

        Raises: BadInput naming the key; EnvironmentProblem, FatalError. Nothing has changed then.
        """
        if request.config is not None:
            config = load(request.config, request.overrides)
        else:
            config = overlay(self._config, request.overrides)
        self._check(config)
        plan = planning.make_plan(config, model_path=self._model_path, model=self._model, cores=machine.usable_cores())
        self._check_memory(plan)
        applied = self._carry_out(
            WorkersWanted(
                workers=plan.workers,
                thread_environment=plan.thread_environment,
                num_seats=num_seats(config),
                drain_s=config.workers.drain_s,
            )
        )
        self._config, self._plan = config, plan
        answer: dict[str, Any] = msgspec.to_builtins(applied)
        return answer

    def _check(self, config: Config) -> None:
        before, after = settings_of(self._config), settings_of(config)
        for key, value in after.items():
            if value != before[key] and (not key.startswith(CHANGEABLE) or key in FIXED):
                raise BadInput(key, value, "cannot change while the cluster serves; stop it and start it again")

    def _check_memory(self, plan: ClusterPlan) -> None:
        """Refuses what does not fit beside the workers that run."""
        running = {spec.worker_id: Running(spec.role, planning.worker_kind(spec)) for spec in self._plan.workers}
        rollout = plan_rollout(running, [(spec.role, planning.worker_kind(spec)) for spec in plan.workers])
        assert plan.store is not None
        weights = planning.weight_bytes(self._config, self._model_path)
        needed = sum(plan.workers[index].pool_blocks * plan.store.block_bytes + weights for _, index in rollout.start)
        _, available = machine.memory_bytes()
        if needed > available:
            raise EnvironmentProblem(
                f"not enough memory: {machine.readable_bytes(needed)} needed for the new workers beside the others, "
                f"{machine.readable_bytes(available)} available; lower workers.*.replicas or pool_blocks"
            )
