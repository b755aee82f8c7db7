"""A slice of seeds with the real cores: no violation, every cell reached, the same log everywhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from cluster.sim import replay_file, run_scenario, run_seeds, save_scenario
from cluster.sim.coverage import AT_LEAST, STATES, short_of
from cluster.sim.dice import Dice
from cluster.sim.mutants import MUTANTS
from cluster.sim.scenario import Scenario, make_scenario
from cluster.sim.shrink import shrink
from kvstore.errors import BadInput

SEEDS = 3000
CODE = "from cluster.sim import run_seeds; print([run_seeds(s, s + 1).log_hash for s in range(0, 25)])"
NEWER_MINORS = range(sys.version_info.minor + 1, 16)
FAILING_SEED = 16
"""A seed that shows the planted bug ``digest_skipped``."""


@pytest.mark.timeout(600)
def test_no_seed_breaks_a_claim_and_every_cell_is_reached() -> None:
    """Thousands of clusters under faults; each comes to rest with nothing left and serves again."""
    report = run_seeds(0, SEEDS, processes=2)
    assert report.violations == []
    assert report.seeds == SEEDS
    assert report.events_min >= 200
    assert short_of(report.coverage, AT_LEAST) == {}
    assert {cell.partition("/")[0] for cell in report.coverage} == set(STATES), "something happened in another state"


def test_no_seed_breaks_a_claim_with_the_real_driver() -> None:
    """Level 2: the ingress is the product's request driver on a loop under virtual time."""
    report = run_seeds(0, 200, level=2)
    assert report.violations == []
    assert report.seeds == 200 and report.events_min >= 200
    reached = {cell.partition("/")[0] for cell in report.coverage}
    assert reached == set(STATES), reached


def test_the_real_driver_runs_the_same_events_each_time() -> None:
    """Virtual time all the way down: no clock, no random id and no order of a set shows in the log."""
    code = CODE.replace("s + 1)", "s + 1, level=2)")
    assert hashes(sys.executable, "0", code) == hashes(sys.executable, "4242", code)


def test_a_seed_is_a_real_case() -> None:
    """At least 3 requests, 3 faults and 200 events each."""
    for seed in range(200):
        scenario = make_scenario(seed)
        assert len(scenario.asks) >= 3 and len(scenario.faults) >= 3, seed
        assert run_scenario(scenario)[0].num_events >= 200, seed


def test_processes_share_seeds_and_find_the_same() -> None:
    """The split over processes decides nothing."""
    one, two = run_seeds(0, 100), run_seeds(0, 100, processes=2)
    assert (one.seeds, one.events, one.events_min, one.coverage) == (
        two.seeds,
        two.events,
        two.events_min,
        two.coverage,
    )


