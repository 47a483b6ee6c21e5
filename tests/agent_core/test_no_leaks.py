"""A thousand cancelled turns leave nothing behind: no task, no descriptor, no signal, no memory.

And nothing in the loop could abandon work: what would is not there, and is not called.
"""

from __future__ import annotations

import ast
import asyncio
import gc
import os
import sys
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import anyio
import pytest
from core_rig import PARENT, USER, runtime_for, settle, tool

import agent_core
from agent_core.agent import Agent
from agent_core.cancellation import AbortSignal
from agent_core.events import Aborted, Outcome, TurnEnd
from agent_core.models.adapter import (
    Finish,
    ModelEvent,
    ModelInfo,
    ModelRequest,
    TextDelta,
    ToolCallDelta,
)
from agent_core.permissions import Approval
from agent_core.runtime import AgentRuntime
from agent_core.sessions.memory import MemoryStore
from agent_core.tools.shell import Shell
from agent_core.tools.tool import ToolContext, ToolOutput

TURNS: Final = 1000
TURNS_OF_AN_AGENT: Final = 25
MANNERS: Final = ("stream", "tool", "permission", "listener", "before the turn", "pair")
LIMIT_S: Final = 50.0


class World:
    """Agents whose every turn comes to a halt somewhere, and says so."""

    info = ModelInfo("halting")

    def __init__(self) -> None:
        self.manner = "stream"
        self.halted = anyio.Event()
        self.signals: list[weakref.ref[AbortSignal]] = []
        self.store = MemoryStore()
        self.runtime: AgentRuntime

    @asynccontextmanager
    async def run(self) -> AsyncIterator[World]:
        model: Any = self
        tools = [
            tool("wait", self._wait_in_tool),
            tool("pair", self._wait_in_tool, overlaps=True),
            tool("ask", self._wait_in_tool, does="execute"),
            Shell(),
        ]
        async with runtime_for(model, tools, mode="ask", store=self.store) as self.runtime:
            self.runtime.hooks.on("agent/pre-step", self._wait_before_step)
            self.runtime.hooks.on("approval/request", self._answer)
            yield self

    async def cancelled_turn(self, agent: Agent, manner: str, cause: dict[str, str]) -> None:
        self.manner, self.halted = manner, anyio.Event()
        prompt, queued = agent.send("A" * 100), agent.send("B")
        if manner != "before the turn":
            await self.halted.wait()
        steering = agent.steer("S")
        agent.cancel(cause)
        await agent.when_idle()
        outcomes = [await prompt.settled(), await queued.settled(), await steering.settled()]
        expected: list[Outcome | None] = [Aborted(), None, None]
        assert outcomes == ([None] * 3 if manner == "before the turn" else expected)

    async def cancelled_turns(self, count: int, manners: tuple[str, ...]) -> None:
        agent = await self.runtime.create("/")
        for number in range(count):
            await self.cancelled_turn(
                agent, manners[number % len(manners)], (USER, PARENT)[number % 2]
            )
        ends = [event for event in agent.session.events if isinstance(event.data, TurnEnd)]
        assert len(ends) == sum(
            manners[n % len(manners)] != "before the turn" for n in range(count)
        )
        await agent.dispose()
        await self.store.delete(agent.id)

    # --- where turns halt -----------------------------------------------------------------------

    async def _halt(self, signal: AbortSignal) -> None:
        self.signals.append(weakref.ref(signal))
        self.halted.set()
        async with signal.scope():
            await anyio.sleep_forever()

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        yield TextDelta("some words")
        if self.manner == "stream":
            await self._halt(request.signal)
        names = {"permission": ["ask"], "pair": ["pair"] * 3, "shell": ["shell"]}
        for index, name in enumerate(names.get(self.manner, ["wait"])):
            arguments = '{"command":"echo begun; sleep 60"}' if name == "shell" else "{}"
            yield ToolCallDelta(index, name, arguments)
        yield Finish("tool_calls")

    async def aclose(self) -> None:
        pass

    async def _wait_in_tool(self, context: ToolContext) -> ToolOutput:
        await self._halt(context.signal)
        return ToolOutput("never")

    async def _wait_before_step(self, *args: Any) -> None:
        if self.manner == "listener":
            await self._halt(args[-1])

    async def _answer(self, execution: Any, _next: Any) -> Approval:
        if self.manner == "shell":

            def see(event: Any) -> None:
                if type(event.data).__name__ == "ToolProgress":
                    self.halted.set()

            execution.agent.session.observe(see)
            return Approval.ALLOWED
        await self._halt(execution.signal)
        return Approval.ALLOWED


