"""The end of a worker that cannot go on: loud, and at once.

Crash-only: an exit is the one report that cannot be lost. Who watches the process sees it within milliseconds, fences
its attempts and starts another; every half-alive state in between would have to be waited out by leases.
"""

from __future__ import annotations

import logging
import os
import sys

logger = logging.getLogger(__name__)

EXIT_STATUS = 70
"""``EX_SOFTWARE``: an internal error."""


def end_process(error: BaseException) -> None:
    """Writes the error down and ends this process without any clean-up. Never returns."""
    logger.critical("worker_failed error=%r", error, exc_info=error)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_STATUS)
