"""What a decode worker knows about one attempt that is being handed over to it.

A pure state machine: blocks are posted by prefill, land one by one, and the hand-off message says that all were
posted. The attempt may decode once every block of its prompt has landed with the right digest and the hand-off is
here. A block that failed fails the attempt; nothing is ever decoded over a block that did not verify.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvstore.core.messages import DestinationBlock, HandOff, PostedBlock


class HandOffState(Enum):
    """Where a hand-off stands."""

    RECEIVING = "receiving"
    COMPLETE = "complete"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A posted block that does not fit the ticket; ``why`` names index and field."""

    why: str


@dataclass(slots=True)
class HandOffTracker:
    """Tracks the prompt blocks of one attempt.

    ``blocks`` are the destinations named in its ticket; the first ``num_held`` blocks of the prompt are here already,
    so that block ``index`` of the prompt goes to ``blocks[index - num_held]``.
    """

    blocks: tuple[DestinationBlock, ...]
    num_held: int = 0
    state: HandOffState = HandOffState.RECEIVING
    hand_off: HandOff | None = None
    failure: str | None = None
    _posted: set[int] = field(default_factory=set)
    _landed: set[int] = field(default_factory=set)

    def on_posted(self, posted: tuple[PostedBlock, ...]) -> list[PostedBlock] | Refusal:
        """Returns the blocks to receive now, or a refusal that fails the attempt. Modifies: state."""
        fresh: list[PostedBlock] = []
        for block in posted:
            if block.index < self.num_held:
                return self._refuse(f"index {block.index}: the ticket says that this block is held")
            if block.index >= self.num_held + len(self.blocks):
                return self._refuse(f"index {block.index}: the ticket has {self.num_held + len(self.blocks)} blocks")
            if block.tag != self.destination(block.index).tag:
                return self._refuse(f"index {block.index}: tag {block.tag} is not the ticket's")
            if block.index in self._posted:
                return self._refuse(f"index {block.index}: posted twice")
            self._posted.add(block.index)
            fresh.append(block)
        return fresh

    def destination(self, index: int) -> DestinationBlock:
        """Returns where a block of the prompt that is not held goes."""
        return self.blocks[index - self.num_held]

    def on_landed(self, index: int) -> HandOffState:
        """A block arrived and verified. Modifies: state."""
        assert index in self._posted, f"block {index} landed before it was posted"
        self._landed.add(index)
        return self._settle()

    def on_failed(self, index: int, result: str) -> HandOffState:
        """A block did not arrive or did not verify; the first failure counts. Modifies: state."""
        self._refuse(f"block {index}: {result}")
        return self.state

    def on_hand_off(self, hand_off: HandOff) -> HandOffState:
        """Prefill says that it posted everything. Modifies: state."""
        if self.hand_off is not None:
            self._refuse("handed off twice")
            return self.state
        self.hand_off = hand_off
        if len(self._posted) != len(self.blocks):
            self._refuse(f"handed off with {len(self._posted)} of {len(self.blocks)} blocks posted")
        return self._settle()

    @property
    def outstanding_indices(self) -> frozenset[int]:
        """Blocks whose transfer may still be under way."""
        return frozenset(self._posted - self._landed)

    def check_invariants(self) -> None:
        """Asserts what must hold after every step."""
        assert self._landed <= self._posted, (self._landed, self._posted)
        assert self.state is not HandOffState.COMPLETE or len(self._landed) == len(self.blocks)
        assert (self.state is HandOffState.FAILED) == (self.failure is not None), (self.state, self.failure)

    def _refuse(self, why: str) -> Refusal:
        if self.state is not HandOffState.FAILED:
            self.state = HandOffState.FAILED
            self.failure = why
        return Refusal(why)

    def _settle(self) -> HandOffState:
        if self.state is HandOffState.RECEIVING and self.hand_off is not None and len(self._landed) == len(self.blocks):
            self.state = HandOffState.COMPLETE
        return self.state
