"""The environment that Ray reads when it is imported; this module must run first, and imports nothing of Ray."""

from __future__ import annotations

import os
import secrets

TOKEN_BYTES = 32
_SETTINGS = {
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Workers serve people: Ray would run them at the lowest priority otherwise.
    "RAY_worker_niceness": "0",
    # An event of a stream passes the hop from ingress to proxy as a message: these make it cheaper, by a gRPC
    # stream instead of one object of Ray for each message, and without a change of threads on either side.
    "RAY_SERVE_PROXY_USE_GRPC": "1",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    # Serve takes middlewares of its HTTP proxy only by this variable, read in the proxy process.
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "cluster.ingress.api.proxy_edge.proxy_middlewares",
}


def prepare(*, local: bool) -> None:
    """Sets what Ray needs, without touching what the user has set. A local cluster gets a token of its own.

    Modifies: the environment of this process.
    """
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    if not local:
        return
    mode = os.environ.setdefault("RAY_AUTH_MODE", "token")
    if mode == "token" and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(TOKEN_BYTES))
