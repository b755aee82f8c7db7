"""The keys file: what it may say, how it changes, and that nothing of it gets into a message."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from cluster.cli import main as cli
from cluster.config import ConfigError, load
from cluster.core.tenants import digest_of_key
from cluster.keys_source import KeysSource, add_key, load_keys, revoke_key
from cluster.plan import check_supported
from kvstore.errors import BadInput

KEY = "a key of acme"
SALT = "the secret salt of acme"
WHOLE = f"""\
tenants:
  - name: acme
    salt: {SALT}
    keys:
      - {{id: laptop, sha256: {digest_of_key(KEY).hex()}}}
    max_concurrency: 4
    tokens_per_minute: 6000
    kv_quota_bytes: 64MiB
  - name: other
    keys: [{{id: old, sha256: {"ab" * 32}, revoked: true}}]
"""


def write(path: Path, text: str) -> Path:
    """Replaces the file as an editor or a deployment does."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(path)
    return path


def test_a_whole_file_is_read(tmp_path: Path) -> None:
    """Every field of the contract; a key is found by its text alone."""
    ring = load_keys(write(tmp_path / "keys.yaml", WHOLE))
    key = ring.find(KEY)
    assert key is not None and (key.key_id, key.tenant.name, key.is_revoked) == ("laptop", "acme", False)
    limits = (key.tenant.max_concurrency, key.tenant.tokens_per_minute, key.tenant.kv_quota_bytes)
    assert limits == (4, 6000, 64 << 20)
    assert ring.find("another") is None and ring.find(digest_of_key(KEY).hex()) is None


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("max_concurrency: 4", "max_concurrency: 0", "tenants[0].max_concurrency"),
        ("max_concurrency: 4", "max_concurency: 4", "tenants[0]"),
        ("kv_quota_bytes: 64MiB", "kv_quota_bytes: much", "tenants[0].kv_quota_bytes"),
        ("name: other", "name: acme", "tenants[1].name"),
        ("id: old", "id: laptop", "tenants[1].keys[0].id"),
        ("ab" * 32, digest_of_key(KEY).hex(), "tenants[1].keys[0].sha256"),
        ("ab" * 32, "ab" * 31, "tenants[1].keys[0].sha256"),
        (f"salt: {SALT}", f"salt: [{SALT}]", "tenants[0].salt"),
        (f"salt: {SALT}", f"salt: '{SALT}", ""),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_without_its_secrets(
    tmp_path: Path, old: str, new: str, field: str
) -> None:
    """The message names the place, never a salt or a hash."""
    path = write(tmp_path / "keys.yaml", WHOLE.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        load_keys(path)
    assert caught.value.field == field
    for text in (str(caught.value), repr(caught.value)):
        assert SALT not in text and digest_of_key(KEY).hex() not in text


def test_changes_come_into_force_all_or_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A bad file, or none at all, leaves the old keys; a good one replaces all of them."""
    path = write(tmp_path / "keys.yaml", WHOLE)
    source = KeysSource(path, reload_s=1.0)
    with caplog.at_level(logging.INFO):
        write(path, WHOLE.replace("acme", "new").replace("ab" * 32, "ab"))
        assert not source.look() and "sha256" in source.error and source.current.find(KEY) is not None
        path.unlink()
        assert not source.look() and source.error and source.current.find(KEY) is not None
        write(path, WHOLE.replace("name: acme", "name: new"))
        assert source.look() and not source.error
        assert not source.look()
    key = source.current.find(KEY)
    assert key is not None and key.tenant.name == "new"
    assert SALT not in caplog.text and digest_of_key(KEY).hex() not in caplog.text


def test_keys_are_made_listed_and_revoked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Printed once, alone on stdout; the file holds only the hash and is for its owner only."""
    path = tmp_path / "keys.yaml"
    assert cli.run(["keys", "new", "acme", "--file", str(path)]) == 0
    printed = capsys.readouterr()
    key = printed.out.strip()
    assert len(key) > 40 and "\n" not in key and key not in printed.err
    assert key not in path.read_text() and path.stat().st_mode & 0o077 == 0
    assert cli.run(["keys", "new", "acme", "--file", str(path), "--json"]) == 0
    second = json.loads(capsys.readouterr().out)
    ring = load_keys(path)
    first, other = ring.find(key), ring.find(second["key"])
    assert first is not None and other is not None and first.tenant == other.tenant
    assert cli.run(["keys", "revoke", second["id"], "--file", str(path)]) == 0
    assert cli.run(["keys", "revoke", "nobody", "--file", str(path)]) == 1
    capsys.readouterr()
    assert cli.run(["keys", "ls", "--file", str(path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["tenant"], row["revoked"]) for row in rows] == [("acme", False), ("acme", True)]


def test_a_name_that_no_file_could_hold_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And nothing is written."""
    assert cli.run(["keys", "new", "a b", "--file", str(tmp_path / "keys.yaml")]) == 2
    assert "TENANT" in capsys.readouterr().err and not (tmp_path / "keys.yaml").exists()


def test_making_a_key_keeps_what_the_file_has(tmp_path: Path) -> None:
    """Salts and limits stay; a salt that changed would empty the tenant's cache."""
    path = write(tmp_path / "keys.yaml", WHOLE)
    before = load_keys(path).find(KEY)
    key_id, key = add_key(path, "acme")
    ring = load_keys(path)
    assert before is not None and ring.find(KEY) == before
    made = ring.find(key)
    assert made is not None and made.tenant == before.tenant
    assert revoke_key(path, key_id)


def test_only_keys_open_the_endpoint_to_the_network(tmp_path: Path) -> None:
    """Without keys loopback only, said by name."""
    with pytest.raises(BadInput, match=r"auth\.keys_file"):
        check_supported(load(None, ["server.host=0.0.0.0"]))
    path = write(tmp_path / "keys.yaml", WHOLE)
    check_supported(load(None, ["server.host=0.0.0.0", f"auth.keys_file={path}"]))
