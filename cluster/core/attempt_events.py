"""What a request machine hears and what it answers: its events and its instructions.

Every event carries ``now_ns``, the ingress's own monotonic time. An instruction is an order to the driver; a machine
never does anything itself.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, Role] = ("prefill", "decode")

FaultReason = Literal[
    "worker_exited",
    "network_cut",
    "lease_expired",
    "engine_fault",
    "deadline",
    "shutdown",
    "transfer_failed",
    "client_stalled",
]
InterruptReason = Literal["worker_exited", "network_cut", "lease_expired", "engine_fault", "deadline", "shutdown"]


class WorkerRef(Struct, frozen=True, kw_only=True):
    """Which life of which worker runs one side of an attempt."""

    worker_id: str
    incarnation: str
    pid: int
    node: str


class Event(Struct, frozen=True, kw_only=True, tag=True):
    """Base of all events."""

    now_ns: int


class Routed(Event, frozen=True, kw_only=True, tag=True):
    """A pair of workers was chosen for the next attempt."""

    attempt_id: str
    prefill: WorkerRef
    decode: WorkerRef


class NoRoute(Event, frozen=True, kw_only=True, tag=True):
    """No pair can take the request now."""

    message: str


class BlocksReserved(Event, frozen=True, kw_only=True, tag=True):
    attempt_id: str
    epoch: int


class WorkerRefused(Event, frozen=True, kw_only=True, tag=True):
    """A worker will not take the attempt; it holds nothing of it."""

    attempt_id: str
    epoch: int
    role: Role
    code: str
    message: str


class PrefillBegan(Event, frozen=True, kw_only=True, tag=True):
    attempt_id: str
    epoch: int
    cached_tokens: int
    cached_by_tier: dict[str, int] = {}


class PrefillEnded(Event, frozen=True, kw_only=True, tag=True):
    """Decode holds every block; the worker's own measurements come along."""

    attempt_id: str
    epoch: int
    spans_ns: dict[str, int] = {}


class TokensArrived(Event, frozen=True, kw_only=True, tag=True):
    """Tokens [first_index, first_index + num_tokens) of a frame."""

    attempt_id: str
    epoch: int
    first_index: int
    num_tokens: int
    end: Literal["stop", "length"] | None = None


class FirstDelta(Event, frozen=True, kw_only=True, tag=True):
    """The first write towards the client comes next."""


class Delivered(Event, frozen=True, kw_only=True, tag=True):
    """The text of the first ``num_tokens`` tokens has been written in full."""

    num_tokens: int


class StopMatched(Event, frozen=True, kw_only=True, tag=True):
    """A stop string ended the text; the rest is not wanted."""


class Completed(Event, frozen=True, kw_only=True, tag=True):
    """The end of the answer was written. ``rest``: why tokens that were not delivered were not, if that is no loss."""

    rest: str = ""


class AnswerEnded(Event, frozen=True, kw_only=True, tag=True):
    """Nothing more is written for a request that failed, was interrupted or cancelled: its client has been told."""


class WorkerGone(Event, frozen=True, kw_only=True, tag=True):
    """A life of a worker is proved over."""

    incarnation: str


class LinkLost(Event, frozen=True, kw_only=True, tag=True):
    """The link to a worker ended; that proves nothing."""

    incarnation: str


class LinkBack(Event, frozen=True, kw_only=True, tag=True):
    """A life whose link was lost is connected again."""

    incarnation: str


class AttemptFaulted(Event, frozen=True, kw_only=True, tag=True):
    """A worker ended its side by a fault and publishes nothing more of it."""

    attempt_id: str
    epoch: int
    role: Role
    reason: FaultReason
    message: str


class CancelAcked(Event, frozen=True, kw_only=True, tag=True):
    attempt_id: str
    epoch: int
    role: Role
    num_generated: int


class TimerFired(Event, frozen=True, kw_only=True, tag=True):
    """A timer that the machine asked for: nothing of this side can be published any more."""

    attempt_id: str
    epoch: int
    role: Role


class LeaseLapsed(Event, frozen=True, kw_only=True, tag=True):
    """A side has not asked for its lease during a whole hold (``LeaseGranter.lapse``): it has surely stopped."""

    attempt_id: str
    epoch: int
    role: Role


class ClientGone(Event, frozen=True, kw_only=True, tag=True):
    """Nobody reads the answer any more, or somebody cancelled it."""

    reason: str


class DeadlineReached(Event, frozen=True, kw_only=True, tag=True):
    """The request's time is over."""


class DrainEnded(Event, frozen=True, kw_only=True, tag=True):
    """The ingress stops now."""


AnyEvent = (
    Routed
    | NoRoute
    | BlocksReserved
    | WorkerRefused
    | PrefillBegan
    | PrefillEnded
    | TokensArrived
    | FirstDelta
    | Delivered
    | StopMatched
    | Completed
    | AnswerEnded
    | WorkerGone
    | LinkLost
    | LinkBack
    | AttemptFaulted
    | CancelAcked
    | TimerFired
    | LeaseLapsed
    | ClientGone
    | DeadlineReached
    | DrainEnded
)


# --- instructions -------------------------------------------------------------------------------------------


class SendReserve(Struct, frozen=True):
    """Ask the decode side for blocks."""

    attempt_id: str
    epoch: int


class SendPrefill(Struct, frozen=True):
    """Send the prompt with the ticket to the prefill side."""

    attempt_id: str
    epoch: int


class SendCancel(Struct, frozen=True):
    """Revoke the lease of one side, then tell it to stop."""

    attempt_id: str
    epoch: int
    role: Role
    reason: str


class WaitForFence(Struct, frozen=True):
    """Answer with ``TimerFired`` once this side's lease has surely run out."""

    attempt_id: str
    epoch: int
    role: Role


class Deliver(Struct, frozen=True):
    """Hand tokens on to the client side, leaving out the first ``skip`` of the frame."""

    skip: int
    num_tokens: int
    end: Literal["stop", "length"] | None


class DropTokens(Struct, frozen=True):
    """Drop a frame's tokens and count them."""

    num_tokens: int
    reason: Literal["stale_attempt", "duplicate", "gap", "not_wanted"]


class AskResend(Struct, frozen=True):
    """A lost link is back: ask decode for every token from ``next_index`` on. Frames may have died with the old link,
    and a stream that waits for credit sends no later frame that would show the gap."""

    attempt_id: str
    epoch: int
    next_index: int


class RouteAgain(Struct, frozen=True):
    """The old attempt is fenced and nothing was sent: choose another pair. Tokens so far are void."""

    avoid: tuple[str, ...]
    """Incarnations that this request has failed on."""
    silent_nodes: tuple[str, ...] = ()
    """Hosts of sides that were lost by silence: what ails a network ails everybody on it."""


class Fail(Struct, frozen=True):
    """Nothing was sent: answer with an ordinary HTTP error."""

    status: int
    code: str
    message: str
    retryable_by_client: bool


class Interrupt(Struct, frozen=True):
    """Something was sent: end the answer by the interruption event."""

    reason: InterruptReason
    attempt_id: str
    message: str


class Close(Struct, frozen=True):
    """Request ended and both sides of every attempt are fenced: books can be closed."""

    num_generated: int
    num_delivered: int
    discard_reason: str


Instruction = (
    SendReserve
    | SendPrefill
    | SendCancel
    | WaitForFence
    | Deliver
    | DropTokens
    | AskResend
    | RouteAgain
    | Fail
    | Interrupt
    | Close
)
