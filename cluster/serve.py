"""The main job: one serve from its first check to its last process.

Owns everything it starts and the order of start and end. Life cycle: checks that cost nothing -> Ray -> controller
and workers, with the HTTP side coming up at the same time -> ready -> waits for a signal or a fault -> stops all.
"""

from __future__ import annotations

import logging
import os
import signal
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

import httpx
import msgspec

from cluster import machine, ray_environment, runfile
from cluster import plan as planning
from cluster.config import Config
from cluster.control import ControlServer
from cluster.ingress.tracing import check_installed
from cluster.secret import cluster_secret
from kvstore.errors import EnvironmentProblem, FatalError, KopirError
from kvstore.store.slab import remove_dead_slabs
from workers.model import hub
from workers.model.config import read_config

logger = logging.getLogger(__name__)

READY_DEADLINE_S = 60.0
READY_POLL_S = 0.05
DOWN_DEADLINE_S = 10.0
DOWN_POLL_S = 0.05
DRAIN_POLL_S = 0.1
DRAIN_MARGIN_S = 2.0
"""So much longer than a drain may take the controller is waited for."""


def run(config: Config, *, on_ready: Callable[[str], None], on_drain: Callable[[float], None]) -> int:
    """Serves until a signal. ``on_ready`` gets the base URL once a request would be answered.

    SIGTERM lets what runs finish for ``server.drain_s``, which ``on_drain`` is told; SIGINT, and any second signal,
    ends it at once.

    Returns: 0 after SIGINT or SIGTERM. Raises: BadInput, EnvironmentProblem; nothing is left running then.
    """
    planning.check_supported(config)
    check_installed(config.tracing)
    asked = config
    config = _with_tls(_with_keys(_with_policy(_with_tools(_with_ledger(config)))))
    model_path = hub.resolve(config.model)
    model = read_config(model_path)
    plan = planning.make_plan(config, model_path=model_path, model=model, cores=machine.usable_cores())
    assert plan.store is not None
    machine.preflight(
        config,
        block_bytes=plan.store.block_bytes,
        weight_bytes=planning.weight_bytes(config, model_path),
    )
    # Importing Ray takes a second; complaints about the configuration should not wait for it.
    ray_environment.prepare(local=config.cluster.address == "local")
    from cluster.actors import local

    port = config.server.port or local.free_port(config.server.host)
    stop = _StopSignal()
    local.start_ray(config)
    cluster: local.LocalCluster | None = None
    try:
        stop.install()
        cluster = local.LocalCluster(config, plan, model_path=str(model_path), secret=cluster_secret(config))
        scheme = "https" if config.server.tls_cert_file is not None else "http"
        url = f"{scheme}://{_reachable(config.server.host)}:{port}"
        _start(cluster, port, url, stop)
        if stop.is_set():
            return 0
        run_file = runfile.write(
            url=url,
            ray_address=local.ray_address(),
            started_at=datetime.now(UTC).isoformat(),
            drain_s=config.server.drain_s,
        )
        from cluster.applying import Applier

        applier = Applier(asked, plan, model_path=Path(model_path), model=model, carry_out=cluster.apply)
        control = ControlServer(applier.apply)
        try:
            control.start()
            on_ready(url)
            _wait(cluster, stop)
            if config.server.drain_s > 0 and not stop.is_urgent:
                on_drain(config.server.drain_s)
                _drain(cluster, stop, config.server.drain_s, url)
            return 0
        finally:
            control.close()
            run_file.unlink(missing_ok=True)
    finally:
        stop.quiet()
        if config.cluster.address == "local":
            local.end_helpers()
        if cluster is not None:
            cluster.stop()
        local.stop_ray(local=config.cluster.address == "local")
        # A store node that was killed could not unlink its slab itself.
        remove_dead_slabs()


def _with_tls(config: Config) -> Config:
    """Returns the configuration with certificate files that every process finds.

    Raises: EnvironmentProblem if they cannot be used together.
    """
    server = config.server
    if server.tls_cert_file is None or server.tls_key_file is None:
        return config
    cert, key = Path(server.tls_cert_file).absolute(), Path(server.tls_key_file).absolute()
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cert, key, password=_no_password)
    except (OSError, ValueError) as error:  # SSLError is an OSError
        why = getattr(error, "strerror", None) or str(error)
        raise EnvironmentProblem(f"server.tls_cert_file, server.tls_key_file: {why}") from error
    tls = msgspec.structs.replace(server, tls_cert_file=str(cert), tls_key_file=str(key))
    return msgspec.structs.replace(config, server=tls)


def _no_password() -> str:
    raise ValueError("the key is encrypted; give it without a password")


def _reachable(host: str) -> str:
    """Returns how this machine reaches an address that the endpoint listens on."""
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1" if host == "0.0.0.0" else "[::1]"
    return f"[{host}]" if ":" in host else host


def _with_ledger(config: Config) -> Config:
    """Returns the configuration with a ledger that every process finds, after it was opened once.

    Raises: BadInput, EnvironmentProblem, LedgerUnavailable.
    """
    from cluster.ledger.database import absolute_url, open_database

    url = absolute_url(config.ledger.url, Path.cwd())
    open_database(url).close()
    return msgspec.structs.replace(config, ledger=msgspec.structs.replace(config.ledger, url=url))


def _with_tools(config: Config) -> Config:
    """Returns the configuration with a tools file that every process finds. Raises: ConfigError if it is unusable."""
    from cluster.tools_source import load_tools

    if config.tools.file is None:
        return config
    path = Path(config.tools.file).absolute()
    load_tools(path)
    return msgspec.structs.replace(config, tools=msgspec.structs.replace(config.tools, file=str(path)))


