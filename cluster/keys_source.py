"""The keys file: read, checked, read again when it changes, and written by ``kopir keys``.

Owns the current ``KeyRing`` of a process. A change is all or nothing: a file that cannot be used leaves the keys that
were in force, and says so in the log and as ``error`` until it is mended. No message here ever holds a salt or a hash;
the keys themselves are in no file at all.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import tempfile
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml
from msgspec import Meta, Struct

from cluster.config import Config, ConfigError, parse_bytes
from cluster.core.tenants import Key, KeyRing, Tenant, digest_of_key, salt_bytes
from cluster.policy_source import file_stamp
from cluster.yaml_file import read_yaml
from kvstore.errors import BadInput

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 16 << 20
KEY_PREFIX = "kopir-"
KEY_BYTES = 32

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{64}$")]
Limit = Annotated[int, Meta(ge=1, le=1 << 40)]


class KeyEntry(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One key: its public id and the SHA-256 of its text, in hex."""

    id: Name
    sha256: Sha256
    revoked: bool = False


class TenantEntry(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One tenant as the file has it."""

    name: Name
    salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    keys: list[KeyEntry] = []
    max_concurrency: Limit | None = None
    tokens_per_minute: Limit | None = None
    kv_quota_bytes: int | str | None = None


class KeysFile(Struct, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    tenants: list[TenantEntry] = []


def load_keys(path: Path | str) -> KeyRing:
    """Returns the keys of a YAML file. Raises: ConfigError naming what is wrong where, without its value."""
    return _ring(_read(Path(path)), str(path))


def add_key(path: Path, tenant: str) -> tuple[str, str]:
    """Makes a key of ``tenant`` (made too if there is none of this name) and stores its hash; returns (id, key).

    Comments of the file are not kept. Raises: ConfigError, OSError.
    """
    content = _read(path) if path.exists() else KeysFile()
    entry = next((entry for entry in content.tenants if entry.name == tenant), None)
    if entry is None:
        entry = TenantEntry(name=tenant, salt=secrets.token_hex(16))
        content.tenants.append(entry)
    key = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
    key_id = "key-" + secrets.token_hex(6)
    entry.keys.append(KeyEntry(id=key_id, sha256=digest_of_key(key).hex()))
    _write(path, content)
    return key_id, key


def revoke_key(path: Path, key_id: str) -> bool:
    """Marks a key as revoked: whoever sends it hears 403. Returns False if there is none of this id."""
    content = _read(path)
    for tenant in content.tenants:
        for key in tenant.keys:
            if key.id == key_id:
                key.revoked = True
                _write(path, content)
                return True
    return False


def list_keys(path: Path) -> list[dict[str, Any]]:
    """Returns one entry per key: tenant, id, revoked. Raises: ConfigError."""
    content = _read(path)
    return [
        {"tenant": tenant.name, "id": key.id, "revoked": key.revoked}
        for tenant in content.tenants
        for key in tenant.keys
    ]


class KeysSource:
    """The current keys of a process."""

    def __init__(self, path: Path | str, *, reload_s: float) -> None:
        """Raises: ConfigError if the file cannot be used; at the start there is nothing to fall back to."""
        self._path = Path(path)
        self._reload_s = reload_s
        self._stamp = file_stamp(self._path)
        self.current = load_keys(self._path)
        self.error = ""
        """Why the file that is there now is not in force; empty when it is."""

    async def watch(self) -> None:
        """Looks for changes for ever."""
        while True:
            await asyncio.sleep(self._reload_s)
            await asyncio.to_thread(self.look)

    def look(self) -> bool:
        """Takes the file if it has changed. Returns True if other keys are in force now. Blocking."""
        stamp = file_stamp(self._path)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            ring = load_keys(self._path)
        except ConfigError as error:
            self.error = str(error)
            logger.error("keys_kept error=%s", error)
            return False
        self.error = ""
        if ring == self.current:
            return False
        logger.info("keys_changed num_keys=%d before=%d", len(ring.keys), len(self.current.keys))
        self.current = ring
        return True


def keys_source(config: Config) -> KeysSource | None:
    """Returns the source that the configuration names; None: no key is asked for. Raises: ConfigError."""
    auth = config.auth
    return None if auth.keys_file is None else KeysSource(auth.keys_file, reload_s=auth.reload_s)


def _read(path: Path) -> KeysFile:
    where = str(path)
    value = read_yaml(path, max_bytes=MAX_FILE_BYTES)
    try:
        return msgspec.convert(value, KeysFile)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at ")
        key = place.strip("`").removeprefix("$").removeprefix(".")
        raise ConfigError(key, None, what.replace("`", "").replace("Expected", "expected"), where) from None


def _ring(content: KeysFile, where: str) -> KeyRing:
    keys: dict[bytes, Key] = {}
    names: set[str] = set()
    ids: set[str] = set()
    for index, entry in enumerate(content.tenants):
        at = f"tenants[{index}]"
        if entry.name in names:
            raise ConfigError(f"{at}.name", None, f"the tenant {entry.name} stands here twice", where)
        names.add(entry.name)
        tenant = Tenant(
            name=entry.name,
            salt=salt_bytes(entry.name, entry.salt),
            max_concurrency=entry.max_concurrency,
            tokens_per_minute=entry.tokens_per_minute,
            kv_quota_bytes=_size(entry.kv_quota_bytes, f"{at}.kv_quota_bytes", where),
        )
        for number, key in enumerate(entry.keys):
            digest = bytes.fromhex(key.sha256)
            if key.id in ids or digest in keys:
                twice = "id" if key.id in ids else "sha256"
                raise ConfigError(f"{at}.keys[{number}].{twice}", None, "stands here twice", where)
            ids.add(key.id)
            keys[digest] = Key(key_id=key.id, tenant=tenant, is_revoked=key.revoked)
    ring = KeyRing(keys)
    try:
        ring.quotas()
    except BadInput as error:
        raise ConfigError(error.field, None, error.why, where) from error
    return ring


def _size(value: int | str | None, key: str, where: str) -> int | None:
    try:
        size = parse_bytes(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ConfigError(key, None, str(error), where) from None
    if size is not None and not 0 <= size <= 1 << 50:
        raise ConfigError(key, None, "expected a size of at least 0", where)
    return size


def _write(path: Path, content: KeysFile) -> None:
    """Replaces the file in one step; only its owner may read it."""
    text = yaml.safe_dump(msgspec.to_builtins(content), sort_keys=False)
    handle, name = tempfile.mkstemp(prefix=".keys-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
