"""Orders of request machines that leave the process: messages on links, and the wait for what cannot be answered.

Owns nothing: links and lease granters are the relay's, timers the request's. Decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cluster.core import attempt_events as ev
from cluster.core.attempt_events import WorkerRef
from cluster.ingress.generation import RunningRequest
from cluster.ingress.relay import RelayServer
from kvstore.core.messages import Cancel, Credit, Prefill, Resend, Reserve


class LinkOrders:
    """The part of ``Orders`` that talks to workers."""

    def __init__(self, relay: RelayServer, *, clock_ns: Callable[[], int], reservation_ms: int) -> None:
        self._relay = relay
        self._clock_ns = clock_ns
        self._reservation_ms = reservation_ms

    def send_reserve(self, generation: RunningRequest, order: ev.SendReserve) -> None:
        """Asks decode for blocks."""
        message = Reserve(
            request_id=generation.request_id,
            attempt_id=order.attempt_id,
            epoch=order.epoch,
            spec=generation.spec,
            reservation_ms=self._reservation_ms,
        )
        self._dispatch(generation, "decode", message)

    def send_prefill(self, generation: RunningRequest, order: ev.SendPrefill) -> None:
        """Sends the prompt with the ticket."""
        message = Prefill(
            request_id=generation.request_id,
            attempt_id=order.attempt_id,
            epoch=order.epoch,
            spec=generation.spec,
            ticket=generation.ticket,
        )
        self._dispatch(generation, "prefill", message)

    def _dispatch(self, generation: RunningRequest, role: ev.Role, message: Reserve | Prefill) -> None:
        ref = self.ref(generation, message.attempt_id, role)
        link = self._relay.links.get(ref.incarnation)
        if link is not None:
            link.leases.dispatch(message.attempt_id, message.epoch, now_ns=self._clock_ns())
        if link is None or not link.send(message):
            # Nothing left the process, so there is nothing to fence.
            refused = ev.WorkerRefused(
                now_ns=self._clock_ns(),
                attempt_id=message.attempt_id,
                epoch=message.epoch,
                role=role,
                code="no_capacity",
                message=f"{ref.worker_id} is not connected",
            )
            asyncio.get_running_loop().call_soon(generation.step, refused)

    def send_cancel(self, generation: RunningRequest, order: ev.SendCancel) -> None:
        """Revokes the lease, then tells the worker to stop."""
        ref = self.ref(generation, order.attempt_id, order.role)
        granter = self._relay.known_granter(ref.incarnation)
        if granter is not None:
            granter.revoke(order.attempt_id, order.epoch)
        link = self._relay.links.get(ref.incarnation)
        if link is not None:
            link.send(Cancel(attempt_id=order.attempt_id, epoch=order.epoch, reason=order.reason))

    def ask_resend(self, generation: RunningRequest, order: ev.AskResend) -> None:
        """Asks decode for what may have died with its last connection."""
        link = self._relay.links.get(self.ref(generation, order.attempt_id, "decode").incarnation)
        if link is not None:
            link.send(Resend(attempt_id=order.attempt_id, epoch=order.epoch, next_index=order.next_index))

    def wait_for_fence(self, generation: RunningRequest, order: ev.WaitForFence) -> None:
        """Fires the machine's timer once the lease of this side has surely run out."""
        delay_s = max(0, self._safe_after_ns(generation, order) - self._clock_ns()) / 1e9
        if delay_s > 0:
            # A lease that was renewed meanwhile moves the moment: look again then.
            handle = asyncio.get_running_loop().call_later(delay_s, self._fence_due, generation, order)
            generation.timers.add(handle)
        else:
            asyncio.get_running_loop().call_soon(self._fence_due, generation, order)

    def _fence_due(self, generation: RunningRequest, order: ev.WaitForFence) -> None:
        if generation.machine.closed:
            return
        if self._safe_after_ns(generation, order) > self._clock_ns():
            self.wait_for_fence(generation, order)
            return
        fired = ev.TimerFired(now_ns=self._clock_ns(), attempt_id=order.attempt_id, epoch=order.epoch, role=order.role)
        generation.step(fired)

    def _safe_after_ns(self, generation: RunningRequest, order: ev.WaitForFence) -> int:
        """Returns when this side has surely stopped; 0 where it holds nothing."""
        granter = self._relay.known_granter(self.ref(generation, order.attempt_id, order.role).incarnation)
        return (granter.safe_after_ns(order.attempt_id, order.epoch) if granter is not None else None) or 0

    def give_credit(self, generation: RunningRequest, max_index: int) -> None:
        """Lets decode compute further ahead of the client."""
        attempt = generation.machine.current
        if attempt is None:
            return
        link = self._relay.links.get(attempt.workers["decode"].incarnation)
        if link is not None:
            link.send(Credit(attempt_id=attempt.attempt_id, epoch=attempt.epoch, max_index=max_index))

    def ref(self, generation: RunningRequest, attempt_id: str, role: ev.Role) -> WorkerRef:
        """Returns who runs one side of an attempt."""
        for attempt in generation.machine.attempts:
            if attempt.attempt_id == attempt_id:
                return attempt.workers[role]
        raise AssertionError(f"{attempt_id} is no attempt of {generation.request_id}")