def _with_policy(config: Config) -> Config:
    """Returns the configuration with a policy file that every process finds. Raises: ConfigError if it is unusable."""
    from cluster.policy_source import load_policy

    if config.policy.file is None:
        return config
    path = Path(config.policy.file).absolute()
    load_policy(path)
    return msgspec.structs.replace(config, policy=msgspec.structs.replace(config.policy, file=str(path)))


def _with_keys(config: Config) -> Config:
    """Returns the configuration with a keys file that every process finds. Raises: ConfigError if it is unusable."""
    from cluster.keys_source import load_keys

    if config.auth.keys_file is None:
        return config
    path = Path(config.auth.keys_file).absolute()
    load_keys(path)
    return msgspec.structs.replace(config, auth=msgspec.structs.replace(config.auth, keys_file=str(path)))


def down(address: str | None, *, now: bool = False) -> bool:
    """Stops the running serve of this user, wherever it was started from. Returns False when nothing ran.

    What runs may finish within the serve's ``server.drain_s``, unless it is to end ``now``.

    Raises: EnvironmentProblem when it does not end within ``DOWN_DEADLINE_S`` after that.
    """
    found = False
    for info in runfile.find_all():
        if address is not None and address not in (info.ray_address, info.url):
            continue
        found = True
        with suppress(ProcessLookupError):
            os.kill(info.pid, signal.SIGINT if now else signal.SIGTERM)
        allowed_s = DOWN_DEADLINE_S if now else info.drain_s + DRAIN_MARGIN_S + DOWN_DEADLINE_S
        deadline = time.monotonic() + allowed_s
        # Asked this way, a process that has ended but whose parent has not noticed yet counts as ended.
        while runfile.is_running(info):
            if time.monotonic() > deadline:
                raise EnvironmentProblem(
                    f"process {info.pid} did not stop within {allowed_s:.0f} s; end it with kill -9"
                )
            time.sleep(DOWN_POLL_S)
    # What a killed serve left in shared memory belongs to nobody any more.
    return bool(remove_dead_slabs()) or found


class _StopSignal:
    """SIGINT or SIGTERM. SIGINT or a second one is urgent; during the stop itself they are ignored: it can finish."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._urgent = threading.Event()

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def quiet(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)

    def is_set(self) -> bool:
        return self._event.is_set()

    @property
    def is_urgent(self) -> bool:
        return self._urgent.is_set()

    def wait(self, timeout_s: float) -> bool:
        return self._event.wait(timeout_s)

    def wait_urgent(self, timeout_s: float) -> bool:
        return self._urgent.wait(timeout_s)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT or self._event.is_set():
            self._urgent.set()
        self._event.set()


def _start(cluster: object, port: int, url: str, stop: _StopSignal) -> None:
    """Brings up workers and HTTP side by side; returns when the endpoint is ready or a signal came."""
    from cluster.actors.local import LocalCluster

    assert isinstance(cluster, LocalCluster)
    with ThreadPoolExecutor(max_workers=1) as pool:
        workers = pool.submit(cluster.wait_started)
        cluster.start_http(port)
        workers.result()
    # Our own process on this machine is asked, by an address that a certificate need not name.
    verify = not url.startswith("https")
    deadline = time.monotonic() + READY_DEADLINE_S
    reason = "no answer"
    while not stop.is_set():
        try:
            answer = httpx.get(f"{url}/readyz", timeout=5.0, verify=verify)
            if answer.status_code == 200:
                return
            reason = answer.text[:300]
        except httpx.HTTPError as error:
            reason = str(error)
        if time.monotonic() > deadline:
            raise FatalError(f"the endpoint did not become ready within {READY_DEADLINE_S:.0f} s: {reason}")
        stop.wait(READY_POLL_S)


def _wait(cluster: object, stop: _StopSignal) -> None:
    """Waits for a signal. Raises: FatalError when the controller dies."""
    from cluster.actors.local import LocalCluster

    assert isinstance(cluster, LocalCluster)
    while not stop.wait(1.0):
        if not cluster.is_alive():
            raise FatalError("the controller died; everything is being stopped")


def _drain(cluster: object, stop: _StopSignal, drain_s: float, url: str) -> None:
    """Waits until nothing runs, the time is over, or it is urgent. Raises: FatalError when the controller dies."""
    from cluster.actors.local import LocalCluster

    assert isinstance(cluster, LocalCluster)
    drain = cluster.begin_drain(drain_s)
    deadline = time.monotonic() + drain_s + DRAIN_MARGIN_S
    while not stop.is_urgent and time.monotonic() < deadline:
        if cluster.is_drained(drain, DRAIN_POLL_S):
            break
    # The ingresses are done; the proxy may still have the ends of answers that clients take slowly.
    done_s = time.monotonic()
    while time.monotonic() < deadline and _is_under_way(url, since_s=done_s):
        if stop.wait_urgent(DRAIN_POLL_S):
            return


def _is_under_way(url: str, *, since_s: float) -> bool:
    """True while the proxy has an answer open that began before ``since_s`` of the monotonic clock."""
    now_s = time.monotonic()
    try:
        told = httpx.get(f"{url}/internal/proxy", timeout=DRAIN_POLL_S * 10, verify=not url.startswith("https")).json()
        oldest_s = told["oldest_s"]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        logger.warning("proxy_not_asked error=%s", error or type(error).__name__)
        return False
    return oldest_s is not None and float(oldest_s) > now_s - since_s


__all__ = ["KopirError", "cluster_secret", "down", "run"]
