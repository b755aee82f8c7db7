"""Server-side tools of one ingress: which a request may have, and the session of a request that has some.

Owns the checks of ``server_tools``, the start of a run in the ledger with what is frozen for it, and the conversation
that grows by a turn with each round. Generating and writing the answer is ``cluster.ingress.api.tool_answer``.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from cluster.config_schema import ToolsConfig
from cluster.core.tool_events import LoopTerms, ToolResult
from cluster.core.tool_ledger import ToolRun
from cluster.ingress.api.errors import Conflict, InvalidRequest, NotReady, echo
from cluster.ingress.api.plan import AnswerPlan, Planner
from cluster.ingress.api.schema import (
    AssistantMessage,
    ChatRequest,
    FunctionCall,
    FunctionDefinition,
    Message,
    Tool,
    ToolCall,
    ToolMessage,
)
from cluster.ingress.api.wire import ToolCall as MadeCall
from cluster.ingress.tools.caller import ToolCaller
from cluster.ingress.tools.metrics import ToolMetrics
from cluster.ingress.tools.runner import ToolRunner, ToolStopped, ToolWork
from cluster.ledger.database import LedgerUnavailable
from cluster.ledger.tool_store import Frozen, KeyReused, RunRow, ToolStore
from cluster.tools_source import ServerTool, find_tools


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """Which logical request a session belongs to. ``key``: the client's idempotency key."""

    tenant: str
    key: str | None
    body_digest: str
    request_id: str


class ToolService:
    """The tools of one ingress. ``store`` returns None while there is no ledger."""

    def __init__(
        self,
        tools: Sequence[ServerTool],
        *,
        store: Callable[[], ToolStore | None],
        settings: ToolsConfig,
        metrics: ToolMetrics,
        clock_ns: Callable[[], int],
        unix_s: Callable[[], float],
        caller: ToolCaller | None = None,
    ) -> None:
        self._tools = tuple(tools)
        self._store = store
        self._settings = settings
        self._metrics = metrics
        self._clock_ns = clock_ns
        self._unix_s = unix_s
        self._caller = caller or ToolCaller(max_result_bytes=settings.max_result_bytes)

    def session(self, request: ChatRequest, *, tenant: str, has_key: bool, planner: Planner, model: str) -> ToolSession:
        """Returns the session of a request that names server-side tools. Raises: InvalidRequest."""
        tools = self._wanted(request, tenant)
        risky = next((tool.name for tool in tools if tool.has_side_effects), None)
        if risky is not None and not has_key:
            message = (
                f"Idempotency-Key: this request may call {risky}, which has side effects. Client libraries repeat "
                "requests by themselves, so send a key that is the same for every repetition."
            )
            raise InvalidRequest(message, param="Idempotency-Key", code="idempotency_key_required")
        return ToolSession(self, request, tools, planner, model)

    def _wanted(self, request: ChatRequest, tenant: str) -> tuple[ServerTool, ...]:
        names = request.server_tools or []
        if request.tools is not None:
            raise InvalidRequest("server_tools: cannot be combined with tools.", param="server_tools")
        if (request.n or 1) > 1:
            raise InvalidRequest("n: must be 1 with server_tools.", param="n")
        if request.logprobs:
            raise InvalidRequest("logprobs: cannot be combined with server_tools.", param="logprobs")
        if len(set(names)) < len(names):
            raise InvalidRequest("server_tools: a tool stands there twice.", param="server_tools")
        found = find_tools(self._tools, names, tenant=tenant)
        if isinstance(found, str):
            message = f"server_tools: this server has no tool {echo(found)}."
            raise InvalidRequest(message, param="server_tools", code="unknown_tool")
        return found

    async def begin(
        self, opening: Opening, frozen: Frozen, tools: Sequence[ServerTool]
    ) -> tuple[ToolRunner, Frozen, int]:
        """Takes up the run of a logical request; returns what it begins with and its deadline.

        Raises: Conflict, NotReady.
        """
        store = self._store()
        if store is None:
            raise NotReady("Server-side tools need the ledger, which this server does not have.", code="no_ledger")
        row = RunRow(
            tenant=opening.tenant,
            key=opening.key,
            body_digest=opening.body_digest,
            request_id=opening.request_id,
            logical_id=opening.request_id,
            frozen=frozen,
        )
        try:
            row, recorded = await asyncio.to_thread(store.open, row, now_ms=int(self._unix_s() * 1000))
        except KeyReused as error:
            message = "This idempotency key was used with another body, for which tools were called."
            raise Conflict(message, code="idempotency_key_reused", request_id=error.request_id) from error
        except LedgerUnavailable as error:
            raise NotReady("The ledger of tool calls does not answer.", code="no_ledger") from error
        deadline_ns = self._clock_ns() + self._settings.deadline_ms * 1_000_000
        terms = LoopTerms(
            max_rounds=self._settings.max_rounds, max_calls=self._settings.max_calls, deadline_ns=deadline_ns
        )
        run = ToolRun(row.logical_id, terms, {tool.name: tool.terms() for tool in tools}, recorded)
        work = ToolWork(
            store=store,
            tools={tool.name: tool for tool in tools},
            caller=self._caller,
            metrics=self._metrics,
            clock_ns=self._clock_ns,
            unix_s=self._unix_s,
        )
        return ToolRunner(run, row, work), row.frozen, deadline_ns

    async def calls_of_request(self, request_id: str, *, tenant: str) -> list[dict[str, Any]]:
        """Returns the tool calls of a request for people. Raises: NotReady."""
        store = self._store()
        if store is None:
            return []
        try:
            return await asyncio.to_thread(store.calls_of_request, request_id, tenant=tenant)
        except LedgerUnavailable as error:
            raise NotReady("The ledger of tool calls does not answer.", code="no_ledger") from error

    def now_s(self) -> float:
        """Returns the wall clock, for what templates see."""
        return self._unix_s()

    def left_s(self, deadline_ns: int) -> float:
        """Returns the seconds until a deadline; below 0 when it has passed."""
        return (deadline_ns - self._clock_ns()) / 1e9

    async def close(self) -> None:
        """Closes the connections to tools."""
        await self._caller.close()


