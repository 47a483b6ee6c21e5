"""Subagents that go on while their parent does something else, or nothing.

They belong to one agent, the one that a person talks to, and their signals to it and not to the
turn that started them. A cancel of the agent stops them all, as ``parent``, also when no turn runs;
a new prompt stops none; the agent's end is theirs. What one that finished has to say waits for the
next step there is, and never starts a turn; one that was stopped has nothing to say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import anyio

from agent_core.cancellation import PARENT, AbortController, AbortSignal, TurnAborted
from agent_core.errors import AgentError
from agent_core.logs import get_logger
from agent_core.subagents import SubagentRefused, SubagentRequest, SubagentResult

if TYPE_CHECKING:
    from agent_core.agent import Agent
    from agent_core.runtime import AgentRuntime

__all__ = ["SOURCE", "Background", "BackgroundChild"]

SOURCE: Final = "subagents"
"""The source of the notices, as the log has it."""
MAX_WAITING: Final = 32
"""So many may wait for a place among the live ones."""
MAX_KEPT: Final = 32
"""So many that have ended are remembered; the oldest are forgotten first."""
MAX_NOTICE_CHARS: Final = 16 * 1024
SLOW_AFTER_S: Final = 2.0
"""One that has not stopped so long after it was told to is spoken of."""

log = get_logger(__name__)


@dataclass(eq=False, slots=True)
class BackgroundChild:
    """One of them.

    Attributes:
        name: Unique among those of the agent.
        task: The first line of what it is to do.
        doing: What it does just now, in a line.
        result: How it ended; `None` while it has not.
        over: Set when it is quiet.
        is_slow: Whether it was spoken of because it took long to stop.
    """

    name: str
    task: str
    doing: str = "waiting for a place"
    result: SubagentResult | None = None
    over: anyio.Event = field(default_factory=anyio.Event)
    is_told: bool = False
    is_slow: bool = False
    controller: AbortController = field(default_factory=AbortController)

    @property
    def state(self) -> str:
        """``running``, ``stopping``, ``stopped``, ``finished`` or ``failed``."""
        if self.result is None:
            return "stopping" if self.controller.signal.aborted else "running"
        return {"completed": "finished", "aborted": "stopped"}.get(self.result.reason, "failed")

    def show(self, line: str) -> None:
        """Take note of what it does."""
        self.doing = line


class Background:
    """Those of one agent. The synchronous verbs belong to the thread of the event loop."""

    def __init__(self, agent: Agent, runtime: AgentRuntime) -> None:
        self._agent = agent
        self._runtime = runtime
        self._children: dict[str, BackgroundChild] = {}
        self._on_slow: dict[object, Callable[[BackgroundChild], None]] = {}

    def on_slow(self, listener: Callable[[BackgroundChild], None]) -> Callable[[], None]:
        """Tell `listener` of each one that takes long to stop, and again when it is quiet.

        Returns:
            What removes it again.
        """
        key = object()
        self._on_slow[key] = listener

        def remove() -> None:
            self._on_slow.pop(key, None)

        return remove

    @property
    def children(self) -> tuple[BackgroundChild, ...]:
        """Those that run and the latest that have ended, in the order in which they started."""
        return tuple(self._children.values())

    def get(self, name: str) -> BackgroundChild | None:
        """Return the one of that name, if it is known."""
        return self._children.get(name)

    def start(self, provider: str, request: SubagentRequest, task: str) -> BackgroundChild:
        """Start one. It is under way, or waits for a place, when this returns.

        Args:
            provider: As for `Subagents.start`.
            request: Its signal counts up to now; from now on there is one of its own. It is no
                part of any tool call, since that call ends.
            task: For people, in a line.

        Raises:
            SubagentRefused: The agent is a subagent itself, or too many wait.
            TurnAborted: The request's signal fired.
            AgentDisposed: The runtime is being left.
        """
        request.signal.raise_if_aborted()
        if self._agent.parent is not None:
            raise SubagentRefused("Only the agent at the top has subagents in the background.")
        running = [child for child in self._children.values() if child.result is None]
        if len(running) >= self._agent.subagents.max_live + MAX_WAITING:
            raise SubagentRefused(f"{len(running)} subagents are in the background already.")
        child = BackgroundChild(self._free_name(request.name), task)
        request = replace(
            request,
            signal=child.controller.signal,
            call_id="",
            name=child.name,
            show=child.show,
        )
        self._runtime.start_task(
            lambda: self._run(child, provider, request),
            stop=lambda: self.stop(child),
            name=f"background {child.name}",
        )
        self._children[child.name] = child
        return child

    def stop(self, child: BackgroundChild) -> None:
        """Have one stop; ``child.over`` says when it is quiet. Idempotent."""
        if child.result is None:
            child.controller.abort(PARENT)

    def stop_all(self) -> None:
        """Have them all stop; those that wait for a place never start."""
        for child in self.children:
            self.stop(child)

    async def when_stopped(self) -> None:
        """Wait until all that were told to stop are quiet; however long it takes.

        Cancellation: safe. Concurrency: any number of tasks.
        """
        for child in self.children:
            if child.controller.signal.aborted:
                await child.over.wait()

    async def wait(self, child: BackgroundChild, signal: AbortSignal) -> SubagentResult:
        """Wait for its end; whoever gets the result here needs no notice.

        Cancellation: through `signal`; the child goes on. Concurrency: any number of tasks.

        Raises:
            TurnAborted: The signal fired.
        """
        async with signal.scope():
            await child.over.wait()
        assert child.result is not None
        child.is_told = True
        return child.result

    # --- the child's side --------------------------------------------------------------------

    async def _run(self, child: BackgroundChild, provider: str, request: SubagentRequest) -> None:
        """Run it to its end. Its task is the runtime's, and never cancelled.

        Cancellation: through the child's signal. Concurrency: once a child.
        """
        result = SubagentResult("error", "", "The subagent failed by a defect of ours.")
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._tell_if_slow, child)
                result = await self._result(child, provider, request)
                tasks.cancel_scope.cancel()
        finally:
            child.result = result
            child.over.set()
            if child.is_slow:
                self._tell(child)
            self._forget_oldest()
        # Whoever waits for it comes first, and needs no notice then.
        await anyio.lowlevel.checkpoint()
        if not (child.controller.signal.aborted or child.is_told):
            self._give_notice(child, result)

    async def _tell_if_slow(self, child: BackgroundChild) -> None:
        """Tell that it takes long to stop, should it: nothing else may show that it is not over.

        Cancellation: safe. Concurrency: once a child.
        """
        signal, stopping = child.controller.signal, anyio.Event()
        remove = signal.on_abort(lambda _reason: stopping.set())
        try:
            if not signal.aborted:
                await stopping.wait()
        finally:
            remove()
        await anyio.sleep(SLOW_AFTER_S)
        log.warning("background_still_stopping", session_id=self._agent.id, doing=child.doing)
        child.is_slow = True
        self._tell(child)

    def _tell(self, child: BackgroundChild) -> None:
        for listener in tuple(self._on_slow.values()):
            try:
                listener(child)
            except Exception:
                log.exception("background_listener_failed", session_id=self._agent.id)

    async def _result(
        self, child: BackgroundChild, provider: str, request: SubagentRequest
    ) -> SubagentResult:
        """Start it, wait for its end, and have it quiet.

        Cancellation: through the child's signal. Concurrency: once a child.
        """
        try:
            run = await self._agent.subagents.start(provider, request)
        except TurnAborted:
            return SubagentResult("aborted", "")
        except AgentError as exc:
            return SubagentResult("error", "", str(exc))
        child.doing = "thinking"
        try:
            return await run.result()
        finally:
            await run.dispose()

    def _give_notice(self, child: BackgroundChild, result: SubagentResult) -> None:
        opening = f"The subagent {child.name} has {child.state}."
        text = "\n".join(filter(None, (opening, result.message, _end_of(result.output))))
        try:
            self._agent.inject(text, source=SOURCE)
        except AgentError as exc:  # the session is being closed, or is full of notices
            log.info("background_notice_dropped", session_id=self._agent.id, reason=str(exc))

    def _forget_oldest(self) -> None:
        ended = [child.name for child in self._children.values() if child.result is not None]
        for name in ended[:-MAX_KEPT]:
            del self._children[name]

    def _free_name(self, wanted: str) -> str:
        base = "-".join(wanted.split()) or "subagent"
        name, number = base, 1
        while name in self._children:
            number += 1
            name = f"{base}-{number}"
        return name


def _end_of(output: str) -> str:
    if len(output) <= MAX_NOTICE_CHARS:
        return output
    return f"(the end of its answer; the tool `agents` has all of it)\n{output[-MAX_NOTICE_CHARS:]}"
