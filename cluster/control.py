"""The way from ``kopir apply`` to the ``kopir serve`` of the same user: a Unix socket beside the run file.

One JSON line there, one JSON line back, one connection at a time. The folder belongs to the user alone (see
``cluster.runfile``), which is the same proof that ``kopir down`` goes by; nothing of it can be reached over a network.

    asker -> serve   {"config": PATH | null, "overrides": ["KEY=VALUE", ...]}
    serve -> asker   {"ok": true, ...}   or   {"ok": false, "error": "...", "field": NAME | null}
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct, convert
from msgspec import ValidationError as InvalidMessage

from cluster.runfile import RunInfo, run_folder
from kvstore.errors import BadInput, EnvironmentProblem, FatalError, KopirError

logger = logging.getLogger(__name__)

MAX_LINE_BYTES = 256 * 1024
READ_DEADLINE_S = 5.0
ANSWER_DEADLINE_S = 300.0
"""More than new workers may take to come up."""


class ApplyRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the running serve is to become; ``config`` None: what it is, with the overrides."""

    config: str | None = None
    overrides: tuple[str, ...] = ()


def socket_path(pid: int) -> Path:
    """Returns where the serve of process ``pid`` listens."""
    return run_folder() / f"run-{pid}.sock"


class ControlServer:
    """Answers on a thread of its own. ``apply`` raises a KopirError for what cannot be done."""

    def __init__(self, apply: Callable[[ApplyRequest], dict[str, Any]]) -> None:
        self._apply = apply
        self._path = socket_path(os.getpid())
        self._socket: socket.socket | None = None

    def start(self) -> None:
        """Listens. A path that the system does not take costs ``kopir apply`` and nothing else."""
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._path.unlink(missing_ok=True)
            listening.bind(str(self._path))
            self._path.chmod(0o600)
            listening.listen(4)
        except OSError as error:
            listening.close()
            logger.warning("control_not_listening path=%s error=%s", self._path, error)
            return
        self._socket = listening
        threading.Thread(target=self._serve, args=(listening,), name="kopir-control", daemon=True).start()

    def close(self) -> None:
        """Stops listening; an answer under way is not waited for."""
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
            self._path.unlink(missing_ok=True)

    def _serve(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection:
                try:
                    connection.settimeout(READ_DEADLINE_S)
                    answer = self._answer(read_line(connection))
                    connection.sendall(json.dumps(answer).encode() + b"\n")
                except (OSError, KopirError) as error:
                    logger.warning("control_broken error=%s", error or type(error).__name__)

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            request = convert(json.loads(line), ApplyRequest)
            return {"ok": True, **self._apply(request)}
        except (InvalidMessage, ValueError) as error:
            return {"ok": False, "error": str(error), "field": getattr(error, "field", None)}
        except KopirError as error:
            return {"ok": False, "error": str(error), "field": None}
        except Exception as error:
            logger.exception("apply_failed")
            return {"ok": False, "error": f"internal error: {type(error).__name__}: {error}", "field": None}


def ask(info: RunInfo, config: Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    """Has the serve ``info`` apply a change; returns its answer.

    Raises: BadInput, FatalError as the serve told; EnvironmentProblem when it does not answer.
    """
    request = {"config": None if config is None else str(config.absolute()), "overrides": list(overrides)}
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ANSWER_DEADLINE_S)
            connection.connect(str(socket_path(info.pid)))
            connection.sendall(json.dumps(request).encode() + b"\n")
            answer: dict[str, Any] = json.loads(read_line(connection))
    except (OSError, ValueError) as error:
        raise EnvironmentProblem(f"the serve of process {info.pid} does not answer: {error}") from error
    if answer.pop("ok", False):
        return answer
    if answer.get("field") is not None:
        raise Refused(str(answer["field"]), str(answer["error"]))
    raise FatalError(str(answer.get("error")))


class Refused(BadInput):
    """A key of the configuration cannot be taken over, in the words of the serve."""

    def __init__(self, field: str, words: str) -> None:
        super().__init__(field, None, words)

    def __str__(self) -> str:
        return self.why


def read_line(connection: socket.socket) -> bytes:
    """Returns what comes up to a line break. Raises: OSError; EnvironmentProblem when it is too long or breaks off."""
    data = b""
    while not data.endswith(b"\n"):
        part = connection.recv(65536)
        data += part
        if not part or len(data) > MAX_LINE_BYTES:
            raise EnvironmentProblem("the other side sent no whole line")
    return data