class ToolSession:
    """One request with server-side tools: its plan for each round, its run, its deadline.

    Life cycle: ``first_plan`` (nothing is written down) -> ``open`` -> ``add_turn``, ``plan`` for each further round.
    """

    def __init__(
        self, service: ToolService, request: ChatRequest, tools: Sequence[ServerTool], planner: Planner, model: str
    ) -> None:
        self._service = service
        self._request = request
        self._tools = tuple(tools)
        self._planner = planner
        self._model = model
        self._turns: list[Message] = []
        self._frozen = Frozen(seed=0, unix_s=service.now_s(), prompt_digest="", model=model)
        self._runner: ToolRunner | None = None
        self._deadline_ns = 0

    @property
    def runner(self) -> ToolRunner:
        """The run, once it was opened."""
        assert self._runner is not None, "the session is not open"
        return self._runner

    @property
    def has_intent(self) -> bool:
        """Whether the ledger has an intent of this request: then nothing may repeat it unasked."""
        return self._runner is not None and self._runner.run.has_intent

    @property
    def is_replaying(self) -> bool:
        """Whether recorded calls are still to come: until they have, nothing is shown."""
        return self.runner.run.is_replaying

    @property
    def left_s(self) -> float:
        """Seconds until the deadline of all rounds."""
        return self._service.left_s(self._deadline_ns)

    @property
    def max_tokens(self) -> int | None:
        """What the client allows for all rounds together."""
        asked = self._request.max_completion_tokens
        return self._request.max_tokens if asked is None else asked

    async def first_plan(self) -> AnswerPlan:
        """Returns the plan of the first round as it would be now. Raises: InvalidRequest, NotFound."""
        plan = await self._plan(self._request.seed, may_call=True, max_tokens=self.max_tokens, is_first=True)
        seed = plan.spec.sampling.seed
        self._frozen = msgspec.structs.replace(self._frozen, seed=seed, prompt_digest=_digest(plan))
        return plan

    async def open(self, opening: Opening, plan: AnswerPlan) -> AnswerPlan:
        """Takes up the run; returns the plan of the first round as its first life had it.

        Raises: ToolStopped when that cannot be made again; Conflict, NotReady.
        """
        mine = self._frozen
        self._runner, self._frozen, self._deadline_ns = await self._service.begin(opening, mine, self._tools)
        if self._frozen == mine:
            return plan
        plan = await self._plan(self._frozen.seed, may_call=True, max_tokens=self.max_tokens, is_first=True)
        if _digest(plan) != self._frozen.prompt_digest or self._model != self._frozen.model:
            raise ToolStopped(
                "Tools were called for this request, and its prompt cannot be made again as it was: the model, its "
                "template or the tools have changed.",
                code="tool_divergence",
                status=409,
                reason="tool_divergence",
                call=None,
            )
        return plan

    def add_turn(self, text: str, calls: Sequence[MadeCall], results: Sequence[ToolResult]) -> None:
        """Adds what the model said and asked for in a round, and what came of it."""
        made = [
            ToolCall(id=call.id, function=FunctionCall(call.function.name, call.function.arguments)) for call in calls
        ]
        self._turns.append(AssistantMessage(content=text or None, tool_calls=made))
        for call, result in zip(calls, results, strict=True):
            self._turns.append(ToolMessage(content=result.content, tool_call_id=call.id))

    async def plan(self, *, may_call: bool, max_tokens: int | None) -> AnswerPlan:
        """Returns the plan of the next round. Raises: InvalidRequest when the conversation has grown too long."""
        return await self._plan(self._frozen.seed, may_call=may_call, max_tokens=max_tokens, is_first=False)

    async def _plan(self, seed: int | None, *, may_call: bool, max_tokens: int | None, is_first: bool) -> AnswerPlan:
        choice = self._request.tool_choice
        if not is_first and choice != "none":
            # Who must call once need not call for ever.
            choice = "auto"
        request = msgspec.structs.replace(
            self._request,
            messages=[*self._request.messages, *self._turns],
            server_tools=None,
            tools=[_definition(tool) for tool in self._tools],
            tool_choice=choice if may_call else "none",
            seed=seed,
            max_tokens=max_tokens,
            max_completion_tokens=None,
        )
        return await self._planner.chat(request, unix_s=self._frozen.unix_s)


def _definition(tool: ServerTool) -> Tool:
    return Tool(
        function=FunctionDefinition(name=tool.name, description=tool.description or None, parameters=tool.parameters)
    )


def _digest(plan: AnswerPlan) -> str:
    return hashlib.sha256(repr(plan.spec.prompt_token_ids).encode()).hexdigest()
