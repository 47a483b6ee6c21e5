"""Delegation: named providers that start a subagent, and what a parent may expect of its run.

The request's signal is the one way to stop a subagent, before its start and after it: a parent
hands on the signal of its own turn, a child's turn has its own, and so a cancel goes down however
deep the tree is. An in-process child is cancelled as ``parent``. A parent that awaits a run's
result and then `dispose` cannot become idle before everything below it is quiet.

`Subagents.start` either returns a run that belongs to the caller, who must dispose it, or raises
and leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol
from weakref import WeakKeyDictionary

import anyio
from msgspec import Struct

from agent_core.cancellation import AbortSignal
from agent_core.content import Block, ReasoningPart, TextPart, ToolCallPart
from agent_core.errors import AgentError
from agent_core.events import (
    Aborted,
    AssistantChunk,
    AssistantMessage,
    Completed,
    Event,
    EventData,
    Failed,
    MaxSteps,
    MaxTokens,
    ModeChanged,
    ModelRetry,
    Outcome,
    PermissionAsked,
    PermissionDecided,
    Refused,
    ToolProgress,
    TurnEnd,
)
from agent_core.inbox import Prompt
from agent_core.logs import get_logger

if TYPE_CHECKING:
    from agent_core.agent import Agent
    from agent_core.runtime import AgentRuntime

__all__ = [
    "Capabilities",
    "InProcessProvider",
    "SubagentProvider",
    "SubagentRefused",
    "SubagentRequest",
    "SubagentResult",
    "SubagentRun",
    "Subagents",
]

MAX_DEPTH: Final = 3
MAX_LIVE: Final = 8
"""Live children of one agent; further ones wait. Counted for each agent and not for a tree, or
children that wait for children of their own could take each other's places for ever."""

_NOT_INHERITED: Final = (
    AssistantChunk,
    ModeChanged,
    ModelRetry,
    PermissionAsked,
    PermissionDecided,
    ToolProgress,
)

log = get_logger(__name__)


class SubagentRefused(AgentError):
    """The request asks for what the provider or the limits do not allow. Nothing was started."""


class Capabilities(Struct, frozen=True):
    """Which optional parts of a request a provider honours. Others are refused, never ignored."""

    tool_names: bool = False
    persona: bool = False


@dataclass(frozen=True, slots=True)
class SubagentRequest:
    """What is delegated. `signal` is the parent's own turn signal."""

    prompt: tuple[Block, ...]
    parent: Agent
    signal: AbortSignal
    tool_names: frozenset[str] | None = None
    persona: str | None = None


Reason = Literal["completed", "aborted", "max_tokens", "max_steps", "refusal", "error"]


class SubagentResult(Struct, frozen=True):
    """How a run ended, and what it said: its last words, or as much of them as there were.

    `message` is for people and says what went wrong, where something did.
    """

    reason: Reason
    output: str
    message: str = ""


class SubagentRun(Protocol):
    """A started subagent."""

    @property
    def id(self) -> str:
        """Unique; for an in-process child, its session's id."""
        ...

    async def result(self) -> SubagentResult:
        """Wait for its end. Never raises for a failure of the subagent's.

        Cancellation: safe. Concurrency: any number of tasks.
        """
        ...

    async def dispose(self) -> None:
        """Stop it if it runs, and wait until it is quiet. Idempotent; always owed.

        Cancellation: safe; the disposal goes on. Concurrency: any number of tasks.
        """
        ...


