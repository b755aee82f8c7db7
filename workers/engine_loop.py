"""The thread that computes: what the scheduler plans, step after step.

Owns the engine and everything about a sequence that only computing needs: its known tokens and its block table. Other
threads talk to it through commands; it talks back through the callbacks of a job or of the loop, called on this
thread. Which tokens are computed in a step is the scheduler's decision (``workers.core.scheduler``); a step is one
pass over pieces of prompts and one token of each stream.

When a pass fails, its parts run again one by one, so that what is broken fails alone: running a position again writes
the same bytes. An error outside of the passes is nobody's alone: it ends the thread, and the worker with it. The loop
never touches sockets, leases or block accounting.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from kvstore.core.messages import GenerationSpec, TokenLogprobs
from kvstore.errors import FatalError
from workers.core.scheduler import Piece, Scheduler, SchedulerLimits, StepPlan
from workers.core.sequence import EngineLimits, SeqChunk
from workers.guide import Guide, GuideFactory
from workers.sampling import sample

logger = logging.getLogger(__name__)

AttemptKey = tuple[str, int]
"""(attempt_id, epoch)."""

EndReason = Literal["stop", "length"]

Choose = Callable[[Tensor], tuple[int, TokenLogprobs | None]]
"""From a row of logits to a token."""


@dataclass(slots=True)
class PrefillJob:
    """One prompt to compute. Positions [0, num_computed_tokens) are in the pool already.

    ``on_chunk(job)`` follows each chunk; ``on_done(job, token_id, logprobs)`` the last one; ``on_fault(job, error)``
    replaces them when the engine failed. All run on the engine thread.

    ``resumed_output``: what a preempted stream had generated. Its tokens but the last belong to what is computed, and
    nothing is sampled: ``on_done`` gets the last token as it was.
    """

    key: AttemptKey
    spec: GenerationSpec
    block_table: Sequence[int]
    num_computed_tokens: int
    on_chunk: Callable[[PrefillJob], None]
    on_done: Callable[[PrefillJob, int, TokenLogprobs | None], None]
    on_fault: Callable[[PrefillJob, Exception], None]
    resumed_output: Sequence[int] = ()
    started_ns: int | None = None
    """When the first chunk began; what lies before is the engine's queue."""
    token_ids: Sequence[int] = ()
    """All tokens to compute; set by the constructor."""

    def __post_init__(self) -> None:
        self.token_ids = (*self.spec.prompt_token_ids, *self.resumed_output[:-1])

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.spec.prompt_token_ids)


