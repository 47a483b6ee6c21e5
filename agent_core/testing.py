"""For people who write tools, listeners and adapters: run them, and abort them at every await.

What `abort_at_every_await` proves is the contract: whenever the signal fires, the call ends soon,
by `TurnAborted` or by a result, and leaves no task behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import anyio

from agent_core.agent import Agent
from agent_core.cancellation import USER, AbortController, AbortSignal
from agent_core.content import ToolContent
from agent_core.models.rehearsal import RehearsalModel
from agent_core.runtime import AgentRuntime
from agent_core.sessions.memory import MemoryStore
from agent_core.tools.local_commands import LocalCommands
from agent_core.tools.local_files import LocalFiles
from agent_core.tools.registry import default_tools
from agent_core.tools.tool import Tool, ToolContext

__all__ = ["AbortedRun", "abort_at_every_await", "rehearsal_agent", "tool_context"]

MAX_AWAITS: Final = 10_000
"""A call that awaits more often than this is too long to be aborted at each of them."""


@dataclass(frozen=True, slots=True)
class AbortedRun:
    """One run: at which await it was aborted, counted from 1, and what it then did.

    `result` is what it returned, `error` what it raised; a `TurnAborted` is the usual end.
    """

    at_await: int
    result: object = None
    error: Exception | None = None


@asynccontextmanager
async def rehearsal_agent(
    cwd: str, *tools: Tool, user_folder: str = ""
) -> AsyncGenerator[Agent, None]:
    """Run an agent on the rehearsal model with the built-in tools and `tools`, in memory.

    Cancellation: the agent is disposed. Concurrency: any number.
    """
    async with AgentRuntime(
        MemoryStore(),
        model=RehearsalModel(),
        tools=(*default_tools(), *tools),
        files=LocalFiles(),
        commands=LocalCommands(),
        mode="bypass",
        user_folder=user_folder,
    ) as runtime:
        yield await runtime.create(cwd)


def tool_context(
    agent: Agent, signal: AbortSignal, shown: list[ToolContent] | None = None
) -> ToolContext:
    """Return a context for calling ``tool.run`` by hand; what it shows is added to `shown`."""

    def progress(content: tuple[ToolContent, ...]) -> None:
        if shown is not None:
            shown.extend(content)

    return ToolContext(
        agent, "test-call", signal, agent.roots, agent.files, agent.commands, progress
    )


async def abort_at_every_await(
    call: Callable[[AbortSignal], Coroutine[Any, Any, object]], *, limit_s: float = 5.0
) -> list[AbortedRun]:
    """Run ``call(signal)`` again and again, and abort it at its first await, its second, and so on.

    Cancellation: safe. Concurrency: once at a time, or tasks of others pass for leftovers.

    Args:
        call: Makes a fresh coroutine of what is to be tested.
        limit_s: What each run has to end, once aborted.

    Returns:
        One entry for each await that a whole run has.

    Raises:
        TimeoutError: A run did not end in `limit_s` seconds after its abort.
        AssertionError: A run left a task behind, or a call awaited more than `MAX_AWAITS` times.
    """
    runs: list[AbortedRun] = []
    for at_await in range(1, MAX_AWAITS + 1):
        controller = AbortController()
        before = asyncio.all_tasks()
        stepped = _Stepped(call(controller.signal), at_await, controller)
        result, error = None, None
        with anyio.fail_after(limit_s):
            try:
                result = await stepped
            except Exception as exc:
                error = exc
        if left := asyncio.all_tasks() - before:
            raise AssertionError(f"aborted at await {at_await}, it left {left} behind")
        if not controller.signal.aborted:
            if error is not None:
                raise error  # it fails by itself, without any abort
            return runs
        runs.append(AbortedRun(at_await, result, error))
    raise AssertionError(f"the call awaits more than {MAX_AWAITS} times")


class _Stepped:
    """Awaits a coroutine and aborts the controller while it is suspended for the n-th time."""

    def __init__(
        self, work: Coroutine[Any, Any, object], at_await: int, controller: AbortController
    ) -> None:
        self._work = work
        self._left = at_await
        self._controller = controller

    def __await__(self) -> Generator[Any, Any, object]:
        steps = self._work.__await__()
        send: Any = None
        raised: BaseException | None = None
        while True:
            try:
                waits_for = steps.send(send) if raised is None else steps.throw(raised)
            except StopIteration as stop:
                return stop.value
            self._left -= 1
            if self._left == 0:
                self._controller.abort(USER)
            raised = None
            try:
                send = yield waits_for
            except BaseException as exc:  # the event loop resumes it with an error
                raised = exc
