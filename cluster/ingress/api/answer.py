"""One generation request from submit to its single ending.

Owns the request's generation, its text and its counts, and the watch over the client's connection: an answer runs as
a task beside that watch, so that a client who leaves stops the work at once, whether tokens flow or not. What is
written, and when, is up to the two subclasses (``StreamedAnswer``, ``WholeAnswer``).

Exactly one ending: finished, an error status, one error event, or silence to a client who is gone.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from cluster.ingress.api.backend import (
    CancelReason,
    FinishReason,
    Generation,
    Interrupted,
    Restarted,
    TokenBatch,
)
from cluster.ingress.api.errors import ApiError, UpstreamFailed, as_api_error
from cluster.ingress.api.plan import AnswerPlan
from cluster.ingress.api.services import Services
from cluster.ingress.api.shapes import AnswerShape, ScoredToken
from cluster.ingress.api.text import AnswerText
from cluster.ingress.api.wire import PromptTokensDetails, Usage
from kvstore.errors import KopirError, ProtocolError

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_clean_ups: set[asyncio.Task[None]] = set()
"""Clean-ups that outlive a cancelled handler; the loop alone would not keep them."""


class Answer(ABC):
    """Runs one request; see the module."""

    def __init__(
        self, services: Services, plan: AnswerPlan, *, request_id: str, label: str | None, tenant: str, arrived_s: float
    ) -> None:
        self._services = services
        self._plan = plan
        self._request_id = request_id
        self._label = label
        self._tenant = tenant
        self._arrived_s = arrived_s
        self._generation: Generation | None = None
        self._text = self._fresh_text()
        self._scored: deque[ScoredToken] = deque()
        self._num_scored = 0
        """Tokens whose logprobs were given out."""
        self._started = False
        """The first byte went out, or is about to."""
        self._ended = False
        """The generation needs no cancel any more."""
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
            outcome = "failed" if error.status >= 500 else "rejected"
            raise
        finally:
            metrics.running.dec()
            metrics.requests.labels(self._plan.kind, outcome).inc()
            metrics.generated_tokens.inc(self._text.num_tokens)
            if self._started:
                metrics.delivered_tokens.inc(self._text.num_delivered)

    async def _run_watched(self, receive: Receive, send: Send) -> str:
        """Returns the outcome, as named in ``metrics.OUTCOMES``."""
        work = asyncio.ensure_future(self._answer(send))
        watch = asyncio.ensure_future(_wait_for_disconnect(receive))
        try:
            await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
        finally:
            # Also reached when this handler itself is cancelled, which is how Serve tells of a client that left.
            watch.cancel()
            if not work.done() or not self._ended:
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
        if self._generation is None or self._ended:
            return
        self._ended = True
        logger.info("answer_cancelled request_id=%s reason=%s", self._request_id, reason)
        await self._generation.cancel(reason)

    async def _answer(self, send: Send) -> str:
        """Runs the request; every error after the first byte becomes the one error event."""
        try:
            generation = await self._services.backend.submit(
                self._plan.spec,
                request_id=self._request_id,
                stream=self._plan.stream,
                label=self._label,
                tenant=self._tenant,
            )
            self._generation = generation
            return await self._consume(generation, send)
        except OSError:
            return "client_gone"  # the server's way to say that a write went nowhere
        except Exception as error:
            if isinstance(error, ApiError) and not self._started:
                self._ended = True  # the backend ended it by itself
                raise
            if not isinstance(error, KopirError) or self._started:
                logger.exception("answer_failed request_id=%s", self._request_id)
            await self._cancel("gateway_fault")
            if not self._started:
                raise as_api_error(error) from error
            await self._interrupt(send, Interrupted("engine_fault", self._attempt_id, "the gateway had an error"))
            return "interrupted"

    async def _consume(self, generation: Generation, send: Send) -> str:
        """Takes events until the end; returns the outcome."""
        while True:
            event = await generation.next()
            if isinstance(event, TokenBatch):
                text = self._take(event)
                if self._text.stopped:
                    await generation.finish_stop()
                    await self._finish(send, text, "stop")
                    self._ended = True
                    return "finished"
                await self._piece(send, text)
            elif isinstance(event, Restarted):
                self._restart()
            elif isinstance(event, Interrupted):
                self._ended = True
                if not self._started:
                    raise UpstreamFailed(event.message, code="upstream_failed")
                await self._interrupt(send, event)
                return "interrupted"
            else:
                await self._finish(send, self._text.finish(), event.finish)
                self._ended = True
                return "finished"

    @abstractmethod
    async def _piece(self, send: Send, text: str) -> None:
        """New text (possibly none) that may be shown."""

    @abstractmethod
    async def _finish(self, send: Send, text: str, reason: FinishReason) -> None:
        """The last text (possibly none) and the end."""

    @abstractmethod
    async def _interrupt(self, send: Send, event: Interrupted) -> None:
        """The answer broke after its first byte."""

    def _take(self, batch: TokenBatch) -> str:
        num_before = self._text.num_tokens
        if batch.first_index != num_before:
            raise ProtocolError(f"tokens continue at {batch.first_index}, expected {num_before}")
        visible_before = self._text.num_visible_tokens
        text = self._text.push(batch.token_ids)
        if batch.logprobs is not None and self._plan.num_logprobs is not None:
            num_visible = self._text.num_visible_tokens - visible_before
            self._scored.extend(zip(batch.token_ids[:num_visible], batch.logprobs[:num_visible], strict=True))
        return text

    def _take_scored(self) -> list[ScoredToken]:
        """Returns the logprobs of tokens whose text is out, once each."""
        num_due = min(self._text.num_delivered, self._text.num_visible_tokens) - self._num_scored
        due = [self._scored.popleft() for _ in range(min(num_due, len(self._scored)))]
        self._num_scored += len(due)
        return due

    def _fresh_text(self) -> AnswerText:
        return AnswerText(
            self._services.tokenizer.table,
            stop_token_ids=frozenset(self._plan.spec.stop_token_ids),
            stops=self._plan.stops,
        )

    def _restart(self) -> None:
        if self._started:
            raise ProtocolError("an attempt was repeated after the first delta")
        self._services.metrics.generated_tokens.inc(self._text.num_tokens)
        self._text = self._fresh_text()
        self._scored.clear()

    def _mark_started(self, generation: Generation) -> None:
        """Crosses the boundary: to be called right before the first write."""
        generation.mark_first_delta()
        self._started = True
        metrics = self._services.metrics
        metrics.ttft.observe(self._services.monotonic_s() - self._arrived_s)
        metrics.prompt_tokens.inc(self._plan.num_prompt_tokens)
        metrics.cached_tokens.inc(generation.cached_tokens)

    @property
    def _attempt_id(self) -> str:
        return self._generation.attempt_id if self._generation is not None else ""

    def _usage(self) -> Usage:
        num_prompt, num_completion = self._plan.num_prompt_tokens, self._text.num_tokens
        cached = self._generation.cached_tokens if self._generation is not None else 0
        return Usage(num_prompt, num_completion, num_prompt + num_completion, PromptTokensDetails(cached))


async def _wait_for_disconnect(receive: Receive) -> None:
    """Returns when the client is gone; a server that can no longer tell counts as gone."""
    try:
        while (await receive())["type"] != "http.disconnect":
            pass
    except Exception:
        logger.exception("disconnect_watch_failed")
