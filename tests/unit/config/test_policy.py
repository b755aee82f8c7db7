"""The policy file: what it may say, what is refused and where, and how a change comes into force."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cluster.cli import main as cli
from cluster.config import ConfigError, load
from cluster.core.policy import Policy
from cluster.policy_source import PolicySource, load_policy

WHOLE = """\
version: "7"
on_upstream_failure:
  before_first_delta:
    require: [source_attempt_fenced, retry_budget_available]
    action: retry_prefill_on_healthy_replica
    max_attempts: 3
    max_reprefill_tokens: 4000
  after_first_delta:
    action: terminate_stream
    client_error: upstream_decode_interrupted
    automatic_retry: false
  uncertain_source_liveness:
    action: fence_source_attempt
    wait_for: cancel_ack_or_lease_expiry
    then: retry_only_if_no_delta_was_sent
"""


def write(tmp_path: Path, text: str) -> Path:
    """Replaces the file as an editor or a deployment does: a new file under the old name."""
    fresh = tmp_path / "policy.new"
    fresh.write_text(text)
    fresh.replace(tmp_path / "policy.yaml")
    return tmp_path / "policy.yaml"


def source(path: Path) -> PolicySource:
    return PolicySource(load(None, [f"policy.file={path}"]))


def test_a_whole_policy_is_read(tmp_path: Path) -> None:
    """Every key of section G1."""
    policy = load_policy(write(tmp_path, WHOLE))
    assert (policy.version, policy.max_attempts, policy.max_reprefill_tokens) == ("7", 3, 4000)


def test_without_a_file_the_policy_follows_from_the_attempts() -> None:
    """Two places never contradict each other: a file replaces these values."""
    policy = PolicySource(load(None, ["attempts.max_attempts=4", "attempts.max_reprefill_tokens=9"])).current
    assert (policy.max_attempts, policy.max_reprefill_tokens) == (4, 9)


def test_an_error_at_once_means_one_attempt(tmp_path: Path) -> None:
    """``return_error`` is the other action that may stand before the first delta."""
    text = WHOLE.replace("retry_prefill_on_healthy_replica", "return_error")
    assert load_policy(write(tmp_path, text)).max_attempts == 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "max_attempts: 3",
            "max_atempts: 3",
            "policy.yaml:6: on_upstream_failure.before_first_delta.max_atempts: unknown key; "
            "did you mean on_upstream_failure.before_first_delta.max_attempts?",
        ),
        ("version", "versoin", "policy.yaml:1: versoin: unknown key; did you mean version?"),
        ("max_attempts: 3", "max_attempts: 0", "max_attempts: expected int >= 1, got 0"),
        ("[source_attempt_fenced, ", "[", "policy.yaml:4: .*source_attempt_fenced is missing: without it two attempts"),
        (", retry_budget_available]", "]", "policy.yaml:4: .*retry_budget_available is missing: without it a mass"),
        ("[source_attempt_fenced, ", "[source_attempt_fenced, source_attempt_fenced, ", "says one thing twice"),
        ("[source_attempt_fenced, ", "[hope, ", "policy.yaml:4: .*require"),
        ("automatic_retry: false", "automatic_retry: true", "policy.yaml:11: .*automatic_retry: must be false"),
        ("terminate_stream", "continue", "policy.yaml:9: .*action: .*terminate_stream.*got 'continue'"),
        ("  after_first_delta:", "  afterwards:", "policy.yaml:8: on_upstream_failure.afterwards: unknown key"),
        ('version: "7"', "version: [", "not valid YAML"),
    ],
)
def test_a_policy_that_cannot_be_used_is_refused_with_its_place(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    """File, line, key, and the nearest key that exists."""
    assert old in WHOLE
    with pytest.raises(ConfigError, match=message.replace("?", r"\?").replace("[", r"\[")):
        load_policy(write(tmp_path, WHOLE.replace(old, new)))


def test_a_change_of_the_file_comes_into_force(tmp_path: Path) -> None:
    """Once, and only when the content differs."""
    policy_source = source(write(tmp_path, WHOLE))
    assert policy_source.look() is False
    write(tmp_path, WHOLE.replace("max_attempts: 3", "max_attempts: 5"))
    assert policy_source.look() is True
    assert policy_source.current.max_attempts == 5
    os.utime(tmp_path / "policy.yaml", ns=(1, 1))
    assert policy_source.look() is False
    assert policy_source.num_reloads == 1


@pytest.mark.parametrize("damage", ["max_attempts: lots", "max_attempts: 5\n    nonsense: 1", ""])
def test_a_bad_change_changes_nothing(tmp_path: Path, damage: str) -> None:
    """All or nothing: not even the good keys of a bad file. The complaint stands until the file is mended."""
    policy_source = source(write(tmp_path, WHOLE))
    before = policy_source.current
    text = WHOLE.replace("max_attempts: 3", damage).replace('"7"', '"8"') if damage else "version: ["
    write(tmp_path, text)
    assert policy_source.look() is False
    assert policy_source.current is before
    assert "policy.yaml" in policy_source.error
    write(tmp_path, WHOLE.replace('"7"', '"9"'))
    assert policy_source.look() is True
    assert (policy_source.current.version, policy_source.error) == ("9", "")


def test_a_file_that_vanishes_changes_nothing(tmp_path: Path) -> None:
    """A deployment that moves files about has a moment without one."""
    path = write(tmp_path, WHOLE)
    policy_source = source(path)
    path.unlink()
    assert policy_source.look() is False
    assert policy_source.current.version == "7"
    assert "cannot be read" in policy_source.error


def test_a_serve_does_not_start_on_a_bad_policy(tmp_path: Path) -> None:
    """There is nothing to fall back to."""
    with pytest.raises(ConfigError, match=r"missing\.yaml: cannot be read"):
        source(tmp_path / "missing.yaml")


def test_the_digest_names_the_content(tmp_path: Path) -> None:
    """Defaults written out or left out: the same policy."""
    assert load_policy(write(tmp_path, "version: null\n")).digest == Policy().digest
    assert load_policy(write(tmp_path, WHOLE)).digest != Policy().digest


def test_check_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 0 with the digest, 2 with one line."""
    path = write(tmp_path, WHOLE)
    assert cli.run(["policy", "check", str(path)]) == 0
    assert load_policy(path).digest in capsys.readouterr().out
    path.write_text(WHOLE.replace("max_attempts", "max_atempts"))
    assert cli.run(["policy", "check", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "policy.yaml:6" in captured.err and len(captured.err.splitlines()) == 1
    assert cli.run(["policy", "check", str(path), "--json"]) == 2
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False and told["field"].endswith("max_atempts") and told["where"].endswith(":6")


def test_the_shown_policy_is_a_file_to_start_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What ``show`` prints is read back as the same policy."""
    assert cli.run(["policy", "show"]) == 0
    path = write(tmp_path, capsys.readouterr().out)
    assert load_policy(path) == Policy()
