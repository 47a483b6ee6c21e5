"""Subagents in this process: ``spawn`` and ``fork``, each an agent with a session of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import anyio
import msgspec
from msgspec import structs

from agent_core.agreement import disagreement, schema_problem
from agent_core.cancellation import TurnAborted
from agent_core.content import Block, ReasoningPart, Text, TextPart, ToolCallPart, Usage
from agent_core.errors import AgentError
from agent_core.events import (
    Aborted,
    AssistantChunk,
    AssistantMessage,
    Completed,
    Event,
    EventData,
    Failed,
    FileChanged,
    FilesRestored,
    MaxSteps,
    MaxTokens,
    ModeChanged,
    ModelRetry,
    ModelUsage,
    Outcome,
    PermissionAsked,
    PermissionDecided,
    Refused,
    SubagentUsage,
    ToolCall,
    ToolProgress,
    ToolResult,
    TurnEnd,
)
from agent_core.inbox import Prompt
from agent_core.subagents import (
    Capabilities,
    Delegation,
    Reason,
    Spent,
    SubagentRefused,
    SubagentRequest,
    SubagentResult,
    SubagentRun,
)

if TYPE_CHECKING:
    from agent_core.agent import Agent
    from agent_core.runtime import AgentRuntime

__all__ = ["InProcessProvider"]

MAX_LINE_CHARS: Final = 200

_NOT_INHERITED: Final = (
    AssistantChunk,
    FileChanged,
    FilesRestored,
    ModeChanged,
    ModelRetry,
    PermissionAsked,
    PermissionDecided,
    SubagentUsage,
    ToolProgress,
)


class InProcessProvider:
    """``spawn``: a child that knows nothing. ``fork``: one that knows what its parent knew.

    A fork is seeded with the parent's log up to its last finished turn; the turn that delegates is
    not part of it.
    """

    def __init__(self, runtime: AgentRuntime, name: Literal["spawn", "fork"]) -> None:
        self._runtime = runtime
        self._name = name

    @property
    def name(self) -> str:
        """``spawn`` or ``fork``."""
        return self._name

    @property
    def capabilities(self) -> Capabilities:
        """All of them."""
        return Capabilities(tool_names=True, persona=True, model=True, output_schema=True)

    async def start(self, request: SubagentRequest) -> SubagentRun:
        """See `SubagentProvider.start`.

        Cancellation: through ``request.signal``. Concurrency: any number.

        Raises:
            SubagentRefused: There is no such model, or the schema is none.
        """
        request.signal.raise_if_aborted()
        if request.model is not None and request.parent.models.get(request.model) is None:
            raise SubagentRefused(f"No model {request.model!r} is configured.")
        if request.output_schema is not None:
            problem = await schema_problem(request.output_schema, request.parent, request.signal)
            if problem is not None:
                raise SubagentRefused(f"That is no JSON schema: {problem}")
        seed = _finished(request.parent) if self._name == "fork" else []
        child = await self._runtime.create_child(
            request.parent,
            seed=seed,
            tool_names=request.tool_names,
            persona=request.persona,
            model=request.model,
            delegation=Delegation(request.call_id, request.name or "subagent"),
        )
        if request.signal.aborted:  # while it was being made
            await child.dispose()
            request.signal.raise_if_aborted()
        return _ChildRun(child, request, len(child.session.events))


class _ChildRun:
    """An in-process child at work on its one task."""

    def __init__(self, child: Agent, request: SubagentRequest, seeded: int) -> None:
        self._child = child
        self._request = request
        self._seeded = seeded
        self._result: SubagentResult | None = None
        self._settling = anyio.Lock()
        # Listening comes first: what is told of the prompt may abort already.
        self._detach = (
            request.signal.on_abort(self._abort),
            child.session.observe(self._show),
        )
        self._prompt = child.send((*request.prompt, *_demand(request)), source="parent")

    @property
    def id(self) -> str:
        return self._child.id

    def _abort(self, _reason: object) -> None:
        self._child.cancel({"kind": "parent"})

    def _show(self, event: Event) -> None:
        match event.data:
            case ToolCall(title=title):
                self._request.show(title)
            case ToolResult(is_error=True, output=output):
                self._request.show(f"  {output.partition(chr(10))[0][:MAX_LINE_CHARS]}")
            case AssistantMessage():
                text = _text(event.data).strip().partition("\n")[0]
                if text:
                    self._request.show(text[:MAX_LINE_CHARS])
            case _:
                pass

    async def result(self) -> SubagentResult:
        """See `SubagentRun.result`.

        Cancellation: safe. Concurrency: any number of tasks.
        """
        async with self._settling:  # whoever waits, a second answer is asked for once
            if self._result is None:
                answer = await self._checked_answer()
                self._result = structs.replace(answer, spent=self._spent())
            return self._result

    async def dispose(self) -> None:
        """See `SubagentRun.dispose`.

        Cancellation: safe; the disposal goes on. Concurrency: any number of tasks.
        """
        for detach in self._detach:
            detach()
        await self._child.dispose()

    async def _checked_answer(self) -> SubagentResult:
        result = await self._answer(self._prompt)
        if self._request.output_schema is None or result.reason != "completed":
            return result
        try:
            return await self._agreeing(result, self._request.output_schema)
        except TurnAborted:
            return SubagentResult("aborted", self._output())
        except AgentError as exc:  # it takes no second prompt
            return SubagentResult("error", self._output(), str(exc))

    async def _agreeing(self, result: SubagentResult, schema: Mapping[str, Any]) -> SubagentResult:
        """Hold a complete answer against the schema, and have one that does not agree mended once.

        Cancellation: through the request's signal. Concurrency: once.
        """
        problem = ""
        for is_last in (False, True):
            result = structs.replace(result, output=_bare(result.output))
            found = await disagreement(result.output, schema, self._child, self._request.signal)
            if found is None:
                return result
            problem = found
            if is_last:
                break
            again = self._child.send(f"That does not agree with the schema: {problem}")
            result = await self._answer(again)
            if result.reason != "completed":
                return result
        message = f"Its answer does not agree with the schema: {problem}"
        return SubagentResult("error", result.output, message)

    async def _answer(self, prompt: Prompt) -> SubagentResult:
        try:
            outcome = await prompt.settled()
        except AgentError as exc:
            return SubagentResult("error", self._output(), str(exc))
        reason = _reason(outcome)
        if self._request.signal.aborted and reason != "completed":
            reason = "aborted"
        message = outcome.message if isinstance(outcome, Failed) else ""
        return SubagentResult(reason, self._output(), message)

    def _output(self) -> str:
        return _last_words(self._own_events())

    def _spent(self) -> Spent:
        usage, state = Usage(), self._child.session.state
        for event in self._own_events():
            if isinstance(event.data, ModelUsage | SubagentUsage):
                usage += event.data.usage
        return Spent(usage, state.cost, state.currency)

    def _own_events(self) -> Sequence[Event]:
        return self._child.session.events[self._seeded :]


def _demand(request: SubagentRequest) -> tuple[Block, ...]:
    if request.output_schema is None:
        return ()
    schema = msgspec.json.encode(request.output_schema).decode()
    return (Text(f"Answer with nothing but JSON that agrees with this schema:\n{schema}"),)


def _bare(output: str) -> str:
    """Return JSON without the fence that models like to put around it."""
    text = output.strip()
    if text.startswith("```") and text.endswith("```"):
        text = text.removesuffix("```").partition("\n")[2]
    return text.strip()


def _finished(parent: Agent) -> list[EventData]:
    """Return what the parent said and did up to its last finished turn, and nothing it decided.

    Modes and remembered answers are not inherited by way of history, and what was spent is not
    counted twice. Of a message's chunks one for each part is enough.
    """
    events = parent.session.events
    ends = (i for i in range(len(events), 0, -1) if isinstance(events[i - 1].data, TurnEnd))
    seed: list[EventData] = []
    for event in events[: next(ends, 0)]:
        data = event.data
        if isinstance(data, AssistantMessage):
            seed += (
                AssistantChunk(data.turn, data.step, part.text, isinstance(part, ReasoningPart))
                for part in data.content
                if not isinstance(part, ToolCallPart)
            )
        if isinstance(data, ModelUsage):
            data = structs.replace(data, cost=None, currency=None)
        if not isinstance(data, _NOT_INHERITED):
            seed.append(data)
    return seed


def _reason(outcome: Outcome | None) -> Reason:
    match outcome:
        case Completed():
            return "completed"
        case MaxTokens():
            return "max_tokens"
        case MaxSteps():
            return "max_steps"
        case Refused():
            return "refusal"
        case None | Aborted():
            return "aborted"
        case _:
            return "error"


def _last_words(events: Sequence[Event]) -> str:
    """Return the last message that says something, or else whatever was streamed."""
    for event in reversed(events):
        if isinstance(event.data, AssistantMessage):
            text = _text(event.data)
            if text.strip():
                return text
    chunks = (event.data for event in events if isinstance(event.data, AssistantChunk))
    return "".join(chunk.text for chunk in chunks if not chunk.reasoning)


def _text(message: AssistantMessage) -> str:
    return "".join(part.text for part in message.content if isinstance(part, TextPart))
