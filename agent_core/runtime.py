"""The composition: a runtime owns the driver task of every agent, and nobody else does."""

from __future__ import annotations

import asyncio
import contextvars
import secrets
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from types import TracebackType
from typing import Any, Final
from weakref import WeakSet

import anyio
from anyio.abc import TaskGroup

from agent_core import execution
from agent_core.agent import Agent
from agent_core.children import InProcessProvider
from agent_core.compaction import Compactor
from agent_core.errors import AgentDisposed
from agent_core.events import EventData, ToolProgress
from agent_core.hooks import Hooks
from agent_core.logs import get_logger
from agent_core.models.adapter import ModelAdapter
from agent_core.models.choice import Models
from agent_core.project_files import ProjectFiles
from agent_core.prompt import SystemPrompt
from agent_core.sessions.log import Session
from agent_core.sessions.store import SessionHeader, SessionStore
from agent_core.subagents import Delegation, Subagents
from agent_core.tools.roots import Roots
from agent_core.tools.tool import Commands, Files, Tool

__all__ = ["AgentRuntime"]

SAY_AWAITING_AFTER_S: Final = 2.0
"""A turn that is still unwinding this long after its abort says what it is waiting for."""

log = get_logger(__name__)


class AgentRuntime:
    """Makes agents and owns what they run on: ``async with AgentRuntime(...) as runtime:``.

    Leaving the block disposes every agent, stops every task it was given, and waits until all are
    quiet.

    Attributes:
        hooks: Listeners of all agents.
        subagents: The ways to delegate, and their limits.
        agents: The agents that are not quiet yet, by id.
        models: What they may choose from.
        project_files: Looks for what their projects, and `user_folder`, have for them.
    """

    def __init__(
        self,
        store: SessionStore,
        *,
        model: ModelAdapter | Models,
        tools: tuple[Tool, ...],
        files: Files,
        commands: Commands,
        system_prompt: SystemPrompt | None = None,
        mode: str = "ask",
        max_steps: int = 0,
        user_folder: str = "",
    ) -> None:
        self.hooks = Hooks()
        self.project_files = ProjectFiles(user_folder)
        self.subagents = Subagents()
        self.subagents.register(InProcessProvider(self, "spawn"), "knows only what you tell it")
        self.subagents.register(InProcessProvider(self, "fork"), "knows this conversation")
        self.agents: dict[str, Agent] = {}
        Compactor(self.agents).listen(self.hooks)
        self._store = store
        self.models = model if isinstance(model, Models) else Models(model)
        self._tools = {tool.name: tool for tool in tools}
        self._files = files
        self._commands = commands
        self._system_prompt = system_prompt or SystemPrompt()
        self._mode = mode
        self._max_steps = max_steps
        self._is_closing = False
        self._watched: WeakSet[anyio.Event] = WeakSet()  # once a turn, however often one says stop
        self._stops: dict[object, Callable[[], object]] = {}
        self._tasks: TaskGroup

    async def __aenter__(self) -> AgentRuntime:
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        # Drivers start from here and not from whoever makes the agent, or a child made in a tool
        # would carry its parent's ambient values for life.
        self._context = contextvars.copy_context()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        self._is_closing = True
        for agent in tuple(self.agents.values()):
            agent.dispose()
        for stop in tuple(self._stops.values()):
            stop()
        try:
            if exc is None or isinstance(exc, Exception):
                # Told of its owner's failure, the task group would cancel the drivers.
                await self._tasks.__aexit__(None, None, None)
                return None
            return await self._tasks.__aexit__(exc_type, exc, traceback)
        except BaseExceptionGroup as group:
            if list(group.exceptions) != [exc]:
                raise
            return False  # what the block raised leaves as it is, not as a group of one
        finally:
            with anyio.CancelScope(shield=True):
                for tool in self._tools.values():
                    await tool.aclose()

    async def create(self, cwd: str, *, additional: tuple[str, ...] = (), owner: str = "") -> Agent:
        """Make an agent with a new session.

        Cancellation: safe; nothing is published. Concurrency: any number of tasks.

        Args:
            cwd: Absolute directory the session is about.
            additional: Further absolute directories its tools may touch.
            owner: Whose session it is.

        Raises:
            AgentDisposed: The runtime is being left.
            StoreError: The session could not be kept.
        """
        session = await Session.create(_new_header(cwd, owner=owner), self._store)
        return self.adopt(session, additional=additional, source="startup")

    async def create_child(
        self,
        parent: Agent,
        *,
        seed: Sequence[EventData] = (),
        tool_names: Collection[str] | None = None,
        persona: str | None = None,
        model: str | None = None,
        delegation: Delegation | None = None,
    ) -> Agent:
        """Make a subagent: a new session below `parent`'s, with its places, model and mode.

        Cancellation: safe; nothing is published. Concurrency: any number of tasks.

        Args:
            parent: Who delegates. Its permission mode is the child's from now on.
            seed: History that the child begins with.
            tool_names: The only tools it is offered; `None` for its parent's.
            persona: What it is told first about itself; `None` for what its parent is told.
            model: The name of its model; `None` for its parent's.
            delegation: Whence it comes, for people.

        Raises:
            AgentDisposed: The runtime is being left.
            StoreError: The session could not be kept.
        """
        header = _new_header(parent.roots.cwd, parent.id, parent.depth + 1, parent.session.owner)
        session = await Session.create(header, self._store)
        for data in seed:
            session.append(data)
        system_prompt = parent.system_prompt
        if persona is not None:
            system_prompt = system_prompt.copy()
            system_prompt.section("persona", persona, rank=-50)
        tools = parent.tools.items()
        child = Agent(
            self,
            session,
            models=self.models,
            model=model or parent.model.info.name,
            tools={name: tool for name, tool in tools if tool_names is None or name in tool_names},
            roots=parent.roots,
            files=parent.files,
            commands=parent.commands,
            system_prompt=system_prompt,
            mode=parent.mode,
            max_steps=parent.max_steps,
            parent=parent,
            delegation=delegation,
        )
        return self._publish(child, "startup")

    def adopt(
        self, session: Session, *, additional: tuple[str, ...] = (), source: str = "resume"
    ) -> Agent:
        """Make an agent for a session that has none; the caller makes sure of that.

        Args:
            session: Usually what `Session.load` returned.
            additional: As in `create`.
            source: What ``agent/session-start`` is told.

        Raises:
            AgentDisposed: The runtime is being left.
        """
        agent = Agent(
            self,
            session,
            models=self.models,
            model=self.models.default,
            tools=dict(self._tools),
            roots=Roots(session.cwd, additional),
            files=self._files,
            commands=self._commands,
            system_prompt=self._system_prompt,
            mode=self._mode,
            max_steps=self._max_steps,
        )
        return self._publish(agent, source)

    def _publish(self, agent: Agent, source: str) -> Agent:
        if self._is_closing:
            raise AgentDisposed("The agent is shutting down.")
        self.agents[agent.id] = agent
        context = execution.context_for(agent, self._context)
        self._tasks.create_task(self._drive(agent), name=f"agent {agent.id}", context=context)
        agent.hooks.emit("agent/created", agent)
        agent.hooks.emit("agent/session-start", agent, source)
        return agent

    def add_tool(self, tool: Tool) -> None:
        """Offer `tool` to every agent made from now on; it replaces one of the same name."""
        self._tools[tool.name] = tool

    def start_task(
        self,
        work: Callable[[], Coroutine[Any, Any, None]],
        *,
        stop: Callable[[], object],
        name: str,
    ) -> None:
        """Run `work` beside the agents, for what must be opened, used and closed by one task.

        It has no ambient agent, and is not cancelled with whoever started it. What it raises is
        logged and goes no further.

        Args:
            work: Must end soon once `stop` was called.
            stop: Called when the runtime is left, which then waits for the end of `work`.
            name: The task's.

        Raises:
            AgentDisposed: The runtime is being left.
        """
        if self._is_closing:
            raise AgentDisposed("The agent is shutting down.")
        key = object()
        self._stops[key] = stop
        context = self._context.copy()
        self._tasks.create_task(self._run_task(key, work, name), name=name, context=context)

    def watch_unwinding(self, agent: Agent) -> None:
        """Have an aborted turn say what it waits for, should it take long. Idempotent."""
        over = agent.unwinding()
        if over is not None and over not in self._watched:
            self._watched.add(over)
            # A timer, because a task for each cancel would make its answer wait for one more.
            loop = asyncio.get_running_loop()
            loop.call_later(SAY_AWAITING_AFTER_S, self._say_awaiting, agent, over)

    async def _drive(self, agent: Agent) -> None:
        try:
            await agent.drive()
        except Exception:
            # A defect of ours ends this agent and no other.
            log.exception("agent_driver_crashed", session_id=agent.id)
        finally:
            if self.agents.get(agent.id) is agent:
                del self.agents[agent.id]

    async def _run_task(
        self, key: object, work: Callable[[], Coroutine[Any, Any, None]], name: str
    ) -> None:
        try:
            with anyio.CancelScope(shield=True):  # it is told by `stop`, and ends in its own way
                await work()
        except Exception:
            log.exception("runtime_task_crashed", task=name)
        finally:
            del self._stops[key]

    def _say_awaiting(self, agent: Agent, over: anyio.Event) -> None:
        if over.is_set():
            return
        log.warning("turn_still_unwinding", session_id=agent.id, awaiting=agent.awaiting())
        try:
            for call_id, title in tuple(agent.running_calls.items()):
                agent.running_calls[call_id] = f"Waiting for it to stop: {title}"
                agent.session.append(ToolProgress(call_id, title=agent.running_calls[call_id]))
        except Exception:  # a validator's veto, say: one notice less, and nothing else
            log.exception("notice_not_logged", session_id=agent.id)


def _new_header(
    cwd: str, parent_id: str | None = None, depth: int = 0, owner: str = ""
) -> SessionHeader:
    now_ms = time.time_ns() // 1_000_000
    session_id = f"sess_{secrets.token_hex(12)}"
    return SessionHeader(session_id, cwd, now_ms, now_ms, None, parent_id, depth, owner)