@dataclass(slots=True)
class DecodeSequence:
    """One running stream. ``output_token_ids[0]`` came with the hand-off; the KV of the last token is not yet computed.

    ``max_index`` is the stream's credit: token indexes below it may be computed. It decodes as far as ``block_table``
    has room.
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
    scheduler: Scheduler
    jobs: dict[AttemptKey, PrefillJob] = field(default_factory=dict)
    sequences: dict[AttemptKey, DecodeSequence] = field(default_factory=dict)
    guides: dict[AttemptKey, Guide] = field(default_factory=dict)
    """Of sequences with a grammar, once they have chosen a token here."""


@dataclass(frozen=True, slots=True)
class _Sampled:
    """What a part of a step gave: a token where one was due, or an error."""

    token: tuple[int, TokenLogprobs | None] | None = None
    error: Exception | None = None


class ForwardEngine(Protocol):
    """What the loop needs of an engine: ``Engine`` or ``PacedEngine``."""

    limits: EngineLimits

    def forward(self, chunks: Sequence[SeqChunk]) -> Tensor: ...


class EngineLoop:
    """Runs the engine on its own thread until ``close``."""

    def __init__(
        self,
        engine: ForwardEngine,
        *,
        chunk_tokens: int,
        clock_ns: Callable[[], int],
        on_tokens: Callable[[list[NewToken]], None],
        on_decode_fault: Callable[[list[AttemptKey], Exception], None],
        on_died: Callable[[Exception], None],
        guides: GuideFactory | None = None,
    ) -> None:
        self._engine = engine
        self._guides = guides
        self._block_tokens = engine.limits.block_tokens
        self._clock_ns = clock_ns
        self._on_tokens = on_tokens
        self._on_decode_fault = on_decode_fault
        self._on_died = on_died
        self._commands: queue.SimpleQueue[Callable[[_State], None] | None] = queue.SimpleQueue()
        limits = SchedulerLimits(chunk_tokens=chunk_tokens, granule_tokens=self._block_tokens)
        self._state = _State(Scheduler(limits))
        self._thread = threading.Thread(target=self._run, name="kopir-engine", daemon=True)

    # --- commands, from any thread ------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit_prefill(self, job: PrefillJob) -> None:
        """Queues a prompt; one that resumes a preempted stream goes to the front."""

        def add(state: _State) -> None:
            state.jobs[job.key] = job
            state.scheduler.add_prompt(
                job.key,
                num_tokens=len(job.token_ids),
                num_computed=job.num_computed_tokens,
                is_resumed=bool(job.resumed_output),
            )

        self._commands.put(add)

    def add_sequence(self, sequence: DecodeSequence) -> None:
        """Adds a stream to the next decode step."""

        def add(state: _State) -> None:
            state.sequences[sequence.key] = sequence
            state.scheduler.add_stream(
                sequence.key,
                num_tokens=sequence.position + 1,
                num_outputs=len(sequence.output_token_ids),
                max_index=sequence.max_index,
                room_tokens=len(sequence.block_table) * self._block_tokens,
            )

        self._commands.put(add)

    def set_credit(self, key: AttemptKey, max_index: int) -> None:
        """Lets a stream compute indexes below ``max_index``; a smaller value than before is ignored."""

        def credit(state: _State) -> None:
            if (sequence := state.sequences.get(key)) is not None:
                sequence.max_index = max(sequence.max_index, max_index)
                state.scheduler.on_credit(key, max_index)

        self._commands.put(credit)

    def extend(self, key: AttemptKey, block_table: Sequence[int]) -> None:
        """Gives a stream a longer block table, which begins with the one it has."""

        def grow(state: _State) -> None:
            if (sequence := state.sequences.get(key)) is not None:
                sequence.block_table = block_table
                state.scheduler.on_room(key, len(block_table) * self._block_tokens)

        self._commands.put(grow)

    def remove(self, key: AttemptKey, done: Callable[[int], None]) -> None:
        """Takes an attempt out, whatever it was doing, then calls ``done(tokens computed)`` on this thread."""

        def take_out(state: _State) -> None:
            sequence = self._take_out(key)
            done(len(sequence.output_token_ids) if sequence is not None else 0)

        self._commands.put(take_out)

    def pause(self, key: AttemptKey, done: Callable[[DecodeSequence | None], None]) -> None:
        """Takes a stream out between two steps and calls ``done`` with it, on this thread; None when it has ended."""
        self._commands.put(lambda state: done(self._take_out(key)))

    def probe(self, done: Callable[[int, int], None]) -> None:
        """Calls ``done(running, waiting)`` from the engine thread: proof that it turns."""
        self._commands.put(lambda state: done(state.scheduler.num_running, state.scheduler.num_waiting))

    def close(self) -> None:
        """Ends the thread after the step under way."""
        self._commands.put(None)
        self._thread.join(timeout=5.0)

    # --- on the engine thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take_commands():
                plan = self._state.scheduler.plan()
                if plan:
                    self._run_step(plan)
        except Exception as error:
            # Nobody would ever hear of what was queued here: without this thread there is no worker.
            logger.critical("engine_died", exc_info=error)
            self._on_died(error)

    def _take_commands(self) -> bool:
        """Carries out waiting commands; blocks while there is nothing to compute. Returns False to end."""
        while True:
            try:
                command = self._commands.get(block=not self._state.scheduler.has_work)
            except queue.Empty:
                return True
            if command is None:
                return False
            command(self._state)

    def _take_out(self, key: AttemptKey) -> DecodeSequence | None:
        state = self._state
        state.scheduler.remove(key)
        state.jobs.pop(key, None)
        state.guides.pop(key, None)
        return state.sequences.pop(key, None)

    def _run_step(self, plan: StepPlan) -> None:
        state = self._state
        started_ns = self._clock_ns()
        for piece in plan.pieces:
            job = state.jobs[piece.key]
            if job.started_ns is None:
                job.started_ns = started_ns
        streams = [state.sequences[key] for key in plan.decode]
        results = self._compute(plan, streams)
        state.scheduler.on_step(plan, duration_ns=self._clock_ns() - started_ns)
        # Streams first: their readers wait for nothing else.
        self._finish_streams(streams, results[: len(streams)])
        for piece, result in zip(plan.pieces, results[len(streams) :], strict=True):
            self._finish_piece(piece, state.jobs[piece.key], result)

    def _compute(self, plan: StepPlan, streams: list[DecodeSequence]) -> list[_Sampled]:
        """Runs the step; returns one result per stream, then one per piece."""
        parts = [self._stream_part(stream) for stream in streams] + [self._piece_part(piece) for piece in plan.pieces]
        chunks = [chunk for chunk, _ in parts]
        try:
            logits = self._engine.forward(chunks)
        except Exception as error:
            if len(parts) == 1:
                return [_Sampled(error=error)]
            logger.exception("step_failed num_seqs=%d num_pieces=%d", len(streams), len(plan.pieces))
            return [self._compute_alone(chunk, choose) for chunk, choose in parts]
        rows = iter(logits)
        return [_sampled(choose, next(rows)) if chunk.want_logits else _Sampled() for chunk, choose in parts]

    def _compute_alone(self, chunk: SeqChunk, choose: Choose) -> _Sampled:
        try:
            logits = self._engine.forward([chunk])
        except Exception as error:
            return _Sampled(error=error)
        return _sampled(choose, logits[0]) if chunk.want_logits else _Sampled()

    def _stream_part(self, stream: DecodeSequence) -> tuple[SeqChunk, Choose]:
        chunk = SeqChunk((stream.output_token_ids[-1],), stream.position, stream.block_table)
        return chunk, lambda row: self._choose(row, stream.key, stream.spec, stream.output_token_ids)

    def _piece_part(self, piece: Piece) -> tuple[SeqChunk, Choose]:
        job = self._state.jobs[piece.key]
        wants_token = piece.is_last and not job.resumed_output
        chunk = SeqChunk(job.token_ids[piece.start : piece.stop], piece.start, job.block_table, wants_token)
        return chunk, lambda row: self._choose(row, job.key, job.spec, ())

    def _choose(
        self, row: Tensor, key: AttemptKey, spec: GenerationSpec, output: Sequence[int]
    ) -> tuple[int, TokenLogprobs | None]:
        position = len(spec.prompt_token_ids) + len(output)
        guide = self._guide(key, spec, output)
        allowed = guide.allowed() if guide is not None else None
        token = sample(row, spec.sampling, position, output, prompt_token_ids=spec.prompt_token_ids, allowed=allowed)
        if guide is not None and token[0] not in spec.stop_token_ids:
            guide.consume(token[:1])
        return token

    def _guide(self, key: AttemptKey, spec: GenerationSpec, output: Sequence[int]) -> Guide | None:
        """Returns the grammar's state behind ``output``, rebuilt when the sequence is new here."""
        if spec.grammar is None:
            return None
        guide = self._state.guides.get(key)
        if guide is None:
            if self._guides is None:
                raise FatalError("this worker cannot follow grammars")
            guide = self._state.guides[key] = self._guides.guide(spec.grammar, output)
        return guide

    def _finish_streams(self, streams: list[DecodeSequence], results: list[_Sampled]) -> None:
        tokens = []
        for stream, result in zip(streams, results, strict=True):
            if result.token is None:
                assert result.error is not None, f"{stream.key} has neither token nor error"
                logger.error("decode_failed attempt_id=%s epoch=%d", *stream.key, exc_info=result.error)
                self._take_out(stream.key)
                self._on_decode_fault([stream.key], result.error)
            else:
                tokens.append(self._append(stream, *result.token))
        if tokens:
            self._on_tokens(tokens)

    def _append(self, stream: DecodeSequence, token_id: int, logprobs: TokenLogprobs | None) -> NewToken:
        stream.output_token_ids.append(token_id)
        num_generated = len(stream.output_token_ids)
        end = end_reason(stream.spec, token_id, num_generated)
        if end is not None:
            self._take_out(stream.key)
        return NewToken(stream.key, num_generated - 1, token_id, logprobs, end)

    def _finish_piece(self, piece: Piece, job: PrefillJob, result: _Sampled) -> None:
        if result.error is not None:
            logger.error("prefill_failed attempt_id=%s epoch=%d", *job.key, exc_info=result.error)
            self._take_out(job.key)
            job.on_fault(job, result.error)
            return
        job.num_computed_tokens = piece.stop
        try:
            job.on_chunk(job)
        except Exception as error:
            # It only touches what is this job's: digests, and the transfer to its peer.
            logger.exception("push_failed attempt_id=%s epoch=%d", *job.key)
            self._take_out(job.key)
            job.on_fault(job, error)
            return
        if piece.is_last:
            self._take_out(job.key)
            token = (job.resumed_output[-1], None) if result.token is None else result.token
            job.on_done(job, *token)


def _sampled(choose: Choose, row: Tensor) -> _Sampled:
    """Chooses a token; an error is this row's alone."""
    try:
        return _Sampled(choose(row))
    except Exception as error:
        return _Sampled(error=error)