class SubagentProvider(Protocol):
    """One way to run a subagent."""

    @property
    def name(self) -> str:
        """What requests name it by."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """Which optional parts of a request it honours."""
        ...

    async def start(self, request: SubagentRequest) -> SubagentRun:
        """Start one.

        Cancellation: through ``request.signal``. Concurrency: any number.

        Raises:
            TurnAborted: The signal fired; nothing is left.
            AgentError: It could not be started; nothing is left.
        """
        ...


class Subagents:
    """The providers of one runtime. ``spawn`` and ``fork`` are there from the start."""

    def __init__(
        self, runtime: AgentRuntime, *, max_depth: int = MAX_DEPTH, max_live: int = MAX_LIVE
    ) -> None:
        self.max_depth = max_depth
        self.max_live = max_live
        self._providers: dict[str, SubagentProvider] = {}
        self._places: WeakKeyDictionary[Agent, anyio.Semaphore] = WeakKeyDictionary()
        self.register(InProcessProvider(runtime, "spawn"))
        self.register(InProcessProvider(runtime, "fork"))

    def register(self, provider: SubagentProvider) -> Callable[[], None]:
        """Add or replace a provider; return a function that removes it again."""
        self._providers[provider.name] = provider

        def remove() -> None:
            if self._providers.get(provider.name) is provider:
                del self._providers[provider.name]

        return remove

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the providers there are."""
        return tuple(self._providers)

    async def start(self, name: str, request: SubagentRequest) -> SubagentRun:
        """Start a subagent, once there is a place for it.

        Cancellation: through ``request.signal``; what waits for a place never starts.
        Concurrency: any number of tasks.

        Raises:
            SubagentRefused: No such provider, too deep, or a part it does not honour.
            TurnAborted: The signal fired; nothing is left.
            AgentError: It could not be started; nothing is left.
        """
        provider = self._checked(name, request)
        parent = request.parent
        place = self._places.setdefault(parent, anyio.Semaphore(self.max_live))
        has_place = False
        try:
            async with request.signal.scope():
                await place.acquire()
                has_place = True
            run = await provider.start(request)
        except BaseException:
            if has_place:
                place.release()
            raise
        parent.hooks.emit("subagent/start", parent, run.id, name)
        return _Tracked(run, parent, place.release)

    def _checked(self, name: str, request: SubagentRequest) -> SubagentProvider:
        request.signal.raise_if_aborted()
        provider = self._providers.get(name)
        if provider is None:
            known = ", ".join(self._providers)
            raise SubagentRefused(f"There is no subagent {name!r}; there are {known}.")
        if request.parent.depth >= self.max_depth:
            raise SubagentRefused(f"Subagents go {self.max_depth} levels deep and no deeper.")
        for part in Capabilities.__struct_fields__:
            if getattr(request, part) is not None and not getattr(provider.capabilities, part):
                raise SubagentRefused(f"The subagent {name!r} takes no {part}.")
        return provider


class _Tracked:
    """A run that gives its place back and announces its end, once, when it is disposed."""

    def __init__(self, run: SubagentRun, parent: Agent, release: Callable[[], None]) -> None:
        self._run = run
        self._parent = parent
        self._release: Callable[[], None] | None = release

    @property
    def id(self) -> str:
        return self._run.id

    async def result(self) -> SubagentResult:
        return await self._run.result()

    async def dispose(self) -> None:
        await self._run.dispose()
        if (release := self._release) is not None:
            self._release = None
            release()
            reason = (await self._run.result()).reason
            self._parent.hooks.emit("subagent/end", self._parent, self._run.id, reason)


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
        return Capabilities(tool_names=True, persona=True)

    async def start(self, request: SubagentRequest) -> SubagentRun:
        """See `SubagentProvider.start`."""
        request.signal.raise_if_aborted()
        seed = _finished(request.parent) if self._name == "fork" else []
        child = await self._runtime.create_child(
            request.parent, seed=seed, tool_names=request.tool_names, persona=request.persona
        )
        if request.signal.aborted:  # while it was being made
            await child.dispose()
            request.signal.raise_if_aborted()
        return _ChildRun(child, request, len(child.session.events))


class _ChildRun:
    """An in-process child at work on its one prompt."""

    def __init__(self, child: Agent, request: SubagentRequest, seeded: int) -> None:
        self._child = child
        self._signal = request.signal
        self._seeded = seeded
        # Listening comes first: what is told of the prompt may abort already.
        self._remove = request.signal.on_abort(self._abort)
        self._prompt: Prompt = child.send(request.prompt, source="parent")

    @property
    def id(self) -> str:
        return self._child.id

    def _abort(self, _reason: object) -> None:
        self._child.cancel({"kind": "parent"})

    async def result(self) -> SubagentResult:
        try:
            outcome = await self._prompt.settled()
        except AgentError as exc:
            return SubagentResult("error", self._output(), str(exc))
        reason = _reason(outcome)
        if self._signal.aborted and reason != "completed":
            reason = "aborted"
        message = outcome.message if isinstance(outcome, Failed) else ""
        return SubagentResult(reason, self._output(), message)

    async def dispose(self) -> None:
        self._remove()
        await self._child.dispose()

    def _output(self) -> str:
        return _last_words(self._child.session.events[self._seeded :])


def _finished(parent: Agent) -> list[EventData]:
    """Return what the parent said and did up to its last finished turn, and nothing it decided.

    Modes and remembered answers are not inherited by way of history. Of a message's chunks one for
    each part is enough.
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
            text = "".join(part.text for part in event.data.content if isinstance(part, TextPart))
            if text.strip():
                return text
    chunks = (event.data for event in events if isinstance(event.data, AssistantChunk))
    return "".join(chunk.text for chunk in chunks if not chunk.reasoning)