def hashes(python: str, hash_seed: str, code: str = CODE) -> str:
    """Returns the log hashes of 25 seeds, run by another interpreter."""
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run([python, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout


def test_one_seed_gives_one_log_whatever_the_hash_seed() -> None:
    """Sets and dictionaries of strings must not decide anything."""
    outputs = {hashes(sys.executable, hash_seed) for hash_seed in ("0", "4242")}
    assert len(outputs) == 1
    assert len(set(next(iter(outputs)).split(","))) == 25, "different seeds gave the same log"


def find_python(minor: int) -> str | None:
    """Returns Python 3.``minor``: on the path, or kept by pyenv, whose commands there work for one version only."""
    found = shutil.which(f"python3.{minor}")
    if found and subprocess.run([found, "-V"], check=False, capture_output=True).returncode == 0:
        return found
    if (pyenv := shutil.which("pyenv")) is None:
        return None
    kept = subprocess.run([pyenv, "prefix", f"3.{minor}"], check=False, capture_output=True, text=True)
    return f"{kept.stdout.strip()}/bin/python" if kept.returncode == 0 else None


@pytest.fixture
def other_python(tmp_path: Path) -> str:
    """A newer interpreter that has msgspec: named by KOPIR_OTHER_PYTHON, on the path, or an environment made of one."""
    named = os.environ.get("KOPIR_OTHER_PYTHON")
    pythons = [named] if named else [path for minor in NEWER_MINORS if (path := find_python(minor))]
    for python in pythons:
        if subprocess.run([python, "-c", "import msgspec"], check=False, capture_output=True).returncode == 0:
            return python
    made = tmp_path / "python"
    for python in pythons:
        making = subprocess.run([python, "-m", "venv", str(made)], check=False, capture_output=True, timeout=60)
        if making.returncode == 0:
            wanted = f"msgspec=={msgspec.__version__}"
            install = [str(made / "bin" / "python"), "-m", "pip", "install", "--quiet", wanted]
            subprocess.run(install, check=True, capture_output=True, timeout=100)
            return str(made / "bin" / "python")
    pytest.skip("no newer Python is installed here; name one by KOPIR_OTHER_PYTHON")


def test_one_seed_gives_one_log_under_every_python(other_python: str) -> None:
    """A newer interpreter runs the same events."""
    version = subprocess.run([other_python, "-V"], check=True, capture_output=True, text=True).stdout
    assert version.split()[1].rsplit(".", 1)[0] != f"{sys.version_info.major}.{sys.version_info.minor}", version
    assert hashes(other_python, "7") == hashes(sys.executable, "7")


def test_dice_draw_the_same_numbers_under_every_python() -> None:
    """Pinned: a seed in a bug report means the same run a year later."""
    dice = Dice(7, 1)
    assert [dice.between(0, 999) for _ in range(5)] == [26, 167, 868, 808, 250]
    assert make_scenario(3) == make_scenario(3) != make_scenario(4)


def test_a_recorded_case_runs_again(tmp_path: Path) -> None:
    """A file holds the whole scenario and the planted bug that it shows."""
    scenario = msgspec.structs.replace(make_scenario(FAILING_SEED), mutant="digest_skipped")
    path = tmp_path / "case.json"
    save_scenario(scenario, path)
    report = replay_file(path)
    assert report.failed_seeds == [FAILING_SEED]
    assert any("RightBytes" in violation for violation in report.violations)
    save_scenario(msgspec.structs.replace(scenario, mutant=None), path)
    assert replay_file(path).violations == []


def test_a_file_that_is_no_case_is_refused(tmp_path: Path) -> None:
    """Bad input names the file."""
    path = tmp_path / "case.json"
    path.write_text("{}")
    with pytest.raises(BadInput, match=r"case\.json"):
        replay_file(path)


def test_a_failing_case_shrinks_and_still_fails_in_the_same_way() -> None:
    """What is left cannot lose one more fault or request."""
    parts = MUTANTS["digest_skipped"].parts
    large = make_scenario(FAILING_SEED)
    small = shrink(large, parts)
    assert _checkers(small, "digest_skipped") & MUTANTS["digest_skipped"].expected
    assert len(small.faults) < len(large.faults) and len(small.asks) < len(large.asks), small
    for name in ("aims", "faults", "asks"):
        items = getattr(small, name)
        for index in range(len(items)):
            smaller = msgspec.structs.replace(small, **{name: items[:index] + items[index + 1 :]})
            assert not _checkers(smaller, "digest_skipped") & _checkers(small, "digest_skipped")


def _checkers(scenario: Scenario, mutant: str) -> set[str]:
    return {violation.checker for violation in run_scenario(scenario, MUTANTS[mutant].parts)[0].violations}


REGRESSIONS = sorted((Path(__file__).parent / "regressions").glob("*.json"))


@pytest.mark.parametrize("path", REGRESSIONS, ids=[path.stem for path in REGRESSIONS])
def test_cases_that_failed_once_stay_mended(path: Path) -> None:
    """Each file is a shrunk scenario that showed a bug of the cores or of the drivers' rules."""
    assert replay_file(path).violations == []


@pytest.mark.parametrize(
    ("case", "mutant"),
    [
        ("frames-lost-at-credit-limit", "lost_frames_not_asked_for"),
        ("grant-later-than-lease", "grant_nonce_ignored"),
        ("holder-goes-silent", "silence_ignored"),
        ("late-write-after-reuse", "quarantine_skipped"),
    ],
)
def test_recorded_cases_still_show_what_they_were_recorded_for(case: str, mutant: str) -> None:
    """With the planted bug the case fails: it has not become an ordinary run through a change of the simulator."""
    scenario = msgspec.json.decode((Path(__file__).parent / "regressions" / f"{case}.json").read_bytes(), type=Scenario)
    assert _checkers(scenario, mutant) & MUTANTS[mutant].expected
