"""The leases of one ingress's attempts at a worker, renewed from a thread that nothing else runs on.

Owns the lease holder and a connection that carries asks and grants and nothing else. The link loop begins and ends
attempts and looks whether it may publish; the lease thread asks every third of a lease and takes the grants. Both go
through one lock, held for the time of a dictionary look-up. So neither a step of the engine, nor a burst of messages
on the link, nor bytes that wait in its socket delay a renewal; and a lease thread that stands still lets the leases
run out.

Life cycle: made -> ``start`` -> ``link_up`` and ``link_down`` with each connection of the link -> ``close``. While the
link is down nothing is asked: an ingress that cannot be told anything must not believe that all is well.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from msgspec.structs import replace

from kvstore.core.lease import NS_PER_MS, LeaseHolder
from kvstore.core.messages import LeaseAsk, LeaseGrant, LeaseReady
from kvstore.errors import DeadlineExceeded, KopirError, NoCapacity, PeerLost
from kvstore.net.channel import Channel, connect
from kvstore.net.handshake import LEASE_ROLE, PeerInfo
from workers.engine_loop import AttemptKey
from workers.loop_thread import LoopThread
from workers.spec import IngressAddress

logger = logging.getLogger(__name__)

REDIAL_DELAY_S = 0.1
READY_DEADLINE_S = 5.0
STUCK_LEASES = 10
"""A link loop that has run nothing for so many leases is stuck for good: what it holds is not asked for any more."""
LATENESS_KEPT = 4096


class LeaseLine:
    """See the module. ``post`` runs a call on the link loop."""

    def __init__(
        self,
        address: IngressAddress,
        *,
        me: PeerInfo,
        secret: bytes,
        lease_ms: int,
        clock_ns: Callable[[], int],
        thread: LoopThread,
        post: Callable[..., object],
        ask_over_link: Callable[[LeaseAsk], object],
        on_granted: Callable[[], object],
        on_expired: Callable[[list[AttemptKey]], object],
    ) -> None:
        self._address = address
        self._me = replace(me, role=LEASE_ROLE)
        self._secret = secret
        self._lease_ns = lease_ms * NS_PER_MS
        self._clock_ns = clock_ns
        self._thread = thread
        self._post = post
        self._ask_over_link = ask_over_link
        self._on_granted = on_granted
        self._on_expired = on_expired
        self._lock = threading.Lock()
        self._holder = LeaseHolder(lease_ms)
        self._link_is_up = False
        self._beat_ns = clock_ns()
        self._due: dict[int, int] = {}
        """When each open ask was due, by nonce; only asks of the lease thread's own timer."""
        self._lateness_ns: deque[int] = deque(maxlen=LATENESS_KEPT)
        # The rest is the lease thread's.
        self._channel: Channel | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._is_closed = False

    # --- from the link loop -------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to renew."""
        self._thread.call(self._start)

    def close(self) -> None:
        """Renews nothing any more; what is held runs out."""
        self._thread.call(self._close)

    def begin(self, key: AttemptKey) -> None:
        """Starts to hold a lease; it is asked for at once."""
        with self._lock:
            self._holder.begin(*key, now_ns=self._clock_ns())
        self._thread.call(self._ask)

    def end(self, key: AttemptKey) -> None:
        """Lets an attempt go."""
        with self._lock:
            self._holder.end(*key)

    def may_publish(self, key: AttemptKey) -> bool:
        """True while this attempt's lease is valid."""
        with self._lock:
            return self._holder.may_publish(*key, now_ns=self._clock_ns())

    def was_granted(self, key: AttemptKey) -> bool:
        """True if this attempt ever had a lease."""
        with self._lock:
            return self._holder.was_granted(*key)

    def link_up(self) -> None:
        """The link carries messages again: what is held is asked for at once."""
        self._link_is_up = True
        self._beat()
        self._thread.call(self._ask)

    def link_down(self) -> None:
        """The link is lost."""
        self._link_is_up = False

    @property
    def is_up(self) -> bool:
        """True while asks have a connection of their own; before it is made they go over the link."""
        return self._channel is not None

    def on_grant(self, grant: LeaseGrant) -> None:
        """Takes a grant, from either connection and on either thread."""
        now_ns = self._clock_ns()
        with self._lock:
            due_ns = self._due.pop(grant.nonce, None)
            if self._holder.on_grant(grant) and due_ns is not None:
                self._lateness_ns.append(max(0, now_ns - due_ns))

    def lateness_ns(self) -> list[int]:
        """Returns how long after its due moment each of the last renewals was granted."""
        with self._lock:
            return list(self._lateness_ns)

    def _beat(self) -> None:
        self._beat_ns = self._clock_ns()

    # --- on the lease thread ------------------------------------------------------------------------------

    def _start(self) -> None:
        if not self._is_closed:
            self._tasks = [asyncio.create_task(self._keep()), asyncio.create_task(self._stay_connected())]

    def _close(self) -> None:
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        if self._channel is not None:
            self._channel.abort()

    async def _keep(self) -> None:
        """Asks every third of a lease, and reports attempts whose lease has run out."""
        every_ns = self._lease_ns // 3
        due_ns = self._clock_ns()
        while True:
            # A renewal that was late does not make the next ones late, nor are missed ones made up for.
            due_ns = max(due_ns + every_ns, self._clock_ns() - every_ns)
            await asyncio.sleep(max(0, due_ns - self._clock_ns()) / 1e9)
            self._ask(due_ns)
            self._post(self._beat)
            with self._lock:
                expired = self._holder.expired(self._clock_ns())
            if expired:
                self._post(self._on_expired, expired)

    def _ask(self, due_ns: int | None = None) -> None:
        now_ns = self._clock_ns()
        if self._is_closed or not self._link_is_up or now_ns > self._beat_ns + STUCK_LEASES * self._lease_ns:
            return
        with self._lock:
            if not len(self._holder):
                return
            ask = self._holder.ask(now_ns)
            if due_ns is not None:
                self._due[ask.nonce] = due_ns
            while len(self._due) > LATENESS_KEPT:
                self._due.pop(next(iter(self._due)))
        if self._channel is None:
            self._post(self._ask_over_link, ask)
            return
        try:
            self._channel.send_nowait(ask)
        except (PeerLost, NoCapacity):
            self._channel.abort()

    async def _stay_connected(self) -> None:
        while True:
            if self._link_is_up:
                with suppress(KopirError, TimeoutError):
                    await self._serve()
            await asyncio.sleep(REDIAL_DELAY_S)

    async def _serve(self) -> None:
        """Serves one connection until it ends; asks use it once the ingress's lease thread has it."""
        channel = await connect(
            self._address.host,
            self._address.port,
            secret=self._secret,
            me=self._me,
            decode=LeaseGrant | LeaseReady,
        )
        try:
            if channel.peer.incarnation != self._address.incarnation:
                raise PeerLost(f"another incarnation answers at {self._address.host}:{self._address.port}")
            async with asyncio.timeout(READY_DEADLINE_S):
                await channel.recv()
            self._channel = channel
            self._ask()
            while True:
                message = await channel.recv()
                if isinstance(message, LeaseGrant):
                    self.on_grant(message)
                    self._post(self._on_granted)
        except DeadlineExceeded as error:
            logger.info("lease_line_down ingress=%s error=%s", self._address.ingress_id, error)
        finally:
            self._channel = None
            channel.abort()
