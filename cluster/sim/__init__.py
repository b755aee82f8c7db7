"""Deterministic simulation of the cluster: the real cores under virtual time, faults from seeds, checkers.

``run_seeds`` and ``replay_file`` are what the command line uses; see ``cluster.sim.run``.
"""

from cluster.sim.run import RunResult, SimReport, Violation, replay_file, run_scenario, run_seeds, save_scenario

__all__ = ["RunResult", "SimReport", "Violation", "replay_file", "run_scenario", "run_seeds", "save_scenario"]
