"""What a step of the engine costs, learnt from the steps that were run.

Pure. A step takes about ``decode_ns(rows) + tokens * prefill_ns_per_token``: the first part from steps without a
prompt, the second from what a prompt's tokens added. Both are moving averages, because contexts grow and machines are
shared. Estimates steer sizes only; no token depends on them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

WEIGHT: Final = 0.25
"""Share of the newest step in an average."""


@dataclass(slots=True)
class StepCosts:
    """Moving averages; None while nothing is known."""

    prefill_ns_per_token: float | None = None
    _decode_ns: dict[int, float] = field(default_factory=dict)
    """By class of batch size: number of rows, rounded up to a power of two."""

    def observe(self, *, num_decode_rows: int, num_prefill_tokens: int, duration_ns: int) -> None:
        """Learns from one step. Modifies: the averages."""
        size = _size_class(num_decode_rows)
        if num_decode_rows == 0:
            if num_prefill_tokens:
                self._learn_prefill(duration_ns / num_prefill_tokens)
        elif num_prefill_tokens == 0:
            self._decode_ns[size] = _averaged(self._decode_ns.get(size), duration_ns)
        elif (decode_ns := self.decode_ns(num_decode_rows)) is not None:
            self._learn_prefill(max(0.0, duration_ns - decode_ns) / num_prefill_tokens)
        elif self.prefill_ns_per_token is not None:
            # No step without a prompt was seen yet: what the prompt does not explain is decode.
            rest_ns = duration_ns - num_prefill_tokens * self.prefill_ns_per_token
            self._decode_ns[size] = max(rest_ns, 0.1 * duration_ns)

    def decode_ns(self, num_rows: int) -> float | None:
        """Returns what a step of ``num_rows`` streams takes, from the nearest size known."""
        if not self._decode_ns:
            return None
        size = _size_class(num_rows)
        return self._decode_ns[min(self._decode_ns, key=lambda known: (abs(known - size), known))]

    def _learn_prefill(self, ns_per_token: float) -> None:
        self.prefill_ns_per_token = _averaged(self.prefill_ns_per_token, ns_per_token)


def _size_class(num_rows: int) -> int:
    return 1 << max(0, num_rows - 1).bit_length()


def _averaged(average: float | None, newest: float) -> float:
    return newest if average is None else average + WEIGHT * (newest - average)
