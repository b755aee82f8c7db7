"""The real cores that a world is built from. A mutant replaces one of them; the product never knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.core.attempts import RequestMachine
from kvstore.core.block_pool import BlockPool
from kvstore.core.lease import LeaseGranter, LeaseHolder
from workers.core.hand_off import HandOffTracker

if TYPE_CHECKING:
    from cluster.sim.driver import SimBackend, WatchedMachine


def _digests_agree(content: bytes, digest: bytes) -> bool:
    return content == digest


@dataclass(frozen=True, slots=True)
class Parts:
    """Classes of the cores, and the habits of drivers that a planted bug may break."""

    machine: type[RequestMachine] = RequestMachine
    granter: type[LeaseGranter] = LeaseGranter
    holder: type[LeaseHolder] = LeaseHolder
    pool: type[BlockPool] = BlockPool
    tracker: type[HandOffTracker] = HandOffTracker
    verify: Callable[[bytes, bytes], bool] = _digests_agree
    mark_before_write: bool = True
    """The ingress records the boundary before the first write."""
    fresh_incarnations: bool = True
    """A restarted process has a new incarnation."""
    reservations_expire: bool = True
    driver: type[SimBackend] | None = None
    """Level 2: the request driver; None for the product's own."""
    watched: type[WatchedMachine] | None = None
    """Level 2: the request machine; None for the product's own."""
