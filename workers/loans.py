"""Blocks of decode attempts while a prefill of the same worker computes in them.

A combined worker computes a prompt in the very blocks that its decode side has reserved for it. However the attempt
ends meanwhile, these blocks are nobody else's until the engine has left them; and what was computed in them is kept:
full blocks are shared under their hash, and held until the store has its copy.

Owns the list of such loans: at most one per prefill under way. Runs on the link loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.core.block_pool import BlockPool, CachedBlock
from kvstore.core.ids import AttemptId, BlockDigest
from workers.decode_attempt import DecodeAttempt
from workers.device_cache import DeviceCache
from workers.engine_loop import AttemptKey


@dataclass(slots=True)
class _Loan:
    attempt: DecodeAttempt
    then: Callable[[], None] | None = None
    """The attempt has ended meanwhile: what is to be done once the engine has left its blocks."""


class Loans:
    """Which attempts' blocks are lent to the prefill side."""

    def __init__(self, *, pool: BlockPool, device: DeviceCache) -> None:
        self._pool = pool
        self._device = device
        self._open: dict[AttemptKey, _Loan] = {}

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._open

    def lend(self, attempt: DecodeAttempt) -> tuple[int, ...]:
        """Returns the attempt's slots. They have no deadline any more: the prefill that computes in them has one."""
        self._open[attempt.key] = _Loan(attempt)
        self._pool.renew(AttemptId(attempt.key[0]), attempt.key[1], deadline_ns=None)
        return attempt.slots

    def end_later(self, key: AttemptKey, then: Callable[[], None]) -> None:
        """The attempt has ended: ``then`` frees its blocks when they are taken back."""
        self._open[key].then = then

    def take_back(self, key: AttemptKey) -> tuple[DecodeAttempt, Callable[[], None] | None] | None:
        """The engine has left the blocks. Returns their attempt and what waits for that; None: nothing was lent."""
        loan = self._open.pop(key, None)
        return None if loan is None else (loan.attempt, loan.then)

    def keep(self, attempt: DecodeAttempt, digests: Sequence[BlockDigest]) -> None:
        """The first blocks of the prompt are final, ``digests`` says what they hold: shares and holds the full ones.

        The holds end by ``copied``.
        """
        attempt_id, epoch = AttemptId(attempt.key[0]), attempt.key[1]
        num_held = len(attempt.held)
        for block in attempt.tracker.blocks[: max(0, len(digests) - num_held)]:
            self._pool.landed(attempt_id, epoch, slot=block.slot, generation=block.generation)
        num_full = min(len(digests), len(attempt.hashes))
        for index in range(num_held, num_full):
            self._device.share(attempt.key, index, attempt.hashes[index], digests[index])
        found = (self._pool.find(block_hash) for block_hash in attempt.hashes[:num_full])
        self._device.hold(_holder(attempt.key), attempt.key[1], [block for block in found if block is not None])

    def kept(self, key: AttemptKey) -> tuple[CachedBlock, ...]:
        """Returns what ``keep`` holds."""
        return self._device.held(_holder(key), key[1])

    def copied(self, key: AttemptKey) -> None:
        """Ends the holds of ``keep``. Safe without any."""
        self._device.let_go(_holder(key), key[1])


def _holder(key: AttemptKey) -> str:
    return f"prompt:{key[1]}:{key[0]}"
