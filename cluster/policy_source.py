"""The policy in force in one process: read from a file, and read again when the file changes.

Owns the current ``Policy``. A change is all or nothing: a file that cannot be used, in whatever way, leaves the policy
that was in force, and says so once in the log and as ``error`` until it is mended. Requests keep the policy they were
admitted under.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from cluster.config import Config, ConfigError, load_struct
from cluster.core.policy import Policy, check_policy, policy_of_attempts
from kvstore.errors import BadInput

logger = logging.getLogger(__name__)

_Stamp = tuple[int, int, int] | None


def load_policy(path: Path | str) -> Policy:
    """Returns the policy in a YAML file. Raises: ConfigError naming key, line and the nearest known key."""
    policy, places = load_struct(path, Policy)
    assert isinstance(policy, Policy)
    try:
        check_policy(policy)
    except BadInput as error:
        raise ConfigError(error.field, error.value, error.why, places.get(error.field, str(path))) from error
    return policy


class PolicySource:
    """The current policy of a process."""

    def __init__(self, config: Config) -> None:
        """Raises: ConfigError if the file cannot be used; at the start there is nothing to fall back to."""
        self._path = Path(config.policy.file) if config.policy.file is not None else None
        self._reload_s = config.policy.reload_s
        self._stamp = file_stamp(self._path)
        attempts = config.attempts
        self.current = (
            load_policy(self._path)
            if self._path is not None
            else policy_of_attempts(attempts.max_attempts, attempts.max_reprefill_tokens)
        )
        self.error = ""
        """Why the file that is there now is not in force; empty when it is."""
        self.num_reloads = 0

    async def watch(self) -> None:
        """Looks for changes for ever. Ends at once where no file was named."""
        while self._path is not None:
            await asyncio.sleep(self._reload_s)
            await asyncio.to_thread(self.look)

    def look(self) -> bool:
        """Takes the file if it has changed. Returns True if another policy is in force now. Blocking."""
        if self._path is None or (stamp := file_stamp(self._path)) == self._stamp:
            return False
        self._stamp = stamp
        try:
            policy = load_policy(self._path)
        except ConfigError as error:
            self.error = str(error)
            logger.error("policy_kept digest=%s error=%s", self.current.digest, error)
            return False
        self.error = ""
        if policy == self.current:
            return False
        logger.info("policy_changed digest=%s before=%s", policy.digest, self.current.digest)
        self.current = policy
        self.num_reloads += 1
        return True


def file_stamp(path: Path | None) -> _Stamp:
    """Returns what changes whenever a file is written or replaced; None while it is not there."""
    try:
        stat = path.stat() if path is not None else None
    except OSError:
        return None
    return None if stat is None else (stat.st_mtime_ns, stat.st_size, stat.st_ino)
