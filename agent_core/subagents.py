"""Delegation: named providers that start a subagent, and what a parent may expect of its run.

The request's signal is the one way to stop a subagent, before its start and after it: a parent
hands on the signal of its own turn, a child's turn has its own, and so a cancel goes down however
deep the tree is. An in-process child is cancelled as ``parent``. A parent that awaits a run's
result and then `dispose` cannot become idle before everything below it is quiet.

`Subagents.start` either returns a run that belongs to the caller, who must dispose it, or raises
and leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol
from weakref import WeakKeyDictionary

import anyio
from msgspec import Struct

from agent_core.cancellation import AbortSignal
from agent_core.content import Block, Usage
from agent_core.errors import AgentError
from agent_core.logs import get_logger
from agent_core.usage import subagent_usage

if TYPE_CHECKING:
    from agent_core.agent import Agent
    from agent_core.agent_files import AgentFile, AgentFiles

__all__ = [
    "Capabilities",
    "Delegation",
    "Spent",
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


log = get_logger(__name__)


class SubagentRefused(AgentError):
    """The request asks for what the provider or the limits do not allow. Nothing was started."""


class Capabilities(Struct, frozen=True):
    """Which optional parts of a request a provider honours. Others are refused, never ignored."""

    tool_names: bool = False
    persona: bool = False
    model: bool = False
    output_schema: bool = False


class Delegation(Struct, frozen=True):
    """Whence a subagent comes: the tool call of its parent that it is, and its name for people."""

    call_id: str
    name: str


def _unseen(_line: str) -> None:
    """Show nothing."""


@dataclass(frozen=True, slots=True)
class SubagentRequest:
    """What is delegated.

    Attributes:
        prompt: The task.
        parent: Who delegates.
        signal: The parent's own turn signal, or the session's for what outlives a turn.
        call_id: The parent's tool call that the subagent is; empty if it is none.
        name: The subagent's name for people.
        tool_names: The only tools it is offered; `None` for its parent's.
        persona: What it is told first about itself; `None` for what its parent is told.
        model: The name of its model; `None` for its parent's.
        output_schema: A JSON schema that its answer has to agree with.
        show: Told now and then, in a line, what it is doing.
    """

    prompt: tuple[Block, ...]
    parent: Agent
    signal: AbortSignal
    call_id: str = ""
    name: str = ""
    tool_names: frozenset[str] | None = None
    persona: str | None = None
    model: str | None = None
    output_schema: Mapping[str, Any] | None = None
    show: Callable[[str], None] = _unseen


Reason = Literal["completed", "aborted", "max_tokens", "max_steps", "refusal", "error"]


class Spent(Struct, frozen=True):
    """What a run took, with all below it. `cost` is `None` where no price is known."""

    usage: Usage = Usage()
    cost: float | None = None
    currency: str | None = None


class SubagentResult(Struct, frozen=True):
    """How a run ended, and what it said: its last words, or as much of them as there were.

    `message` is for people and says what went wrong, where something did.
    """

    reason: Reason
    output: str
    message: str = ""
    spent: Spent = Spent()


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
    """The providers of one runtime, and their limits.

    Attributes:
        max_depth: Levels below a person's own agent.
        max_live: Live children of one agent.
        files: Finds what people describe in files; `None` for no look at any.
    """

    def __init__(self, *, max_depth: int = MAX_DEPTH, max_live: int = MAX_LIVE) -> None:
        self.max_depth = max_depth
        self.max_live = max_live
        self.files: AgentFiles | None = None
        self._providers: dict[str, SubagentProvider] = {}
        self._descriptions: dict[str, str] = {}
        self._places: WeakKeyDictionary[Agent, anyio.Semaphore] = WeakKeyDictionary()

    def register(self, provider: SubagentProvider, description: str = "") -> Callable[[], None]:
        """Add or replace a provider; return a function that removes it again.

        Args:
            provider: Goes by its name.
            description: What it is good for, for the model.
        """
        self._providers[provider.name] = provider
        self._descriptions[provider.name] = description

        def remove() -> None:
            if self._providers.get(provider.name) is provider:
                del self._providers[provider.name]

        return remove

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the providers there are."""
        return tuple(self._providers)

    @property
    def described(self) -> dict[str, str]:
        """What the providers are good for, by name."""
        return {name: self._descriptions[name] for name in self._providers}

    async def resolved(self, name: str, request: SubagentRequest) -> tuple[str, SubagentRequest]:
        """Return the provider for who goes by `name`, and the request as it has to have it.

        Cancellation: through ``request.signal``. Concurrency: any number of tasks.

        Raises:
            SubagentRefused: Nobody goes by that name, or it cannot be started.
            TurnAborted: The signal fired.
        """
        files: Mapping[str, AgentFile] = {}
        if self.files is not None and name not in self._providers:
            files = await self.files.known(request.parent, request.signal)
        if (file := files.get(name)) is not None:
            name, request = (
                "spawn",
                replace(
                    request,
                    tool_names=file.tool_names,
                    persona=file.persona,
                    model=file.model,
                ),
            )
        self._checked(name, request, also=files)
        return name, request

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

    def _checked(
        self, name: str, request: SubagentRequest, *, also: Iterable[str] = ()
    ) -> SubagentProvider:
        request.signal.raise_if_aborted()
        provider = self._providers.get(name)
        if provider is None:
            known = ", ".join((*self._providers, *also))
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
            result = await self._run.result()
            self._count(result.spent)
            self._parent.hooks.emit("subagent/end", self._parent, self._run.id, result.reason)

    def _count(self, spent: Spent) -> None:
        """Have the parent's log say what was spent for it."""
        if spent == Spent():
            return
        session, info = self._parent.session, self._parent.model.info
        try:
            session.append(
                subagent_usage(
                    session.state, info, self.id, spent.usage, spent.cost, spent.currency
                )
            )
        except Exception:  # a validator's veto, say: nothing that ended depends on it
            log.exception("subagent_usage_not_logged", session_id=session.id)
