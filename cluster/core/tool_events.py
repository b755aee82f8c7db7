"""What a run of server-side tools is told and what it orders: the vocabulary of ``cluster.core.tool_ledger``.

Owns names, ids and digests; decides nothing. A *call* is what the model asked for in one place (round, index) of one
logical request. Its id follows from that place, so it is the same for every attempt; the key that the tool gets follows
from the id, so that whoever repeats the call repeats the same action.
"""

from __future__ import annotations

import hashlib
from enum import Enum
from typing import Any, Literal

import msgspec
from msgspec import Struct

OnUnknown = Literal["repeat_with_key", "lookup", "human"]
"""What is done when nobody knows whether the action happened (row F3)."""
StopCode = Literal["tool_divergence", "tool_outcome_unknown", "deadline_exceeded", "taken_over"]
LookupAnswer = Literal["done", "absent", "running", "unknown"]


class CallState(Enum):
    """What the ledger says of a call. An intent alone means: it may have happened."""

    INTENDED = "intended"
    DONE = "done"
    HANDED_OVER = "handed_over"
    """Nobody could find out; a person has to."""


class ToolTerms(Struct, frozen=True, kw_only=True):
    """What a run has to know of a tool."""

    name: str
    has_side_effects: bool
    on_unknown: OnUnknown
    timeout_ns: int
    max_tries: int = 3


class LoopTerms(Struct, frozen=True, kw_only=True):
    """Bounds of one run."""

    max_rounds: int
    """Rounds in which the model may call tools; one more answers without."""
    max_calls: int
    deadline_ns: int
    """No try begins after it; one that has begun has its own time limit."""


class Asked(Struct, frozen=True):
    """A call as the model wrote it, by name and by digest of its canonical arguments."""

    name: str
    arguments_digest: str


class ToolResult(Struct, frozen=True):
    """What the model is told. ``is_error``: the tool refused, could not be reached, or said too much."""

    content: str
    is_error: bool = False


class Call(Struct, frozen=True, kw_only=True):
    """One call in its place."""

    call_id: str
    round_index: int
    call_index: int
    name: str
    arguments_digest: str

    @property
    def place(self) -> tuple[int, int]:
        return (self.round_index, self.call_index)


class RecordedCall(Struct, frozen=True):
    """A call as an earlier life of the request left it."""

    call: Call
    state: CallState
    result: ToolResult | None = None


# --- what happens -------------------------------------------------------------------------------------------------


class Event(Struct, frozen=True, kw_only=True, tag=True):
    """Base of all events."""

    now_ns: int


class RoundEnded(Event, frozen=True, kw_only=True, tag=True):
    """The model has ended a round; without calls, its answer is complete."""

    calls: tuple[Asked, ...]


class IntentStored(Event, frozen=True, kw_only=True, tag=True):
    """The intent of the next try is committed."""

    call_id: str


class RunTakenOver(Event, frozen=True, kw_only=True, tag=True):
    """The ledger took nothing down, because the request belongs to a later life by now."""


class Answered(Event, frozen=True, kw_only=True, tag=True):
    """The tool gave a definite answer."""

    call_id: str
    result: ToolResult


class NotMade(Event, frozen=True, kw_only=True, tag=True):
    """The try certainly reached nobody."""

    call_id: str
    why: str


class OutcomeUnknown(Event, frozen=True, kw_only=True, tag=True):
    """The try may have done its work, or not, or may still be at it."""

    call_id: str
    why: str


class LookedUp(Event, frozen=True, kw_only=True, tag=True):
    """What the tool says of the key. ``result`` goes with ``done``."""

    call_id: str
    answer: LookupAnswer
    result: ToolResult | None = None


class WaitOver(Event, frozen=True, kw_only=True, tag=True):
    """The wait of a ``Wait`` is over."""

    call_id: str


class ResultStored(Event, frozen=True, kw_only=True, tag=True):
    """The result is committed."""

    call_id: str


AnyEvent = (
    RoundEnded | IntentStored | RunTakenOver | Answered | NotMade | OutcomeUnknown | LookedUp | WaitOver | ResultStored
)


# --- what is to be done -------------------------------------------------------------------------------------------


class Instruction(Struct, frozen=True, tag=True):
    """Base of all instructions."""


class StoreIntent(Instruction, frozen=True, tag=True):
    """Commit that ``try_number`` (from 1) of a call is about to be made."""

    call: Call
    try_number: int


class MakeCall(Instruction, frozen=True, tag=True):
    """Call the tool. Nothing may be sent from ``send_before_ns`` on: whoever took over may think it never will be."""

    call: Call
    send_before_ns: int


class AskTool(Instruction, frozen=True, tag=True):
    """Ask the tool what it knows of the key."""

    call: Call


class Wait(Instruction, frozen=True, tag=True):
    """Come back with ``WaitOver`` at this time."""

    call: Call
    until_ns: int


class StoreResult(Instruction, frozen=True, tag=True):
    """Commit the result; the model sees it afterwards."""

    call: Call
    result: ToolResult


class StoreHandOver(Instruction, frozen=True, tag=True):
    """Write down that a person has to find out. The row says the same without it."""

    call: Call
    why: str


class NextRound(Instruction, frozen=True, tag=True):
    """Give the model these results, in the order of its calls, and let it go on."""

    results: tuple[ToolResult, ...]
    may_call: bool


class Finish(Instruction, frozen=True, tag=True):
    """The answer is complete and agrees with the ledger."""


class Stop(Instruction, frozen=True, tag=True):
    """Nothing more is done; the client is told why."""

    code: StopCode
    message: str
    call: Call | None = None


AnyInstruction = StoreIntent | MakeCall | AskTool | Wait | StoreResult | StoreHandOver | NextRound | Finish | Stop


# --- names --------------------------------------------------------------------------------------------------------


def call_id_of(logical_id: str, round_index: int, call_index: int) -> str:
    """Names a call by its place: the same for every attempt and every life of the request."""
    text = f"{logical_id}:round-{round_index}:{call_index}"
    return "call_" + hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def action_key(tenant: str, logical_id: str, call_id: str) -> str:
    """Returns the idempotency key of an action (row F2): of the logical request, never of an attempt."""
    return f"{tenant}:{logical_id}:{call_id}"


def canonical_arguments(text: str) -> tuple[bytes, str]:
    """Returns JSON arguments in one fixed writing and the SHA-256 of it, in hex. Raises: ValueError."""
    value: Any = msgspec.json.decode(text)
    canonical = msgspec.json.encode(value, order="sorted")
    return canonical, hashlib.sha256(canonical).hexdigest()
