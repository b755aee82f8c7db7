"""What the HTTP layer asks of the machinery behind it: start a generation, hand out its tokens, stop it.

Owns the contract between ``cluster.ingress.api`` (this side: text, HTTP, SSE) and the request driver (other side:
ledger, routing, relay). The HTTP layer never sees workers, epochs or leases; the backend never sees text or sockets.

Life cycle of a ``Generation``, as the HTTP layer drives it:

    submit -> next() ... next() -> Ended        -> delivered(n) -> completed()
                                -> Interrupted  -> (error event) -> nothing more
                                -> Restarted    -> next() ...          only before mark_first_delta()
           -> finish_stop()                     -> delivered(n) -> completed()     a stop string matched
           -> cancel(reason)                                                       client gone, at any moment

``mark_first_delta()`` comes before the first byte goes out. Until then the backend may repeat the attempt and a failure
is an exception of ``next()``; afterwards a failure is ``Interrupted``. After ``Ended``, ``Interrupted``,
``finish_stop()`` or ``cancel()`` the HTTP layer calls ``next()`` no more.

Every coroutine here may be cancelled at any await (the client left): ``submit`` then gives up what it has started,
``next`` loses no token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

from msgspec import Struct

from kvstore.core.messages import GenerationSpec, TokenLogprobs

InterruptReason = Literal[
    "worker_exited",
    "network_cut",
    "lease_expired",
    "engine_fault",
    "deadline",
    "shutdown",
    "client_stalled",
    "cancelled",
    "tool_outcome_unknown",
]
"""The reasons of the contract; ``cancelled``: the request was stopped by its id while its client still read;
``tool_outcome_unknown``: a tool call of the gateway needs a person."""
FinishReason = Literal["stop", "length"]
CancelReason = Literal["client_gone", "client_stalled", "cancelled", "gateway_fault"]


class TokenBatch(Struct, frozen=True):
    """Tokens ``[first_index, first_index + len(token_ids))``; continues exactly what ``next()`` has given before."""

    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One per token when the spec asked for logprobs."""


class Ended(Struct, frozen=True):
    """The generation is complete: a stop token (the last one given) or ``max_tokens``."""

    finish: FinishReason


class Interrupted(Struct, frozen=True):
    """The attempt is lost after the first delta; nothing more will come."""

    reason: InterruptReason
    attempt_id: str
    message: str = "the generation was interrupted"


class Restarted(Struct, frozen=True):
    """A new attempt began before the first delta: every token so far is void, the next batch has index 0."""

    attempt_id: str


GenerationEvent = TokenBatch | Ended | Interrupted | Restarted


class ReadyState(Struct, frozen=True):
    """Whether a request could be served now."""

    ready: bool
    message: str = ""
    """Why not, in words for an operator; empty when ready."""
    detail: dict[str, Any] = {}
    """Shown in the body of ``/readyz``; values must encode as JSON."""


class Generation(ABC):
    """One logical request while it runs."""

    @property
    @abstractmethod
    def request_id(self) -> str:
        """The id given to ``submit``."""

    @property
    @abstractmethod
    def attempt_id(self) -> str:
        """The attempt that is current."""

    @property
    @abstractmethod
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed; final when the first batch has been given out."""

    @property
    def has_restarted(self) -> bool:
        """True when a ``Restarted`` waits to be read: what ``next()`` gave before is void and must not be written."""
        return False

    async def arrived(self) -> None:
        """Returns once ``next()`` has something to give; at once where that is not known. Grants nothing."""
        return

    def take_ready(self) -> TokenBatch | None:
        """Does what ``next()`` does when tokens are here already; None when something else is next, or nothing."""
        return None

    @abstractmethod
    async def next(self) -> GenerationEvent:
        """Waits for the next event. Asking is what grants the worker credit: a slow reader asks late.

        Raises: ApiError (``UpstreamFailed``, ``NoPlace`` ...) or a ``KopirError`` before the first delta only.
        """

    @abstractmethod
    def mark_first_delta(self) -> None:
        """The first byte of the answer goes out next. From here on no attempt may be repeated. Called once."""

    @abstractmethod
    def delivered(self, num_tokens: int) -> None:
        """The text of the first ``num_tokens`` tokens has been written in full. Never goes down; cheap."""

    @abstractmethod
    def completed(self, *, rest: str = "") -> None:
        """The end of the answer (``[DONE]`` or the whole body) was written. Called at most once, as the last call.

        ``rest`` says why tokens that were not delivered were not, where that is no loss.
        """

    @property
    def is_cancelled(self) -> bool:
        """True when it was stopped by its id."""
        return False

    def note(self, event: str, **fields: Any) -> None:  # noqa: B027
        """Writes something that happened to this request into its journal, where the backend has one."""

    @abstractmethod
    async def finish_stop(self) -> None:
        """A stop string matched: upstream is told to stop. Returns when that was sent, not when it was confirmed."""

    @abstractmethod
    async def cancel(self, reason: CancelReason) -> None:
        """Nobody wants the rest. Returns when upstream was told, not when it confirmed. Harmless when ended already."""


class Backend(ABC):
    """Starts generations and answers about them. Lives on the event loop of the HTTP application."""

    model_id: str
    """The only value of ``model`` that is served."""
    created: int
    """Unix time in seconds of the model, shown by ``/v1/models``."""
    max_model_len: int
    """Most tokens of prompt and answer together."""
    vocab_size: int
    """Token ids are ``[0, vocab_size)``."""
    system_fingerprint: str | None = None
    """Shown in every answer: changes when weights, tokenizer, template or numerics change."""

    @abstractmethod
    def ready(self) -> ReadyState:
        """Returns at once what is known; probes run in the background."""

    @abstractmethod
    async def submit(
        self,
        spec: GenerationSpec,
        *,
        request_id: str,
        stream: bool,
        label: str | None,
        tenant: str,
        client_retries: int = 0,
        cache_key: str | None = None,
        waited_s: float = 0.0,
    ) -> Generation:
        """Admits a request. ``label`` is the client's own x-request-id, for logs only; ``client_retries`` says how
        often its library has sent this request before, which counts as attempts; ``cache_key`` is the client's hint
        that requests with the same key begin alike; ``waited_s`` has gone of its time already.

        Raises: BadInput -> 400; NoCapacity -> 503; any ApiError as it says (``NotReady``, ``Overloaded``,
        ``UpstreamFailed``).
        """

    @abstractmethod
    async def request_record(self, request_id: str, *, tenant: str) -> dict[str, Any] | None:
        """Returns the journal of a request as JSON-ready data; None when unknown or of another tenant."""

    @abstractmethod
    async def cancel(self, request_id: str, *, tenant: str) -> dict[str, Any] | None:
        """Cancels; returns the record once the worker acknowledged or the lease ran out. None: see above."""
