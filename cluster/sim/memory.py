"""Block memory of simulated workers and the copies between them.

A copy takes two events, begin and end, and anything may happen in between. Whose process performs it is the scheme's
choice: with *put* the sender writes into the receiver's memory whenever it runs, also long after everybody gave up on
the copy; with *get* the receiver reads the sender's memory at the end of the copy, whatever stands there by then.
A copy begins when its send and its receive are both posted under one tag.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from cluster.sim.dice import Dice
from cluster.sim.kernel import Kernel, Life
from cluster.sim.network import Network

STALL_NS = 10_000_000
NOTHING = b"\x00" * 16
DAMAGED = b"\xff" * 16

CopyEnd = Literal["OK", "CANCELLED"]


def block_content(ask_number: int, index: int) -> bytes:
    """Returns what a prompt's block holds, the same whoever computed it. It is its own digest."""
    return b"prompt" + ask_number.to_bytes(5, "big") + index.to_bytes(5, "big")


def answer_content(ask_number: int, epoch: int, index: int) -> bytes:
    """Returns what a block of generated tokens holds."""
    return b"answer" + ask_number.to_bytes(4, "big") + epoch.to_bytes(2, "big") + index.to_bytes(4, "big")


@dataclass(slots=True)
class SlotMemory:
    """The bytes of one worker's pool: one value for each slot."""

    life: Life
    slots: list[bytes]
    num_damaged: int = 0
    """So many of the next copies that land here are damaged on the way."""

    @classmethod
    def of(cls, life: Life, num_blocks: int) -> SlotMemory:
        """Returns memory of zeros."""
        return cls(life, [NOTHING] * num_blocks)


@dataclass(slots=True)
class _Side:
    memory: SlotMemory
    slot: int | None
    """None: received and thrown away."""
    done: Callable[[int, CopyEnd], None]


@dataclass(slots=True)
class _Copy:
    send: _Side | None = None
    receive: _Side | None = None
    begun: bool = False


@dataclass(slots=True)
class Copies:
    """All sends, receives and copies under way, by (sender incarnation, receiver incarnation, tag)."""

    kernel: Kernel
    network: Network
    dice: Dice
    receiver_copies: bool
    copy_ns_max: int
    _open: dict[tuple[str, str, int], _Copy] = field(default_factory=dict)

    def post_send(
        self, memory: SlotMemory, receiver: str, tag: int, slot: int, done: Callable[[int, CopyEnd], None]
    ) -> None:
        """Offers a slot. ``done(tag, end)`` is called on the sender once the slot is not read any more."""
        key = (memory.life.incarnation, receiver, tag)
        copy = self._open.setdefault(key, _Copy())
        copy.send = _Side(memory, slot, done)
        self._maybe_begin(key, copy)

    def post_receive(
        self, memory: SlotMemory, sender: str, tag: int, slot: int | None, done: Callable[[int, CopyEnd], None]
    ) -> None:
        """Waits for a block. ``done(tag, end)`` is called on the receiver once nothing writes the slot any more."""
        key = (sender, memory.life.incarnation, tag)
        copy = self._open.setdefault(key, _Copy())
        copy.receive = _Side(memory, slot, done)
        self._maybe_begin(key, copy)

    def cancel_unmatched(self, sender: str, receiver: str) -> None:
        """The endpoint between two lives is closed: what had not begun never will. A begun copy goes on."""
        for key in [k for k, copy in self._open.items() if k[:2] == (sender, receiver) and not copy.begun]:
            copy = self._open.pop(key)
            for side in (copy.send, copy.receive):
                if side is not None:
                    self.kernel.at(0, side.memory.life, side.done, key[2], "CANCELLED")

    def drop_life(self, incarnation: str) -> None:
        """A process is dead: it copies nothing any more and nobody can copy from it."""
        for key in [k for k in self._open if incarnation in k[:2]]:
            del self._open[key]

    @property
    def num_open(self) -> int:
        """How many are not done."""
        return len(self._open)

    def _maybe_begin(self, key: tuple[str, str, int], copy: _Copy) -> None:
        if copy.send is None or copy.receive is None:
            return
        copy.begun = True
        mover = (copy.receive if self.receiver_copies else copy.send).memory.life
        self.kernel.at(self.dice.skewed(1000, self.copy_ns_max), mover, self._end_copy, key)

    def _end_copy(self, key: tuple[str, str, int]) -> None:
        copy = self._open.get(key)
        if copy is None:
            return
        assert copy.send is not None and copy.receive is not None, key
        source, target = copy.send, copy.receive
        mover = (target if self.receiver_copies else source).memory.life
        if self.network.is_cut(source.memory.life.name, target.memory.life.name):
            self.kernel.at(STALL_NS, mover, self._end_copy, key)
            return
        del self._open[key]
        assert source.slot is not None, key
        content = source.memory.slots[source.slot]
        if target.slot is not None:
            if target.memory.num_damaged:
                target.memory.num_damaged -= 1
                content = DAMAGED
            target.memory.slots[target.slot] = content
            self.kernel.note("copied", target.memory.life.name, target.slot)
        self.kernel.at(0, source.memory.life, source.done, key[2], "OK")
        self.kernel.at(0, target.memory.life, target.done, key[2], "OK")
