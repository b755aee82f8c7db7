"""Each planted bug is found by the checker that is there for it. A checker that finds nothing proves nothing."""

from __future__ import annotations

import pytest

from cluster.sim.mutants import MUTANTS, SEEDS_MAX, hunt
from cluster.sim.parts import Parts


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bug_is_found(name: str) -> None:
    """Within a thousand seeds, by an expected checker."""
    violation = hunt(name, seeds_max=SEEDS_MAX)
    assert violation is not None, f"{name} lived through {SEEDS_MAX} seeds"
    assert violation.checker in MUTANTS[name].expected


def test_mutants_change_parts_and_nothing_else() -> None:
    """An overlay: without it a world is built from the product's own classes."""
    for name, mutant in MUTANTS.items():
        assert mutant.parts != Parts(), name
    product = {cls.__module__.split(".")[0] + "." + cls.__module__.split(".")[1] for cls in _classes(Parts())}
    assert product == {"cluster.core", "kvstore.core", "workers.core"}


def _classes(parts: Parts) -> list[type]:
    return [parts.machine, parts.granter, parts.holder, parts.pool, parts.tracker]
