"""An agent: one session, one driver, and the verbs to give it work and to stop it."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Generator
from typing import TYPE_CHECKING, Any

import anyio

from agent_core import execution
from agent_core.background import Background
from agent_core.cancellation import normalize_cancel_cause
from agent_core.content import Block, Text
from agent_core.errors import AgentDisposed
from agent_core.events import EffortChanged, ModeChanged, ModelChanged
from agent_core.hooks import Hooks
from agent_core.inbox import Prompt, check_content
from agent_core.loop import AgentLoop
from agent_core.models.adapter import ModelAdapter
from agent_core.models.choice import Models
from agent_core.permissions import MODES
from agent_core.prompt import SystemPrompt
from agent_core.questions import Nobody, OnBehalf
from agent_core.sessions.log import Session
from agent_core.subagents import Delegation, Subagents
from agent_core.tools.roots import Roots
from agent_core.tools.tool import Ask, Commands, Files, Tool

if TYPE_CHECKING:
    from agent_core.project_files import ProjectFiles
    from agent_core.runtime import AgentRuntime

__all__ = ["Agent"]


class Agent:
    """Takes prompts, runs one turn for each, first in, first out. Made by `AgentRuntime.create`.

    The synchronous verbs belong to the thread of the event loop. Cancelling is cooperative: see
    docs/cancellation.md for what a tool or listener owes its signal.

    Attributes:
        session: The log, the one truth about what happened.
        hooks: Listeners of this agent only; those of the runtime come after them.
        models, tools, roots, files, commands, system_prompt: What its turns work with.
        ask: The person it may ask, `agent_core.questions.Nobody` until somebody sets another one.
        max_steps: Model calls a turn may have; 0 for any number.
        parent: The agent this one is a subagent of, or `None`.
        delegation: What of its parent's it is, if it is a subagent.
        background: Its subagents in the background.
        labels: What records that its turns write say besides its session and turn.
    """

    def __init__(
        self,
        runtime: AgentRuntime,
        session: Session,
        *,
        models: Models,
        model: str,
        tools: dict[str, Tool],
        roots: Roots,
        files: Files,
        commands: Commands,
        system_prompt: SystemPrompt,
        mode: str,
        max_steps: int = 0,
        parent: Agent | None = None,
        delegation: Delegation | None = None,
    ) -> None:
        self.session = session
        self.hooks = Hooks(runtime.hooks)
        self.models = models
        self.tools = tools
        self.roots = roots
        self.files = files
        self.commands = commands
        if parent is not None and delegation is None:
            delegation = Delegation("", "subagent")
        self.ask: Ask = Nobody()
        if parent is not None and delegation is not None:
            self.ask = OnBehalf(parent, delegation.name)
        self.system_prompt = system_prompt
        self.max_steps = max_steps
        self.parent = parent
        self.delegation = delegation
        self.background = Background(self, runtime)
        self.labels: dict[str, object] = {}
        self._runtime = runtime
        self._default_mode = mode
        self._default_model = model
        self._thread = threading.get_ident()
        self._loop = AgentLoop(self)

    @property
    def id(self) -> str:
        """The session's id."""
        return self.session.id

    @property
    def root(self) -> Agent:
        """The agent at the top: a person's own, of which this is a subagent, or itself."""
        agent = self
        while agent.parent is not None:
            agent = agent.parent
        return agent

    @property
    def subagents(self) -> Subagents:
        """The ways to delegate."""
        return self._runtime.subagents

    @property
    def project_files(self) -> ProjectFiles:
        """What looks for its project's files."""
        return self._runtime.project_files

    @property
    def children(self) -> tuple[Agent, ...]:
        """Its subagents in this process that are not quiet yet."""
        return tuple(agent for agent in self._runtime.agents.values() if agent.parent is self)

    @property
    def depth(self) -> int:
        """How many agents are above this one; also in a session that was loaded again."""
        return self.session.depth

    @property
    def status(self) -> str:
        """``idle``, ``running`` or ``disposed``. Tells nothing about any one prompt."""
        return self._loop.status

    @property
    def prompt(self) -> Prompt | None:
        """The prompt that has the turn that runs, `None` when none does."""
        return self._loop.prompt

    @property
    def turn(self) -> int | None:
        """The number of the turn that runs, `None` when none does."""
        return self._loop.turn

    @property
    def n_queued(self) -> int:
        """How many prompts wait for a turn of their own."""
        return self._loop.n_queued

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing runs, waits or is owed: all there is of the agent is in its log.

        Never with subagents in the background, ended or not: it may still ask what they found.
        """
        return self._loop.is_at_rest and not self.children and not self.background.children

    @property
    def mode(self) -> str:
        """The permission mode, a key of `agent_core.permissions.MODES`."""
        return self.session.state.mode or self._default_mode

    @property
    def model(self) -> ModelAdapter:
        """The model of its next call; the default's where the chosen one is no longer there."""
        chosen = self.models.get(self.session.state.model or self._default_model)
        return chosen or self.models.adapter(self.models.default)

    @property
    def effort(self) -> str | None:
        """How hard the model is to think, one of its `efforts`; `None` where it has none."""
        info, chosen = self.model.info, self.session.state.effort
        return chosen if chosen in info.efforts else info.effort

    def set_model(self, name: str) -> None:
        """Change the model, from the next model call on.

        Raises:
            ValueError: There is no such model.
        """
        if self.models.get(name) is None:
            raise ValueError(f"no model {name!r} is configured")
        if name != self.model.info.name:
            self.session.append(ModelChanged(name))

    def set_effort(self, effort: str) -> None:
        """Change how hard the model is to think, from the next model call on.

        Raises:
            ValueError: The model knows no such effort.
        """
        info = self.model.info
        if effort not in info.efforts:
            known = ", ".join(info.efforts) or "none to choose from"
            raise ValueError(f"no effort {effort!r} with {info.name}; there are {known}")
        if effort != self.effort:
            self.session.append(EffortChanged(effort))

    def set_mode(self, mode: str) -> None:
        """Change the permission mode, from the next tool call on.

        Raises:
            ValueError: There is no such mode.
        """
        if mode not in MODES:
            raise ValueError(f"no permission mode {mode!r}; there are {', '.join(MODES)}")
        if mode != self.mode:
            self.session.append(ModeChanged(mode))

    def send(self, content: str | tuple[Block, ...], *, source: str = "user") -> Prompt:
        """Queue a prompt; it gets a turn of its own.

        Args:
            content: Text, or blocks.
            source: Who says it.

        Returns:
            The prompt; ``await prompt.settled()`` for how its turn ended.

        Raises:
            AgentDisposed: The agent takes no more work.
            QueueFull: Too many prompts are waiting.
        """
        return self.submit(Prompt(_blocks(content), source))

    def steer(self, content: str | tuple[Block, ...], *, source: str = "user") -> Prompt:
        """Add to the turn that runs, from its next step on; when none runs, like `send`.

        Raises:
            AgentDisposed: The agent takes no more work.
            QueueFull: Too many prompts are waiting.
        """
        return self.submit(Prompt(_blocks(content), source), is_steering=True)

    def inject(self, content: str | tuple[Block, ...], *, source: str) -> None:
        """Tell the model something without asking it for anything.

        It joins the next step, of the turn that runs or of the next one; no turn is started for it,
        and a cancel leaves it.

        Args:
            content: Text, or blocks.
            source: Who says it; the model is told.

        Raises:
            AgentDisposed: The agent takes no more work.
            QueueFull: Too much is waiting.
            TypeError: The log cannot hold it.
        """
        self._check_thread()
        if self._loop.is_disposed:
            raise AgentDisposed("The session is being closed.")
        blocks = _blocks(content)
        check_content(blocks, source)
        self._loop.inject(blocks, source)

    def submit(self, prompt: Prompt, *, is_steering: bool = False) -> Prompt:
        """Do what `send` or `steer` does, with a prompt made before.

        Raises:
            AgentDisposed: The agent takes no more work.
            QueueFull: Too many prompts are waiting.
        """
        self._check_thread()
        if self._loop.is_disposed:
            raise AgentDisposed("The session is being closed.")
        self._loop.enqueue(prompt, is_steering=is_steering)
        delivery = {"source": prompt.source, "steering": is_steering}
        self.hooks.emit("agent/queued", self, prompt.content, delivery)
        return prompt

    def withdraw(self, prompt: Prompt) -> bool:
        """Take one prompt back, and no other: out of its queue, or by aborting its turn.

        Returns:
            Whether it was still waiting; then it is settled. Otherwise its turn will settle it.
        """
        self._check_thread()
        was_waiting = self._loop.withdraw(prompt)
        self._runtime.watch_unwinding(self)
        return was_waiting

    def cancel(self, cause: object = None) -> None:
        """Ask the running turn to stop, and forget all that is queued or steered by now.

        Subagents in the background are stopped, too, also when no turn runs.

        Work sent afterwards runs, also when an abort listener sends it. On a turn that is being
        cancelled already the first cause stands. Does nothing else when idle or disposed.

        Args:
            cause: See `normalize_cancel_cause`; omitted means user.

        Raises:
            TypeError: `cause` is not one of the closed vocabulary. Nothing has happened.
            RuntimeError: Called on another thread; use ``anyio.from_thread.run_sync``.
        """
        reason = normalize_cancel_cause(cause)
        self._check_thread()
        if not self._loop.is_disposed:
            self._loop.cancel(reason)
            self.background.stop_all()
            self._runtime.watch_unwinding(self)

    async def when_idle(self) -> None:
        """Wait until the agent is idle: no turn runs, none is owed, all is flushed.

        Subagents in the background that were told to stop are waited for, others are not.

        A disposed agent is waited for until its driver is gone. Uncooperative work is waited for,
        however long it takes.

        Cancellation: safe. Concurrency: any number of tasks.

        Raises:
            RuntimeError: Called by the agent's own listener, tool or adapter.
        """
        self.refuse_own_wait()
        await self._loop.when_idle()
        await self.background.when_stopped()

    def dispose(self) -> Awaitable[None]:
        """Stop for good: abort the turn, forget what is queued, refuse what comes.

        All of that has happened when this returns; awaiting the result waits until the agent is
        quiet. Calling it again is harmless, and every caller waits for the same end.

        Cancellation: safe; the disposal goes on. Concurrency: any number of tasks. Awaiting it in
        the agent's own driver (a listener, a tool) is a `RuntimeError`: it would wait for itself.
        """
        self._check_thread()
        if not self._loop.is_disposed:
            self._loop.dispose()
            self.background.stop_all()
            self._runtime.watch_unwinding(self)
        return _Quiet(self)

    def awaiting(self) -> str:
        """Say in words what the running turn is waiting for."""
        running = ", ".join(self._loop.running_calls.values())
        return running or self._loop.awaiting

    def refuse_own_wait(self) -> None:
        """Raise `RuntimeError` if the agent's own work led here: it would wait for itself."""
        frame = execution.current()
        if frame is not None and frame.agent is self and not self._loop.quiet.is_set():
            raise RuntimeError("an agent's own listener, tool or adapter cannot wait for its end")

    async def drive(self) -> None:
        """Run turns until disposed. For the runtime, once."""
        await self._loop.drive()

    def unwinding(self) -> anyio.Event | None:
        """Return the event of the present turn's end if it was aborted, else `None`."""
        return self._loop.unwinding()

    @property
    def running_calls(self) -> dict[str, str]:
        """The titles, as people see them, of the tool calls that are running, by call id."""
        return self._loop.running_calls

    async def _ended(self) -> None:
        """Wait for the driver's end, and for that of what was in the background.

        Cancellation: safe. Concurrency: any number of tasks.
        """
        await self._loop.quiet.wait()
        await self.background.when_stopped()

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                "this agent belongs to another thread; call it through anyio.from_thread.run_sync"
            )


def _blocks(content: str | tuple[Block, ...]) -> tuple[Block, ...]:
    return (Text(content),) if isinstance(content, str) else tuple(content)


class _Quiet:
    """What `Agent.dispose` returns: awaitable, and fine to drop."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def __await__(self) -> Generator[Any, None, None]:
        self._agent.refuse_own_wait()
        return self._agent._ended().__await__()
