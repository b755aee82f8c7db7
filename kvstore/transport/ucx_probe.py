"""Round trips over a link: 64 bytes there and back, between the threads that move the blocks.

A link whose probes come back moves blocks; a process that is stopped, or a network that drops, answers none. The other
side's thread answers by itself, asleep or not.

Message, 64 bytes: kind (1 byte: 0 question, 1 answer), 7 bytes of zeros, nonce (8 bytes, little endian), zeros.

Life cycle: made when the link is ready -> ``ask``, ``collect`` ... -> ``end``.
"""

from __future__ import annotations

import struct
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from kvstore.errors import DeadlineExceeded, KopirError, PeerLost
from kvstore.transport.transfers import fail
from kvstore.transport.ucx_device import UcxDevice
from kvstore.transport.ucx_mailbox import Mailbox, Outbox

MESSAGE_BYTES = 64
MAX_QUESTIONS = 64
"""Open questions per link; a further one is refused."""
_FORMAT = struct.Struct("<B7xQ48x")
_QUESTION, _ANSWER = 0, 1


@dataclass(frozen=True, slots=True)
class _Question:
    asked_at: float
    deadline: float
    future: Future[float]


class LinkProbe:
    """The probes of one link. All calls on the transport's thread."""

    def __init__(self, device: UcxDevice, endpoint: Any, mail: Mailbox, *, my_tag: int) -> None:
        """Raises: PeerLost."""
        self._out = Outbox(device, endpoint, my_tag, MESSAGE_BYTES)
        self._mail = mail
        self._questions: dict[int, _Question] = {}
        # An answer to a question of an earlier link answers none of this one.
        self._next_nonce = time.monotonic_ns()
        mail.attach(endpoint)

    @property
    def is_asking(self) -> bool:
        return bool(self._questions)

    def ask(self, deadline: float, future: Future[float]) -> None:
        """Sends a question; ``future`` gets the seconds until its answer was here, by ``time.monotonic``."""
        if len(self._questions) >= MAX_QUESTIONS:
            fail(future, DeadlineExceeded("too many probes wait for an answer"))
            return
        nonce, self._next_nonce = self._next_nonce, self._next_nonce + 1
        self._questions[nonce] = _Question(time.monotonic(), deadline, future)
        try:
            self._out.send(_FORMAT.pack(_QUESTION, nonce))
        except PeerLost as error:
            fail(self._questions.pop(nonce).future, error)

    def collect(self, now: float) -> bool:
        """Answers questions, takes answers, ends those that are overdue. Returns True when something came.

        Raises: PeerLost when the link is broken.
        """
        came = False
        while (message := self._mail.take()) is not None:
            came = True
            kind, nonce = _FORMAT.unpack(message)
            if kind == _QUESTION:
                self._out.send(_FORMAT.pack(_ANSWER, nonce))
            elif (question := self._questions.pop(nonce, None)) is not None:
                question.future.set_result(time.monotonic() - question.asked_at)
        if self._questions:
            for nonce in [nonce for nonce, question in self._questions.items() if now >= question.deadline]:
                fail(self._questions.pop(nonce).future, DeadlineExceeded("the peer does not answer a probe"))
        return came

    def end(self, error: KopirError) -> None:
        """Ends all questions with ``error``. Memory of posted messages stays with this object."""
        for question in self._questions.values():
            fail(question.future, error)
        self._questions.clear()
