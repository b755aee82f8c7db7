"""The secret that the processes of one cluster share, and with a store on its own its clients. Owns nothing."""

from __future__ import annotations

import secrets
from pathlib import Path

from cluster.config import Config
from kvstore.errors import EnvironmentProblem

SECRET_BYTES = 32


def cluster_secret(config: Config) -> bytes:
    """Returns the secret that the processes of this cluster share. Raises: EnvironmentProblem."""
    if config.auth.cluster_secret_file is None:
        return secrets.token_bytes(SECRET_BYTES)
    path = Path(config.auth.cluster_secret_file)
    try:
        if path.stat().st_mode & 0o077:
            raise EnvironmentProblem(f"auth.cluster_secret_file: {path} is readable by others; run chmod 600 on it")
        secret = path.read_bytes().strip()
    except OSError as error:
        raise EnvironmentProblem(f"auth.cluster_secret_file: {path}: {error.strerror}") from error
    if len(secret) < SECRET_BYTES // 2:
        raise EnvironmentProblem(f"auth.cluster_secret_file: {path} holds fewer than {SECRET_BYTES // 2} bytes")
    return secret
