"""Which tokens the engine computes in its next step.

Pure: events come in as calls, ``plan`` says what to run, ``on_step`` takes what came of it. Prefill-only, decode-only
and combined workers use the same rules:

* Every stream that has credit and room decodes one token in every step.
* Prompts share what is left of the step. The oldest gets half of it, so that it ends however many others come; the
  rest goes to those with least left to compute, so that a short prompt does not wait behind a long one. What nobody
  else needs, the oldest gets as well.
* While streams run, a step may take ``stall_ratio`` times what it takes without prompts; the share of prompts shrinks
  to fit, but never below one granule. Without streams a step is ``chunk_tokens`` long.

Results do not depend on any of this: the engine gives the same bits for every cut of a prompt and any company.

A stream's *room* are the positions that its blocks cover, its *credit* the token indexes that its reader takes. It
never allocates blocks and never looks at a clock: durations come with ``on_step``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.errors import BadInput
from workers.core.step_costs import StepCosts

Key = tuple[str, int]
"""(attempt_id, epoch)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """``chunk_tokens``: prompt tokens of a step without streams. ``granule_tokens``: pieces end at multiples of it."""

    chunk_tokens: int = 512
    granule_tokens: int = 16
    stall_ratio: float = 2.2
    """How long a step may take beside streams, in steps without prompts. Leaves room below the promised 3."""
    max_pieces: int = 16
    """Prompts in one step."""

    def __post_init__(self) -> None:
        if self.granule_tokens < 1 or self.chunk_tokens < 1:
            raise BadInput("chunk_tokens", self.chunk_tokens, "must be at least 1")
        if self.stall_ratio <= 1.0:
            raise BadInput("stall_ratio", self.stall_ratio, "must be above 1")


