"""A Ray cluster on this machine, or a connection to a running one; Serve on top of it; and the end of both."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray._private import ray_constants
from ray._private import worker as ray_worker

from cluster.actors.controller import ACTOR_OPTIONS, CONTROLLER_NAME, NAMESPACE, ControllerActor
from cluster.actors.ingress import APPLICATION_NAME, IngressDeployment
from cluster.config import Config
from cluster.view import Applied, ClusterPlan, ClusterView, WorkersWanted
from kvstore.errors import EnvironmentProblem, FatalError

logger = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 80 << 20
"""Small on purpose: no KV and no tokens go through Ray's object store."""
CONTROLLER_DEADLINE_S = 30.0
APPLY_DEADLINE_S = 270.0
HELPERS = (
    ray_constants.PROCESS_TYPE_LOG_MONITOR,
    ray_constants.PROCESS_TYPE_MONITOR,
    ray_constants.PROCESS_TYPE_DASHBOARD,
)
MAX_ONGOING_REQUESTS = 4096


def start_ray(config: Config) -> None:
    """Starts a local cluster with token authentication, or connects to ``cluster.address``.

    Raises: EnvironmentProblem when Ray cannot start or nothing answers at the address.
    """
    options: dict[str, Any] = {"log_to_driver": False, "namespace": NAMESPACE, "logging_level": logging.ERROR}
    if config.cluster.address == "local":
        options |= {
            "address": "local",
            "num_cpus": max(4, os.cpu_count() or 1),
            "num_gpus": None,
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "_temp_dir": str(_short_temp_dir()),
        }
    else:
        options["address"] = config.cluster.address
    try:
        ray.init(**options)
    except (ConnectionError, RuntimeError, OSError, ValueError) as error:
        raise EnvironmentProblem(f"Ray did not start (cluster.address={config.cluster.address}): {error}") from error


def free_port(host: str) -> int:
    """Returns a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def ray_address() -> str:
    """Returns the address of the cluster that this process is connected to."""
    return str(ray.get_runtime_context().gcs_address)


class LocalCluster:
    """Controller, workers, store node and Serve of one ``kopir serve``."""

    def __init__(self, config: Config, plan: ClusterPlan, *, model_path: str, secret: bytes) -> None:
        self._config = config
        self._model_path = model_path
        self._secret = secret
        self._controller = ControllerActor.options(name=CONTROLLER_NAME, lifetime="detached", **ACTOR_OPTIONS).remote(
            plan, secret
        )
        self._started = self._controller.start.remote()

    def start_http(self, port: int) -> None:
        """Starts Serve's proxy and the ingress replicas; workers may still be loading."""
        server = self._config.server
        # Its chatter about options that were just applied would alarm people; warnings and errors still come.
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        options: dict[str, Any] = {"host": server.host, "port": port, "location": "HeadOnly"}
        if server.tls_cert_file is not None:
            options |= {"ssl_certfile": server.tls_cert_file, "ssl_keyfile": server.tls_key_file}
        serve.start(http_options=options)
        app = IngressDeployment.options(
            num_replicas=self._config.ingress.replicas,
            max_ongoing_requests=MAX_ONGOING_REQUESTS,
            graceful_shutdown_timeout_s=2,
            graceful_shutdown_wait_loop_s=0.1,
            health_check_period_s=5,
        ).bind(self._config, self._model_path, self._secret)
        serve.run(app, name=APPLICATION_NAME, route_prefix="/")

    def wait_started(self) -> ClusterView:
        """Waits for the workers. Raises: what a worker raised while starting."""
        view: ClusterView = ray.get(self._started)
        return view

    def is_alive(self) -> bool:
        """True while the controller answers."""
        try:
            ray.get(self._controller.ping.remote(), timeout=CONTROLLER_DEADLINE_S)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            return False
        return True

    def apply(self, wanted: WorkersWanted) -> Applied:
        """Goes over to other workers. Raises: FatalError; nothing has changed then."""
        try:
            applied: Applied = ray.get(self._controller.apply.remote(wanted), timeout=APPLY_DEADLINE_S)
        except ray.exceptions.RayTaskError as error:
            raise FatalError(str(error.cause)) from error
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise FatalError(f"the controller did not carry it out: {error or type(error).__name__}") from error
        return applied

    def begin_drain(self, drain_s: float) -> Any:
        """Closes the door to new requests. Returns what ``is_drained`` asks about."""
        return self._controller.drain.remote(drain_s)

    def is_drained(self, drain: Any, timeout_s: float) -> bool:
        """Returns True once nothing runs, or the time of the drain is over; False after ``timeout_s``.

        Raises: FatalError when the controller dies.
        """
        try:
            ray.get(drain, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            return False
        except ray.exceptions.RayActorError as error:
            raise FatalError("the controller died; everything is being stopped") from error
        return True

    def stop(self) -> None:
        """Stops everything this cluster started, detached actors included."""
        try:
            ray.get(self._controller.stop.remote(), timeout=3)
        except (ray.exceptions.RayError, TimeoutError) as error:
            logger.warning("controller_stop_failed error=%s", error)
        ray.kill(self._controller)


def end_helpers() -> None:
    """Ends the processes of a local Ray that only watch: its log monitor, autoscaler and dashboard.

    ``ray.shutdown`` ends one after another and waits up to a second for each of these, which do not heed SIGTERM:
    together most of the time that a stop would take. None of them holds anything that a stop has to keep.
    """
    node = ray_worker._global_node
    if node is None:
        return
    for kind in HELPERS:
        for helper in node.all_processes.get(kind, ()):
            helper.process.kill()


def stop_ray(*, local: bool) -> None:
    """Ends Serve and the connection; a local cluster ends with it."""
    if ray.is_initialized():
        if not local:
            serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()


def _short_temp_dir() -> Path:
    """Ray puts Unix sockets into its folder, whose paths must stay short."""
    return Path(tempfile.gettempdir()) / f"kopir-ray-{os.getuid()}"
