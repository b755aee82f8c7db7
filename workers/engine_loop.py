"""The thread that computes: prefill chunks and decode steps, one after the other.

Owns the engine, the queue of prefill jobs and the set of decoding sequences. Other threads talk to it through
commands; it talks back through the callbacks of a job or of the loop, called on this thread. Prefill chunks and
decode steps alternate, so that a long prompt never holds back running streams for more than one chunk.

It never touches sockets, leases or block accounting.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from kvstore.core.messages import GenerationSpec, TokenLogprobs
from workers.engine import Engine, SeqChunk
from workers.sampling import sample

logger = logging.getLogger(__name__)

AttemptKey = tuple[str, int]
"""(attempt_id, epoch)."""

EndReason = Literal["stop", "length"]


@dataclass(slots=True)
class PrefillJob:
    """One prompt to compute. Positions [0, num_computed_tokens) are in the pool already.

    ``on_chunk(job)`` follows each chunk; ``on_done(job, token_id, logprobs)`` the last one; ``on_fault(job, error)``
    replaces them when the engine failed. All run on the engine thread.
    """

    key: AttemptKey
    spec: GenerationSpec
    block_table: Sequence[int]
    num_computed_tokens: int
    on_chunk: Callable[[PrefillJob], None]
    on_done: Callable[[PrefillJob, int, TokenLogprobs | None], None]
    on_fault: Callable[[PrefillJob, Exception], None]
    started_ns: int | None = None
    """When the first chunk began; what lies before is the engine's queue."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.spec.prompt_token_ids)


@dataclass(slots=True)
class DecodeSequence:
    """One running stream. ``output_token_ids[0]`` came with the hand-off; the KV of the last token is not yet computed.

    ``max_index`` is the stream's credit: token indexes below it may be computed.
    """

    key: AttemptKey
    spec: GenerationSpec
    block_table: Sequence[int]
    output_token_ids: list[int]
    max_index: int

    @property
    def position(self) -> int:
        """Position of the last known token, the next one to run through the model."""
        return len(self.spec.prompt_token_ids) + len(self.output_token_ids) - 1


@dataclass(frozen=True, slots=True)
class NewToken:
    """One token of one sequence, as a decode step made it."""

    key: AttemptKey
    index: int
    token_id: int
    logprobs: TokenLogprobs | None
    end: EndReason | None


def end_reason(spec: GenerationSpec, token_id: int, num_generated: int) -> EndReason | None:
    """Says whether a sequence ends with ``token_id`` as its ``num_generated``-th token."""
    if token_id in spec.stop_token_ids:
        return "stop"
    return "length" if num_generated >= spec.max_tokens else None


@dataclass(slots=True)
class _State:
    prefills: deque[PrefillJob] = field(default_factory=deque)
    sequences: dict[AttemptKey, DecodeSequence] = field(default_factory=dict)