@dataclass(frozen=True, slots=True)
class Piece:
    """Positions [start, stop) of a prompt; ``is_last`` when they are its end."""

    key: Key
    start: int
    stop: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: pieces of prompts and streams, each at most once."""

    pieces: tuple[Piece, ...]
    decode: tuple[Key, ...]

    def __bool__(self) -> bool:
        return bool(self.pieces or self.decode)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(piece.stop - piece.start for piece in self.pieces)


@dataclass(slots=True)
class _Prompt:
    num_tokens: int
    num_computed: int

    @property
    def num_left(self) -> int:
        return self.num_tokens - self.num_computed


@dataclass(slots=True)
class _Stream:
    num_tokens: int
    """Known tokens, prompt included; the KV of the last is not computed yet."""
    num_outputs: int
    max_index: int
    room_tokens: int

    @property
    def is_ready(self) -> bool:
        return self.num_outputs < self.max_index and self.num_tokens <= self.room_tokens


@dataclass(slots=True)
class Scheduler:
    """Prompts in order of arrival and streams of one worker."""

    limits: SchedulerLimits = field(default_factory=SchedulerLimits)
    costs: StepCosts = field(default_factory=StepCosts)
    _prompts: dict[Key, _Prompt] = field(default_factory=dict)
    _streams: dict[Key, _Stream] = field(default_factory=dict)
    _oldest_had_turn: bool = False
    """The last step with prompts began with the oldest."""

    # --- events -------------------------------------------------------------------------------------------

    def add_prompt(self, key: Key, *, num_tokens: int, num_computed: int, is_resumed: bool = False) -> None:
        """A prompt whose blocks are there. Positions [0, num_computed) are computed already.

        ``is_resumed``: it was preempted and is older than all that wait; it goes to the front.
        """
        assert key not in self._prompts and key not in self._streams, f"{key} is here already"
        assert 0 <= num_computed < num_tokens, (num_computed, num_tokens)
        prompt = _Prompt(num_tokens, num_computed)
        self._prompts = {key: prompt, **self._prompts} if is_resumed else {**self._prompts, key: prompt}

    def add_stream(self, key: Key, *, num_tokens: int, num_outputs: int, max_index: int, room_tokens: int) -> None:
        """A sequence that decodes: ``num_tokens`` are known, ``num_outputs`` of them generated."""
        assert key not in self._prompts and key not in self._streams, f"{key} is here already"
        self._streams[key] = _Stream(num_tokens, num_outputs, max_index, room_tokens)

    def on_credit(self, key: Key, max_index: int) -> None:
        """Indexes below ``max_index`` may be computed; less than before is ignored, and so is an unknown stream."""
        if (stream := self._streams.get(key)) is not None:
            stream.max_index = max(stream.max_index, max_index)

    def on_room(self, key: Key, room_tokens: int) -> None:
        """A stream got more blocks."""
        if (stream := self._streams.get(key)) is not None:
            assert room_tokens >= stream.room_tokens, (room_tokens, stream.room_tokens)
            stream.room_tokens = room_tokens

    def remove(self, key: Key) -> None:
        """Ended, cancelled, failed or preempted: exactly this key, wherever it is; an unknown one is ignored."""
        self._prompts.pop(key, None)
        self._streams.pop(key, None)

    def on_step(self, plan: StepPlan, *, duration_ns: int) -> None:
        """The step was run: every piece is computed and every stream has one token more."""
        self.costs.observe(
            num_decode_rows=len(plan.decode), num_prefill_tokens=plan.num_prefill_tokens, duration_ns=duration_ns
        )
        if plan.pieces:
            self._oldest_had_turn = plan.pieces[0].key == next(iter(self._prompts), None)
        for piece in plan.pieces:
            if (prompt := self._prompts.get(piece.key)) is not None:
                assert prompt.num_computed == piece.start, (prompt, piece)
                prompt.num_computed = piece.stop
                if piece.is_last:
                    del self._prompts[piece.key]
        for key in plan.decode:
            if (stream := self._streams.get(key)) is not None:
                stream.num_tokens += 1
                stream.num_outputs += 1

    # --- what to do ---------------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """Returns the next step; an empty one when there is nothing to compute."""
        decode = tuple(key for key, stream in self._streams.items() if stream.is_ready)
        return StepPlan(self._pieces(self._budget(len(decode))), decode)

    @property
    def has_work(self) -> bool:
        """Whether ``plan`` would not be empty."""
        return bool(self._prompts) or any(stream.is_ready for stream in self._streams.values())

    @property
    def num_running(self) -> int:
        """Streams, and one prompt if there is any."""
        return len(self._streams) + min(1, len(self._prompts))

    @property
    def num_waiting(self) -> int:
        """Prompts behind the oldest."""
        return max(0, len(self._prompts) - 1)

    def check_invariants(self) -> None:
        """Asserts what must hold after every event."""
        assert not self._prompts.keys() & self._streams.keys(), "a prompt that decodes"
        for key, prompt in self._prompts.items():
            assert 0 <= prompt.num_computed < prompt.num_tokens, (key, prompt)
        for key, stream in self._streams.items():
            assert 1 <= stream.num_outputs < stream.num_tokens, (key, stream)
            assert stream.num_tokens <= stream.room_tokens + 1, (key, stream)

    def _budget(self, num_streams: int) -> int:
        """Returns how many prompt tokens this step may have."""
        limits, costs = self.limits, self.costs
        if num_streams == 0:
            return limits.chunk_tokens
        decode_ns, token_ns = costs.decode_ns(num_streams), costs.prefill_ns_per_token
        if decode_ns is None or token_ns is None:
            return limits.granule_tokens
        spare_ns = (limits.stall_ratio - 1.0) * decode_ns
        affordable = limits.chunk_tokens if token_ns <= 0 else int(spare_ns / token_ns)
        whole = affordable // limits.granule_tokens * limits.granule_tokens
        return min(max(whole, limits.granule_tokens), limits.chunk_tokens)

    def _pieces(self, budget: int) -> tuple[Piece, ...]:
        if not self._prompts:
            return ()
        (oldest, head), *others = self._prompts.items()
        shares: dict[Key, int] = {}
        left = budget
        # A step that cannot be shared goes to the oldest and to the others in turn.
        is_shared = budget >= 2 * self.limits.granule_tokens
        if others and (is_shared or not self._oldest_had_turn):
            half = max(self.limits.granule_tokens, budget // 2)
            shares[oldest] = self._cut(head, min(half, budget)) or min(half, budget)
            left -= shares[oldest]
        # Least left first; of equals the older: the sort is stable.
        for key, prompt in sorted(others, key=lambda entry: entry[1].num_left):
            if len(shares) >= self.limits.max_pieces or left <= 0:
                break
            share = self._cut(prompt, left)
            if share:
                shares[key] = share
                left -= share
        if left > 0:
            whole = shares.get(oldest, 0) + left
            shares[oldest] = self._cut(head, whole) or whole
        return tuple(self._piece(key, share) for key, share in shares.items() if share)

    def _cut(self, prompt: _Prompt, budget: int) -> int:
        """Returns how many tokens of a prompt to take, at most ``budget``: all, or up to a granule end (perhaps 0)."""
        if prompt.num_left <= budget:
            return prompt.num_left
        stop = (prompt.num_computed + budget) // self.limits.granule_tokens * self.limits.granule_tokens
        return max(0, stop - prompt.num_computed)

    def _piece(self, key: Key, share: int) -> Piece:
        prompt = self._prompts[key]
        stop = prompt.num_computed + share
        return Piece(key, prompt.num_computed, stop, stop == prompt.num_tokens)


def room_tokens(block_table: Sequence[int], block_tokens: int) -> int:
    """Returns how many positions a block table covers."""
    return len(block_table) * block_tokens
