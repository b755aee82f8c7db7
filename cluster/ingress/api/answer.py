"""One request from submit to its single ending.

Owns the choices of the request and the watch over the client's connection: an answer runs as a task beside that watch,
so that a client who leaves stops the work at once, whether tokens flow or not. What is written, and when, is up to the
two subclasses (``StreamedAnswer``, ``WholeAnswer``).

The first choice starts alone; the others follow with its first token, because their prompt is in the cache by then.

Exactly one ending: finished, an error status, one error event, or silence to a client who is gone.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from typing import Any

import msgspec

from cluster.core.tool_events import action_key
from cluster.ingress.api.backend import CancelReason, Ended, GenerationEvent, Interrupted, Restarted, TokenBatch
from cluster.ingress.api.choice import Choice, Merge
from cluster.ingress.api.errors import ApiError, UpstreamFailed, as_api_error
from cluster.ingress.api.idempotency import KeyHold
from cluster.ingress.api.plan import AnswerPlan
from cluster.ingress.api.services import Services
from cluster.ingress.api.shapes import AnswerShape
from cluster.ingress.api.window import WRITTEN, WriteWindow
from cluster.ingress.api.wire import Piece, PromptTokensDetails, Usage
from kvstore.errors import KopirError

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_clean_ups: set[asyncio.Task[None]] = set()
"""Clean-ups that outlive a cancelled handler; the loop alone would not keep them."""


class Answer(ABC):
    """Runs one request; see the module."""

    def __init__(
        self,
        services: Services,
        plan: AnswerPlan,
        *,
        request_id: str,
        label: str | None,
        tenant: str,
        arrived_s: float,
        hold: KeyHold | None = None,
        client_retries: int = 0,
        request_class: str | None = None,
        salt: bytes = b"",
        window: WriteWindow | None = None,
    ) -> None:
        self._services = services
        self._plan = plan
        self._request_id = request_id
        self._label = label
        self._tenant = tenant
        self._arrived_s = arrived_s
        self._hold = hold
        self._client_retries = client_retries
        self._salt = salt
        self._request_class = request_class
        self._window = window
        """None: a write waits for the client by itself."""
        self._waited_s = 0.0
        """For a seat."""
        self._choices = [
            Choice(
                index,
                plan,
                services.tokenizer.table,
                call_ids=partial(_call_id, request_id, index),
                action_keys=partial(action_key, tenant, request_id),
            )
            for index in range(plan.num_choices)
        ]
        self._is_open = False
        """Headers went out, maybe with a comment, and nothing else yet."""
        self._is_written_down = False
        self._interruption: dict[str, Any] | None = None
        self._computed = True
        self._started = False
        """The first byte went out, or is about to."""
        backend = services.backend
        self._shape = AnswerShape.of(plan)(
            plan,
            services.tokenizer.table,
            request_id=request_id,
            created=int(services.unix_s()),
            model=backend.model_id,
            fingerprint=backend.system_fingerprint,
        )

    async def run(self, receive: Receive, send: Send) -> None:
        """Answers the client.

        Raises: ApiError when nothing was written yet; whoever calls answers with it.
        """
        metrics = self._services.metrics
        metrics.running.inc()
        outcome = "client_gone"
        try:
            outcome = await self._run_watched(receive, send)
        except ApiError as error:
            self._computed = self._num_tokens > 0
            outcome = "failed" if error.status >= 500 else "rejected"
            raise
        finally:
            if self._services.seats is not None:
                self._services.seats.leave(self._request_id)
            metrics.running.dec()
            metrics.requests.labels(self._plan.kind, outcome).inc()
            metrics.generated_tokens.inc(self._num_tokens)
            if self._started:
                metrics.delivered_tokens.inc(self._num_delivered)
            if self._hold is not None:
                await self._settle(self._hold, outcome)

    async def _settle(self, hold: KeyHold, outcome: str) -> None:
        """Writes down what became of the key; finished even when this handler is cancelled."""

        async def write() -> None:
            try:
                if not self._started and not self._is_open:
                    await hold.release()
                elif outcome != "finished":
                    await hold.interrupted(self._interruption or self._broken_off())
                elif self._plan.stream:
                    await hold.finished()
            except ApiError as error:
                # Its row stays open: who asks again hears that it is under way until this ingress ends.
                logger.error("key_not_settled request_id=%s error=%s", self._request_id, error)

        task = asyncio.ensure_future(write())
        _clean_ups.add(task)
        task.add_done_callback(_clean_ups.discard)
        await asyncio.shield(task)

    def _broken_off(self) -> dict[str, Any]:
        return {
            "code": "client_gone",
            "reason": "client_gone",
            "request_id": self._request_id,
            "attempt_id": self._attempt_id,
            "partial_output": True,
            "delivered_output_tokens": self._num_delivered,
            "retryable": False,
        }

    @property
    def used_tokens(self) -> int:
        """Tokens that a quota counts: the prompt once anything was computed, and what was generated."""
        return self._plan.num_prompt_tokens + self._num_tokens if self._computed else 0

    async def _run_watched(self, receive: Receive, send: Send) -> str:
        """Returns the outcome, as named in ``metrics.OUTCOMES``."""
        work = asyncio.ensure_future(self._answer(send))
        watch = asyncio.ensure_future(_wait_for_disconnect(receive, self._window))
        try:
            await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
        finally:
            # Also reached when this handler itself is cancelled, which is how Serve tells of a client that left.
            watch.cancel()
            if not work.done() or any(not choice.is_over for choice in self._running):
                await self._clean_up(work)
        return "client_gone"

    async def _clean_up(self, work: asyncio.Task[str]) -> None:
        async def stop() -> None:
            work.cancel()
            await asyncio.wait((work,))
            await self._cancel("client_gone")

        task = asyncio.ensure_future(stop())
        _clean_ups.add(task)
        task.add_done_callback(_clean_ups.discard)
        await asyncio.shield(task)

    async def _cancel(self, reason: CancelReason) -> None:
        for choice in self._running:
            if not choice.is_over:
                choice.is_over = True
                logger.info(
                    "answer_cancelled request_id=%s choice=%d reason=%s", self._request_id, choice.index, reason
                )
            elif choice.finish is None:
                continue  # The backend has ended it by itself.
            # One that has its finish is cancelled as well: the answer it belongs to will never be complete.
            await choice.started.cancel(reason)

    async def _answer(self, send: Send) -> str:
        """Runs the request; every error after the first byte becomes the one error event."""
        try:
            return await self._consume(send)
        except OSError:
            return "client_gone"  # the server's way to say that a write went nowhere
        except Exception as error:
            if not isinstance(error, KopirError) or self._started:
                logger.exception("answer_failed request_id=%s", self._request_id)
            await self._cancel("gateway_fault")
            if not self._started:
                api_error = as_api_error(error)
                if not self._is_open:
                    raise api_error from error
                await self._fail(send, api_error)
                return "failed"
            await self._interrupt(send, Interrupted("engine_fault", self._attempt_id, "the gateway had an error"))
            return "interrupted"

    async def _submit(self, choice: Choice) -> None:
        choice.generation = await self._services.backend.submit(
            msgspec.structs.replace(self._plan.spec_of(choice.index), tenant_salt=self._salt),
            request_id=self._id_of(choice),
            stream=self._plan.stream,
            label=self._label,
            tenant=self._tenant,
            client_retries=self._client_retries,
            cache_key=self._plan.cache_key,
            waited_s=self._waited_s,
        )

    def _id_of(self, choice: Choice) -> str:
        """Returns the id under which a choice is journalled."""
        return request_id_of_choice(self._request_id, choice.index)

    async def _consume(self, send: Send) -> str:
        """Waits for a seat, then runs to the end; returns the outcome."""
        seats = self._services.seats
        if seats is not None:
            class_name = seats.check_class(self._request_class)
            self._waited_s = await seats.take(self._request_id, class_name, num_seats=len(self._choices))
        return await self._generate(send)

    async def _generate(self, send: Send) -> str:
        """Takes events of all choices until the last has ended; returns the outcome."""
        events = Merge()
        await self._submit(self._choices[0])
        events.add(self._choices[0])
        try:
            while any(choice.finish is None for choice in self._choices):
                choice, event = await self._next(send, events)
                if isinstance(event, TokenBatch | Ended):
                    for other in self._choices:
                        if other.generation is None:
                            await self._submit(other)
                            events.add(other)
                    if not choice.is_marked and choice.started.has_restarted:
                        continue  # Its attempt was lost after the event was given, or while the others were submitted.
                if isinstance(event, Interrupted):
                    choice.is_over = True
                    await self._cancel("gateway_fault")
                    if not self._started:
                        raise UpstreamFailed(event.message, code="upstream_failed")
                    await self._interrupt(send, event)
                    return "interrupted"
                if isinstance(event, Restarted) and self._started:
                    # One boundary for all choices: after the first delta of any, none runs again.
                    await self._cancel("gateway_fault")
                    await self._interrupt(send, Interrupted("engine_fault", event.attempt_id, "an attempt was lost"))
                    return "interrupted"
                if isinstance(event, Restarted):
                    keep_alive = self._services.limits.keep_alive
                    if self._is_open and keep_alive.ping_s > 0 and not keep_alive.retry_after_first_byte:
                        # The first byte was the boundary: the new attempt is cancelled, nothing of it is shown.
                        raise UpstreamFailed("the attempt was lost after the first byte had gone out")
                    self._services.metrics.generated_tokens.inc(choice.restart())
                    self._restarted(choice)
                elif await self._advance(send, choice, event):
                    events.remove(choice)
        finally:
            await events.close()
        return "finished"

    async def _next(self, send: Send, events: Merge) -> tuple[Choice, GenerationEvent]:
        """Returns the next event of any choice."""
        return await events.next()

    async def _advance(self, send: Send, choice: Choice, event: TokenBatch | Ended) -> bool:
        """Shows what a choice has now; returns True when that was its last."""
        if isinstance(event, Ended):
            piece = choice.end(event.finish)
        else:
            piece = choice.take(event)
            while not choice.is_stopped and (batch := self._put_aside(choice, piece)) is not None:
                piece = choice.take(batch)
            if not choice.is_stopped:
                await self._piece(send, choice, piece)
                return False
            await choice.started.finish_stop()
            rest = choice.end("stop")
            piece = Piece(piece.text + rest.text, piece.calls + rest.calls)
        await self._finish(send, choice, piece)
        choice.is_over = True
        return True

    def _put_aside(self, choice: Choice, piece: Piece) -> TokenBatch | None:
        """Puts output aside to be shown with what comes next, which it returns; None to show it now."""
        return None

    @abstractmethod
    async def _piece(self, send: Send, choice: Choice, piece: Piece) -> None:
        """New output (possibly none) that may be shown."""

    @abstractmethod
    async def _finish(self, send: Send, choice: Choice, piece: Piece) -> None:
        """The last output (possibly none) of a choice, whose ``finish`` is set."""

    async def _fail(self, send: Send, error: ApiError) -> None:
        """The answer failed after its headers and before its first delta."""
        raise error

    @abstractmethod
    async def _interrupt(self, send: Send, event: Interrupted) -> None:
        """The answer broke after its first byte."""

    @abstractmethod
    def _restarted(self, choice: Choice) -> None:
        """What was gathered of a choice is void."""

    async def _mark_started(self, choice: Choice, whole: bytes | None = None) -> None:
        """Crosses the boundary of a choice: to be awaited right before anything of it is written.

        ``whole``: the body that will be written. For a keyed request the crossing is in the ledger when this returns.
        """
        # First here, so that no attempt is repeated while the ledger is written.
        choice.mark_first_delta()
        if not self._started:
            await self._write_down(whole)
            self._started = True

    async def _write_down(self, whole: bytes | None = None) -> None:
        """Tells the ledger, once, that the first byte of a keyed answer goes out next."""
        if self._hold is not None and not self._is_written_down:
            await (self._hold.sent() if whole is None else self._hold.finished(whole))
        self._is_written_down = True

    def _observe_start(self, choice: Choice) -> None:
        """Counts an answer whose first output goes out."""
        metrics = self._services.metrics
        metrics.ttft.observe(self._services.monotonic_s() - self._arrived_s)
        metrics.prompt_tokens.inc(self._plan.num_prompt_tokens)
        metrics.cached_tokens.inc(choice.started.cached_tokens)

    @property
    def _running(self) -> list[Choice]:
        """Choices that were submitted."""
        return [choice for choice in self._choices if choice.generation is not None]

    @property
    def _is_complete(self) -> bool:
        return all(choice.finish is not None for choice in self._choices)

    @property
    def _attempt_id(self) -> str:
        first = self._choices[0]
        return first.generation.attempt_id if first.generation is not None else ""

    @property
    def _num_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self._choices)

    @property
    def _num_delivered(self) -> int:
        return sum(choice.num_delivered for choice in self._choices)

    def _usage(self) -> Usage:
        """The prompt counts once, whatever the number of choices; so does what the cache had of it."""
        num_prompt, num_completion = self._plan.num_prompt_tokens, self._num_tokens
        first = self._choices[0].generation
        cached = first.cached_tokens if first is not None else 0
        return Usage(num_prompt, num_completion, num_prompt + num_completion, PromptTokensDetails(cached))


def request_id_of_choice(request_id: str, index: int) -> str:
    """Returns the id under which a choice is journalled: the request's own for the first."""
    return f"{request_id}-{index}" if index else request_id


def _call_id(request_id: str, index: int, number: int) -> str:
    """Names a tool call: the same for every attempt of a request."""
    return "call_" + hashlib.blake2b(f"{request_id}:{index}:{number}".encode(), digest_size=12).hexdigest()


async def _wait_for_disconnect(receive: Receive, window: WriteWindow | None) -> None:
    """Returns when the client is gone; a server that can no longer tell counts as gone."""
    try:
        while (message := await receive())["type"] != "http.disconnect":
            if window is not None and message["type"] == WRITTEN:
                window.written(message["bytes"])
    except Exception:
        logger.exception("disconnect_watch_failed")