class EngineLoop:
    """Runs the engine on its own thread until ``close``."""

    def __init__(
        self,
        engine: Engine,
        *,
        chunk_tokens: int,
        clock_ns: Callable[[], int],
        on_tokens: Callable[[list[NewToken]], None],
        on_decode_fault: Callable[[list[AttemptKey], Exception], None],
    ) -> None:
        self._engine = engine
        self._chunk_tokens = chunk_tokens
        self._clock_ns = clock_ns
        self._on_tokens = on_tokens
        self._on_decode_fault = on_decode_fault
        self._commands: queue.SimpleQueue[Callable[[_State], None] | None] = queue.SimpleQueue()
        self._state = _State()
        self._thread = threading.Thread(target=self._run, name="kopir-engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit_prefill(self, job: PrefillJob) -> None:
        """Queues a prompt, first come, first served."""
        self._commands.put(lambda state: state.prefills.append(job))

    def add_sequence(self, sequence: DecodeSequence) -> None:
        """Adds a stream to the next decode step."""

        def add(state: _State) -> None:
            state.sequences[sequence.key] = sequence

        self._commands.put(add)

    def set_credit(self, key: AttemptKey, max_index: int) -> None:
        """Lets a stream compute indexes below ``max_index``; a smaller value than before is ignored."""

        def credit(state: _State) -> None:
            if (sequence := state.sequences.get(key)) is not None:
                sequence.max_index = max(sequence.max_index, max_index)

        self._commands.put(credit)

    def remove(self, key: AttemptKey, done: Callable[[int], None]) -> None:
        """Takes an attempt out, whatever it was doing, then calls ``done(tokens computed)`` on this thread."""

        def take_out(state: _State) -> None:
            state.prefills = deque(job for job in state.prefills if job.key != key)
            sequence = state.sequences.pop(key, None)
            done(len(sequence.output_token_ids) if sequence is not None else 0)

        self._commands.put(take_out)

    def probe(self, done: Callable[[int, int], None]) -> None:
        """Calls ``done(running, waiting)`` from the engine thread: proof that it turns."""
        self._commands.put(
            lambda state: done(len(state.sequences) + (1 if state.prefills else 0), max(0, len(state.prefills) - 1))
        )

    def close(self) -> None:
        """Ends the thread after the step under way."""
        self._commands.put(None)
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while self._take_commands():
            if self._state.prefills:
                self._run_chunk(self._state.prefills[0])
            if self._state.sequences:
                self._run_decode_step()

    def _take_commands(self) -> bool:
        """Carries out waiting commands; blocks while there is nothing to compute. Returns False to end."""
        while True:
            try:
                command = self._commands.get(block=not self._has_work())
            except queue.Empty:
                return True
            if command is None:
                return False
            command(self._state)

    def _has_work(self) -> bool:
        return bool(self._state.prefills) or any(
            len(sequence.output_token_ids) < sequence.max_index for sequence in self._state.sequences.values()
        )

    def _run_chunk(self, job: PrefillJob) -> None:
        if job.started_ns is None:
            job.started_ns = self._clock_ns()
        start = job.num_computed_tokens
        stop = min(start + self._chunk_tokens, job.num_prompt_tokens)
        is_last = stop == job.num_prompt_tokens
        chunk = SeqChunk(
            token_ids=job.spec.prompt_token_ids[start:stop],
            start_position=start,
            block_table=job.block_table,
            want_logits=is_last,
        )
        try:
            logits = self._engine.forward([chunk])
            token = (
                sample(logits[0], job.spec.sampling, stop, (), prompt_token_ids=job.spec.prompt_token_ids)
                if is_last
                else None
            )
        except Exception as error:
            logger.exception("prefill_failed attempt_id=%s epoch=%d", *job.key)
            self._state.prefills.popleft()
            job.on_fault(job, error)
            return
        job.num_computed_tokens = stop
        job.on_chunk(job)
        if token is not None:
            self._state.prefills.popleft()
            job.on_done(job, *token)

    def _run_decode_step(self) -> None:
        ready = [s for s in self._state.sequences.values() if len(s.output_token_ids) < s.max_index]
        if not ready:
            return
        chunks = [
            SeqChunk(
                token_ids=(sequence.output_token_ids[-1],),
                start_position=sequence.position,
                block_table=sequence.block_table,
                want_logits=True,
            )
            for sequence in ready
        ]
        try:
            logits = self._engine.forward(chunks)
            tokens = [self._append(sequence, logits[row]) for row, sequence in enumerate(ready)]
        except Exception as error:
            logger.exception("decode_failed num_seqs=%d", len(ready))
            for sequence in ready:
                self._state.sequences.pop(sequence.key, None)
            self._on_decode_fault([sequence.key for sequence in ready], error)
            return
        self._on_tokens(tokens)

    def _append(self, sequence: DecodeSequence, logits: Tensor) -> NewToken:
        token_id, logprobs = sample(
            logits,
            sequence.spec.sampling,
            sequence.position + 1,
            sequence.output_token_ids,
            prompt_token_ids=sequence.spec.prompt_token_ids,
        )
        sequence.output_token_ids.append(token_id)
        num_generated = len(sequence.output_token_ids)
        end = end_reason(sequence.spec, token_id, num_generated)
        if end is not None:
            del self._state.sequences[sequence.key]
        return NewToken(sequence.key, num_generated - 1, token_id, logprobs, end)
