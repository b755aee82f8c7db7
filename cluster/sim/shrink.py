"""Makes a failing scenario small: drops aims, faults and requests while the same checker still complains.

Greedy and deterministic. The dice of the network are the seed's, so a smaller scenario is another run; only runs that
still fail in the same way are kept.
"""

from __future__ import annotations

import msgspec

from cluster.sim.parts import Parts
from cluster.sim.run import run_scenario
from cluster.sim.scenario import Scenario

RUNS_MAX = 400


def shrink(scenario: Scenario, parts: Parts | None = None) -> Scenario:
    """Returns a scenario with as few aims, faults and requests as were needed to see one of the same breaches."""
    wanted = _breaches(scenario, parts)
    runs_left = RUNS_MAX
    shrunk = True
    while shrunk and wanted:
        shrunk = False
        for name in ("aims", "faults", "asks"):
            index = 0
            while index < len(getattr(scenario, name)) and runs_left > 0:
                items = getattr(scenario, name)
                smaller = msgspec.structs.replace(scenario, **{name: items[:index] + items[index + 1 :]})
                runs_left -= 1
                if _breaches(smaller, parts) & wanted:
                    scenario, shrunk = smaller, True
                else:
                    index += 1
    return scenario


def _breaches(scenario: Scenario, parts: Parts | None) -> set[str]:
    return {violation.checker for violation in run_scenario(scenario, parts)[0].violations}
