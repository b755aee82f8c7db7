"""The links of a UCX transport: how they are made, warmed, asked and closed.

A link is an endpoint to one peer and what belongs to it: its probes, and the reading of its memory where that is
possible. Made by both sides at about the same time; ready once a message large enough for the path of blocks went each
way. What UCX does not let go of cleanly is kept until the peer is proved dead.

Life cycle of a link: connect -> warming -> ready -> closing -> gone. All calls on the transport's thread.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvstore.digest import block_digest
from kvstore.errors import DeadlineExceeded, PeerLost
from kvstore.transport.peer_memory import PeerMemory
from kvstore.transport.transfers import PromisedFuture, RequestEnd, TransferBook, fail
from kvstore.transport.ucx_device import UcxDevice
from kvstore.transport.ucx_mailbox import Mailbox
from kvstore.transport.ucx_probe import MESSAGE_BYTES as PROBE_BYTES
from kvstore.transport.ucx_probe import LinkProbe
from kvstore.transport.ucx_reads import MESSAGE_BYTES as READS_BYTES
from kvstore.transport.ucx_reads import LinkReads

logger = logging.getLogger(__name__)

OWN_TAG_BIT, PROBE_TAG_BIT, READS_TAG_BIT = 1 << 63, 1 << 62, 1 << 61
"""Block tags have 63 bits; the upper half belongs to warm-up messages, probes, and the messages of direct reads."""
WARM_BYTES = 256 << 10
"""Large enough for the rendezvous path that blocks take."""
CANNOT_READ, CAN_READ = 1, 2
"""First byte of a warm-up message: whether its sender can read the memory of its receiver."""
CLOSE_DEADLINE_S = 1.0
"""How long an endpoint may take to close before others stop waiting for it."""


@dataclass(frozen=True, slots=True)
class Waiter:
    """Somebody who wants a link to be ready by ``deadline``."""

    deadline: float
    future: Future[None]


@dataclass(slots=True)
class Link:
    """The way to one peer."""

    peer: str
    endpoint: Any
    same_host: bool
    waiters: list[Waiter]
    warm_buffers: list[np.ndarray]
    their_address: bytes
    warm_requests: list[Any] = field(default_factory=list)
    probe: LinkProbe | None = None
    """Made when the link is ready."""
    memory: PeerMemory | None = None
    """The peer's, where we can read it."""
    reads: LinkReads | None = None
    """Made with ``probe`` when both sides can read each other's memory; blocks then move by reading alone."""

    @property
    def is_ready(self) -> bool:
        return self.probe is not None


@dataclass(slots=True)
class _Closing:
    """The end of a link, or a question for its end."""

    peer: str
    request: Any
    """None when there is no endpoint to close any more."""
    link: Link | None
    deadline: float
    proved_dead: bool
    future: Future[None]


