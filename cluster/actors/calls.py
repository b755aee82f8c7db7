"""Calls to other processes through Ray, and what their errors prove.

Only ``ActorDiedError`` proves a death. Any other error of a call (``ActorUnavailableError`` above all: a connection was
reset, a network is cut) is the uncertain case, in which the process may live and publish.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ray.exceptions import ActorDiedError, RayError

logger = logging.getLogger(__name__)

CALL_DEADLINE_S = 10.0
LOOK_AGAIN_S = 1.0


async def quiet(reference: Any) -> Any:
    """Awaits a call to a process that may be dead or slow. Returns None for an error or no answer in time."""
    try:
        async with asyncio.timeout(CALL_DEADLINE_S):
            return await reference
    except (RayError, TimeoutError) as error:
        logger.info("call_failed error=%s", error or "no answer in time")
        return None


async def until_dead(actor: Any) -> None:
    """Returns once an actor has stopped by itself or its process is proved dead, which is seen when it happens."""
    try:
        await actor.wait_until_stopped.remote()
    except ActorDiedError:
        return
    except RayError as error:
        # Asked no more than once: each such call that broke off may still hold a thread of the actor.
        logger.warning("watch_broken error=%s", error)
        await until_died(actor)


async def until_died(actor: Any) -> None:
    """Returns once an actor's process is proved dead; looks every ``LOOK_AGAIN_S``."""
    while True:
        try:
            await actor.__ray_ready__.remote()
        except ActorDiedError:
            return
        except RayError as error:
            logger.debug("look_failed error=%s", error)
        await asyncio.sleep(LOOK_AGAIN_S)