def descriptors() -> set[str]:
    return set(os.listdir("/dev/fd"))


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.timeout(60)
@pytest.mark.requirement("R73", "R75", "R97")
async def test_a_thousand_cancelled_turns_leave_nothing_behind() -> None:
    tasks, world = asyncio.all_tasks(), World()
    with anyio.fail_after(LIMIT_S):
        async with world.run():
            await world.cancelled_turns(TURNS_OF_AN_AGENT, MANNERS)
            await settle()
            within, files = len(asyncio.all_tasks()), descriptors()
            for _ in range(TURNS // TURNS_OF_AN_AGENT - 1):
                await world.cancelled_turns(TURNS_OF_AN_AGENT, MANNERS)
            await settle()

            assert len(asyncio.all_tasks()) == within
            assert world.runtime.agents == {}
            gc.collect()
            assert len(world.signals) > TURNS / 2
            assert [ref for ref in world.signals if ref() is not None] == []
            assert descriptors() == files
    assert asyncio.all_tasks() == tasks


@pytest.mark.timeout(60)
@pytest.mark.requirement("R73")
async def test_cancelled_shell_commands_leave_no_descriptor_and_no_task() -> None:
    world = World()
    with anyio.fail_after(LIMIT_S):
        async with world.run():
            await world.cancelled_turns(2, ("shell",))
            await settle()
            within, files = len(asyncio.all_tasks()), descriptors()
            await world.cancelled_turns(20, ("shell",))
            await settle()

            assert len(asyncio.all_tasks()) == within
            assert len(descriptors()) == len(files)


@pytest.mark.timeout(60)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_a_thousand_cancelled_turns_take_no_memory() -> None:
    world = World()
    with anyio.fail_after(LIMIT_S):
        async with world.run():

            async def measure() -> int:
                for _ in range(TURNS // TURNS_OF_AN_AGENT):
                    await world.cancelled_turns(TURNS_OF_AN_AGENT, MANNERS)
                world.signals.clear()
                gc.collect()
                return resident_bytes()

            warm = await measure()
            assert await measure() < warm * 1.05


# --- nothing is ever abandoned --------------------------------------------------------------------

CORE: Final = ("loop.py", "agent.py", "inbox.py", "hooks.py", "pipeline.py", "batch.py")
ABANDONING: Final = {
    *("move_on_after", "move_on_at", "fail_after", "fail_at", "CancelScope", "cancel_scope"),
    *("wait_for", "wait", "shield", "timeout", "timeout_at", "gather", "TaskGroup"),
    *("cancel", "uncancel", "create_task_group", "start_soon", "create_task", "run_sync"),
}
ALLOWED: Final = {
    ("loop.py", "self._wake.wait()"): "the driver parks",
    ("loop.py", "self._idle_edge.wait()"): "somebody waits for idle",
    ("loop.py", "self.quiet.wait()"): "somebody waits for the end",
    (
        "loop.py",
        "anyio.CancelScope(shield=True)",
    ): "the flush that is owed outlives the host",
    ("inbox.py", "self._settled.wait()"): "somebody waits for a prompt",
    ("agent.py", "self._loop.quiet.wait()"): "somebody waits for the end",
    ("agent.py", "self._loop.cancel(reason)"): "the public verb",
    ("pipeline.py", "agent.cancel()"): "a person who dismisses the question stops the turn",
    ("pipeline.py", "agent.root.cancel()"): "and the one that a subagent works for",
    (
        "batch.py",
        "anyio.create_task_group()",
    ): "overlapping calls contain their failures",
    ("batch.py", "group_tasks.start_soon(run, part, name=f'tool call {part.id}')"): "the same",
}


def called(path: Path) -> list[tuple[str, str]]:
    """Return the calls in a module whose name could mean that work is given up."""
    calls = [
        node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)
    ]
    named = [
        (node, node.func.attr if isinstance(node.func, ast.Attribute) else "") for node in calls
    ]
    named += [(node, node.func.id) for node in calls if isinstance(node.func, ast.Name)]
    return [(path.name, ast.unparse(node)) for node, name in named if name in ABANDONING]


@pytest.mark.requirement("R73", "R94")
def test_the_core_calls_nothing_that_gives_up_the_work_of_others() -> None:
    root = Path(agent_core.__file__).parent
    paths = [path for path in root.rglob("*.py") if path.name in CORE]
    found = {call for path in paths for call in called(path)}

    assert len(paths) == len(CORE)
    assert found == set(ALLOWED)


@pytest.mark.requirement("R73", "R94")
async def test_no_task_of_a_turn_is_ever_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the scope of a leaf may cancel, and only the task that entered it."""
    allowed: list[str] = []
    forbidden: list[str] = []

    class Watched(asyncio.Task[Any]):
        def cancel(self, msg: Any = None) -> bool:
            frame: Any = sys._getframe(1)
            callers: list[str] = []
            while frame is not None:
                callers.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}")
                frame = frame.f_back
            is_leaf = "cancellation.py:_cancel" in callers or "_deliver_cancellation" in callers[0]
            (allowed if is_leaf else forbidden).append(self.get_name())
            return super().cancel(msg)

    def make(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        return Watched(coro, loop=loop, **options)

    asyncio.get_running_loop().set_task_factory(make)
    scopes: list[str] = []
    entered: Callable[..., Any] = anyio.CancelScope.__enter__

    def note(scope: Any) -> Any:
        frame = sys._getframe(1)
        scopes.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}")
        return entered(scope)

    world = World()
    with anyio.fail_after(LIMIT_S):
        async with world.run():
            scope_class = type(anyio.CancelScope())
            entered = scope_class.__enter__
            monkeypatch.setattr(scope_class, "__enter__", note)
            await world.cancelled_turns(2 * len(MANNERS), MANNERS)
            monkeypatch.undo()

    assert forbidden == []
    assert allowed != []
    assert {scope for scope in scopes if scope.split(":")[0] in CORE} == set()