class UcxLinks:
    """See the module. ``book``: whose transfers end with their link. ``address``: that of this transport."""

    def __init__(self, device: UcxDevice, book: TransferBook, *, has_direct_reads: bool) -> None:
        self._device = device
        self._book = book
        self._has_direct_reads = has_direct_reads
        self._links: dict[str, Link] = {}
        self._closings: list[_Closing] = []
        self._held: dict[str, list[Link]] = {}
        """Links that UCX did not let go of cleanly, with the memory of their warm-up, by peer."""
        self._mailboxes: dict[str, dict[int, Mailbox]] = {}
        """Of each peer by tag, until it is proved dead."""

    def ready(self, peer: str) -> Link | None:
        """Returns the link to ``peer`` when blocks can move on it."""
        link = self._links.get(peer)
        return link if link is not None and link.is_ready else None

    @property
    def is_waiting(self) -> bool:
        """True while an answer is due: to a connect, a close or a probe."""
        return bool(self._closings) or any(
            link.waiters or (link.probe is not None and link.probe.is_asking) for link in self._links.values()
        )

    @property
    def has_work(self) -> bool:
        """True when a block can be read now."""
        return any(link.reads is not None and link.reads.has_work for link in self._links.values())

    def connect(self, peer: str, address: bytes, same_host: bool, waiter: Waiter) -> None:
        link = self._links.get(peer)
        if link is not None and not self._device.is_alive(link.endpoint):
            self.on_broken(peer)
            link = None
        if link is not None:
            # A warm-up that ran out of time goes on: a second one's message would end in the first one's receive.
            link.waiters.append(waiter)
            return
        try:
            endpoint = self._device.connect(peer, address, same_host=same_host)
        except PeerLost as error:
            fail(waiter.future, PeerLost(f"no transport link to {peer}: {error}"))
            return
        out, into = np.ones(WARM_BYTES, np.uint8), np.zeros(WARM_BYTES, np.uint8)
        link = self._links[peer] = Link(peer, endpoint, same_host, [waiter], [out, into], address)
        if same_host and self._has_direct_reads:
            link.memory = self._device.open_memory(address)
        out[0] = CAN_READ if link.memory is not None else CANNOT_READ
        try:
            link.warm_requests.append(self._device.receive(endpoint, into, warm_tag(address)))
            link.warm_requests.append(self._device.send(endpoint, out, warm_tag(self._device.address_for(peer))))
        except PeerLost:
            self.lose(peer, proved_dead=False, future=PromisedFuture())

    def collect(self, now: float) -> bool:
        """Answers those who wait for a link to be ready or closed. Returns True when somebody was answered."""
        moved = False
        for link in tuple(self._links.values()):
            if link.waiters:
                moved |= self._collect_warming(link, now)
            if link.probe is not None:
                moved |= self._collect_ready(link, link.probe, now)
        for closing in tuple(self._closings):
            if self._is_closed(closing, now):
                self._closings.remove(closing)
                self._on_closed(closing)
                moved = True
        return moved

    def _collect_warming(self, link: Link, now: float) -> bool:
        if not link.is_ready and all(request.completed for request in link.warm_requests):
            try:
                if any(self._device.ended(request) is not RequestEnd.DONE for request in link.warm_requests):
                    raise PeerLost("the warm-up broke")
                mail = self._mailbox(link, probe_tag(link.their_address), PROBE_BYTES)
                link.probe = LinkProbe(
                    self._device, link.endpoint, mail, my_tag=probe_tag(self._device.address_for(link.peer))
                )
                self._open_reads(link)
            except PeerLost:
                self.on_broken(link.peer)
                return True
            link.warm_requests, link.warm_buffers = [], []
        if link.is_ready:
            for waiter in link.waiters:
                waiter.future.set_result(None)
            link.waiters = []
            return True
        late = [waiter for waiter in link.waiters if now >= waiter.deadline]
        for waiter in late:
            link.waiters.remove(waiter)
            fail(waiter.future, DeadlineExceeded(f"the link to {link.peer} did not warm up in time"))
        return bool(late)

    def _open_reads(self, link: Link) -> None:
        """Agrees on direct reads: both warm-up messages say whether their sender can read. Raises: PeerLost."""
        if link.memory is None or link.warm_buffers[1][0] != CAN_READ:
            return
        mail = self._mailbox(link, reads_tag(link.their_address), READS_BYTES)
        my_tag = reads_tag(self._device.address_for(link.peer))
        link.reads = LinkReads(self._device, link.endpoint, link.memory, mail, my_tag=my_tag)

    def _mailbox(self, link: Link, tag: int, num_bytes: int) -> Mailbox:
        """Returns the mailbox of ``tag``, which may have served an earlier link to the same peer."""
        boxes = self._mailboxes.setdefault(link.peer, {})
        if tag not in boxes:
            boxes[tag] = Mailbox(self._device, tag, num_bytes)
        return boxes[tag]

    def _collect_ready(self, link: Link, probe: LinkProbe, now: float) -> bool:
        try:
            moved = probe.collect(now)
            return (link.reads is not None and link.reads.step()) or moved
        except PeerLost:
            self.on_broken(link.peer)
            return True

    def ask(self, peer: str, deadline: float, future: Future[float]) -> None:
        link = self._links.get(peer)
        if link is None or link.probe is None:
            fail(future, PeerLost(f"no link to {peer}"))
        else:
            link.probe.ask(deadline, future)

    def on_broken(self, peer: str) -> None:
        """UCX reported a broken connection. The link goes, so that a later connect makes a new one."""
        if peer in self._links:
            logger.warning("link_broken peer=%s", peer)
            self.lose(peer, proved_dead=False, future=PromisedFuture())

    def lose(self, peer: str, *, proved_dead: bool, future: Future[None]) -> None:
        """Ends what is in flight with ``peer`` and starts to close its link; ``future`` is done when that is over."""
        link = self._links.pop(peer, None)
        request = None
        if link is not None:
            request = self._device.close_endpoint(link.endpoint)
            self._fail_waiters(link, PeerLost(f"{peer} is gone"))
            if link.probe is not None:
                link.probe.end(PeerLost(f"{peer} is gone"))
            if link.reads is not None:
                link.reads.end()
            elif link.memory is not None:
                link.memory.close()
        self._closings.append(_Closing(peer, request, link, time.monotonic() + CLOSE_DEADLINE_S, proved_dead, future))
        self._book.give_up_peer(peer)

    def _is_closed(self, closing: _Closing, now: float) -> bool:
        """Returns True when ``closing`` may be answered: closed, or overdue and nothing is promised about memory."""
        if next(other for other in self._closings if other.peer == closing.peer) is not closing:
            # A question for the end of a link that is still closing waits for it.
            return False
        if closing.request is None or closing.request.completed:
            return True
        return now >= closing.deadline and not closing.proved_dead

    def _on_closed(self, closing: _Closing) -> None:
        if closing.link is not None:
            self._held.setdefault(closing.peer, []).append(closing.link)
        if closing.proved_dead:
            self._held.pop(closing.peer, None)
            self._mailboxes.pop(closing.peer, None)
            self._book.settle_peer(closing.peer)
            self._device.close_inbox(closing.peer)
        closing.future.set_result(None)

    def _fail_waiters(self, link: Link, error: Exception) -> None:
        for waiter in link.waiters:
            fail(waiter.future, error)
        link.waiters = []

    def close_all(self) -> None:
        """Closes every link, as far as their peers allow it in time. Modifies: everything."""
        for peer in tuple(self._links):
            self.lose(peer, proved_dead=False, future=PromisedFuture())
        deadline = time.monotonic() + CLOSE_DEADLINE_S
        while self._closings and time.monotonic() < deadline:
            self._device.progress()
            self.collect(time.monotonic())

    def fail_all(self) -> None:
        """Answers whoever still waits for a link or its end: the transport ended."""
        for closing in self._closings:
            fail(closing.future, PeerLost(f"the transport ended before the link to {closing.peer} was closed"))
        for link in self._links.values():
            self._fail_waiters(link, PeerLost("the transport ended"))

    def forget(self) -> None:
        """Lets go of everything; requests that are kept would keep UCX's workers."""
        for book in (self._links, self._held, self._mailboxes):
            book.clear()


def warm_tag(address: bytes) -> int:
    """Returns the tag of the warm-up message of the transport that lives at ``address``."""
    return OWN_TAG_BIT | _hash(address)


def probe_tag(address: bytes) -> int:
    """Returns the tag of the probes of the transport that lives at ``address``."""
    return OWN_TAG_BIT | PROBE_TAG_BIT | _hash(address)


def reads_tag(address: bytes) -> int:
    """Returns the tag of the messages about direct reads of the transport that lives at ``address``."""
    return OWN_TAG_BIT | READS_TAG_BIT | _hash(address)


def _hash(address: bytes) -> int:
    return int.from_bytes(block_digest(address)[:8], "little") & (READS_TAG_BIT - 1)
